"""The MoE service as `moe.tier` wants it, over the public client. The only importer of the service in this package."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace

from loadgen.moe.rows import RankRows
from loadgen.moe.tier import LayerOutcome, SubStepSeen, TierInfo
from megamoe import StageTimes, SubStepReport
from megamoe.errors import ConfigError, LeaseHeldError, PeerTimeoutError, UnavailableError, must_be
from service.client import AsyncMoeGroup, AsyncStep, GroupOutput, ServiceInfo

log = logging.getLogger("loadgen")

_STAGES = StageTimes.stages()
_RENEW_PAUSE_S = 0.2


def tier_info(info: ServiceInfo) -> TierInfo:
    """The facts that a load generator needs of a service."""
    return TierInfo(
        shape=info.shape,
        model_name=info.model_name,
        profile=info.profile,
        backend=info.backend,
        generation=info.generation,
        max_tokens_per_rank=info.limits.max_tokens_per_rank,
        max_step_rows=info.limits.max_step_rows,
        max_micro_batches=info.limits.max_micro_batches,
        metrics_urls=tuple(f"http://{address}/metrics" for address in info.metrics_addresses),
    )


class LiveTier:
    """A leased service. Made by `connect`. on_restart: told when `renew` has leased another incarnation of it."""

    def __init__(self, target: str, holder: str, wait_ready_s: float, transport: str = "grpc") -> None:
        self._target = target
        self._transport = transport
        self._holder = holder
        self._wait_ready_s = wait_ready_s
        self._leased = contextlib.AsyncExitStack()
        self._group: AsyncMoeGroup
        self.info: TierInfo
        self.on_restart: Callable[[], Awaitable[None]] | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(
        cls, target: str, *, holder: str, wait_ready_s: float, transport: str = "grpc"
    ) -> AsyncIterator[LiveTier]:
        """Lease the service whose front is at `target` (host:port). Raises MegaMoeError when that fails.

        transport: "grpc", or "ring" for rows through shared memory of the service's host.
        """
        if not 0 <= wait_ready_s < math.inf:
            raise ConfigError(must_be("wait_ready", "at least 0, and finite", wait_ready_s))
        tier = cls(target, holder, wait_ready_s, transport)
        await tier._lease(wait_ready_s)
        try:
            yield tier
        finally:
            await tier._leased.aclose()

    async def _lease(self, wait_ready_s: float) -> None:
        group = AsyncMoeGroup.connect(
            self._target, holder=self._holder, wait_ready_s=wait_ready_s, transport=self._transport
        )
        self._group = await self._leased.enter_async_context(group)
        self.info = tier_info(self._group.info)

    async def renew(self) -> None:
        """See MoeTier. Waits as long as `connect` did."""
        old, deadline = self.info, time.monotonic() + self._wait_ready_s
        await self._leased.aclose()
        while True:
            try:
                await self._lease(max(round(deadline - time.monotonic(), 1), 0.0))
                break
            except (
                UnavailableError,
                LeaseHeldError,
                PeerTimeoutError,
            ) as error:  # it may go down again meanwhile
                if time.monotonic() >= deadline:
                    raise
                log.info("no lease yet: %s", error)
                await asyncio.sleep(_RENEW_PAUSE_S)
        same = {"generation": 0, "metrics_urls": ()}
        if replace(self.info, **same) != replace(old, **same):  # type: ignore[arg-type]
            raise ConfigError(f"{self._target} must come back as it was, got another service: {self.info}")
        if self.info.generation != old.generation and self.on_restart is not None:
            await self.on_restart()

    @contextlib.asynccontextmanager
    async def step(
        self, *, num_rows_per_rank: Sequence[int], phase: Sequence[str], micro_batch_idx: int = 0
    ) -> AsyncIterator[LiveStep]:
        async with self._group.step(num_rows_per_rank, phase, micro_batch_idx) as step:
            yield LiveStep(step)


class LiveStep:
    """An agreed step of the live service."""

    def __init__(self, step: AsyncStep) -> None:
        self._step = step

    async def layer(self, layer_idx: int, batches: Sequence[RankRows | None]) -> LayerOutcome:
        return outcome_of(await self._step.layer(layer_idx, batches))


def outcome_of(output: GroupOutput) -> LayerOutcome:
    """What the replies of one layer call say, all ranks together."""
    replying = {rank: reports for rank, reports in enumerate(output.reports_per_rank) if reports}
    num_pieces = len(output.sub_steps)
    return LayerOutcome(
        num_rows_per_rank=tuple(int(hidden.shape[0]) for hidden in output.hidden_states),
        sub_steps=tuple(
            _seen({rank: reports[piece] for rank, reports in replying.items()}) for piece in range(num_pieces)
        ),
    )


def _seen(reports: dict[int, SubStepReport]) -> SubStepSeen:
    first = next(iter(reports.values()))
    slowest = max(reports.values(), key=lambda report: report.times.total_us)
    return SubStepSeen(
        path=str(first.path),
        runtime_capacity=first.runtime_capacity,
        max_rows=max(first.num_rows_per_rank),
        total_us_per_rank={rank: report.times.total_us for rank, report in reports.items()},
        stages_us={stage: getattr(slowest.times, f"{stage}_us") for stage in _STAGES},
    )
