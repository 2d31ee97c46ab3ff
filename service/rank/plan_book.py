"""The plans of one rank: taken from callers, brought to the board, agreed, closed. Never blocks.

Owns per micro-batch the plan that is being agreed or open, the intents that wait behind it, and a few earlier plans.
Opens plans on behalf of callers that need not call (counts vector with a zero for this rank). Refuses intents that
are stale on this rank alone; what is wrong with an intent of the current step is brought to the board, so that all
ranks answer it. One caller of these methods at a time (the step loop's lock).
"""

from __future__ import annotations

from collections.abc import Callable

from megamoe import Bundle, PathPolicy, Phase, PlanId, StagedPolicies, StepIntent, StepPlan, choose_path
from megamoe.errors import (
    AgreementError,
    ConfigError,
    InvalidArgumentError,
    MegaMoeError,
    StaleCallError,
    must_be,
)
from service.board.admission import AdmissionLimits, RankLoad
from service.board.agreement import Agreed, IntentTable, Outcome
from service.board.board import Board
from service.board.lease import Lease, LeaseTable, check_serial
from service.messages import CloseRequest, ErrorReply, IntentRequest
from service.rank.intent_check import checked_intent
from service.rank.micro_batch import MicroBatch
from service.rank.plan_state import Answer, PlanState, PlanStatus, not_open

STEPS_PER_LEASE = 2**40
"""Step ids of a lease stay below its first one plus this (34 years of 1000 steps a second): no caller can use up the
64-bit ids of a generation with one that is far ahead."""
BLOCKED_POLL_S = 0.001
"""How soon to look again whether ranks have settled a step whose entry is to be overwritten."""


