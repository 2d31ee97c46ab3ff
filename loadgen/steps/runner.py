"""One step of the attention tier on a MoE service, tried again when it fails; errors and tries go into the record.

`replay` drives it with simulated sessions, `engine` with HTTP requests. How a step is executed is in `step_passes`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from loadgen.clock import Clock
from loadgen.moe.rows import RowSource
from loadgen.moe.table import TableTier
from loadgen.moe.tier import MoeTier, TierInfo
from loadgen.steps.passes import ServedSteps, SimulatedSteps
from loadgen.steps.records import RunPhase, RunRecord, StepRecord
from loadgen.tier.attention_tier import AttentionTier, TierConfig
from loadgen.tier.attention_time import AttentionTime
from loadgen.tier.step import TierStep
from megamoe.errors import ConfigError, MegaMoeError, StaleCallError, UnavailableError, must_be

log = logging.getLogger("loadgen")

RETRY_PAUSE_S = 0.1
"""Pause before a failed step is tried again, longer with every try: an overloaded service asks for one."""
LOST = (UnavailableError.code, StaleCallError.code)
"""Errors after which the lease, or the group under it, is gone: a step is only tried again under a new lease."""
MAX_RENEWALS = 3
"""New leases for one step: a service that goes down again with every try of it does not get a fourth."""
_STOP_POLL_S = 0.2


class ServiceGoneError(UnavailableError):
    """The service was lost and did not come back: there is nothing left to run on."""


def fit_tier(config: TierConfig, info: TierInfo) -> TierConfig:
    """The tier's limits lowered to what the service takes in one step. Raises ConfigError where that cannot be."""
    rows_per_request = config.speculation.rows_per_request
    if info.max_step_rows < rows_per_request:
        raise ConfigError(
            must_be(
                "rows of a decode request (num_drafts + 1)", f"at most {info.max_step_rows}", rows_per_request
            )
        )
    if config.draft_moe_layers > info.num_layers:
        raise ConfigError(
            must_be("draft_moe_layers", f"at most the service's {info.num_layers}", config.draft_moe_layers)
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
        self._service = None if isinstance(moe, TableTier) else moe
        self._steps: SimulatedSteps | ServedSteps
        if isinstance(moe, TableTier):
            self._steps = SimulatedSteps(moe, clock, record, tier.config, time_scale)
        elif num_micro_batches > moe.info.max_micro_batches:
            wanted = f"at most {moe.info.max_micro_batches} with this service"
            raise ConfigError(must_be("micro_batches", wanted, num_micro_batches))
        elif rows is None:
            raise AssertionError("a service needs rows: this is a bug")
        else:
            self._steps = ServedSteps(moe, rows, clock, record, tier.config, time_scale, num_micro_batches)

    async def run(
        self, step: TierStep, step_idx: int, phase: RunPhase, began_s: float, stopped: Callable[[], bool]
    ) -> StepRecord:
        """Execute a step; its record lacks tokens and completions. began_s: when the generator began to schedule it.

        A try whose lease was lost counts as no try: the step is executed again under a new one, in a new plan, which is
        always safe. Raises the last MegaMoeError when every try has failed, or the first one once stopped();
        ServiceGoneError when a lost service does not come back.
        """
        record, clock = self._record, self._clock
        attention_s = self._tier.attention_s(step, self._attention, self._token_scale)
        num_failed = num_renewals = 0
        while True:
            try:
                return await self._steps.execute(step, step_idx, attention_s, phase, began_s)
            except MegaMoeError as error:
                sentence = f"{error.code}: {error}"
                record.errors[sentence] = record.errors.get(sentence, 0) + 1
                log.warning("step %d failed (try %d): %s", step_idx, num_failed + num_renewals + 1, sentence)
                if stopped():
                    raise
                if error.code in LOST and num_renewals < MAX_RENEWALS:
                    await self._renew(error, stopped)
                    num_renewals += 1
                else:
                    num_failed += 1
                    if num_failed > self._step_retries:
                        raise
                record.num_retried_steps += 1
                await clock.sleep_until(clock.now() + RETRY_PAUSE_S * max(num_failed, 1))

    async def _renew(self, lost: MegaMoeError, stopped: Callable[[], bool]) -> None:
        """Lease the service anew. Raises ServiceGoneError when it stays away, `lost` once stopped()."""
        if self._service is None:
            raise lost
        renewing = asyncio.ensure_future(self._service.renew())
        try:
            while not renewing.done():
                await asyncio.wait({renewing}, timeout=_STOP_POLL_S)
                if stopped():
                    raise lost
            renewing.result()
        except MegaMoeError as error:
            if error is lost:
                raise
            raise ServiceGoneError(f"the service was lost ({lost}) and did not come back: {error}") from error
        finally:
            if not renewing.done():
                renewing.cancel()
                await asyncio.wait({renewing})
