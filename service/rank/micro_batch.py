"""The plans of one micro-batch on one rank: what waits, what is being agreed, what is remembered."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from service.rank.plan_state import PlanState, PlanStatus

_REMEMBERED_PLANS = 256
"""Earlier plans of a micro-batch that a late layer call, or a call to join, can still name: a caller that gives up step
after step while a call waits for its turn must not make ranks forget the plan of that call."""


@dataclass(eq=False)
class MicroBatch:
    """waiting: intents of this rank's caller that are not on the board yet. unsettled: posted, outcome unknown.

    recent: the latest plans by step id; unclosed: those of them that the caller opened since its last step.
    last_step: the latest that the caller brought. seen_version: the board's when it was last looked at.
    blocked: its next entry waits until all ranks have settled the one in its place.
    """

    idx: int
    waiting: deque[PlanState] = field(default_factory=deque)
    unsettled: list[PlanState] = field(default_factory=list)
    recent: OrderedDict[int, PlanState] = field(default_factory=OrderedDict)
    unclosed: list[PlanState] = field(default_factory=list)
    last_step: int = 0
    seen_version: int = -1
    blocked: bool = False

    def take(self, plan: PlanState) -> None:
        """The caller's next step: closes the plans that it opened before."""
        for earlier in self.unclosed:
            earlier.close()
        self.unclosed = [plan]
        self.remember(plan)
        self.last_step = plan.plan_id.step_id
        self.waiting.append(plan)

    def remember(self, plan: PlanState) -> None:
        self.recent[plan.plan_id.step_id] = plan
        if len(self.recent) > _REMEMBERED_PLANS:
            live = (PlanStatus.WAITING, PlanStatus.POSTED)
            for step_id in list(self.recent)[: len(self.recent) - _REMEMBERED_PLANS]:
                if self.recent[step_id].status not in live:
                    del self.recent[step_id]

    def open_rows(self) -> int:
        """Agreed maxima of rows a rank of the caller's open plans, summed."""
        return sum(
            plan.plan.max_rows
            for plan in self.unclosed
            if plan.status is PlanStatus.OPEN and plan.plan is not None
        )