class PlanBook:
    """See the module. weights_version: of what this rank has bound. queued_calls: layer calls that wait on this rank.
    on_plan is told of every agreed plan."""

    def __init__(
        self,
        board: Board,
        rank: int,
        bundle: Bundle,
        *,
        policies: StagedPolicies,
        step_timeout_s: float,
        lease_timeout_s: float,
        limits: AdmissionLimits,
        weights_version: int = 0,
        queued_calls: Callable[[], int] = lambda: 0,
        on_plan: Callable[[StepPlan, PathPolicy], None] = lambda plan, policy: None,
    ) -> None:
        self._board = board
        self._rank = rank
        self._bundle = bundle
        self._policies = policies
        self._weights_version = weights_version
        self.step_timeout_s = step_timeout_s
        self._queued_calls = queued_calls
        self._on_plan = on_plan
        self._max_step_rows = bundle.deployment.step_rows_limit
        self._table = IntentTable(board, rank, max_step_rows=self._max_step_rows, limits=limits)
        self.leases = LeaseTable(board, timeout_s=lease_timeout_s)
        self.draining = False
        self._micro_batches = [MicroBatch(idx) for idx in range(board.max_micro_batches)]
        self._lease_version = -1
        self._lease = Lease(0, 0, 0, False, "")

    # ------------------------------------------------------------------------------ lease

    @property
    def lease(self) -> Lease:
        """The lease in force; plans of an earlier one end when a new one is seen."""
        if self._board.lease_version != self._lease_version:
            with self._board.locked():
                self._lease_version = self._board.lease_version
                lease = self.leases.read()
            changed = lease.serial != self._lease.serial or not lease.held
            self._lease = lease
            if changed:
                self._end_plans()
        return self._lease

    def _end_plans(self) -> None:
        """Close what belongs to a lease that is over."""
        for micro_batch in self._micro_batches:
            for plan in list(micro_batch.recent.values()):
                try:
                    check_serial(self._lease, plan.lease_serial)
                except StaleCallError as stale:
                    if plan.status is PlanStatus.OPEN:
                        plan.status = PlanStatus.CLOSED
                    elif plan.status is PlanStatus.POSTED:
                        self._table.mark_settled(plan.lease_serial, plan.plan_id)
                        micro_batch.unsettled.remove(plan)
                        plan.fail(ErrorReply.of(stale))
                    elif plan.status is PlanStatus.WAITING:
                        micro_batch.waiting.remove(plan)
                        plan.fail(ErrorReply.of(stale))

    def check_lease(self, serial: int, now: float) -> None:
        """Raise StaleCallError unless `serial` is in force; else the holder was heard of just now."""
        check_serial(self.lease, serial)
        self._board.mark_traffic(self._rank, int(now * 1e9))

    # ------------------------------------------------------------------------------ from callers

    def take_intent(self, request: IntentRequest, answer: Answer, now: float) -> None:
        """Open a plan. Raises what only concerns this rank; everything else is answered when it is known."""
        plan_id = request.plan_id
        self.check_lease(request.lease_serial, now)
        micro_batch = self._micro_batch(plan_id)
        limit = self._lease.first_step_id + STEPS_PER_LEASE
        if plan_id.step_id >= limit:
            raise InvalidArgumentError(must_be("step_id", f"below {limit} in this lease", plan_id.step_id))
        known = micro_batch.recent.get(plan_id.step_id)
        if known is not None and not known.called and known is self.find(request.lease_serial, plan_id):
            self._take_late_intent(known, request, answer)
            return
        if plan_id.step_id <= micro_batch.last_step or known is not None:
            raise StaleCallError(
                must_be(
                    f"step_id of micro-batch {micro_batch.idx}",
                    f"above {micro_batch.last_step}, the last one",
                    plan_id.step_id,
                )
            )
        if plan_id.step_id < self._lease.first_step_id:
            raise StaleCallError(
                must_be("step_id", f"at least {self._lease.first_step_id} in this lease", plan_id.step_id)
            )
        plan = PlanState(
            request.lease_serial,
            PlanId(self._board.generation, plan_id.step_id, plan_id.micro_batch_idx),
            self._patience_s(request),
            request,
            request.num_rows_per_rank,
            called=True,
            answers=[answer],
        )
        micro_batch.take(plan)
        self._advance(micro_batch, now)

    def _patience_s(self, request: IntentRequest) -> float:
        """How long a plan may wait; a timeout that makes no sense is refused when all ranks hear of it."""
        wanted_s = request.timeout_s
        return wanted_s if wanted_s and 0 < wanted_s < self.step_timeout_s else self.step_timeout_s

    def _take_late_intent(self, known: PlanState, request: IntentRequest, answer: Answer) -> None:
        """The caller of a rank that went ahead without it does call: it gets the plan, if it says the same."""
        known.called = True
        self._micro_batch(known.plan_id).unclosed.append(known)
        counts = request.num_rows_per_rank
        if request.refusal is not None:
            known.poison = ErrorReply(code=request.refusal[0], message=request.refusal[1])
            answer(known.poison)
        elif request.num_rows or (counts is not None and counts != known.counts):
            said = list(counts) if counts is not None else f"num_rows {request.num_rows} of rank {self._rank}"
            known.poison = ErrorReply.of(
                AgreementError(
                    must_be(
                        f"counts of plan {known.plan_id}",
                        f"num_rows_per_rank {list(known.counts or ())} as other ranks' callers sent",
                        said,
                    )
                )
            )
            answer(known.poison)
        else:
            known.tell(answer)

    def close(self, request: CloseRequest, now: float) -> None:
        """CloseStep: closing what is closed already does nothing. Raises StaleCallError for an unknown plan."""
        self.check_lease(request.lease_serial, now)
        plan_id = request.plan_id
        plan = self.find(request.lease_serial, plan_id)
        if plan is not None:
            plan.close()
        elif (
            plan_id.generation != self._board.generation
            or plan_id.step_id > self._micro_batch(plan_id).last_step
        ):
            raise StaleCallError(must_be("plan_id", "a plan of this lease", plan_id))

    def _micro_batch(self, plan_id: PlanId) -> MicroBatch:
        if not 0 <= plan_id.micro_batch_idx < len(self._micro_batches):
            limit = len(self._micro_batches) - 1
            raise InvalidArgumentError(
                must_be("micro_batch_idx", f"from 0 to {limit} (max_micro_batches)", plan_id.micro_batch_idx)
            )
        return self._micro_batches[plan_id.micro_batch_idx]

    # ------------------------------------------------------------------------------ lookups

    def find(self, lease_serial: int, plan_id: PlanId) -> PlanState | None:
        """A plan of this rank, open or not, as long as it is remembered."""
        if plan_id.generation != self._board.generation or plan_id.micro_batch_idx >= len(
            self._micro_batches
        ):
            return None
        plan = self._micro_batches[plan_id.micro_batch_idx].recent.get(plan_id.step_id)
        return plan if plan is not None and plan.lease_serial == lease_serial else None

    def open_for_calls(self, lease_serial: int, plan_id: PlanId) -> PlanState:
        """The plan that a layer call names: open, or still being agreed. Raises StaleCallError saying why not."""
        if plan_id.generation != self._board.generation:
            raise StaleCallError(must_be("generation", self._board.generation, plan_id.generation))
        plan = self.find(lease_serial, plan_id)
        if plan is None:
            raise StaleCallError(must_be("plan_id", "an open plan", f"{plan_id}, which is not"))
        if plan.status is PlanStatus.FAILED or plan.status is PlanStatus.CLOSED or plan.close_requested:
            raise not_open(plan)
        return plan

    def num_waiting(self) -> int:
        """Intents that are not answered yet."""
        return sum(len(one.waiting) + len(one.unsettled) for one in self._micro_batches)

    def next_deadline(self, now: float) -> float:
        """When to look again though nothing rang; infinity if nothing waits."""
        deadline = float("inf")
        for micro_batch in self._micro_batches:
            if micro_batch.blocked:
                deadline = min(deadline, now + BLOCKED_POLL_S)
            for plan in micro_batch.unsettled:
                deadline = min(deadline, plan.deadline)
        return deadline

    # ------------------------------------------------------------------------------ agreement

    def advance(self, now: float) -> None:
        """Move every micro-batch on as far as the board allows."""
        _ = self.lease
        for micro_batch in self._micro_batches:
            version = self._board.intent_version(micro_batch.idx)
            if (
                version != micro_batch.seen_version
                or micro_batch.blocked
                or any(now >= plan.deadline for plan in micro_batch.unsettled)
            ):
                self._advance(micro_batch, now)

    def _advance(self, micro_batch: MicroBatch, now: float) -> None:
        micro_batch.blocked = False
        while True:
            micro_batch.seen_version = self._board.intent_version(micro_batch.idx)
            for plan in list(micro_batch.unsettled):
                outcome = self._table.settle(plan.lease_serial, plan.plan_id)
                if outcome is None and now >= plan.deadline:
                    outcome = self._table.withdraw(plan.lease_serial, plan.plan_id, plan.timeout_s)
                if outcome is not None:
                    micro_batch.unsettled.remove(plan)
                    self._settled(plan, outcome)
            following = self._next_plan(micro_batch)
            if following is None:
                return
            if not self._post(micro_batch, following, now):
                micro_batch.blocked = True
                return

    def _next_plan(self, micro_batch: MicroBatch) -> PlanState | None:
        """What this rank brings to the board next: steps in order, the caller's and those that need no call."""
        own = micro_batch.waiting[0] if micro_batch.waiting else None
        following = own
        found = self._table.uncalled_step(self._lease.serial, micro_batch.idx) if self._lease.held else None
        if found is not None and (own is None or found[0].step_id < own.plan_id.step_id):
            plan_id, counts, dtype = found
            request = IntentRequest(
                lease_serial=self._lease.serial,
                plan_id=plan_id,
                num_rows=0,
                phase=Phase.IDLE,
                dtype=dtype,
                num_rows_per_rank=counts,
            )
            following = PlanState(
                self._lease.serial, plan_id, self.step_timeout_s, request, counts, called=False
            )
        return following

    def _post(self, micro_batch: MicroBatch, plan: PlanState, now: float) -> bool:
        request = plan.request
        assert request is not None
        refused: ErrorReply | None = None
        try:
            intent = checked_intent(
                request,
                plan.plan_id,
                rank=self._rank,
                num_ranks=self._board.num_ranks,
                weights_version=self._weights_version,
                policy_version=self._policies.newest.version,
                draining=self.draining,
            )
        except MegaMoeError as error:
            refused = ErrorReply.of(error)
            intent = StepIntent(
                rank=self._rank,
                num_ranks=self._board.num_ranks,
                plan_id=plan.plan_id,
                num_rows=0,
                phase=Phase.IDLE,
            )
        if not self._table.post(plan.lease_serial, intent, self._load(), called=plan.called, refused=refused):
            return False
        if plan.called:
            micro_batch.waiting.popleft()
        else:
            micro_batch.remember(plan)
        micro_batch.unsettled.append(plan)
        plan.status = PlanStatus.POSTED
        plan.deadline = now + plan.timeout_s
        return True

    def _load(self) -> RankLoad:
        open_rows = sum(micro_batch.open_rows() for micro_batch in self._micro_batches)
        return RankLoad(queued_calls=self._queued_calls(), open_rows=open_rows)

    def _settled(self, plan: PlanState, outcome: Outcome) -> None:
        if not isinstance(outcome, Agreed):
            plan.fail(outcome)
            return
        plan.plan = outcome.plan
        plan.has_counts = outcome.has_counts
        plan.status = PlanStatus.CLOSED if plan.close_requested else PlanStatus.OPEN
        try:
            plan.policy = self._policies.of(outcome.plan.policy_version)
        except ConfigError as error:
            # Agreed on something that this rank does not have: all ranks get this error with the first layer call.
            plan.poison = ErrorReply(code="internal", message=f"rank {self._rank}: {error}")
        else:
            plan.sub_steps = choose_path(outcome.plan, self._bundle, plan.policy)
            self._on_plan(outcome.plan, plan.policy)
        self._board.mark_progress(self._rank)
        plan.tell_all()

    def fail_all(self, error: ErrorReply) -> None:
        """The group is down: answer everything that waits."""
        for micro_batch in self._micro_batches:
            for plan in (*micro_batch.waiting, *micro_batch.unsettled):
                plan.fail(error)
            micro_batch.waiting.clear()
            micro_batch.unsettled.clear()
