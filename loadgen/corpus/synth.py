"""Synthetic agent sessions, seeded, with the published statistics of recorded ones (`recipe` says how they are drawn).

Every session is made on demand from (seed, index, number of sessions), the same in any order, and holds its block
identities as views of a few arrays.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from loadgen.corpus.recipe import Floats, LogNormal, Recipe, SessionDraws, Window, seeded, session_draws
from loadgen.trace.trace import BLOCK_SIZE, HashIds, SubagentEntry, Trace, TraceRequest
from megamoe.errors import ConfigError, must_be

MODEL_NAME = "synthetic"
MAX_SESSIONS = 1_000_000
"""More is a slip of the finger, and would fill the memory before anything is said."""

Ints = npt.NDArray[np.int64]


class SyntheticTraces:
    """num_traces sessions of `recipe` from `seed`. Raises ConfigError naming the field."""

    def __init__(self, num_traces: int = 393, seed: int = 42, recipe: Recipe | None = None) -> None:
        if not 1 <= num_traces <= MAX_SESSIONS:
            raise ConfigError(must_be("num_traces", f"from 1 to {MAX_SESSIONS:,}", num_traces))
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
        return _Session(
            self.recipe,
            session_draws(self.seed, self._num_traces)[trace_idx],
            seeded(self.seed, "synth", trace_idx),
            f"synth-{self.seed}-{trace_idx:04d}",
        ).build()


class _Session:
    """One session in the making: the clock of the recording and the block identities used so far."""

    def __init__(self, recipe: Recipe, draws: SessionDraws, rng: np.random.Generator, trace_id: str) -> None:
        self.recipe = recipe
        self.rng = rng
        self.trace_id = trace_id
        turns = round(recipe.turns.at(draws.turns))
        self.num_turns = min(max(turns, recipe.min_turns), recipe.max_turns)
        # One uniform says whether there are sub-agents and, rescaled, how many.
        quantile = draws.subagents / recipe.subagent_share
        growth = (self.num_turns / recipe.turns.median) ** recipe.group_growth
        groups = round(growth * recipe.groups.at(quantile)) if quantile < 1 else 0
        self.num_groups = min(max(groups, 1), recipe.max_groups) if quantile < 1 else 0
        self.start_context = recipe.start_context.at(draws.start_context)
        is_wide = draws.window < recipe.wide_share(self.num_turns)
        self.window = recipe.wide if is_wide else recipe.narrow
        self.group_window = recipe.wide_group if is_wide else recipe.narrow_group
        self.pace = recipe.pace(self.num_turns)
        self.next_hash_id = 0
        self.group_ends: list[float] = []

    def build(self) -> Trace:
        recipe = self.recipe
        prefix = self._new_blocks(_num_blocks(recipe.shared_prefix))
        outputs = self._outputs(recipe.output, self.num_turns)
        prompts = self._prompts(prefix, self.start_context, outputs, recipe.appended, self.window)
        gaps = recipe.gap_s.draws(self.rng, self.num_turns)
        fan_outs = self._fan_outs()
        entries: list[TraceRequest | SubagentEntry] = []
        now, cached, joins_until = 0.0, 0, 0.0
        for turn_idx, hash_ids in enumerate(prompts):
            if turn_idx:
                now = max(now + float(gaps[turn_idx]), joins_until)
                joins_until = 0.0
            turn = self._request(now, hash_ids, int(outputs[turn_idx]), max(len(hash_ids) - cached, 1))
            entries.append(turn)
            cached, now = len(hash_ids), turn.end_t
            for size in fan_outs.get(turn_idx, ()):
                group = self._fan_out(turn, size, len(entries))
                entries.extend(group)
                if self.rng.random() < recipe.join_next_share:
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

    # ------------------------------------------------------------ sub-agents

    def _fan_outs(self) -> dict[int, list[int]]:
        """Sizes of the sub-agent fan-outs that each main turn spawns; the sizes sum to num_groups."""
        spawned: dict[int, list[int]] = {}
        left = self.num_groups
        while left > 0:
            size = min(
                left, max(1, round(self.recipe.fan_out.draw(self.rng))), self.recipe.max_concurrent_groups
            )
            spawned.setdefault(int(self.rng.integers(self.num_turns)), []).append(size)
            left -= size
        return spawned

    def _fan_out(self, parent: TraceRequest, size: int, number: int) -> list[SubagentEntry]:
        """`size` sub-agents of a turn; one starts later where too many would run at once."""
        group = []
        sizes = self.recipe.group_requests.draws(self.rng, size)
        for nth in range(size):
            if self.rng.random() < self.recipe.in_flight_share:
                start = parent.t + self.rng.random() * (parent.end_t - parent.t)
            else:
                start = parent.end_t + self.rng.random() * 0.5
            ends = sorted(end for end in self.group_ends if end > start)
            if len(ends) >= self.recipe.max_concurrent_groups:
                start = ends[len(ends) - self.recipe.max_concurrent_groups]
            group.append(self._subagent(start, number + nth, max(round(float(sizes[nth])), 1)))
            self.group_ends.append(group[-1].end_t)
        return group

    def _subagent(self, start: float, number: int, size: int) -> SubagentEntry:
        recipe = self.recipe
        count = min(size, recipe.max_group_requests)
        outputs = self._outputs(recipe.group_output, count)
        start_context = recipe.group_start_context.draw(self.rng)
        prompts = self._prompts(
            self._new_blocks(_num_blocks(recipe.group_prefix)),
            start_context,
            outputs,
            recipe.group_appended,
            self.group_window,
        )
        gaps = recipe.group_gap_s.draws(self.rng, count)
        now, cached = start, 0
        requests = []
        for idx, hash_ids in enumerate(prompts):
            if idx:
                now += float(gaps[idx])
            request = self._request(now, hash_ids, int(outputs[idx]), max(len(hash_ids) - cached, 1))
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
            system_tokens=recipe.group_prefix,
        )

    # ------------------------------------------------------------ requests

    def _request(self, now: float, hash_ids: HashIds, num_output: int, new_blocks: int) -> TraceRequest:
        recipe = self.recipe
        ttft = recipe.base_ttft_s.draw(self.rng) + new_blocks * BLOCK_SIZE / recipe.prefill_tokens_per_s
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

    def _outputs(self, output: LogNormal, count: int) -> Ints:
        draws = np.rint(self.pace * output.draws(self.rng, count))
        limited: Ints = np.clip(draws, 1, self.recipe.max_output).astype(np.int64)
        return limited

    def _prompts(
        self, prefix: HashIds, start: float, outputs: Ints, appended: LogNormal, window: Window
    ) -> list[HashIds]:
        """Block identities of each prompt of a stream. A prompt extends the one before until a compaction, which
        keeps the shared prefix and starts over behind it. Prompts of one lineage are views of one array."""
        recipe, rng = self.recipe, self.rng
        fewest = len(prefix) + 1
        most = max(_num_blocks(window.peak.draw(rng)), fewest)
        new: Floats = outputs + self.pace * appended.draws(rng, len(outputs))
        compacts = rng.random(len(outputs)) < recipe.compaction_probability
        lineages: list[list[int]] = [[min(max(_num_blocks(start), fewest), most)]]
        for idx in range(len(outputs) - 1):
            blocks = lineages[-1][-1] + _num_blocks(float(new[idx]))
            if blocks > most or compacts[idx]:
                blocks = min(max(_num_blocks(window.compacted.draw(rng)), fewest), most)
                lineages.append([blocks])
            else:
                lineages[-1].append(blocks)
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
