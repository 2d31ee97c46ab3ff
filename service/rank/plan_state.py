"""One plan on one rank, from its caller's intent to its end. See plan_book.py for who moves it on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from megamoe import PathPolicy, PlanId, StepPlan, SubStep
from megamoe.errors import StaleCallError
from service.messages import ErrorReply, IntentRequest, PlanReply, Reply

Answer = Callable[[Reply], None]


class PlanStatus(Enum):
    WAITING = "waiting for the step before it"
    POSTED = "being agreed"
    OPEN = "open"
    CLOSED = "closed"
    FAILED = "failed"


@dataclass(eq=False)
class PlanState:
    """One plan on this rank. called: its own caller opened it. poison: why this rank refuses all its layer calls."""

    lease_serial: int
    plan_id: PlanId
    timeout_s: float
    request: IntentRequest | None
    counts: tuple[int, ...] | None
    called: bool
    status: PlanStatus = PlanStatus.WAITING
    answers: list[Answer] = field(default_factory=list)
    deadline: float = 0.0
    close_requested: bool = False
    plan: StepPlan | None = None
    has_counts: bool = False
    sub_steps: tuple[SubStep, ...] = ()
    policy: PathPolicy | None = None
    error: ErrorReply | None = None
    poison: ErrorReply | None = None
    last_layer_idx: int = -1

    def needs_no_call(self, rank: int) -> bool:
        """Whether this rank follows the plan's layer calls without being called."""
        return self.has_counts and self.plan is not None and not self.plan.num_rows_per_rank[rank]

    def tell(self, answer: Answer) -> None:
        """Answer its caller: now if the outcome is known, else as soon as it is."""
        if self.error is not None:
            answer(self.error)
        elif self.plan is None:
            self.answers.append(answer)
        elif self.poison is not None:
            answer(self.poison)
        else:
            answer(PlanReply(plan=self.plan, sub_steps=self.sub_steps))

    def tell_all(self) -> None:
        """The outcome is known: answer everyone who waits for it."""
        answers, self.answers = self.answers, []
        for answer in answers:
            self.tell(answer)

    def fail(self, error: ErrorReply) -> None:
        self.status = PlanStatus.FAILED
        self.error = error
        self.tell_all()

    def close(self) -> None:
        """Its caller needs it no more; one that is still being agreed closes when it is."""
        if self.status is PlanStatus.OPEN:
            self.status = PlanStatus.CLOSED
        self.close_requested = True


def not_open(plan: PlanState) -> StaleCallError:
    """Why a layer call of this plan is refused."""
    why = f" ({plan.error.message})" if plan.error is not None else ""
    state = plan.status.value if plan.status is not PlanStatus.OPEN else "closed"
    return StaleCallError(f"plan {plan.plan_id} must be open, got {state}{why}")
