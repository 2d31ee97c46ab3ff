"""What a rank knows between two instants: its rings, plans and calls, without threads and without a runtime.

Takes requests out of the rings and gives each to who answers it: leases, plan_book.py, call_queue.py. Hands the device
thread one piece of work at a time and takes its result back. Never blocks and holds no lock of its own, so that tests
drive eight of them in one thread. Refuses everything once the group is down.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megamoe import Bundle, MoeOutput, PathPolicy, StagedPolicies, StepPlan, SubStepReport
from megamoe.errors import InternalError, MegaMoeError, StaleCallError, must_be
from service.board.admission import AdmissionLimits
from service.board.board import Board
from service.messages import (
    CloseRequest,
    DoneReply,
    DrainRequest,
    ErrorReply,
    IntentRequest,
    LeaseRequest,
    PolicyRequest,
    Reply,
    Request,
)
from service.rank.call_queue import CallQueue
from service.rank.call_state import Work
from service.rank.plan_book import PlanBook
from service.ring import codec as ring_codec
from service.ring.consumer import RingConsumer
from service.ring.record import Record

log = logging.getLogger(__name__)

_IDLE_S = 1.0
"""How long a loop sleeps when nothing is due: only a guard, everything that matters rings."""


class Observer(Protocol):
    """Who is told what happened, from the device thread: each call may only enqueue."""

    def record_plan(self, plan: StepPlan, policy: PathPolicy) -> None: ...

    def record_step(self, plan: StepPlan, policy: PathPolicy, reports: tuple[SubStepReport, ...]) -> None: ...

    def record_error(self, code: str) -> None: ...

    def record_policy(self, policy: PathPolicy) -> None: ...


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """step_timeout_s: how long an intent waits for the others, and a layer call for its peers.

    limits: None = as much as AdmissionLimits.of gives. spin_s: how long the loop looks for the next request before it
    sleeps; it keeps a core busy for that long. weights_version: of what the rank has bound.
    """

    step_timeout_s: float = 10.0
    spin_s: float = 0.0
    lease_timeout_s: float = 10.0
    limits: AdmissionLimits | None = None
    weights_version: int = 0


class RankState:
    """All that a rank knows between two instants, without threads and without a runtime. Never blocks.

    Callers hold one lock around every method. clock: seconds, monotonic and the same on all ranks.
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        bundle: Bundle,
        *,
        policy: PathPolicy,
        rings: Sequence[RingConsumer] = (),
        settings: LoopSettings | None = None,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        settings = settings or LoopSettings()
        self.board = board
        self.rank = rank
        self.rings = list(rings)
        self.policies = StagedPolicies(policy)
        self.to_stage: list[tuple[Record, PathPolicy]] = []
        """Policies that the device thread must stage."""
        self.jobs: list[Callable[[], None]] = []
        """What else it must do between two layer calls: opening and closing memory of callers."""
        self._retiring: list[tuple[RingConsumer, Callable[[], None]]] = []
        self._observer = observer
        self._clock = clock
        self._version = -1
        self._deadline = 0.0
        self._down: ErrorReply | None = None
        self.plans = PlanBook(
            board,
            rank,
            bundle,
            policies=self.policies,
            step_timeout_s=settings.step_timeout_s,
            lease_timeout_s=settings.lease_timeout_s,
            limits=settings.limits
            or AdmissionLimits.of(bundle.deployment, max_micro_batches=board.max_micro_batches),
            weights_version=settings.weights_version,
            queued_calls=lambda: len(self.calls),
            on_plan=self._on_plan,
        )
        self.calls = CallQueue(board, rank, bundle, self.plans, self.answer)

    # ------------------------------------------------------------------------------ one turn

    def turn(self) -> None:
        """Take what the rings hold and move plans on. Executes nothing."""
        now = self._clock()
        for ring in self.rings:
            for record in ring.poll():
                self._take(record, now)
        if self._retiring:
            self._close_retired()
        if self._down is None and self.board.down is not None:
            self.go_down(self.board.down)
        version = self.board.version
        if version != self._version or now >= self._deadline:
            self._version = version
            self.plans.advance(now)
            self._deadline = self.plans.next_deadline(now)

    def next_work(self) -> Work | None:
        """What the device thread executes next, if its turn has come."""
        return None if self._down is not None else self.calls.next_work(self._clock())

    def idle_s(self) -> float:
        """How long to sleep if nothing rings."""
        deadline = min(self._deadline, self.calls.next_deadline())
        return min(max(deadline - self._clock(), 0.0), _IDLE_S)

    def finish(self, work: Work, result: MoeOutput | Exception, queue_us: float, total_us: float) -> None:
        """Answer an executed call."""
        reply = self.calls.finish(work, result, queue_us, total_us)
        self.board.mark_progress(self.rank)
        plan, policy = work.plan.plan, work.plan.policy
        if self._observer is not None and isinstance(result, MoeOutput) and plan and policy:
            self._observer.record_step(plan, policy, result.sub_steps)
        elif isinstance(reply, ErrorReply) and work.call is None:
            self._note_error(reply)

    def _on_plan(self, plan: StepPlan, policy: PathPolicy) -> None:
        if self._observer is not None:
            self._observer.record_plan(plan, policy)

    def staged(self, record: Record, policy: PathPolicy) -> None:
        """The device thread staged a policy: this rank's next intents say so."""
        self.policies.stage(policy)
        if self._observer is not None:
            self._observer.record_policy(policy)
        self.answer(record, DoneReply())

    # ------------------------------------------------------------------------------ rings of callers

    def attach(self, ring: RingConsumer) -> None:
        """Read this ring too, from the next turn on."""
        self.rings.append(ring)

    def retire(self, ring: RingConsumer, on_closed: Callable[[], None]) -> None:
        """Its caller is gone: finish what it announced, then close the ring and let go of the memory it lent."""
        now = self._clock()
        for record in ring.poll():
            self._take(record, now)
        self.rings.remove(ring)
        self._retiring.append((ring, on_closed))
        self._close_retired()

    def _close_retired(self) -> None:
        for entry in [one for one in self._retiring if not one[0].num_open]:
            self._retiring.remove(entry)
            ring, on_closed = entry
            ring.lent.drop_all()
            self.jobs += [ring.close, on_closed]

    # ------------------------------------------------------------------------------ requests

    def answer(self, record: Record, reply: Reply) -> None:
        """Every reply of this rank goes through here."""
        record.reply(reply)
        if isinstance(reply, ErrorReply):
            self._note_error(reply)

    def _note_error(self, reply: ErrorReply) -> None:
        if self._observer is not None:
            self._observer.record_error(reply.code)

    def _take(self, record: Record, now: float) -> None:
        try:
            if self._down is not None:
                self.answer(record, self._down)
            elif record.kind == ring_codec.LAYER:
                self.calls.take(record, now)
            else:
                self._control(record, record.request(), now)
        except MegaMoeError as error:
            self.answer(record, ErrorReply.of(error))
        except Exception as error:
            log.exception("rank %d: a request failed", self.rank)
            if not record.replied:
                self.answer(
                    record, ErrorReply.of(InternalError(f"rank {self.rank}: {error!r}; this is a bug"))
                )

    def _control(self, record: Record, request: Request, now: float) -> None:
        self._deadline = 0.0  # plans move on in the turn that takes it
        match request:
            case IntentRequest():
                self.plans.take_intent(request, lambda reply: self.answer(record, reply), now)
            case LeaseRequest(release=True):
                self.plans.leases.release(request.holder, request.lease_serial)
                self.answer(record, DoneReply())
            case LeaseRequest():
                self.answer(record, self.plans.leases.take(request.holder, self.rank, now_ns=int(now * 1e9)))
            case CloseRequest():
                self.plans.close(request, now)
                self.answer(record, DoneReply())
            case DrainRequest():
                self.plans.draining = request.draining
                self.answer(record, DoneReply())
            case PolicyRequest():
                self._take_policy(record, request.policy)
            case _:
                raise InternalError(f"{type(request).__name__} is no control message; this is a bug")

    def _take_policy(self, record: Record, policy: PathPolicy) -> None:
        newest = self.policies.newest.version
        if policy in self.policies:
            self.answer(record, DoneReply())
        elif policy.version <= newest:
            raise StaleCallError(must_be("policy.version", f"above {newest}", policy.version))
        else:
            self.to_stage.append((record, policy))

    def go_down(self, error: ErrorReply) -> None:
        """Answer this to everything that waits and everything that comes."""
        self._down = error
        self.plans.fail_all(error)
        self.calls.fail_all(error)
        for record, _ in self.to_stage:
            self.answer(record, error)
        self.to_stage.clear()
