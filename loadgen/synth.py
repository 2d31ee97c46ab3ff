"""Synthetic agent sessions, seeded: lognormal turns, contexts, outputs and gaps around the published medians.

Every session is made on demand from (seed, index), the same in any order. Session-level draws (turns, whether there
are sub-agents) are stratified over the corpus, so that a corpus scatters less than independent draws would. The
recipe is a starting point: sub-agent inputs come out too long and the tails of new tokens and gaps a little light.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np

from loadgen.trace import BLOCK_SIZE, HashIds, SubagentEntry, Trace, TraceRequest
from megamoe.errors import ConfigError, must_be

MODEL_NAME = "synthetic"


@dataclass(frozen=True)
class LogNormal:
    """Lognormal with this median and this standard deviation of the logarithm."""

    median: float
    sigma: float

    def at(self, quantile: float) -> float:
        """The value that a share `quantile` of draws stays below."""
        return self.median * math.exp(self.sigma * NormalDist().inv_cdf(quantile))

    def draw(self, rng: np.random.Generator) -> float:
        return self.median * math.exp(self.sigma * rng.standard_normal())


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What sessions are made of. Lengths in tokens, gaps in seconds. Published as a recipe that comes close."""

    turns: LogNormal = LogNormal(65, 1.27)
    min_turns: int = 20
    max_turns: int = 4096
    start_context: LogNormal = LogNormal(45_000, 0.55)
    shared_prefix: int = 17_000
    output: LogNormal = LogNormal(616, 1.30)
    appended: LogNormal = LogNormal(760, 1.38)
    compaction_probability: float = 0.005
    compacted_context: LogNormal = LogNormal(60_000, 0.5)
    max_context: int = 990_000
    gap_s: LogNormal = LogNormal(4.9, 2.65)
    max_gap_s: float = 4 * 3600.0
    subagent_probability: float = 0.445
    groups: LogNormal = LogNormal(5, 1.15)
    group_requests: LogNormal = LogNormal(16, 1.0)
    max_group_requests: int = 789
    group_start_context: LogNormal = LogNormal(30_000, 0.55)
    group_output: LogNormal = LogNormal(270, 1.2)
    group_appended: LogNormal = LogNormal(950, 1.1)
    # The published statistics fix neither of these; they only shape when recorded calls overlap.
    fan_out: LogNormal = LogNormal(3, 0.6)
    max_fan_out: int = 10
    in_flight_probability: float = 1 / 3
    join_next_probability: float = 0.7
    group_gap_s: LogNormal = LogNormal(2.0, 1.2)
    max_output: int = 65_536
    output_tokens_per_s: LogNormal = LogNormal(75, 0.25)
    prefill_tokens_per_s: float = 20_000.0
    base_ttft_s: LogNormal = LogNormal(1.2, 0.5)


class SyntheticTraces:
    """num_traces sessions of `recipe` from `seed`. Raises ConfigError naming the field."""

    def __init__(self, num_traces: int = 393, seed: int = 42, recipe: Recipe | None = None) -> None:
        if num_traces < 1:
            raise ConfigError(must_be("num_traces", "at least 1", num_traces))
        self.recipe = recipe or Recipe()
        self.seed = seed
        self._num_traces = num_traces

    @property
    def description(self) -> str:
        return f"synthetic ({self._num_traces} sessions, seed {self.seed})"

    def __len__(self) -> int:
        return self._num_traces

    def __getitem__(self, trace_idx: int) -> Trace:
        if not 0 <= trace_idx < self._num_traces:
            raise IndexError(must_be("trace_idx", f"from 0 to {self._num_traces - 1}", trace_idx))
        digest = hashlib.sha256(f"{self.seed}:synth:{trace_idx}".encode()).digest()
        rng = np.random.default_rng(int.from_bytes(digest[:8], "big"))
        turns = self.recipe.turns.at(_strata(self.seed, "turns", self._num_traces)[trace_idx])
        has_subagents = (
            _strata(self.seed, "subagents", self._num_traces)[trace_idx] < self.recipe.subagent_probability
        )
        groups = self.recipe.groups.at(_strata(self.seed, "groups", self._num_traces)[trace_idx])
        return _Session(
            self.recipe,
            rng,
            f"synth-{self.seed}-{trace_idx:04d}",
            num_turns=min(max(round(turns), self.recipe.min_turns), self.recipe.max_turns),
            num_groups=max(1, round(groups)) if has_subagents else 0,
        ).build()


@cache
def _strata(seed: int, name: str, count: int) -> tuple[float, ...]:
    """`count` uniforms, one in each of `count` equal slices of (0, 1), in a shuffled order."""
    digest = hashlib.sha256(f"{seed}:strata:{name}:{count}".encode()).digest()
    rng = np.random.default_rng(int.from_bytes(digest[:8], "big"))
    values = (rng.permutation(count) + rng.uniform(1e-9, 1 - 1e-9, count)) / count
    return tuple(float(value) for value in values)


