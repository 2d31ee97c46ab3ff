"""The servicer of one rank over real gRPC, in front of a rank that answers at once."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from megamoe.errors import InvalidArgumentError, PeerTimeoutError
from service.client import RemoteError
from service.messages import LayerRequest
from service.net import wire
from service.net.grpc_server import LAYER_SERVICE
from service.pb import moe_pb2 as pb
from service.pb.moe_pb2_grpc import MoELayerStub
from service.ring.step_codec import LayerHead
from tests.service.served_rank import CONFIG, SHAPE, ServedRank, layer_call


async def test_a_whole_step(served: ServedRank) -> None:
    stream = served.stream()
    granted = await stream.request(pb.ForwardRequest(lease=pb.Lease(holder="me")), timeout_s=5)
    assert granted.message.lease_granted == pb.LeaseGranted(
        lease_serial=7, generation=3, next_sequence=11, next_step_id=5, first_sequence=11, first_step_id=5
    )
    plan_id = pb.PlanId(generation=3, step_id=5)
    intent = pb.StepIntent(lease_serial=7, plan_id=plan_id, num_rows=40, phase=pb.PHASE_decode)
    planned = await stream.request(pb.ForwardRequest(step_intent=intent), timeout_s=5)
    assert [sub.path for sub in planned.message.step_plan.sub_steps] == [pb.PATH_fixed_slot]
    message, parts = layer_call(40, layer_idx=2)
    reply = await stream.request(message, parts, timeout_s=5)
    result = reply.message.layer_result
    assert (result.layer_idx, result.sequence, result.plan_id) == (2, 11, plan_id)
    assert result.sub_steps[0].counters.launches == 3
    rows = wire.named(result.tensors, reply.payload, "hidden_states")
    sent = torch.arange(40 * SHAPE.hidden).remainder(100).to(torch.bfloat16).view(40, -1)
    assert torch.equal(rows, sent * 2)
    closed = await stream.request(
        pb.ForwardRequest(close_step=pb.CloseStep(lease_serial=7, plan_id=plan_id)), timeout_s=5
    )
    assert closed.message.HasField("closed")
    await stream.close()
    assert served.ring.producer.num_in_flight == 0


async def test_pipelined_requests_stay_in_order_and_find_their_replies(served: ServedRank) -> None:
    stream = served.stream()
    calls = [layer_call(rows, layer_idx=rows) for rows in range(1, 90)]
    tasks = [stream.send(message, parts) for message, parts in calls]
    replies = await asyncio.wait_for(asyncio.gather(*tasks), 20)
    assert [reply.message.layer_result.layer_idx for reply in replies] == list(range(1, 90))
    heads = [item for item in served.rank.seen if isinstance(item, LayerHead)]
    assert [head.layer_idx for head in heads] == list(range(1, 90))
    await stream.close()
    assert served.ring.producer.num_in_flight == 0


async def test_bad_rows_join_the_layer_as_a_refusal_and_the_stream_stays_open(served: ServedRank) -> None:
    stream = served.stream()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"hidden": torch.zeros(2, SHAPE.hidden)}, "hidden_states.dtype must be bfloat16, got float32"),
        ({"hidden": torch.zeros(2, 8, dtype=torch.bfloat16)}, r"hidden_states.shape must be \[2, 256\]"),
        (
            {"ids": torch.full((2, 6), 64, dtype=torch.int32)},
            r"topk_ids\[0\]\[0\] \(token 0, slot 0\) must be",
        ),
    ]
    for change, sentence in cases:
        message, parts = layer_call(2, **change)
        with pytest.raises(InvalidArgumentError, match=sentence) as caught:
            await stream.request(message, parts, timeout_s=5)
        assert isinstance(caught.value, RemoteError)
        assert caught.value.status is grpc.StatusCode.INVALID_ARGUMENT
        refused = served.rank.seen[-1]
        assert isinstance(refused, LayerHead)
        assert refused.refusal is not None
        assert refused.sequence == 11, "the refusal takes its place in the total order"
    message, parts = layer_call(2)
    assert (await stream.request(message, parts, timeout_s=5)).message.HasField("layer_result")
    await stream.close()


async def test_too_many_rows_for_the_ring_is_a_refusal_too(served: ServedRank) -> None:
    rows = CONFIG.deployment.step_rows_limit + 1
    stream = served.stream()
    message, parts = layer_call(rows)
    with pytest.raises(InvalidArgumentError, match=f"at most {rows - 1}"):
        await stream.request(message, parts, timeout_s=5)
    await stream.close()


async def test_errors_of_the_rank_keep_code_and_missing_ranks(served: ServedRank) -> None:
    stream = served.stream()
    message, parts = layer_call(1, layer_idx=99)
    with pytest.raises(PeerTimeoutError, match="rank 5 did not come") as caught:
        await stream.request(message, parts, timeout_s=5)
    assert caught.value.missing_ranks == (5,)
    await stream.close()


async def test_empty_requests_and_nameless_holders_are_refused(served: ServedRank) -> None:
    stream = served.stream()
    with pytest.raises(InvalidArgumentError, match="request must be one of lease"):
        await stream.request(pb.ForwardRequest(), timeout_s=5)
    with pytest.raises(InvalidArgumentError, match="lease.holder must be the name"):
        await stream.request(pb.ForwardRequest(lease=pb.Lease()), timeout_s=5)
    served.metrics.flush()
    labels = {"rank": "0", "model_name": "demo", "code": "invalid_argument"}
    assert served.metrics.registry.get_sample_value("megamoe_errors_total", labels) == 2
    await stream.close()


async def test_a_vanished_caller_leaks_nothing(served: ServedRank) -> None:
    served.rank.hold.clear()
    stream = served.stream()
    for _ in range(3):
        message, parts = layer_call(100)
        stream.send(message, parts).add_done_callback(lambda future: future.cancelled() or future.exception())
    for _ in range(300):
        if served.ring.num_waiting == 3:
            break
        await asyncio.sleep(0.01)
    assert served.ring.num_waiting == 3
    stream._call.cancel()
    await stream.close()
    await asyncio.sleep(0.1)
    served.rank.hold.set()
    for _ in range(200):
        if served.ring.producer.num_in_flight == 0:
            break
        await asyncio.sleep(0.01)
    assert served.ring.producer.num_in_flight == 0
    assert sum(isinstance(item, LayerRequest | LayerHead) for item in served.rank.seen) == 3


async def test_garbage_ends_only_its_own_stream(served: ServedRank) -> None:
    async with grpc.aio.insecure_channel(served.address) as channel:
        raw: Any = channel.stream_stream(f"/{LAYER_SERVICE}/Forward")
        call = raw()
        await call.write(b"\xff\xff\xff\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), 5)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    stream = served.stream()
    message, parts = layer_call(1)
    await stream.request(message, parts, timeout_s=5)
    await stream.close()


async def test_a_message_above_the_limit_is_refused_with_the_number(served: ServedRank) -> None:
    async with grpc.aio.insecure_channel(served.address) as channel:
        stub: Any = MoELayerStub(channel)
        call = stub.Forward()
        await call.write(pb.ForwardRequest(payload=bytes(CONFIG.message_bytes + 1)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), 5)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(CONFIG.message_bytes) in str(caught.value.details())


async def test_info_health_and_reflection(served: ServedRank) -> None:
    async with grpc.aio.insecure_channel(served.address) as channel:
        stub: Any = MoELayerStub(channel)
        info = await stub.GetInfo(pb.GetInfoRequest(), timeout=5)
        assert info.shape.hidden == SHAPE.hidden
        assert info.limits.max_message_bytes == CONFIG.message_bytes
        assert {(r.path, r.capacity) for r in info.runtimes} >= {
            (pb.PATH_compact, 512),
            (pb.PATH_small_m, 16),
        }
        health: Any = health_pb2_grpc.HealthStub(channel)
        for serving in (False, True):
            await served.health.set(serving)
            for service in ("", LAYER_SERVICE):
                request = health_pb2.HealthCheckRequest(service=service)
                reply = await health.Check(request, timeout=5)
                assert reply.status == (1 if serving else 2)
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = reflection.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=LAYER_SERVICE))
        answer = await asyncio.wait_for(call.read(), 5)
        assert b"ForwardStep" in answer.file_descriptor_response.file_descriptor_proto[0]


async def test_a_request_is_sent_although_its_caller_gives_up_at_once(served: ServedRank) -> None:
    """It has taken its place in the total order: a gap there would hold up everything behind it."""
    stream = served.stream()
    message, parts = layer_call(1)
    stream.request(message, parts, timeout_s=5).close()
    message, parts = layer_call(1, layer_idx=1)
    await stream.request(message, parts, timeout_s=5)
    heads = [item for item in served.rank.seen if isinstance(item, LayerHead)]
    assert [head.layer_idx for head in heads] == [0, 1]
    await stream.close()
