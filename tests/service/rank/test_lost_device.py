"""A rank whose device is lost or hangs: everybody hears of it, and it ends instead of refusing call after call."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest

from megamoe import MoeOutput, PathPolicy, plan_bundle
from megamoe.errors import InternalError, MegaMoeError, UnavailableError
from service.board.board import Board
from service.board.layout import rank_at
from service.config import load_config
from service.messages import ErrorReply, LeaseReply, LeaseRequest
from service.rank import process
from service.rank.process import RankProcess
from service.rank.spec import RankSpec
from service.rank.step_loop import StepLoop
from service.ring.bell import FIRST_RING_WRITER, Bell
from service.ring.ring import RingConsumer, RingProducer, RingSpec
from tests.service.loop_worker import Caller, deployment

LOST = UnavailableError("GPU of rank 0 must be working, got RuntimeError: CUDA error")


class Runtime:
    """One rank on a device on which every call ends with `error`."""

    next_sequence = 1
    memory_kinds = ()

    def __init__(self, error: MegaMoeError) -> None:
        self.error = error
        self.bundle, self.policy = plan_bundle(deployment(1)), PathPolicy.of(deployment(1))

    def pin(self, memory: object) -> object:
        return lambda: None

    def forward(self, *_: object, **__: object) -> MoeOutput:
        raise self.error


def serving_loop(
    group_name: str, runtime: object, opened: contextlib.ExitStack
) -> tuple[Board, RingProducer, StepLoop]:
    """A group of one rank: its board, a caller's ring, and its step loop, which is closed with `opened`."""
    board = Board.create(group_name, num_ranks=1, max_micro_batches=2, generation=3)
    opened.callback(board.unlink)
    opened.callback(board.close)
    own = Board.attach(group_name, 0)
    opened.callback(own.close)
    consumer = RingConsumer.create(group_name, 0, 0, RingSpec.of(deployment(1), num_bulk_calls=4))
    opened.callback(consumer.close)
    ring = RingProducer.attach(group_name, 0, 0, Bell(board.segment, rank_at(0), FIRST_RING_WRITER))
    opened.callback(ring.close)
    loop = StepLoop(own, 0, runtime, [consumer])  # type: ignore[arg-type]
    loop.start()
    opened.callback(loop.stop)
    return board, ring, loop


@pytest.mark.parametrize("error", [LOST, InternalError("one call failed")])
def test_a_lost_device_ends_its_rank_and_another_error_does_not(group_name: str, error: MegaMoeError) -> None:
    with contextlib.ExitStack() as opened:
        board, ring, loop = serving_loop(group_name, Runtime(error), opened)
        lease = ring.call(LeaseRequest(holder="tier"), 10.0)
        assert isinstance(lease, LeaseReply)
        caller = Caller([ring], lease, lease.next_sequence, lease.next_step_id)
        plan = caller.open((2,))
        (reply,) = caller.all(list(caller.calls(plan)))
        assert isinstance(reply, ErrorReply)
        assert (reply.code, reply.message) == (error.code, str(error))
        if error is not LOST:
            caller.open((2,))
            assert loop.failure is None
            assert board.down is None
            return
        deadline = time.monotonic() + 5.0
        while board.down is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert board.down == ErrorReply(code="unavailable", message=f"rank 0 is lost: {LOST}")
        assert loop.failure is LOST


class Hanging(Runtime):
    """On a device that never comes to an end, until the test does."""

    def __init__(self) -> None:
        super().__init__(LOST)
        self.over = threading.Event()

    def forward(self, *_: object, **__: object) -> MoeOutput:
        self.over.wait(30.0)
        raise self.error


@pytest.mark.parametrize("hangs", [True, False])
def test_a_rank_ends_whose_device_hangs(
    group_name: str, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_STUCK_GRACE_S", 0.1)
    monkeypatch.setattr(process, "_HEALTH_PERIOD_S", 0.05)
    config = load_config(overrides={"step_timeout_s": 0.2}, env=False)
    rank = RankProcess(RankSpec(config=config, rank=0, generation=3, group_name=group_name))
    runtime = Hanging()
    with contextlib.ExitStack() as opened:
        board, ring, loop = serving_loop(group_name, runtime, opened)
        opened.callback(runtime.over.set)
        lease = ring.call(LeaseRequest(holder="tier"), 10.0)
        assert isinstance(lease, LeaseReply)
        caller = Caller([ring], lease, lease.next_sequence, lease.next_step_id)
        if hangs:
            plan = caller.open((2,))
            ring.submit(caller.calls(plan)[0])
        waiting = SimpleNamespace(num_waiting=0)

        async def watch() -> None:
            stopping = asyncio.Event()
            asyncio.get_running_loop().call_later(1.5, stopping.set)
            await rank._keep_health(Mock(set=AsyncMock()), board, waiting, loop, Mock(), stopping)  # type: ignore[arg-type]

        asyncio.run(watch())
        assert rank._ended.is_set() == hangs
        if hangs:
            assert "the device hangs: a step has made no progress for more than 1.0 s" in rank.wait()
