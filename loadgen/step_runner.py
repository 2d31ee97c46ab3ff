"""One step of the attention tier on a MoE service: attention time passes, every MoE layer is a call.

`replay` drives it with simulated sessions, `engine` with HTTP requests. Owns the rows that are sent and the attention
time owed; tries failed steps again, and notes calls, errors and tries in the run's record.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from loadgen.attention_tier import AttentionTier, TierConfig, TierStep, Work
from loadgen.attention_time import AttentionTime
from loadgen.clock import Clock
from loadgen.moe_tier import MoeTier, TierInfo
from loadgen.records import RunPhase, RunRecord, StepRecord
from loadgen.rows import RowSource
from megamoe.errors import ConfigError, InvalidArgumentError, MegaMoeError, must_be

log = logging.getLogger("loadgen")

PHASE_OF_WORK = {Work.EXTEND: "prefill", Work.VERIFY: "decode", Work.IDLE: "idle"}
RETRY_PAUSE_S = 0.1
"""Pause before a failed step is tried again, longer with every try: an overloaded service asks for one."""
MIN_SLEEP_S = 1e-3
"""Attention time is owed until it is worth a sleep: timers are not finer than this."""


def fit_tier(config: TierConfig, info: TierInfo) -> TierConfig:
    """The tier's limits lowered to what the service takes in one step. Raises ConfigError if one request is too big."""
    rows_per_request = config.speculation.rows_per_request
    if info.max_step_rows < rows_per_request:
        raise ConfigError(
            must_be(
                "rows of a decode request (num_drafts + 1)", f"at most {info.max_step_rows}", rows_per_request
            )
        )
    return replace(
        config,
        chunk_rows=min(config.chunk_rows, info.max_step_rows),
        max_running=min(config.max_running, info.max_step_rows // rows_per_request),
    )


def row_source(config: TierConfig, info: TierInfo, seed: int, distribution: str) -> RowSource:
    """Rows for the largest step that a tier with this configuration makes."""
    max_rows = max(config.chunk_rows, config.max_running * config.speculation.rows_per_request)
    return RowSource(info.shape, info.num_layers, max_rows, seed=seed, distribution=distribution)


class StepRunner:
    """Executes steps one at a time. time_scale: wall seconds per modelled second of attention; token_scale: the scale
    that context lengths were shortened by; step_retries: tries more of a failed step."""

    def __init__(
        self,
        moe: MoeTier,
        tier: AttentionTier,
        rows: RowSource,
        clock: Clock,
        record: RunRecord,
        attention: AttentionTime,
        *,
        time_scale: float,
        token_scale: float,
        step_retries: int,
    ) -> None:
        self._moe = moe
        self._tier = tier
        self._rows = rows
        self._clock = clock
        self._record = record
        self._attention = attention
        self._time_scale = time_scale
        self._token_scale = token_scale
        self._step_retries = step_retries
        self._owed_s = 0.0

    async def run(
        self, step: TierStep, step_idx: int, phase: RunPhase, began_s: float, stopped: Callable[[], bool]
    ) -> StepRecord:
        """Execute a step; its record lacks tokens and completions. began_s: when the generator began to schedule it.

        Raises the last MegaMoeError when every try has failed, or the first one once stopped().
        """
        record, clock = self._record, self._clock
        for attempt in range(1 + self._step_retries):
            try:
                return await self._execute(step, step_idx, phase, began_s)
            except MegaMoeError as error:
                sentence = f"{error.code}: {error}"
                record.errors[sentence] = record.errors.get(sentence, 0) + 1
                log.warning("step %d failed (try %d): %s", step_idx, attempt + 1, sentence)
                if attempt == self._step_retries or stopped():
                    raise
                record.num_retried_steps += 1
                await clock.sleep_until(clock.now() + RETRY_PAUSE_S * (attempt + 1))
        raise AssertionError("a step was not tried at all: this is a bug")

    async def _execute(self, step: TierStep, step_idx: int, phase: RunPhase, began_s: float) -> StepRecord:
        """Attention and all MoE layers of one step. Raises MegaMoeError when the service refuses or fails."""
        clock, record = self._clock, self._record
        rows = step.num_rows_per_rank
        num_layers = self._moe.info.num_layers
        attention_s = self._tier.attention_s(step, self._attention, self._token_scale)
        per_layer_s = attention_s * self._time_scale / num_layers
        asked_s = clock.now()
        waited_s = moe_s = 0.0
        paths: tuple[str, ...] = ()
        phases = [PHASE_OF_WORK[rank.work] for rank in step.ranks]
        async with self._moe.step(num_rows_per_rank=rows, phase=phases) as moe_step:
            agree_s = clock.now() - asked_s
            for layer_idx in range(num_layers):
                waited_s += await self._attend(per_layer_s)
                batches = self._rows.batches(step_idx, layer_idx, rows)
                called_s = clock.now()
                try:
                    outcome = await moe_step.layer(layer_idx, batches)
                    if outcome.num_rows_per_rank != rows:
                        raise InvalidArgumentError(
                            must_be("rows of a reply, by rank", list(rows), list(outcome.num_rows_per_rank))
                        )
                except MegaMoeError:
                    record.num_calls_failed += 1
                    raise
                took_s = clock.now() - called_s
                moe_s += took_s
                record.add_call(phase, took_s, outcome.sub_steps)
                paths = tuple(piece.path for piece in outcome.sub_steps)
        return StepRecord(
            step_idx=step_idx,
            run_phase=phase,
            phase=step.phase,
            start_s=began_s,
            end_s=clock.now(),
            attention_s=waited_s,
            agree_s=agree_s,
            moe_s=moe_s,
            num_rows_per_rank=rows,
            num_requests=len(step.requests()),
            num_tokens=0,
            num_completed=0,
            paths=paths,
        )

    async def _attend(self, seconds: float) -> float:
        """Let attention time pass; returns what did. Small amounts are owed until they are worth a sleep."""
        self._owed_s += seconds
        if self._owed_s < MIN_SLEEP_S:
            return 0.0
        before = self._clock.now()
        await self._clock.sleep_until(before + self._owed_s)
        waited = self._clock.now() - before
        self._owed_s -= waited
        return waited
