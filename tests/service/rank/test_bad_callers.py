"""Callers that say nothing, listen to nothing or send what makes no sense: they lose their stream, nobody else does."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from megamoe import Phase
from megamoe.errors import InvalidArgumentError
from service.messages import IntentRequest
from service.net.grpc_server import LAYER_SERVICE
from service.pb import moe_pb2 as pb
from service.ring.step_codec import LayerHead
from tests.service.served_rank import STEP_TIMEOUT_S, ServedRank, layer_call

LEASE = pb.ForwardRequest(lease=pb.Lease(holder="me"))


@contextlib.asynccontextmanager
async def raw_stream(served: ServedRank) -> AsyncIterator[Any]:
    """A stream that reads only what the test reads, on a connection of its own that holds little unread."""
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.http2.lookahead_bytes", 4096),
        ("grpc.http2.bdp_probe", 0),
    ]
    async with grpc.aio.insecure_channel(served.address, options=options) as channel:
        open_stream: Any = channel.stream_stream(f"/{LAYER_SERVICE}/Forward")
        call = open_stream()
        yield call
        call.cancel()


async def until(done: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def flood(call: Any, message: bytes) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while True:
            await call.write(message)


async def test_a_silent_stream_is_ended(served: ServedRank) -> None:
    async with raw_stream(served) as silent, raw_stream(served) as brief:
        await brief.write(LEASE.SerializeToString())
        assert await asyncio.wait_for(brief.read(), 5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(silent.read(), STEP_TIMEOUT_S + 5)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert f"the first request must come within {STEP_TIMEOUT_S:g} s" in str(caught.value.details())
        await brief.write(LEASE.SerializeToString())
        assert await asyncio.wait_for(brief.read(), 5), "who has said something may be quiet"


async def test_who_does_not_read_replies_keeps_nobody_else_waiting(served: ServedRank) -> None:
    async with raw_stream(served) as deaf:
        flooding = asyncio.create_task(flood(deaf, LEASE.SerializeToString()))
        seen = 0
        while len(served.rank.seen) > seen or not seen:  # until the connection is full of replies
            seen = len(served.rank.seen)
            await asyncio.sleep(0.3)
        stream = served.stream()
        start = time.monotonic()
        for _ in range(5):
            await stream.request(LEASE, timeout_s=5)
        assert time.monotonic() - start < STEP_TIMEOUT_S / 2, "not only once the deaf one is thrown out"
        await stream.close()
        flooding.cancel()


async def test_rows_that_nobody_reads_leave_the_ring(served: ServedRank) -> None:
    """The rank's ring is for all its callers: a reply that waits for its reader may not lie in it for long."""
    message, parts = layer_call(2000)
    message.payload = b"".join(parts)
    async with raw_stream(served) as deaf:
        flooding = asyncio.create_task(flood(deaf, message.SerializeToString()))
        await until(lambda: len(served.rank.seen) >= 3)
        await until(lambda: served.ring.producer.num_in_flight == 0, 2 * STEP_TIMEOUT_S + 5)
        stream = served.stream()
        own, parts = layer_call(2000)
        assert (await stream.request(own, parts, timeout_s=5)).message.HasField("layer_result")
        await stream.close()
        flooding.cancel()


def intent(**change: Any) -> pb.ForwardRequest:
    plan_id = pb.PlanId(generation=3, step_id=5)
    table = {"lease_serial": 7, "plan_id": plan_id, "num_rows": 2, "phase": pb.PHASE_decode} | change
    return pb.ForwardRequest(step_intent=pb.StepIntent(**table))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"num_rows_per_rank": [1] * 100_000},
            "num_rows_per_rank must be 8 numbers, one per rank, got 100000",
        ),
        ({"num_rows_per_rank": [2]}, "num_rows_per_rank must be 8 numbers, one per rank, got 1 numbers"),
        ({"phase": 77}, "phase of a rank with 2 rows must be 'prefill' or 'decode', got 77"),
        ({"phase": 0}, "phase of a rank with 2 rows must be 'prefill' or 'decode', got PHASE_UNSPECIFIED"),
    ],
    ids=["endless_counts", "short_counts", "unknown_phase", "no_phase"],
)
async def test_an_intent_that_fits_no_record_goes_on_as_a_refusal(
    served: ServedRank, change: dict[str, Any], sentence: str
) -> None:
    """Not answered here: the other ranks of the step must hear of it, and not wait for this one."""
    stream = served.stream()
    await stream.request(intent(**change), timeout_s=5)
    (seen,) = served.rank.seen
    assert isinstance(seen, IntentRequest)
    assert seen.refusal is not None
    assert seen.refusal[0] == "invalid_argument"
    assert seen.refusal[1].startswith(sentence)
    await stream.close()


async def test_an_endless_dtype_is_cut(served: ServedRank) -> None:
    stream = served.stream()
    await stream.request(intent(dtype="x" * 100_000), timeout_s=5)
    (seen,) = served.rank.seen
    assert isinstance(seen, IntentRequest)
    assert (seen.dtype, seen.phase, seen.refusal) == ("x" * 64, Phase.DECODE, None)
    await stream.close()


@pytest.mark.parametrize(
    "sizes", [[2**40, 2**40, 0], [2**63 - 1, 2**63 - 1, 0], [0] * 70, [0, 2**62]], ids=str
)
async def test_shapes_beyond_all_bounds_are_refusals(served: ServedRank, sizes: list[int]) -> None:
    """Also of empty tensors, whose strides torch computes all the same."""
    stream = served.stream()
    message, parts = layer_call(2)
    message.layer_call.tensors[0].shape[:] = sizes
    with pytest.raises(InvalidArgumentError, match=r"hidden_states.shape must be "):
        await stream.request(message, parts, timeout_s=5)
    (seen,) = served.rank.seen
    assert isinstance(seen, LayerHead)
    assert seen.refusal is not None
    await stream.close()


async def test_a_bug_in_reading_rows_is_a_refusal_that_all_hear(
    served: ServedRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr("service.rank.server.wire.read_batch", broken)
    stream = served.stream()
    message, parts = layer_call(2)
    with pytest.raises(Exception, match="a request could not be taken: RuntimeError"):
        await stream.request(message, parts, timeout_s=5)
    (seen,) = served.rank.seen
    assert isinstance(seen, LayerHead)
    assert seen.refusal is not None
    assert seen.refusal[0] == "internal"
    monkeypatch.undo()
    message, parts = layer_call(2)
    assert (await stream.request(message, parts, timeout_s=5)).message.HasField("layer_result")
    await stream.close()


async def test_garbage_is_an_invalid_argument_of_every_unary_call(served: ServedRank) -> None:
    async with grpc.aio.insecure_channel(served.address) as channel:
        raw: Any = channel.unary_unary(f"/{LAYER_SERVICE}/GetInfo")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw(b"\xff\xff\xff", timeout=5)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "message must be a GetInfoRequest" in str(caught.value.details())
