"""One agreement per step and micro-batch: StepIntent of each rank -> agree() -> one StepPlan, or one error.

Pure: no I/O and no clock, so that eight ranks that hold the same intents hold the same plan. The service carries
intents between ranks; this file decides what they mean. It refuses intents that differ in anything that every
rank must share, with one sentence that is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from megamoe.errors import AgreementError, DrainingError, InvalidArgumentError, must_be


class Phase(StrEnum):
    """What a rank, or an agreed step, does. Only ranks without rows are idle."""

    PREFILL = "prefill"
    DECODE = "decode"
    IDLE = "idle"


@dataclass(frozen=True, order=True)
class PlanId:
    """(generation of the group, caller's step id, micro-batch): names one plan on all ranks."""

    generation: int
    step_id: int
    micro_batch_idx: int = 0

    def __str__(self) -> str:
        return f"{self.generation}/{self.step_id}/{self.micro_batch_idx}"


@dataclass(frozen=True, kw_only=True)
class StepIntent:
    """What one rank brings to a step.

    num_rows: this rank's rows (tokens) of the step, 0 for none.
    dtype: wire dtype of the rows ("bfloat16" or "mxfp8"), the same on all ranks.
    weights_version, placement_version: what this rank has bound; the same on all ranks. Placement 0: experts lie in
    the order of their ids.
    policy_version: the newest that this rank has staged; the plan takes the lowest, so that a new version takes effect
    at one step on all ranks at once.
    num_rows_per_rank: the whole counts vector where the caller knows it, else None.
    """

    rank: int
    num_ranks: int
    plan_id: PlanId
    num_rows: int
    phase: Phase
    dtype: str = "bfloat16"
    weights_version: int = 0
    placement_version: int = 0
    policy_version: int = 0
    draining: bool = False
    num_rows_per_rank: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.num_ranks:
            raise InvalidArgumentError(must_be("rank", f"from 0 to {self.num_ranks - 1}", self.rank))
        if self.num_rows < 0:
            raise InvalidArgumentError(must_be("num_rows", "at least 0", self.num_rows))
        if (self.num_rows == 0) != (self.phase is Phase.IDLE):
            wanted = "'idle'" if self.num_rows == 0 else "'prefill' or 'decode'"
            raise InvalidArgumentError(
                must_be(
                    f"phase of a rank with {self.num_rows} rows",
                    wanted,
                    f"'{self.phase}'",
                )
            )
        counts = self.num_rows_per_rank
        if counts is None:
            return
        if len(counts) != self.num_ranks or min(counts) < 0:
            raise InvalidArgumentError(
                must_be(
                    "num_rows_per_rank",
                    f"{self.num_ranks} numbers of at least 0",
                    list(counts),
                )
            )
        if counts[self.rank] != self.num_rows:
            raise InvalidArgumentError(
                must_be(
                    "num_rows",
                    f"num_rows_per_rank[{self.rank}] = {counts[self.rank]}",
                    self.num_rows,
                )
            )


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What all ranks agreed on. Holds for every MoE layer of the step's micro-batch."""

    plan_id: PlanId
    num_rows_per_rank: tuple[int, ...]
    phase: Phase
    dtype: str
    weights_version: int
    placement_version: int
    policy_version: int

    @property
    def num_ranks(self) -> int:
        return len(self.num_rows_per_rank)

    @property
    def max_rows(self) -> int:
        """The DP-global maximum token count: the number that chooses paths."""
        return max(self.num_rows_per_rank)

    @property
    def total_rows(self) -> int:
        return sum(self.num_rows_per_rank)


def _same(name: str, values: Sequence[object]) -> None:
    if any(value != values[0] for value in values):
        said = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
        raise AgreementError(must_be(name, "equal on all ranks", said))


def agree(intents: Sequence[StepIntent], *, max_step_rows: int | None = None) -> StepPlan:
    """Make the one plan of a step from the intents of all ranks, given in rank order.

    max_step_rows: the most rows that any rank may bring (oversize steps are refused for all ranks alike).
    Raises AgreementError (ranks differ), DrainingError (some rank drains), InvalidArgumentError (oversize, or an
    intent missing: the caller of agree must wait for all). The rule is pure: the same intents give the same
    outcome on every rank.
    """
    if not intents or [intent.rank for intent in intents] != list(range(intents[0].num_ranks)):
        raise InvalidArgumentError(
            must_be(
                "intents",
                "one per rank, in rank order",
                [intent.rank for intent in intents],
            )
        )
    _same("num_ranks", [intent.num_ranks for intent in intents])
    _same(
        "plan id (generation/step_id/micro_batch_idx)",
        [str(intent.plan_id) for intent in intents],
    )
    _same("weights_version", [intent.weights_version for intent in intents])
    _same("placement_version", [intent.placement_version for intent in intents])
    counts = tuple(intent.num_rows for intent in intents)
    for intent in intents:
        if intent.num_rows_per_rank is not None and intent.num_rows_per_rank != counts:
            raise AgreementError(
                must_be(
                    f"num_rows_per_rank as sent to rank {intent.rank}",
                    f"the ranks' own counts {list(counts)}",
                    list(intent.num_rows_per_rank),
                )
            )
    busy = [intent for intent in intents if intent.num_rows]
    dtypes = {intent.dtype for intent in busy}
    if len(dtypes) > 1:
        said = ", ".join(f"rank {intent.rank}: {intent.dtype}" for intent in busy)
        raise AgreementError(must_be("dtype", "equal on all ranks with rows", said))
    draining = [intent.rank for intent in intents if intent.draining]
    if draining:
        raise DrainingError(f"the service is draining (ranks {draining}): no new steps are agreed")
    if max_step_rows is not None and max(counts) > max_step_rows:
        worst = counts.index(max(counts))
        raise InvalidArgumentError(
            must_be(
                f"num_rows of rank {worst}",
                f"at most max_step_rows = {max_step_rows}",
                counts[worst],
            )
        )
    prefill = any(intent.phase is Phase.PREFILL for intent in busy)
    return StepPlan(
        plan_id=intents[0].plan_id,
        num_rows_per_rank=counts,
        phase=Phase.PREFILL if prefill else (Phase.DECODE if busy else Phase.IDLE),
        dtype=busy[0].dtype if busy else intents[0].dtype,
        weights_version=intents[0].weights_version,
        placement_version=intents[0].placement_version,
        policy_version=min(intent.policy_version for intent in intents),
    )
