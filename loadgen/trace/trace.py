"""Agent sessions in the recorded trace format, as values, and the streams of turns inside a session.

A trace is one session: its main requests and sub-agent entries in one list, times in seconds from the start of the
session. `in` is block_size times the number of hash_ids; hash_ids are the prefix-cache identity of the blocks and
mean something only within their trace (hash_id_scope "local"). Files: `file`; replay: `replay.session`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megamoe.errors import InvalidArgumentError, must_be

BLOCK_SIZE = 64
"""Tokens that share one prefix-cache identity (the recorded format fixes it)."""

HashIds = npt.NDArray[np.int64]

JOIN_EPSILON_S = 1e-6
"""Recorded times this close count as equal when joins are derived."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TraceRequest:
    """One model call: num_input prompt tokens (`in`), num_output tokens to generate (`out`).

    t: start, seconds from session start. api_time: how long the call took when recorded. type: "n" or "s" (streamed).
    """

    t: float
    num_input: int
    num_output: int
    hash_ids: HashIds
    type: str = "s"
    model: str = ""
    input_types: tuple[str, ...] = ()
    output_types: tuple[str, ...] = ()
    stop: str = ""
    api_time: float | None = None
    think_time: float | None = None
    ttft: float | None = None

    @property
    def end_t(self) -> float:
        """Recorded completion; a missing, negative or non-finite api_time counts as zero."""
        took = self.api_time if self.api_time is not None and math.isfinite(self.api_time) else 0.0
        return self.t + max(took, 0.0)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SubagentEntry:
    """A sub-agent with a fresh context of its own. t: when it was spawned."""

    t: float
    agent_id: str
    requests: tuple[TraceRequest, ...]
    subagent_type: str = ""
    duration_ms: int | None = None
    total_tokens: int | None = None
    tool_use_count: int | None = None
    status: str = "completed"
    models: tuple[str, ...] = ()
    tool_tokens: int = 0
    system_tokens: int = 0

    @property
    def end_t(self) -> float:
        """Recorded end: the last request's, or t + duration_ms where that is later."""
        ends = [request.end_t for request in self.requests]
        if self.duration_ms is not None:
            ends.append(self.t + self.duration_ms / 1000.0)
        return max(ends, default=self.t)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Trace:
    """One session. requests: main requests and sub-agent entries, in order of t."""

    id: str
    requests: tuple[TraceRequest | SubagentEntry, ...]
    models: tuple[str, ...] = ()
    block_size: int = BLOCK_SIZE
    hash_id_scope: str = "local"
    tool_tokens: int = 0
    system_tokens: int = 0
    totals: Mapping[str, Any] | None = None

    @property
    def main_requests(self) -> tuple[TraceRequest, ...]:
        return tuple(entry for entry in self.requests if isinstance(entry, TraceRequest))

    @property
    def subagents(self) -> tuple[SubagentEntry, ...]:
        return tuple(entry for entry in self.requests if isinstance(entry, SubagentEntry))

    @property
    def span(self) -> tuple[float, float]:
        """(first start, last end) in recorded seconds; (0, 0) for a trace without requests."""
        starts = [entry.t for entry in self.requests]
        ends = [entry.end_t for entry in self.requests]
        return (min(starts), max(ends)) if starts else (0.0, 0.0)


class TraceSource(Protocol):
    """A corpus of sessions, each made or read when asked for, the same each time."""

    @property
    def description(self) -> str: ...

    def __len__(self) -> int: ...

    def __getitem__(self, trace_idx: int) -> Trace: ...


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Stream:
    """The turns of one agent in order, and how it hangs in its session.

    stream_idx: 0 = the main agent. gaps_s[i]: recorded end-to-start gap before turn i (gaps_s[0] of a sub-agent: from
    its spawning turn; 0 where turns overlapped). spawn_turn_idx: main turn that spawns it, -1 = the session's start.
    spawn_in_flight: gaps_s[0] counts from the START of the spawning turn, which was still running.
    join_turn_idx: main turn that waits for it; None = background.
    """

    stream_idx: int
    turns: tuple[TraceRequest, ...]
    gaps_s: tuple[float, ...]
    spawn_turn_idx: int = -1
    spawn_in_flight: bool = False
    join_turn_idx: int | None = None


