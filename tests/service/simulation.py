"""A whole group in one thread: real boards and rings, a simulated device and a clock that only the test moves.

Every rank is a RankState. `turn(rank)` is what its threads would do next; a rank that began a layer call stays inside
it, served only by its stand-in, until all ranks are in the same call, as a real device group would. What the
simulation itself checks on the way: all ranks of a launch hold the same plan, layer, sequence and sub-steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from megamoe import (
    Counters,
    Deployment,
    MoeOutput,
    MoeShape,
    PathPolicy,
    RowFormat,
    StageTimes,
    StepPlan,
    SubStepReport,
    plan_bundle,
)
from megamoe.errors import PeerRefusedError, PeerTimeoutError
from service.board.board import Board
from service.board.layout import rank_at
from service.messages import ErrorReply, LayerReply, LeaseReply, LeaseRequest, Reply, Request
from service.rank.call_state import Work
from service.rank.state import Observer, RankState
from service.rank.step_loop import STAND_IN_S, LoopSettings
from service.ring.bell import FIRST_RING_WRITER, Bell
from service.ring.ring import RingConsumer, RingProducer, RingSpec, Ticket

NUM_LAYERS = 4


def deployment(num_ranks: int) -> Deployment:
    shape = MoeShape(
        hidden=32, intermediate=32, num_experts=8, num_topk=2, num_ranks=num_ranks, num_layers=NUM_LAYERS
    )
    return Deployment(
        shape=shape,
        max_tokens_per_rank=8,
        fixed_slot_max=4,
        small_m_capacities=(2,),
        large_m_capacity=8,
        large_m_min_tokens=4,
        max_step_rows=16,
    )


@dataclass
class Sent:
    """A request on its way: its ticket and the reply once taken."""

    rank: int
    request: Request
    ticket: Ticket
    reply: Reply | None = None


@dataclass
class Group:
    """See the module. launches: (sequence, plan id, layer, refused ranks) in the order in which rank 0 began them."""

    boards: list[Board]
    states: list[RankState]
    consumers: list[RingConsumer]
    producers: list[RingProducer]
    now: float = 1000.0
    inside: dict[int, Work] = field(default_factory=dict)
    begun: list[list[tuple[int, str, int]]] = field(default_factory=list)
    outcomes: dict[int, set[int]] = field(default_factory=dict)
    plans: dict[str, StepPlan] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    heard: dict[int, int] = field(default_factory=dict)
    heard_control: dict[int, int] = field(default_factory=dict)
    asleep_until: dict[int, float] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        return len(self.states)

    # ------------------------------------------------------------------------------ callers

    def send(self, rank: int, request: Request) -> Sent:
        return Sent(rank, request, self.producers[rank].submit(request))

    def poll(self, sent: Sent) -> Reply | None:
        """The reply if it is there; rows are copied out."""
        if sent.reply is None:
            reply = self.producers[sent.rank].try_take(sent.ticket)
            if isinstance(reply, LayerReply):
                reply = LayerReply(
                    hidden_states=reply.hidden_states.clone(),
                    sub_steps=reply.sub_steps,
                    queue_us=reply.queue_us,
                    total_us=reply.total_us,
                )
            if reply is not None:
                self.producers[sent.rank].release(sent.ticket)
            sent.reply = reply
        return sent.reply

    def ask(self, rank: int, request: Request) -> Reply:
        """Send and run the group until the answer is there."""
        sent = self.send(rank, request)
        self.settle()
        reply = self.poll(sent)
        assert reply is not None, f"no answer to {request}"
        return reply

    def ask_all(self, requests: dict[int, Request]) -> dict[int, Reply]:
        sent = [self.send(rank, request) for rank, request in requests.items()]
        self.settle()
        replies = {one.rank: self.poll(one) for one in sent}
        missing = [rank for rank, reply in replies.items() if reply is None]
        assert not missing, f"no answer on ranks {missing}"
        return replies  # type: ignore[return-value]

    def lease(self, holder: str = "tier") -> LeaseReply:
        reply = self.ask(0, LeaseRequest(holder=holder))
        assert isinstance(reply, LeaseReply), reply
        return reply

    # ------------------------------------------------------------------------------ ranks

    def turn(self, rank: int) -> bool:
        """One turn of a rank's threads, if a bell or the clock wakes them. True if it began or ended a layer call."""
        state, board = self.states[rank], self.boards[rank]
        doorbell, control = (board.segment.word(at).load() for at in board.doorbell(rank))
        if rank in self.inside:
            if control != self.heard_control.get(rank) or self.now >= self.asleep_until[rank]:
                self.heard_control[rank] = control
                self.asleep_until[rank] = self.now + STAND_IN_S
                state.turn()
            return self._try_end(rank)
        if doorbell == self.heard.get(rank) and self.now < self.asleep_until[rank]:
            return False
        self.heard[rank] = doorbell
        state.turn()
        for record, policy in state.to_stage:
            state.staged(record, policy)
        state.to_stage.clear()
        work = state.next_work()
        if work is None:
            self.asleep_until[rank] = self.now + state.idle_s()
            return False
        self.heard_control[rank] = control
        self.asleep_until[rank] = self.now + STAND_IN_S
        plan = work.plan.plan
        assert plan is not None
        assert plan.total_rows, "a step without rows is never launched"
        known = self.plans.setdefault(str(plan.plan_id), plan)
        assert known == plan, f"two ranks hold different plans: {known} and {plan}"
        self.begun[rank].append((work.sequence, str(plan.plan_id), work.layer_idx))
        self.inside[rank] = work
        self.boards[rank].set_busy(rank, True)
        return True

    def _try_end(self, rank: int) -> bool:
        work = self.inside[rank]
        group = self.outcomes.setdefault(work.sequence, set())
        if not group:
            calls = [self.begun[r][-1] for r in self.inside]
            here = self.begun[rank][-1]
            if len(self.inside) < self.num_ranks or any(call != here for call in calls):
                if all(call[0] == here[0] for call in calls) and any(call != here for call in calls):
                    self.errors.append(f"one sequence, different calls: {calls}")
                return False
            group.add(-1)
            group.update(r for r, other in self.inside.items() if other.refused)
        refusing = sorted(group - {-1})
        result: MoeOutput | Exception
        if refusing:
            result = PeerRefusedError(f"ranks {refusing} refused", refusing)
        else:
            result = self._output(rank, work)
        self._finish(rank, work, result)
        return True

    def _output(self, rank: int, work: Work) -> MoeOutput:
        """Every row plus the sequence and the number of rows of all ranks: a value that needs the right plan."""
        plan = work.plan.plan
        assert plan is not None
        out = torch.empty((0, 32), dtype=torch.bfloat16)
        if work.call is not None and plan.num_rows_per_rank[rank]:
            out = work.call.record.out()
            out.copy_(work.call.record.batch().hidden_states + (work.sequence % 64 + plan.total_rows))
        reports = tuple(
            SubStepReport(
                path=piece.path,
                runtime_capacity=piece.runtime_capacity,
                num_rows_per_rank=piece.num_rows_per_rank,
                row_format_per_rank=(RowFormat.BF16,) * self.num_ranks,
                counters=Counters(launches=1),
                times=StageTimes(total_us=1.0),
            )
            for piece in work.plan.sub_steps
        )
        return MoeOutput(out, reports)

    def _finish(self, rank: int, work: Work, result: MoeOutput | Exception) -> None:
        del self.inside[rank]
        del self.heard[rank]  # its device thread looks around before it sleeps
        self.boards[rank].set_busy(rank, False)
        self.states[rank].finish(work, result, 0.0, 1.0)

    def settle(self) -> None:
        """Turn all ranks until nothing changes any more."""
        quiet = 0
        while quiet < 4:
            moved = [self.turn(rank) for rank in range(self.num_ranks)]
            quiet = 0 if any(moved) else quiet + 1

    def time_out(self, seconds: float = 10.0) -> None:
        """Let time pass: ranks inside a layer call that cannot finish give up, as the device would."""
        self.settle()
        self.now += seconds + 0.001
        missing = [rank for rank in range(self.num_ranks) if rank not in self.inside]
        for rank, work in list(self.inside.items()):
            self._finish(rank, work, PeerTimeoutError(f"rank {rank} waited for ranks {missing}", missing))
        self.settle()

    def close(self) -> None:
        for thing in (*self.producers, *self.consumers):
            thing.close()
        for board in self.boards:
            board.close()
        self.boards[0].unlink()


