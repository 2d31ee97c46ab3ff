"""The layer calls of one rank in the group's total order: which runs next, as what, and what each is answered.

Owns the calls that wait for their sequence. Hands out one `Work` at a time: a call of this rank's caller, a call
that others began and this rank only follows, or a claimed call that this rank joins with its error bit. Refuses
what is stale at once; a refusal that other ranks must hear of goes through the board's order. One caller at a time
(the step loop's lock); executes nothing itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch

from megamoe import Bundle, MoeOutput
from megamoe.errors import InvalidArgumentError, MegaMoeError, PeerRefusedError, StaleCallError, must_be
from service.board.board import Board
from service.messages import ErrorReply, LayerReply, Reply
from service.rank.call_order import CallId, CallOrder, Slot, SlotState
from service.rank.call_state import Call, Work, wrong_with
from service.rank.plan_book import PlanBook
from service.rank.plan_state import PlanState, PlanStatus
from service.ring.record import Record

SEQUENCE_WINDOW = 64
"""How far ahead of the group a layer call may be: half of what the board remembers."""
_REMEMBERED_CALLS = 256
"""Calls that this rank executed, or gave up, without its caller: for callers that come after all."""


class CallQueue:
    """See the module. answer: how a record gets its reply."""

    def __init__(
        self,
        board: Board,
        rank: int,
        bundle: Bundle,
        plans: PlanBook,
        answer: Callable[[Record, Reply], None],
    ) -> None:
        self._board = board
        self._rank = rank
        self._num_layers = bundle.shape.num_layers
        self._plans = plans
        self._answer = answer
        self._order = CallOrder(board, rank)
        self._pending: dict[int, Call] = {}
        self._missed: OrderedDict[int, tuple[CallId | None, Reply]] = OrderedDict()
        self.next_sequence = board.highest_sequence + 1

    def __len__(self) -> int:
        return len(self._pending)

    # ------------------------------------------------------------------------------ from callers

    def take(self, record: Record, now: float) -> None:
        """Queue a layer call. Raises what only concerns this caller: a stale lease or sequence."""
        head = record.layer_head()
        self._plans.check_lease(head.lease_serial, now)
        sequence = head.sequence
        call_id = CallId(head.lease_serial, head.plan_id, head.layer_idx)
        if sequence < self.next_sequence:
            self._answer_done(record, sequence, call_id)
            return
        if sequence in self._pending:
            raise StaleCallError(f"sequence {sequence} is repeated: its layer call waits for its turn")
        limit = max(self.next_sequence, self._board.highest_sequence + 1) + SEQUENCE_WINDOW
        if sequence >= limit:
            raise InvalidArgumentError(
                must_be("sequence", f"contiguous (below {limit}, next is {self.next_sequence})", sequence)
            )
        plan, refusal = None, None
        try:
            plan = self._plans.open_for_calls(head.lease_serial, head.plan_id)
        except StaleCallError as stale:
            refusal = ErrorReply.of(stale)
        if refusal is None and head.refusal is not None:
            refusal = ErrorReply(code=head.refusal[0], message=head.refusal[1])
        timeout_s = self._plans.step_timeout_s if plan is None else plan.timeout_s
        self._pending[sequence] = Call(record, call_id, sequence, plan, refusal, now + timeout_s, timeout_s)

    def _answer_done(self, record: Record, sequence: int, call_id: CallId) -> None:
        """A call whose sequence this rank has passed: it followed it without its caller, or the call is stale."""
        call_id_and_reply = self._missed.get(sequence)
        if call_id_and_reply is not None:
            ours, reply = call_id_and_reply
            given_up = ours is None and isinstance(reply, ErrorReply) and reply.code != "peer_timeout"
            if given_up or (ours == call_id and not record.num_rows):
                del self._missed[sequence]  # once: a second one is a repetition
                self._answer(record, reply)
                return
        slot = self._order.read(sequence)
        why = "" if slot is None or slot.error is None else f": {slot.error.message}"
        raise StaleCallError(f"sequence {sequence} is done, the next one is {self.next_sequence}{why}")

    # ------------------------------------------------------------------------------ whose turn it is

    def next_work(self, now: float) -> Work | None:
        """The next thing to execute, after answering everything that needs no execution; None if nothing is ready."""
        while True:
            sequence = self.next_sequence
            call = self._pending.get(sequence)
            if call is None:
                if sequence > self._board.highest_sequence:
                    self._check_gap(now)
                    if sequence > self._board.highest_sequence:
                        return None
                work, wait = self._uncalled(sequence)
            else:
                work, wait = self._called(call)
            if work is not None or (wait and not self._is_stuck(call, now)):
                return work

    def _uncalled(self, sequence: int) -> tuple[Work | None, bool]:
        """Others began or gave up this sequence and our caller has not come (yet)."""
        slot = self._order.read(sequence)
        if slot is None:
            # So far behind that the board forgot: what we missed ran without us, so it was empty or given up.
            self.next_sequence = max(self._order.oldest(), sequence + 1)
            return None, False
        if slot.state is SlotState.GIVEN_UP:
            self._remember(sequence, None, slot.error or _UNKNOWN)
            self.next_sequence += 1
            return None, False
        plan = self._plans.find(slot.call.lease_serial, slot.call.plan_id)
        lease = self._plans.lease
        lease_over = slot.call.lease_serial != lease.serial or not lease.held
        if plan is None or plan.plan is None:
            if lease_over:
                self.next_sequence += 1
                return None, False
            return None, True
        if not plan.plan.total_rows:
            # Nothing runs, so nobody waits for this rank: its caller gets the empty reply when it comes.
            empty = LayerReply(hidden_states=_NO_ROWS, sub_steps=(), queue_us=0.0, total_us=0.0)
            self._remember(sequence, slot.call, empty)
            self.next_sequence += 1
            return None, False
        if lease_over and not plan.needs_no_call(self._rank):
            # Our caller will not come any more: do not let the others wait for it.
            error = ErrorReply.of(StaleCallError(f"lease {slot.call.lease_serial} is over"))
            return self._refused(sequence, error, None)
        if not plan.needs_no_call(self._rank):
            return None, True
        if plan.poison is not None:
            return self._refused(sequence, plan.poison, None)
        return Work(sequence, plan, slot.call.layer_idx, None, False), False

    def _called(self, call: Call) -> tuple[Work | None, bool]:
        plan = call.plan
        if (
            call.refusal is None
            and plan is not None
            and plan.status in (PlanStatus.WAITING, PlanStatus.POSTED)
        ):
            slot = self._order.read(call.sequence)
            if slot is None or slot.state is SlotState.CLAIMED:
                return None, True
            self._done(call, slot.error or _UNKNOWN)
            return None, False
        refusal = call.refusal or wrong_with(call, self._plans.lease, self._rank, self._num_layers)
        if refusal is not None:
            return self._refused(call.sequence, refusal, call)
        assert plan is not None
        assert plan.plan is not None
        try:
            joined = self._order.join(call.sequence, call.call_id)
        except StaleCallError as stale:
            # The board forgot it: it ran without us, so it was empty or given up.
            self._done(call, ErrorReply.of(stale) if plan.plan.total_rows else self._empty(call))
            return None, False
        if joined is not None:
            slot, conflict = joined
            if conflict is not None:
                return self._join_refused(slot, conflict, call)
            self._done(call, slot.error or _UNKNOWN)
            return None, False
        if not plan.plan.total_rows:
            plan.last_layer_idx = call.call_id.layer_idx
            self._done(call, self._empty(call))
            return None, False
        self._wake_followers(plan)
        return Work(call.sequence, plan, call.call_id.layer_idx, call, False), False

    def _wake_followers(self, plan: PlanState) -> None:
        if plan.has_counts and plan.plan is not None:
            counts = plan.plan.num_rows_per_rank
            self._board.ring(
                (rank for rank, rows in enumerate(counts) if not rows and rank != self._rank), control=False
            )

    def _refused(self, sequence: int, refusal: ErrorReply, call: Call | None) -> tuple[Work | None, bool]:
        """Tell the group: give the sequence up if nobody began it, else join what was begun."""
        try:
            slot = self._order.refuse(sequence, refusal)
        except StaleCallError as stale:
            self._done_or_skip(call, ErrorReply.of(stale))
            return None, False
        if slot.state is SlotState.GIVEN_UP:
            self._done_or_skip(call, slot.error or _UNKNOWN)
            return None, False
        return self._join_refused(slot, refusal, call)

    def _join_refused(self, slot: Slot, refusal: ErrorReply, call: Call | None) -> tuple[Work | None, bool]:
        plan = self._plans.find(slot.call.lease_serial, slot.call.plan_id)
        if plan is None or plan.plan is None:
            # A call of a plan that this rank does not know cannot be joined: the others' timeout ends it.
            self._done_or_skip(call, refusal)
            return None, False
        if not plan.plan.total_rows:
            self._done_or_skip(call, self._order.refusal(slot.sequence))
            return None, False
        return Work(slot.sequence, plan, slot.call.layer_idx, call, True), False

    def _done_or_skip(self, call: Call | None, reply: Reply) -> None:
        if call is None:
            self.next_sequence += 1
        else:
            self._done(call, reply)

    def _done(self, call: Call, reply: Reply) -> None:
        del self._pending[call.sequence]
        self.next_sequence = call.sequence + 1
        self._answer(call.record, reply)

    def _empty(self, call: Call) -> LayerReply:
        return LayerReply(hidden_states=call.record.out(), sub_steps=(), queue_us=0.0, total_us=0.0)

    def _check_gap(self, now: float) -> None:
        """A call whose predecessor came to no rank at all is given up when its time is over."""
        if not self._pending:
            return
        call = self._pending[min(self._pending)]
        if now < call.deadline:
            return
        error = ErrorReply(
            code="peer_timeout",
            message=f"sequence {call.sequence} must follow sequence {self.next_sequence}, which came to no rank "
            f"within {call.timeout_s:g} s",
        )
        self._order.give_up(call.sequence, error, first=self.next_sequence)

    def _is_stuck(self, call: Call | None, now: float) -> bool:
        """Give up a sequence that others began and nobody ended, although their timeout is over: they are gone."""
        if call is not None or not self._pending:
            return False
        first = self._pending[min(self._pending)]
        if now < first.deadline + first.timeout_s:
            return False
        error = ErrorReply(
            code="peer_timeout",
            message=f"sequence {self.next_sequence} was begun and neither finished nor given up within "
            f"{2 * first.timeout_s:g} s",
        )
        self._order.give_up(self.next_sequence, error)
        return True

    def next_deadline(self) -> float:
        """When a waiting call gives up on the sequence before it; infinity if none does."""
        if not self._pending or self.next_sequence in self._pending:
            return float("inf")
        first = self._pending[min(self._pending)]
        begun = self.next_sequence <= self._board.highest_sequence
        return first.deadline + (first.timeout_s if begun else 0.0)

    # ------------------------------------------------------------------------------ what became of it

    def finish(self, work: Work, result: MoeOutput | Exception, queue_us: float, total_us: float) -> Reply:
        """Answer an executed call and move on; returns what every rank answers for it."""
        sequence = work.sequence
        if isinstance(result, MoeOutput):
            work.plan.last_layer_idx = work.layer_idx
            reply: Reply = LayerReply(
                hidden_states=result.hidden_states,
                sub_steps=result.sub_steps,
                queue_us=queue_us,
                total_us=total_us,
            )
        elif isinstance(result, PeerRefusedError):
            reply = self._order.refusal(sequence)
        else:
            error = (
                ErrorReply.of(result)
                if isinstance(result, MegaMoeError)
                else ErrorReply(
                    code="internal", message=f"rank {self._rank}: {type(result).__name__}: {result}"
                )
            )
            reply = self._order.give_up(sequence, error) or error
        self.next_sequence = sequence + 1
        call = self._pending.pop(sequence, None)
        if work.call is not None:
            if call is work.call:  # else it was answered when the group went down
                self._answer(call.record, reply)
        else:
            call_id = CallId(work.plan.lease_serial, work.plan.plan_id, work.layer_idx)
            self._remember(sequence, call_id, reply)
            if call is not None:  # our caller came while we followed without it
                try:
                    self._answer_done(call.record, sequence, call.call_id)
                except StaleCallError as stale:
                    self._answer(call.record, ErrorReply.of(stale))
        return reply

    def _remember(self, sequence: int, call_id: CallId | None, reply: Reply) -> None:
        if isinstance(reply, LayerReply):
            reply = reply._replace(hidden_states=_NO_ROWS)
        self._missed[sequence] = (call_id, reply)
        while len(self._missed) > _REMEMBERED_CALLS:
            self._missed.popitem(last=False)

    def fail_all(self, error: ErrorReply) -> None:
        """The group is down: answer everything that waits."""
        for call in self._pending.values():
            self._answer(call.record, error)
        self._pending.clear()


_NO_ROWS = torch.empty((0, 0), dtype=torch.bfloat16)
_UNKNOWN = ErrorReply(code="internal", message="a sequence was given up without an error: this is a bug")