def streams_of(trace: Trace) -> tuple[Stream, ...]:
    """The main stream and one stream per sub-agent with requests.

    A sub-agent is spawned by the last main turn that started at or before it, and gates the first main turn that was
    recorded at or after its end; without such a turn it runs in the background. Raises InvalidArgumentError for a
    trace without main requests.
    """
    main = tuple(sorted(trace.main_requests, key=lambda request: request.t))
    if not main:
        raise InvalidArgumentError(must_be(f"requests of trace {trace.id!r}", "at least one main request", 0))
    streams = [Stream(stream_idx=0, turns=main, gaps_s=_gaps(main, 0.0))]
    for entry in trace.subagents:
        turns = tuple(sorted(entry.requests, key=lambda request: request.t))
        if not turns:
            continue
        before = [idx for idx, turn in enumerate(main) if turn.t <= entry.t + JOIN_EPSILON_S]
        spawn = before[-1] if before else -1
        in_flight = spawn >= 0 and turns[0].t < main[spawn].end_t
        anchor = main[0].t if spawn < 0 else (main[spawn].t if in_flight else main[spawn].end_t)
        end_t = entry.end_t
        join = next(
            (idx for idx, turn in enumerate(main) if idx > spawn and turn.t + JOIN_EPSILON_S >= end_t),
            None,
        )
        streams.append(
            Stream(
                stream_idx=len(streams),
                turns=turns,
                gaps_s=_gaps(turns, max(turns[0].t - anchor, 0.0)),
                spawn_turn_idx=spawn,
                spawn_in_flight=in_flight,
                join_turn_idx=join,
            )
        )
    return tuple(streams)


def _gaps(turns: tuple[TraceRequest, ...], first: float) -> tuple[float, ...]:
    between = (max(turn.t - last.end_t, 0.0) for last, turn in pairwise(turns))
    return (first, *between)


def limit_context(trace: Trace, max_tokens: int) -> Trace | None:
    """The session without requests of more than max_tokens, prompt and output together; times stay as they are.

    None when no main request is left.
    """

    def kept(requests: Iterable[TraceRequest]) -> tuple[TraceRequest, ...]:
        return tuple(request for request in requests if request.num_input + request.num_output <= max_tokens)

    entries: list[TraceRequest | SubagentEntry] = []
    for entry in trace.requests:
        if isinstance(entry, TraceRequest):
            entries.extend(kept((entry,)))
        elif left := kept(entry.requests):
            entries.append(replace(entry, requests=left))
    limited = replace(trace, requests=tuple(entries))
    return limited if limited.main_requests else None


def scale_tokens(trace: Trace, token_scale: float) -> Trace:
    """The same session with token counts times token_scale (0 < token_scale <= 1), for runs on small machines.

    A block becomes ceil(64 token_scale) tokens; below 1/64 blocks are thinned instead. Two prompts that shared a
    prefix share the same part of it afterwards. Outputs keep at least one token.
    """
    if not 0.0 < token_scale <= 1.0:
        raise InvalidArgumentError(must_be("token_scale", "above 0 and at most 1", token_scale))
    if token_scale == 1.0:
        return trace
    exact = trace.block_size * token_scale
    block_size = max(1, math.ceil(exact - 1e-9))
    stride = block_size / exact

    def scaled(request: TraceRequest) -> TraceRequest:
        num_blocks = math.ceil(len(request.hash_ids) / stride - 1e-9)
        kept = np.floor(np.arange(num_blocks) * stride + 1e-9).astype(np.int64)
        return replace(
            request,
            num_input=num_blocks * block_size,
            num_output=max(1, round(request.num_output * token_scale)),
            hash_ids=request.hash_ids[kept],
        )

    entries = tuple(
        replace(entry, requests=tuple(scaled(request) for request in entry.requests))
        if isinstance(entry, SubagentEntry)
        else scaled(entry)
        for entry in trace.requests
    )
    return replace(trace, block_size=block_size, requests=entries)
