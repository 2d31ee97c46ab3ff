"""Executes one step of the attention tier: attention time passes, every MoE layer is called, a record is made.

Served: each layer is a real call. Several micro-batches may be in flight at once: attention is one device and takes
them in turn, while the service works on the layers of the others. Simulated: a table says how long the layers take.
The draft model's own passes follow, one agreed step each. No weights of it are bound to the service: the last target
layers stand in.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from typing import Any

from loadgen.clock import Clock
from loadgen.moe.rows import RankRows, RowSource
from loadgen.moe.table import TableTier
from loadgen.moe.tier import LayerOutcome, MoeStep, MoeTier
from loadgen.steps.records import RunPhase, RunRecord, StepRecord
from loadgen.tier.attention_tier import TierConfig
from loadgen.tier.step import StepRows, TierStep
from megamoe.errors import InvalidArgumentError, MegaMoeError, must_be

MIN_SLEEP_S = 1e-3
"""Attention time is owed until it is worth a sleep: timers are not finer than this."""


class _Meter:
    """Seconds in which at least one of several overlapping activities went on."""

    def __init__(self, clock: Clock) -> None:
        self.total_s = 0.0
        self._clock = clock
        self._num_open = 0
        self._since = 0.0

    def __enter__(self) -> None:
        if self._num_open == 0:
            self._since = self._clock.now()
        self._num_open += 1

    def __exit__(self, *_: object) -> None:
        self._num_open -= 1
        if self._num_open == 0:
            self.total_s += self._clock.now() - self._since


class SimulatedSteps:
    """Steps whose MoE time a table tells. time_scale: seconds of the clock per modelled second."""

    def __init__(
        self, moe: TableTier, clock: Clock, record: RunRecord, config: TierConfig, time_scale: float
    ) -> None:
        self._moe = moe
        self._clock = clock
        self._record = record
        self._config = config
        self._time_scale = time_scale

    async def execute(
        self, step: TierStep, step_idx: int, attention_s: float, phase: RunPhase, began_s: float
    ) -> StepRecord:
        target = step.target_pass()
        moe_s, paths = self._pass(target, self._moe.info.num_layers, phase)
        if self._config.draft_moe_layers:
            passes = step.draft_passes(self._config.speculation.num_drafts)
            alike = max(len(passes) - 1, 1)  # all passes after the first are alike
            for rows, times in zip(passes, (1, alike)):
                moe_s += self._pass(rows, self._config.draft_moe_layers * times, phase)[0]
        start_s = self._clock.now()
        await self._clock.sleep_until(start_s + attention_s * self._time_scale + moe_s)
        return step_record(
            step,
            step_idx,
            phase,
            began_s,
            self._clock.now(),
            paths,
            attention_s=attention_s * self._time_scale,
            moe_s=moe_s,
        )

    def _pass(self, rows: StepRows, num_layers: int, phase: RunPhase) -> tuple[float, tuple[str, ...]]:
        pieces = self._moe.layer(rows.num_rows_per_rank, prefill=rows.is_prefill)
        took_s = sum(piece.total_us for piece in pieces) * 1e-6 * self._time_scale
        self._record.add_call(phase, took_s, pieces, num_layers)
        return took_s * num_layers, tuple(piece.path for piece in pieces)


class ServedSteps:
    """Steps whose MoE layers are calls to a service, attention time passing before each.

    num_micro_batches: parts of a step in flight at once, each with its own agreement.
    """

    def __init__(
        self,
        moe: MoeTier,
        rows: RowSource,
        clock: Clock,
        record: RunRecord,
        config: TierConfig,
        time_scale: float,
        num_micro_batches: int = 1,
    ) -> None:
        self._moe = moe
        self._rows = rows
        self._clock = clock
        self._record = record
        self._config = config
        self._time_scale = time_scale
        self._num_micro_batches = num_micro_batches
        self._attention = asyncio.Lock()
        self._owed_s = 0.0

    async def execute(
        self, step: TierStep, step_idx: int, attention_s: float, phase: RunPhase, began_s: float
    ) -> StepRecord:
        num_layers, config = self._moe.info.num_layers, self._config
        run = _PassRun(self._clock)
        parts = step.target_pass().split(self._num_micro_batches, config.speculation.rows_per_request)
        per_layer_s = attention_s * self._time_scale / num_layers / len(parts)
        passes = [
            self._pass(run, part, range(num_layers), step_idx, phase, per_layer_s, micro_batch_idx)
            for micro_batch_idx, part in enumerate(parts)
        ]
        paths = await _all_of(passes)
        if config.draft_moe_layers:
            layers = range(max(num_layers - config.draft_moe_layers, 0), num_layers)
            for rows in step.draft_passes(config.speculation.num_drafts):
                await self._pass(run, rows, layers, step_idx, phase, 0.0, 0)
        return step_record(
            step,
            step_idx,
            phase,
            began_s,
            self._clock.now(),
            tuple(path for part in paths for path in part),
            agree_s=run.agreeing.total_s,
            moe_s=run.serving.total_s - run.agreeing.total_s,
            attention_s=run.working.total_s - run.serving.total_s,
        )

    async def _pass(
        self,
        run: _PassRun,
        rows: StepRows,
        layers: range,
        step_idx: int,
        phase: RunPhase,
        per_layer_s: float,
        micro_batch_idx: int,
    ) -> tuple[str, ...]:
        """One pass through `layers`; returns the paths of its last call."""
        paths: tuple[str, ...] = ()
        counts = rows.num_rows_per_rank
        manager = self._moe.step(num_rows_per_rank=counts, phase=rows.phases, micro_batch_idx=micro_batch_idx)
        async with contextlib.AsyncExitStack() as stack:
            with run.working, run.serving, run.agreeing:
                moe_step = await stack.enter_async_context(manager)
            for layer_idx in layers:
                with run.working:
                    await self._attend(per_layer_s)
                batches = self._rows.batches(
                    step_idx * self._num_micro_batches + micro_batch_idx, layer_idx, counts
                )
                called_s = self._clock.now()
                with run.working, run.serving:
                    outcome = await self._call(moe_step, layer_idx, batches, counts)
                self._record.add_call(phase, self._clock.now() - called_s, outcome.sub_steps)
                paths = tuple(piece.path for piece in outcome.sub_steps)
        return paths

    async def _call(
        self, moe_step: MoeStep, layer_idx: int, batches: Sequence[RankRows | None], counts: tuple[int, ...]
    ) -> LayerOutcome:
        try:
            outcome = await moe_step.layer(layer_idx, batches)
            if outcome.num_rows_per_rank != counts:
                raise InvalidArgumentError(
                    must_be("rows of a reply, by rank", list(counts), list(outcome.num_rows_per_rank))
                )
        except MegaMoeError:
            self._record.num_calls_failed += 1
            raise
        return outcome

    async def _attend(self, seconds: float) -> None:
        """Let attention time pass, one micro-batch at a time. Small amounts are owed until they are worth a sleep."""
        async with self._attention:
            self._owed_s += seconds
            if self._owed_s < MIN_SLEEP_S:
                return
            before = self._clock.now()
            await self._clock.sleep_until(before + self._owed_s)
            self._owed_s -= self._clock.now() - before


class _PassRun:
    """Meters of one step: time with an agreement, with anything of the service, with anything at all in flight."""

    def __init__(self, clock: Clock) -> None:
        self.agreeing, self.serving, self.working = _Meter(clock), _Meter(clock), _Meter(clock)


async def _all_of(passes: list[Coroutine[Any, Any, tuple[str, ...]]]) -> list[tuple[str, ...]]:
    """Results in order. The first error ends the others and is raised alone, as with a single pass."""
    if len(passes) == 1:
        return [await passes[0]]
    tasks = [asyncio.ensure_future(one) for one in passes]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def step_record(
    step: TierStep,
    step_idx: int,
    phase: RunPhase,
    began_s: float,
    end_s: float,
    paths: tuple[str, ...],
    *,
    attention_s: float,
    moe_s: float,
    agree_s: float = 0.0,
) -> StepRecord:
    """The record of an executed step; the driver adds its tokens."""
    return StepRecord(
        step_idx=step_idx,
        run_phase=phase,
        phase=step.phase,
        start_s=began_s,
        end_s=end_s,
        attention_s=attention_s,
        agree_s=agree_s,
        moe_s=moe_s,
        num_rows_per_rank=step.num_rows_per_rank,
        num_requests=sum(len(rank.parts) for rank in step.ranks),
        num_tokens=0,
        num_completed=0,
        paths=paths,
    )
