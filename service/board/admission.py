"""Permit or refuse at once, by agreed numbers when a plan is agreed: overload is never found in the middle of one.

Every intent carries how loaded its rank is; `admit` is a pure function of those numbers, so that all ranks admit a plan
or all refuse it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megamoe import Deployment
from megamoe.errors import InvalidArgumentError, OverloadedError, must_be


@dataclass(frozen=True, kw_only=True)
class RankLoad:
    """How loaded a rank is when it brings an intent: numbers that its entry on the board carries.

    queued_calls: layer calls that wait for their turn in the total order.
    open_rows: agreed maxima of its open plans of other micro-batches, summed.
    """

    queued_calls: int = 0
    open_rows: int = 0


@dataclass(frozen=True, kw_only=True)
class AdmissionLimits:
    """Above these a plan is refused on all ranks. Settings of the service."""

    max_queued_calls: int
    max_open_rows: int

    def __post_init__(self) -> None:
        for name in ("max_queued_calls", "max_open_rows"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(must_be(name, "at least 1", getattr(self, name)))

    @classmethod
    def of(cls, deployment: Deployment, *, max_micro_batches: int) -> AdmissionLimits:
        """As much as the rings hold: two calls of max_step_rows, or one step of max_tokens_per_rank a micro-batch."""
        rows = max(2 * deployment.step_rows_limit, max_micro_batches * deployment.max_tokens_per_rank)
        return cls(max_queued_calls=8 * max_micro_batches, max_open_rows=rows)


def admit(loads: Sequence[RankLoad], max_rows: int, limits: AdmissionLimits) -> None:
    """Raise OverloadedError if a plan of max_rows (agreed maximum) must wait; loads in rank order.

    A group that has nothing open admits any plan that fits a step: else it could never run.
    """
    for rank, load in enumerate(loads):
        if load.queued_calls > limits.max_queued_calls:
            raise OverloadedError(
                must_be(
                    f"layer calls queued on rank {rank}",
                    f"at most max_queued_calls = {limits.max_queued_calls}",
                    load.queued_calls,
                )
            )
        if load.open_rows and load.open_rows + max_rows > limits.max_open_rows:
            raise OverloadedError(
                must_be(
                    f"rows of open plans on rank {rank} and of this one",
                    f"at most max_open_rows = {limits.max_open_rows}",
                    load.open_rows + max_rows,
                )
            )
