"""A rank whose device is lost: everybody hears of it, and the rank ends instead of refusing call after call."""

from __future__ import annotations

import contextlib
import time

import pytest

from megamoe import MoeOutput, PathPolicy, plan_bundle
from megamoe.errors import InternalError, MegaMoeError, UnavailableError
from service.board.board import Board
from service.board.layout import rank_at
from service.messages import ErrorReply, LeaseReply, LeaseRequest
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


@pytest.mark.parametrize("error", [LOST, InternalError("one call failed")])
def test_a_lost_device_ends_its_rank_and_another_error_does_not(group_name: str, error: MegaMoeError) -> None:
    with contextlib.ExitStack() as opened:
        board = Board.create(group_name, num_ranks=1, max_micro_batches=2, generation=3)
        opened.callback(board.unlink)
        opened.callback(board.close)
        own = Board.attach(group_name, 0)
        opened.callback(own.close)
        consumer = RingConsumer.create(group_name, 0, 0, RingSpec.of(deployment(1), num_bulk_calls=4))
        opened.callback(consumer.close)
        ring = RingProducer.attach(group_name, 0, 0, Bell(board.segment, rank_at(0), FIRST_RING_WRITER))
        opened.callback(ring.close)
        runtime: object = Runtime(error)
        loop = StepLoop(own, 0, runtime, [consumer])  # type: ignore[arg-type]
        loop.start()
        opened.callback(loop.stop)

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
