"""Step loops over real runtimes in real processes: overlap of micro-batches, deaths, the end, and its cost."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path as FilePath

import pytest

from megamoe import Path, PathPolicy, Phase, SharedSegment, StepPlan
from megamoe.errors import ConfigError, HeapError
from service.board.board import Board
from service.board.layout import rank_at
from service.messages import (
    DoneReply,
    ErrorReply,
    LayerReply,
    LeaseRequest,
    PlanReply,
    PolicyRequest,
)
from service.ring.bell import FIRST_RING_WRITER, Bell
from service.ring.ring import RingProducer
from tests.service.loop_worker import Caller, RankGroup, check_rows, deployment, running_group

RANKS = 4


def test_steps_of_real_ranks(group_name: str) -> None:
    """One group for everything that leaves it whole: starting four torch processes takes most of the time."""
    with running_group(group_name, RANKS) as group:
        caller = group.caller()
        all_paths(caller)
        plan_while_a_layer_call_waits(caller)
        micro_batches_side_by_side(caller)
        refusals(caller)
        policies(caller)
        killed_producer(group, caller)


def all_paths(caller: Caller) -> None:
    """Uneven, empty and cut steps, all checked bitwise; the paths are those that the plan said."""
    for counts, phase in (
        ((3, 1, 0, 4), Phase.DECODE),
        ((16, 0, 0, 2), Phase.DECODE),
        ((0, 0, 32, 9), Phase.PREFILL),
        ((0, 40, 1, 0), Phase.DECODE),
        ((0, 0, 0, 0), Phase.DECODE),
    ):
        replies = caller.all(caller.intents(counts, phase=phase))
        planned = replies[0]
        assert isinstance(planned, PlanReply)
        assert replies == [planned] * RANKS
        for layer_idx in range(2):
            calls = caller.calls(planned.plan, layer_idx)
            for call, reply in zip(calls, caller.all(calls)):
                check_rows(call, reply)
                assert isinstance(reply, LayerReply)
                assert [report.path for report in reply.sub_steps] == [p.path for p in planned.sub_steps]
                assert all(report.num_rows_per_rank for report in reply.sub_steps)
                assert reply.total_us >= sum(report.times.total_us for report in reply.sub_steps) * 0.5


def plan_while_a_layer_call_waits(caller: Caller) -> None:
    """Ranks 0 to 2 are inside a layer call that rank 3's caller sends only after another micro-batch's plan."""
    first = caller.open((1, 1, 1, 1), micro_batch_idx=0)
    calls = caller.calls(first)
    inside = [caller.request(rank, calls[rank]) for rank in range(RANKS - 1)]
    time.sleep(0.05)
    started = time.monotonic()
    second = caller.open((0, 2, 0, 1), micro_batch_idx=1)
    assert time.monotonic() - started < 2.0, "the stand-in agrees while the device thread waits for a peer"
    last = caller.request(RANKS - 1, calls[RANKS - 1])
    for call, sent in zip(calls, [*inside, last]):
        check_rows(call, caller.reply(sent))
    more = caller.calls(second)
    for call, reply in zip(more, caller.all(more)):
        check_rows(call, reply)


def micro_batches_side_by_side(caller: Caller) -> None:
    """Four micro-batches' calls in flight at once, sent to the ranks in different orders."""
    plans: list[StepPlan] = [caller.open((idx, 1, 2, 0), micro_batch_idx=idx) for idx in range(4)]
    calls = [caller.calls(plans[turn % 4], turn // 4) for turn in range(8)]
    sent = {
        (rank, turn): caller.request(rank, calls[turn][rank])
        for rank in range(RANKS)
        for turn in (range(8) if rank % 2 else reversed(range(8)))
    }
    for (rank, turn), one in sent.items():
        check_rows(calls[turn][rank], caller.reply(one))


def refusals(caller: Caller) -> None:
    """A refused call joins the launch with its error bit: all ranks answer it, and the next call works."""
    plan = caller.open((2, 2, 2, 2))
    for first in (0, 1):
        calls = caller.calls(plan, 0)
        fields = {**vars(calls[first]), **dict.fromkeys(("hidden_states", "topk_ids", "topk_weights"))}
        calls[first] = type(calls[first])(**{**fields, "refusal": ("invalid_argument", "bad id")})
        order = [*range(1, RANKS), 0]
        sent = {}
        for rank in order:
            sent[rank] = caller.request(rank, calls[rank])
            time.sleep(0.01)
        replies = {caller.reply(one) for one in sent.values()}
        assert replies == {ErrorReply(code="invalid_argument", message=f"rank {first} refused: bad id")}
    calls = caller.calls(plan, 0)
    for call, reply in zip(calls, caller.all(calls)):
        check_rows(call, reply)


def policies(caller: Caller) -> None:
    policy = PathPolicy.of(deployment(RANKS)).with_path(Path.FIXED_SLOT, False)
    assert set(caller.all([PolicyRequest(policy=policy)] * RANKS)) == {DoneReply()}
    (planned,) = set(caller.all(caller.intents((9, 0, 0, 0))))
    assert isinstance(planned, PlanReply)
    assert planned.plan.policy_version == 1
    assert [piece.path for piece in planned.sub_steps] == [Path.COMPACT]
    calls = caller.calls(planned.plan)
    for call, reply in zip(calls, caller.all(calls)):
        check_rows(call, reply)


def _produce_and_hang(group_name: str, request: object) -> None:
    board = Board.attach(group_name, 40)
    producer = RingProducer.attach(group_name, 1, 0, Bell(board.segment, rank_at(1), FIRST_RING_WRITER))
    producer.submit(request)  # type: ignore[arg-type]
    time.sleep(60)


def killed_producer(group: RankGroup, caller: Caller) -> None:
    """A caller of rank 1 is killed after announcing its rows: the step completes for the others."""
    plan = caller.open((1, 3, 1, 1))
    calls = caller.calls(plan)
    child = multiprocessing.get_context("spawn").Process(
        target=_produce_and_hang, args=(group.name, calls[1]), daemon=True
    )
    child.start()
    sent = [caller.request(rank, calls[rank]) for rank in (0, 2, 3)]
    for rank, one in zip((0, 2, 3), sent):
        check_rows(calls[rank], caller.reply(one))
    with pytest.raises(ConfigError, match="must have one producer"):
        RingProducer.attach(group.name, 1, 0, Bell(group.board.segment, rank_at(1), FIRST_RING_WRITER))
    os.kill(child.pid or 0, signal.SIGKILL)
    child.join(10)
    successor = RingProducer.attach(
        group.name, 1, 0, Bell(group.board.segment, rank_at(1), FIRST_RING_WRITER), timeout_s=5.0
    )
    assert successor.num_in_flight == 0
    reply = successor.call(LeaseRequest(holder="other"), 5.0)
    assert isinstance(reply, ErrorReply)
    assert reply.code == "lease_held"
    successor.close()
    caller.works((1, 2, 3, 4))


def test_a_killed_rank_is_named_within_the_timeout_and_then_the_group_is_down(group_name: str) -> None:
    with running_group(group_name, RANKS, step_timeout_s=1.5) as group:
        caller = group.caller()
        caller.works((1, 1, 1, 1))
        plan = caller.open((2, 2, 2, 2))
        os.kill(group.processes[2].pid or 0, signal.SIGKILL)
        group.processes[2].join(10)
        calls = caller.calls(plan)
        started = time.monotonic()
        sent = [caller.request(rank, calls[rank]) for rank in (0, 1, 3)]
        replies = [caller.reply(one) for one in sent]
        assert time.monotonic() - started < 4.0
        assert len(set(replies)) == 1, "the same sentence on all ranks"
        (reply,) = set(replies)
        assert isinstance(reply, ErrorReply)
        assert (reply.code, reply.missing_ranks) == ("peer_timeout", (2,))
        intents = caller.intents((1, 1, 1, 1))
        sent = [caller.request(rank, intents[rank]) for rank in (0, 1, 3)]
        (reply,) = {caller.reply(one) for one in sent}
        assert isinstance(reply, ErrorReply)
        assert (reply.code, reply.missing_ranks) == ("peer_timeout", (2,))
        # Whoever watches the ranks says so; then nobody waits any more.
        intents = caller.intents((1, 1, 1, 1))
        sent = [caller.request(rank, intents[rank]) for rank in (0, 1, 3)]
        group.board.post_down(ErrorReply(code="unavailable", message="rank 2 was killed"))
        started = time.monotonic()
        assert {caller.reply(one) for one in sent} == {
            ErrorReply(code="unavailable", message="rank 2 was killed")
        }
        assert time.monotonic() - started < 1.0


def test_stopping_answers_what_waits_and_leaves_nothing(group_name: str) -> None:
    with running_group(group_name, 2, step_timeout_s=1.5) as group:
        caller = group.caller()
        caller.works((3, 3))
        plan = caller.open((1, 1))
        sent = caller.request(0, caller.intents((1, 1), micro_batch_idx=1)[0])
        stray = caller.request(1, caller.calls(plan)[1])
        time.sleep(0.05)
        stopped = threading.Thread(target=lambda: [pipe.send("stop") for pipe in group.pipes])
        stopped.start()
        reply = caller.reply(sent)
        assert isinstance(reply, ErrorReply)
        assert reply.code == "unavailable"
        reply = caller.reply(stray)
        assert isinstance(reply, ErrorReply), "inside a call that nobody joins: its timeout or the end"
        stopped.join()
        for pipe in group.pipes:
            assert pipe.poll(20)
            assert pipe.recv() == "down"
        assert not list(FilePath("/dev/shm").glob(f"{group_name}-ring*"))
        with pytest.raises(HeapError):
            SharedSegment.attach(f"{group_name}-ring-0-0")
