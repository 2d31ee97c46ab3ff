"""One step of the attention tier on a MoE service, tried again when it fails; errors and tries go into the record.

`replay` drives it with simulated sessions, `engine` with HTTP requests. How a step is executed is in `step_passes`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from loadgen.attention_tier import AttentionTier, TierConfig
from loadgen.attention_time import AttentionTime
from loadgen.clock import Clock
from loadgen.moe_table import TableTier
from loadgen.moe_tier import MoeTier, TierInfo
from loadgen.records import RunPhase, RunRecord, StepRecord
from loadgen.rows import RowSource
from loadgen.step_passes import ServedSteps, SimulatedSteps
from loadgen.tier_step import TierStep
from megamoe.errors import ConfigError, MegaMoeError, must_be

log = logging.getLogger("loadgen")

RETRY_PAUSE_S = 0.1
"""Pause before a failed step is tried again, longer with every try: an overloaded service asks for one."""


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
    that context lengths were shortened by; step_retries: tries more of a failed step; num_micro_batches: parts of a
    step in flight at once. rows: None only where a table answers."""

    def __init__(
        self,
        moe: MoeTier | TableTier,
        tier: AttentionTier,
        rows: RowSource | None,
        clock: Clock,
        record: RunRecord,
        attention: AttentionTime,
        *,
        time_scale: float,
        token_scale: float,
        step_retries: int,
        num_micro_batches: int = 1,
    ) -> None:
        self._tier = tier
        self._clock = clock
        self._record = record
        self._attention = attention
        self._token_scale = token_scale
        self._step_retries = step_retries
        self._steps: SimulatedSteps | ServedSteps
        if isinstance(moe, TableTier):
            self._steps = SimulatedSteps(moe, clock, record, tier.config, time_scale)
        elif rows is None:
            raise AssertionError("a service needs rows: this is a bug")
        else:
            self._steps = ServedSteps(moe, rows, clock, record, tier.config, time_scale, num_micro_batches)

    async def run(
        self, step: TierStep, step_idx: int, phase: RunPhase, began_s: float, stopped: Callable[[], bool]
    ) -> StepRecord:
        """Execute a step; its record lacks tokens and completions. began_s: when the generator began to schedule it.

        Raises the last MegaMoeError when every try has failed, or the first one once stopped().
        """
        record, clock = self._record, self._clock
        attention_s = self._tier.attention_s(step, self._attention, self._token_scale)
        for attempt in range(1 + self._step_retries):
            try:
                return await self._steps.execute(step, step_idx, attention_s, phase, began_s)
            except MegaMoeError as error:
                sentence = f"{error.code}: {error}"
                record.errors[sentence] = record.errors.get(sentence, 0) + 1
                log.warning("step %d failed (try %d): %s", step_idx, attempt + 1, sentence)
                if attempt == self._step_retries or stopped():
                    raise
                record.num_retried_steps += 1
                await clock.sleep_until(clock.now() + RETRY_PAUSE_S * (attempt + 1))
        raise AssertionError("a step was not tried at all: this is a bug")
