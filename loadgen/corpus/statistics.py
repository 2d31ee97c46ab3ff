"""Statistics of a corpus of sessions, in the terms in which those of the recorded AgentX corpus are published.

Sessions are added one at a time and only numbers are kept, so that a corpus may be larger than memory. New tokens of a
request are those behind its longest common prefix with any earlier prompt of its session, what a cache without limit
would have to prefill. A gap is the recorded end-to-start time between two turns of the main agent. Requests that do
not fit a context limit are left out when one is given, as in the published 256k variant.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loadgen.tier.prefix_cache import PrefixCache
from loadgen.trace.trace import Trace, TraceRequest, streams_of

CONTEXT_256K = 256_000


@dataclass(frozen=True, slots=True)
class Target:
    """A published figure and how far from it the median of several seeds may lie; None = shown, not held."""

    name: str
    published: float
    tolerance: float | None = 0.10


TARGETS = (
    Target("sessions", 393, 0.0),
    Target("requests", 98_827),
    Target("requests, main", 56_798),
    Target("requests, sub-agents", 42_029),
    Target("sub-agent groups", 1_697),
    Target("input p50", 142_016),
    Target("input p90", 549_504),
    Target("input p99", 863_424, 0.20),
    Target("input p50, main", 254_080),
    Target("input p90, main", 651_008),
    Target("input p50, sub-agents", 64_000),
    Target("input p90, sub-agents", 196_326),
    Target("output p50", 444),
    Target("output p50, main", 616),
    Target("output mean, main", 1_374),
    Target("output p90, main", 3_502),
    Target("new tokens p50", 1_664),
    Target("new tokens mean", 3_792),
    Target("new tokens p99", 46_722, 0.20),
    Target("ideal prefix-cache hit", 0.983, 0.005),
    Target("prefill : output", 3.4),
    Target("main turns a session p50", 65),
    Target("main turns a session p90", 330),
    Target("gap p50 s", 4.9),
    Target("gap p90 s", 131.5),
    Target("gap p99 s", 3_257, 0.20),
    Target("gap mean s", 395),
    Target("gaps over 300 s", 0.045),
    Target("sessions with sub-agents", 0.445),
    Target("groups a session with any p50", 4),
    Target("requests a group p50", 16),
    Target("requests a group max", 789, None),
    Target("concurrent groups p50", 3),
    Target("concurrent groups max", 10, None),
    Target("256k: requests", 68_266),
    Target("256k: input p50", 88_768),
    Target("256k: output p50", 376),
)
"""The published corpus table. The hit is a share near 1: its own tolerance holds the misses to about a third."""


class Corpus:
    """Collects what the statistics need of each session."""

    def __init__(self) -> None:
        self._inputs, self._outputs, self._new, self._is_main = array("q"), array("q"), array("q"), array("b")
        self._gaps = array("d")
        self._turns, self._groups, self._concurrent = array("q"), array("q"), array("q")
        self._group_requests = array("q")

    @classmethod
    def of(cls, traces: Iterable[Trace]) -> Corpus:
        corpus = cls()
        for trace in traces:
            corpus.add(trace)
        return corpus

    def add(self, trace: Trace) -> None:
        """Count one session. Raises InvalidArgumentError for a session without main requests."""
        streams = streams_of(trace)
        main = set(map(id, streams[0].turns))
        cache = PrefixCache()
        everything = sorted((turn for stream in streams for turn in stream.turns), key=lambda turn: turn.t)
        for turn in everything:
            hit = cache.match(trace.id, turn.hash_ids)
            cache.insert(trace.id, turn.hash_ids)
            self._inputs.append(turn.num_input)
            self._outputs.append(turn.num_output)
            self._new.append((len(turn.hash_ids) - hit) * trace.block_size)
            self._is_main.append(id(turn) in main)
        self._gaps.extend(streams[0].gaps_s[1:])
        self._turns.append(len(streams[0].turns))
        self._groups.append(len(streams) - 1)
        self._concurrent.append(_most_at_once([stream.turns for stream in streams[1:]]))
        self._group_requests.extend(len(stream.turns) for stream in streams[1:])

    @property
    def num_sessions(self) -> int:
        return len(self._turns)

    def statistics(self) -> dict[str, float]:
        """Every figure of TARGETS by its name, nan where there is nothing to count. Raises ValueError if empty."""
        if not self._turns:
            raise ValueError("a corpus without sessions has no statistics")
        inputs, outputs, new = (
            np.frombuffer(column, np.int64) for column in (self._inputs, self._outputs, self._new)
        )
        main = np.frombuffer(self._is_main, np.int8) == 1
        groups = np.frombuffer(self._groups, np.int64)
        gaps = np.frombuffer(self._gaps, np.float64)
        sizes = np.frombuffer(self._group_requests, np.int64)
        concurrent = np.frombuffer(self._concurrent, np.int64)[groups > 0]
        small = inputs + outputs <= CONTEXT_256K
        return {
            "sessions": len(groups),
            "requests": len(inputs),
            "requests, main": int(main.sum()),
            "requests, sub-agents": int((~main).sum()),
            "sub-agent groups": int(groups.sum()),
            **_percentiles("input", inputs, 50, 90, 99),
            **_percentiles("input", inputs[main], 50, 90, suffix=", main"),
            **_percentiles("input", inputs[~main], 50, 90, suffix=", sub-agents"),
            **_percentiles("output", outputs, 50),
            **_percentiles("output", outputs[main], 50, 90, suffix=", main"),
            "output mean, main": float(outputs[main].mean()),
            **_percentiles("new tokens", new, 50, 99),
            "new tokens mean": float(new.mean()),
            "ideal prefix-cache hit": 1.0 - float(new.sum() / inputs.sum()),
            "prefill : output": float(new.sum() / outputs.sum()),
            **_percentiles("main turns a session", np.frombuffer(self._turns, np.int64), 50, 90),
            **_percentiles("gap", gaps, 50, 90, 99, suffix=" s"),
            "gap mean s": float(gaps.mean()) if len(gaps) else float("nan"),
            "gaps over 300 s": float((gaps > 300).mean()) if len(gaps) else float("nan"),
            "sessions with sub-agents": float((groups > 0).mean()),
            **_percentiles("groups a session with any", groups[groups > 0], 50),
            **_percentiles("requests a group", sizes, 50),
            "requests a group max": int(sizes.max(initial=0)),
            **_percentiles("concurrent groups", concurrent, 50),
            "concurrent groups max": int(concurrent.max(initial=0)),
            "256k: requests": int(small.sum()),
            **_percentiles("256k: input", inputs[small], 50),
            **_percentiles("256k: output", outputs[small], 50),
        }


def deviations(statistics: Mapping[str, float]) -> dict[str, float]:
    """measured / published - 1 of every target."""
    return {target.name: statistics[target.name] / target.published - 1 for target in TARGETS}


def _percentiles(
    name: str, values: npt.NDArray[np.int64] | npt.NDArray[np.float64], *percents: int, suffix: str = ""
) -> dict[str, float]:
    return {
        f"{name} p{percent}{suffix}": float(np.percentile(values, percent)) if len(values) else float("nan")
        for percent in percents
    }


def _most_at_once(groups: list[tuple[TraceRequest, ...]]) -> int:
    """The most sub-agents whose recorded calls span one moment."""
    most = 0
    ends: list[float] = []
    for start, end in sorted((turns[0].t, max(turn.end_t for turn in turns)) for turns in groups):
        while ends and ends[0] <= start:
            heapq.heappop(ends)
        heapq.heappush(ends, end)
        most = max(most, len(ends))
    return most
