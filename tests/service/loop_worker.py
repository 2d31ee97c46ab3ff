"""Rank processes with real runtimes and step loops, and a caller group on their rings: for tests of the whole core."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from megamoe import Deployment, MoeShape, Phase, PlanId, Runtime, StepPlan, unlink_all
from megamoe.errors import PeerTimeoutError
from service.board.board import Board
from service.board.layout import rank_at
from service.messages import (
    IntentRequest,
    LayerReply,
    LayerRequest,
    LeaseReply,
    LeaseRequest,
    PlanReply,
    Reply,
    Request,
)
from service.rank.step_loop import LoopSettings, StepLoop
from service.ring.bell import FIRST_RING_WRITER, Bell
from service.ring.ring import RingConsumer, RingProducer, RingSpec, Ticket

NUM_LAYERS = 2
NUM_RINGS = 2
_SPAWN = multiprocessing.get_context("spawn")


def deployment(num_ranks: int) -> Deployment:
    shape = MoeShape(
        hidden=64, intermediate=32, num_experts=8, num_topk=2, num_ranks=num_ranks, num_layers=NUM_LAYERS
    )
    return Deployment(
        shape=shape,
        max_tokens_per_rank=32,
        fixed_slot_max=16,
        small_m_capacities=(4,),
        large_m_capacity=32,
        large_m_min_tokens=8,
    )


def run_rank(group_name: str, rank: int, num_ranks: int, step_timeout_s: float, pipe: Connection) -> None:
    """One rank: identity experts, so that a row comes back as the sum of its weights times itself."""
    torch.set_num_threads(1)
    made = deployment(num_ranks)
    board = Board.attach(group_name, rank)
    with Runtime.open(made, rank=rank, group_name=group_name) as runtime:
        for layer_idx in range(NUM_LAYERS):
            runtime.bind_identity(layer_idx)
        rings = [
            RingConsumer.create(group_name, rank, idx, RingSpec.of(made, num_bulk_calls=4))
            for idx in range(NUM_RINGS)
        ]
        loop = StepLoop(board, rank, runtime, rings, settings=LoopSettings(step_timeout_s=step_timeout_s))
        loop.start()
        pipe.send("up")
        with suppress(EOFError):
            pipe.recv()
        loop.close()
        assert loop.failure is None
    board.close()
    pipe.send("down")


@dataclass
class Caller:
    """A caller group with a ring to every rank. sequence and step_id are the next ones."""

    rings: list[RingProducer]
    lease: LeaseReply
    sequence: int
    step_id: int

    def request(self, rank: int, request: Request) -> tuple[int, Ticket]:
        return rank, self.rings[rank].submit(request)

    def reply(self, sent: tuple[int, Ticket], timeout_s: float = 20.0) -> Reply:
        """The reply with rows of its own; the record is given back."""
        rank, ticket = sent
        reply = self.rings[rank].wait(ticket, timeout_s)
        if isinstance(reply, LayerReply):
            reply = LayerReply(
                hidden_states=reply.hidden_states.clone(),
                sub_steps=reply.sub_steps,
                queue_us=reply.queue_us,
                total_us=reply.total_us,
            )
        self.rings[rank].release(ticket)
        return reply

    def intents(
        self, counts: tuple[int, ...], *, micro_batch_idx: int = 0, phase: Phase = Phase.DECODE
    ) -> list[Request]:
        plan_id = PlanId(self.lease.generation, self.step_id, micro_batch_idx)
        self.step_id += 1
        return [
            IntentRequest(
                lease_serial=self.lease.lease_serial,
                plan_id=plan_id,
                num_rows=rows,
                phase=phase if rows else Phase.IDLE,
            )
            for rows in counts
        ]

    def calls(self, plan: StepPlan, layer_idx: int = 0) -> list[LayerRequest]:
        sequence, self.sequence = self.sequence, self.sequence + 1
        return [
            LayerRequest(
                lease_serial=self.lease.lease_serial,
                plan_id=plan.plan_id,
                layer_idx=layer_idx,
                sequence=sequence,
                **rows_of(rows, seed=sequence * 8 + rank),
            )
            for rank, rows in enumerate(plan.num_rows_per_rank)
        ]

    def all(self, requests: list[Any], timeout_s: float = 20.0) -> list[Reply]:
        sent = [self.request(rank, request) for rank, request in enumerate(requests)]
        return [self.reply(one, timeout_s) for one in sent]

    def open(self, counts: tuple[int, ...], **more: Any) -> StepPlan:
        plans = {
            reply.plan for reply in self.all(self.intents(counts, **more)) if isinstance(reply, PlanReply)
        }
        (plan,) = plans
        return plan

    def works(self, counts: tuple[int, ...]) -> None:
        """One step with one layer, checked bitwise."""
        plan = self.open(counts)
        calls = self.calls(plan)
        for call, reply in zip(calls, self.all(calls)):
            check_rows(call, reply)


def rows_of(rows: int, seed: int) -> dict[str, torch.Tensor]:
    """Rows that MXFP8 holds exactly, ids over all ranks, weights that are powers of two."""
    random = torch.Generator().manual_seed(seed)
    if not rows:
        return {}
    return {
        "hidden_states": torch.randint(-8, 9, (rows, 64), generator=random).bfloat16(),
        "topk_ids": torch.randint(0, 8, (rows, 2), generator=random, dtype=torch.int32),
        "topk_weights": torch.full((rows, 2), 0.5),
    }


def check_rows(call: LayerRequest, reply: Reply) -> None:
    assert isinstance(reply, LayerReply), reply
    if call.hidden_states is not None:
        assert torch.equal(reply.hidden_states, call.hidden_states)


@dataclass
class RankGroup:
    """Running rank processes."""

    name: str
    num_ranks: int
    board: Board
    processes: list[BaseProcess]
    pipes: list[Connection]
    callers: list[Caller] = field(default_factory=list)

    def caller(self, ring_idx: int = 1, holder: str = "tier") -> Caller:
        """A caller group on ring ring_idx of every rank, with the lease."""
        rings = [
            RingProducer.attach(
                self.name,
                rank,
                ring_idx,
                Bell(self.board.segment, rank_at(rank), FIRST_RING_WRITER + ring_idx),
            )
            for rank in range(self.num_ranks)
        ]
        lease = rings[0].call(LeaseRequest(holder=holder), 10.0)
        assert isinstance(lease, LeaseReply), lease
        caller = Caller(rings, lease, lease.next_sequence, lease.next_step_id)
        self.callers.append(caller)
        return caller

    def stop(self) -> None:
        for caller in self.callers:
            for ring in caller.rings:
                ring.close()
        for pipe in self.pipes:
            with suppress(OSError):  # it was killed
                pipe.send("stop")
        deadline = time.monotonic() + 20
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0.1))
            if process.is_alive():
                process.kill()
                process.join(5)


@contextmanager
def running_group(group_name: str, num_ranks: int, *, step_timeout_s: float = 10.0) -> Iterator[RankGroup]:
    board = Board.create(group_name, num_ranks=num_ranks, max_micro_batches=4, generation=3)
    group = RankGroup(group_name, num_ranks, board, [], [])
    try:
        for rank in range(num_ranks):
            ours, theirs = _SPAWN.Pipe()
            process = _SPAWN.Process(
                target=run_rank, args=(group_name, rank, num_ranks, step_timeout_s, theirs), daemon=True
            )
            process.start()
            theirs.close()
            group.processes.append(process)
            group.pipes.append(ours)
        for rank, pipe in enumerate(group.pipes):
            if not pipe.poll(90):
                raise PeerTimeoutError(f"rank {rank} did not start", [rank])
            assert pipe.recv() == "up"
        yield group
    finally:
        group.stop()
        board.close()
        board.unlink()
        unlink_all(group_name)
