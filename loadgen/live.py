"""The MoE service as `moe_tier` wants it, over the public client. The only importer of the service in this package."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

from loadgen.moe_tier import LayerOutcome, SubStepSeen, TierInfo
from loadgen.rows import RankRows
from megamoe import StageTimes, SubStepReport
from service.client import AsyncMoeGroup, AsyncStep, GroupOutput, ServiceInfo

_STAGES = StageTimes.stages()


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
        metrics_urls=tuple(f"http://{address}/metrics" for address in info.metrics_addresses),
    )


class LiveTier:
    """A leased service. Made by `connect`."""

    def __init__(self, group: AsyncMoeGroup) -> None:
        self._group = group
        self.info = tier_info(group.info)

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, target: str, *, holder: str, wait_ready_s: float) -> AsyncIterator[LiveTier]:
        """Lease the service whose front is at `target` (host:port). Raises MegaMoeError when that fails."""
        async with AsyncMoeGroup.connect(target, holder=holder, wait_ready_s=wait_ready_s) as group:
            yield cls(group)

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