class _Session:
    """One session in the making: the clock of the recording and the block identities used so far."""

    def __init__(
        self, recipe: Recipe, rng: np.random.Generator, trace_id: str, *, num_turns: int, num_groups: int
    ) -> None:
        self.recipe = recipe
        self.rng = rng
        self.trace_id = trace_id
        self.num_turns = num_turns
        self.num_groups = num_groups
        self.next_hash_id = 0

    def build(self) -> Trace:
        recipe = self.recipe
        prefix = self._new_blocks(_num_blocks(recipe.shared_prefix))
        outputs = self._outputs(recipe.output, self.num_turns)
        prompts = self._prompts(
            prefix, recipe.start_context.draw(self.rng), outputs, recipe.appended, recipe.compacted_context
        )
        fan_outs = self._fan_outs()
        entries: list[TraceRequest | SubagentEntry] = []
        now, cached, joins_until = 0.0, 0, 0.0
        for turn_idx, (hash_ids, num_output) in enumerate(zip(prompts, outputs)):
            if turn_idx:
                gap = min(recipe.gap_s.draw(self.rng), recipe.max_gap_s)
                now = max(now + gap, joins_until)
                joins_until = 0.0
            turn = self._request(now, hash_ids, num_output, max(len(hash_ids) - cached, 1))
            entries.append(turn)
            cached = len(hash_ids)
            now = turn.end_t
            for size in fan_outs.get(turn_idx, ()):
                group = [self._subagent(turn, len(entries) + nth) for nth in range(size)]
                entries.extend(group)
                if self.rng.random() < recipe.join_next_probability:
                    slack = recipe.base_ttft_s.draw(self.rng)
                    joins_until = max(joins_until, max(entry.end_t for entry in group) + slack)
        entries.sort(key=lambda entry: entry.t)
        tool_tokens = round(recipe.shared_prefix * 0.8)
        return Trace(
            id=self.trace_id,
            requests=tuple(entries),
            models=(MODEL_NAME,),
            tool_tokens=tool_tokens,
            system_tokens=recipe.shared_prefix - tool_tokens,
        )

    def _fan_outs(self) -> dict[int, list[int]]:
        """Sizes of the sub-agent fan-outs that each main turn spawns; the sizes sum to num_groups."""
        spawned: dict[int, list[int]] = {}
        left = self.num_groups
        while left > 0:
            size = min(left, max(1, round(self.recipe.fan_out.draw(self.rng))), self.recipe.max_fan_out)
            spawned.setdefault(int(self.rng.integers(self.num_turns)), []).append(size)
            left -= size
        return spawned

    def _subagent(self, parent: TraceRequest, number: int) -> SubagentEntry:
        recipe = self.recipe
        count = round(recipe.group_requests.draw(self.rng))
        outputs = self._outputs(recipe.group_output, min(max(count, 1), recipe.max_group_requests))
        prompts = self._prompts(
            self._new_blocks(0),
            recipe.group_start_context.draw(self.rng),
            outputs,
            recipe.group_appended,
            recipe.group_start_context,
        )
        if self.rng.random() < recipe.in_flight_probability:
            start = parent.t + self.rng.random() * (parent.end_t - parent.t)
        else:
            start = parent.end_t + self.rng.random() * 0.5
        now, cached = start, 0
        requests = []
        for idx, (hash_ids, num_output) in enumerate(zip(prompts, outputs)):
            if idx:
                now += min(recipe.group_gap_s.draw(self.rng), recipe.max_gap_s)
            request = self._request(now, hash_ids, num_output, max(len(hash_ids) - cached, 1))
            requests.append(request)
            cached, now = len(hash_ids), request.end_t
        return SubagentEntry(
            t=start,
            agent_id=f"agent_{number:03d}",
            subagent_type="general-purpose",
            duration_ms=math.ceil((now - start) * 1000),
            total_tokens=sum(request.num_input + request.num_output for request in requests),
            tool_use_count=len(requests) - 1,
            requests=tuple(requests),
            models=(MODEL_NAME,),
        )

    def _request(self, now: float, hash_ids: HashIds, num_output: int, new_blocks: int) -> TraceRequest:
        recipe = self.recipe
        prefill = new_blocks * BLOCK_SIZE / recipe.prefill_tokens_per_s
        ttft = recipe.base_ttft_s.draw(self.rng) + prefill
        return TraceRequest(
            t=now,
            num_input=len(hash_ids) * BLOCK_SIZE,
            num_output=num_output,
            hash_ids=hash_ids,
            model=MODEL_NAME,
            input_types=("text",),
            output_types=("text",),
            stop="tool_use",
            api_time=ttft + num_output / recipe.output_tokens_per_s.draw(self.rng),
            ttft=ttft,
        )

    def _outputs(self, output: LogNormal, count: int) -> list[int]:
        draws = output.median * np.exp(output.sigma * self.rng.standard_normal(count))
        return [int(value) for value in np.clip(np.rint(draws), 1, self.recipe.max_output)]

    def _prompts(
        self, prefix: HashIds, start: float, outputs: list[int], appended: LogNormal, compacted: LogNormal
    ) -> list[HashIds]:
        """Block identities of each prompt of a stream. A prompt extends the one before until a compaction, which
        keeps the shared prefix and starts over behind it. Prompts of one lineage are views of one array."""
        limit = _num_blocks(self.recipe.max_context)
        lineages: list[list[int]] = [[min(max(_num_blocks(start), len(prefix) + 1), limit)]]
        for output in outputs[:-1]:
            tokens = lineages[-1][-1] * BLOCK_SIZE + output + appended.draw(self.rng)
            if _num_blocks(tokens) > limit or self.rng.random() < self.recipe.compaction_probability:
                blocks = min(max(_num_blocks(compacted.draw(self.rng)), len(prefix) + 1), limit)
                lineages.append([blocks])
            else:
                lineages[-1].append(_num_blocks(tokens))
        prompts: list[HashIds] = []
        for lengths in lineages:
            longest = np.concatenate([prefix, self._new_blocks(lengths[-1] - len(prefix))])
            prompts.extend(longest[:length] for length in lengths)
        return prompts

    def _new_blocks(self, count: int) -> HashIds:
        first = self.next_hash_id
        self.next_hash_id += count
        return np.arange(first, first + count, dtype=np.int64)


def _num_blocks(tokens: float) -> int:
    """Tokens as whole blocks, to the nearest, at least one."""
    return max(1, round(tokens / BLOCK_SIZE))
