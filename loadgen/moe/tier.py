"""What the load generator needs of an expert-parallel MoE service: facts, a step, the layers of the step.

`replay` sees only these protocols. `live` implements them over the service's public client; tests with a fake that
computes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from loadgen.moe.rows import RankRows
from megamoe import MoeShape


@dataclass(frozen=True, kw_only=True)
class TierInfo:
    """Facts of the service. max_step_rows: rows of one rank in one step. metrics_urls: Prometheus pages by rank.
    max_micro_batches: plans that may be open at once."""

    shape: MoeShape
    model_name: str
    profile: str
    backend: str
    generation: int
    max_tokens_per_rank: int
    max_step_rows: int
    metrics_urls: tuple[str, ...] = ()
    max_micro_batches: int = 1

    @property
    def num_ranks(self) -> int:
        return self.shape.num_ranks

    @property
    def num_layers(self) -> int:
        return self.shape.num_layers


@dataclass(frozen=True, kw_only=True)
class SubStepSeen:
    """One executed piece of a layer call, as its replies tell.

    total_us_per_rank: the service's own time by rank; ranks that were not called say nothing and are left out.
    stages_us: time per stage, the slowest rank's total deciding which rank.
    """

    path: str
    runtime_capacity: int
    max_rows: int
    total_us_per_rank: dict[int, float]
    stages_us: dict[str, float]

    @property
    def total_us(self) -> float:
        """The slowest rank's time."""
        return max(self.total_us_per_rank.values(), default=0.0)


@dataclass(frozen=True, kw_only=True)
class LayerOutcome:
    """Reply to one layer call: num_rows_per_rank came back, in these pieces."""

    num_rows_per_rank: tuple[int, ...]
    sub_steps: tuple[SubStepSeen, ...]


class MoeStep(Protocol):
    """An agreed step. Layers are called in ascending order."""

    async def layer(self, layer_idx: int, batches: Sequence[RankRows | None]) -> LayerOutcome:
        """One MoE layer of all ranks. Raises MegaMoeError when the service refuses or fails."""


class MoeTier(Protocol):
    """A leased MoE service."""

    @property
    def info(self) -> TierInfo: ...

    def step(
        self, *, num_rows_per_rank: Sequence[int], phase: Sequence[str], micro_batch_idx: int = 0
    ) -> AbstractAsyncContextManager[MoeStep]:
        """Agree on a step. phase: "prefill", "decode" or "idle" by rank."""

    async def renew(self) -> None:
        """Lease the service again after the lease, or the whole group under it, was lost; waits for it to come back.

        Raises MegaMoeError when it does not, or comes back as another service.
        """