@contextmanager
def simulated_group(
    group_name: str,
    num_ranks: int,
    *,
    max_micro_batches: int = 3,
    generation: int = 7,
    first_sequence: int = 1,
    settings: LoopSettings | None = None,
    observers: Sequence[Observer] = (),
) -> Iterator[Group]:
    made = deployment(num_ranks)
    bundle = plan_bundle(made)
    spec = RingSpec.of(made, num_control_slots=32, num_bulk_calls=4)
    creator = Board.create(
        group_name,
        num_ranks=num_ranks,
        max_micro_batches=max_micro_batches,
        generation=generation,
        first_sequence=first_sequence,
    )
    creator.close()
    boards = [Board.attach(group_name, rank) for rank in range(num_ranks)]
    group = Group(boards, [], [], [])
    group.begun = [[] for _ in range(num_ranks)]
    for rank, board in enumerate(boards):
        consumer = RingConsumer.create(group_name, rank, 0, spec)
        group.consumers.append(consumer)
        group.producers.append(
            RingProducer.attach(
                group_name, rank, 0, Bell(board.segment, rank_at(rank), FIRST_RING_WRITER), timeout_s=1.0
            )
        )
        group.states.append(
            RankState(
                board,
                rank,
                bundle,
                policy=PathPolicy.of(made),
                rings=[consumer],
                settings=settings or LoopSettings(),
                observer=observers[rank] if observers else None,
                clock=lambda: group.now,
            )
        )
    try:
        yield group
    finally:
        group.close()


def rows_of(plan_rows: int, seed: int) -> dict[str, Any]:
    """Tensors of a layer call of plan_rows rows; none at all for 0."""
    if not plan_rows:
        return {}
    random = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randint(-8, 8, (plan_rows, 32), generator=random).bfloat16(),
        "topk_ids": torch.zeros((plan_rows, 2), dtype=torch.int32),
        "topk_weights": torch.ones((plan_rows, 2)),
    }


def codes(replies: Mapping[int, Reply | None]) -> set[tuple[str, str]]:
    """(code, sentence) of replies that are all errors."""
    assert all(isinstance(reply, ErrorReply) for reply in replies.values()), replies
    return {(reply.code, reply.message) for reply in replies.values() if isinstance(reply, ErrorReply)}
