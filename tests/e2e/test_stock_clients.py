"""Clients that know only moe.proto: generated Python stubs, Node.js, aggressive keepalive, gRPC's default limits."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from megamoe import MoeBatch
from megamoe import Path as MoePath
from service.client import AsyncFront, AsyncMoeGroup, RemoteError, forward_step
from service.net import codec
from service.pb import moe_pb2 as pb
from service.pb.moe_pb2_grpc import AdminStub, MoELayerStub
from tests.e2e.harness import ROOT, SHAPE, ServiceProcess, check_numbers, group_rows, rows, works


@pytest.mark.any_backend
async def test_generated_stubs_alone(running_service: ServiceProcess) -> None:
    """Eight streams with plain protobuf messages: payload as an ordinary bytes field."""
    counts = [3, 1, 4, 1, 5, 9, 2, 6]
    batches = group_rows(counts, seed=60)
    async with grpc.aio.insecure_channel(running_service.front) as channel:
        stub: Any = MoELayerStub(channel)
        info = await stub.GetInfo(pb.GetInfoRequest())
    channels = [grpc.aio.insecure_channel(rank.address) for rank in info.ranks]
    calls: list[Any] = [MoELayerStub(channel).Forward() for channel in channels]  # type: ignore[misc]

    async def ask(make: Any) -> list[pb.ForwardReply]:
        for rank, one in enumerate(calls):
            await one.write(make(rank))
        return [await asyncio.wait_for(one.read(), 10) for one in calls]

    granted = await ask(lambda rank: pb.ForwardRequest(request_id=1, lease=pb.Lease(holder="stock")))
    lease = granted[0].lease_granted
    plan_id = pb.PlanId(generation=lease.generation, step_id=lease.next_step_id)
    planned = await ask(
        lambda rank: pb.ForwardRequest(
            request_id=2,
            step_intent=pb.StepIntent(
                lease_serial=lease.lease_serial, plan_id=plan_id, num_rows=counts[rank], phase=pb.PHASE_decode
            ),
        )
    )
    assert len({reply.step_plan.SerializeToString() for reply in planned}) == 1

    def layer_call(rank: int) -> pb.ForwardRequest:
        hidden, ids, weights = batches[rank]  # type: ignore[misc]
        parts = [hidden.view(torch.uint8).numpy().tobytes(), ids.numpy().tobytes(), weights.numpy().tobytes()]
        n, first, second = counts[rank], len(parts[0]), len(parts[0]) + len(parts[1])
        return pb.ForwardRequest(
            request_id=3,
            payload=b"".join(parts),
            layer_call=pb.LayerCall(
                lease_serial=lease.lease_serial,
                plan_id=plan_id,
                layer_idx=1,
                sequence=lease.next_sequence,
                tensors=[
                    pb.Tensor(name="hidden_states", dtype="bfloat16", shape=[n, SHAPE.hidden]),
                    pb.Tensor(name="topk_ids", dtype="int32", shape=[n, SHAPE.num_topk], offset=first),
                    pb.Tensor(name="topk_weights", dtype="float32", shape=[n, SHAPE.num_topk], offset=second),
                ],
            ),
        )

    replies = await ask(layer_call)
    for rank, reply in enumerate(replies):
        assert reply.request_id == 3
        (tensor,) = reply.layer_result.tensors
        got = torch.frombuffer(bytearray(reply.payload), dtype=torch.bfloat16).view(tuple(tensor.shape))
        reports = [codec.report_from_pb(report) for report in reply.layer_result.sub_steps]
        check_numbers(got, batches[rank], 1, reports)  # type: ignore[arg-type]
    await ask(
        lambda rank: pb.ForwardRequest(
            request_id=4, lease=pb.Lease(holder="stock", release=True, lease_serial=lease.lease_serial)
        )
    )
    for channel in channels:
        await channel.close()


async def test_a_method_of_the_other_server_says_where_to_go(running_service: ServiceProcess) -> None:
    async with AsyncFront(running_service.front) as front:
        ranks = (await front.info()).rank_addresses
    async with (
        grpc.aio.insecure_channel(running_service.front) as to_front,
        grpc.aio.insecure_channel(ranks[0]) as to_rank,
    ):
        stub: Any = MoELayerStub(to_front)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Forward().read()
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "GetInfo names their addresses" in str(refused.value.details())
        stub = MoELayerStub(to_rank)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ForwardStep(pb.ForwardStepRequest())
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "ForwardStep goes to the front" in str(refused.value.details())


@pytest.fixture(scope="session")
def node_modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Node's stock gRPC packages. A machine without node fails here: Node callers are supported."""
    npm = shutil.which("npm")
    assert npm, "npm is needed (Debian: nodejs and npm)"
    folder = tmp_path_factory.mktemp("node")
    shutil.copy(ROOT / "tests/e2e/node/package.json", folder)
    shutil.copy(ROOT / "tests/e2e/node/package-lock.json", folder)
    subprocess.run(
        [npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"], cwd=folder, check=True, timeout=120
    )
    return folder


def test_a_node_client_from_the_proto_alone(running_service: ServiceProcess, node_modules: Path) -> None:
    batch = rows(5, seed=61)
    request = {
        "front": running_service.front,
        "proto": str(ROOT / "proto"),
        "layer_idx": 2,
        "num_rows": 5,
        "hidden_states": batch[0].view(torch.uint8).flatten().tolist(),
        "topk_ids": batch[1].flatten().tolist(),
        "topk_weights": batch[2].flatten().tolist(),
    }
    script = node_modules / "client.js"
    shutil.copy(ROOT / "tests/e2e/node/client.js", script)
    done = subprocess.run(
        ["node", str(script)],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["info"] == {"hidden": SHAPE.hidden, "num_ranks": 8}
    for how in ("stream", "unary"):
        got = torch.tensor(answer[how]["rows"], dtype=torch.uint8).view(torch.bfloat16).view(5, SHAPE.hidden)
        assert answer[how]["path"] == "PATH_small_m"
        reports = _bf16_reports(got, batch)
        assert reports
    assert answer["stream"]["rows"] == answer["unary"]["rows"]
    assert answer["refused"]["code"] == grpc.StatusCode.FAILED_PRECONDITION.value[0]
    assert "node" in answer["refused"]["details"]
    assert "layer_idx" in answer["wrong_layer"]


def _bf16_reports(got: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> bool:
    from megamoe.reference import quantized_moe, relative_l2
    from tests.e2e.harness import weights_of

    want = quantized_moe(MoeBatch.of(SHAPE, *batch), weights_of(2), SHAPE)
    return relative_l2(got, want) <= 2e-2


@pytest.mark.one_launcher("local")
async def test_pings_as_fast_as_a_client_likes(running_service: ServiceProcess) -> None:
    """Keepalive every 100 ms without calls: a strict server would answer GOAWAY too_many_pings."""
    options = [
        ("grpc.keepalive_time_ms", 100),
        ("grpc.keepalive_timeout_ms", 2000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_time_between_pings_ms", 100),
    ]
    async with AsyncFront(running_service.front) as front:
        address = (await front.info()).rank_addresses[3]
    for target in (running_service.front, address):
        async with grpc.aio.insecure_channel(target, options=options) as channel:
            stub: Any = MoELayerStub(channel)
            await stub.GetInfo(pb.GetInfoRequest(), timeout=5)
            states = [channel.get_state()]
            for _ in range(25):
                await asyncio.sleep(0.1)
                states.append(channel.get_state())
            assert set(states) == {grpc.ChannelConnectivity.READY}, states
            await stub.GetInfo(pb.GetInfoRequest(), timeout=5)


async def test_grpc_default_limit_is_named_with_the_way_out(running_service: ServiceProcess) -> None:
    """A reply above 4 MiB: a channel with gRPC's defaults refuses it, one with the announced limit takes it."""
    batches = [rows(1100, seed=rank) for rank in range(8)]
    async with AsyncFront(running_service.front, max_message_bytes=4 << 20) as front:
        with pytest.raises(RemoteError, match=r"max_message_bytes") as caught:
            await front.forward_step(0, batches, "prefill")
        assert caught.value.status is grpc.StatusCode.RESOURCE_EXHAUSTED
    outs = await forward_step(running_service.front, 0, batches, "prefill")
    assert [t.shape[0] for t in outs.hidden_states] == [1100] * 8


async def test_health_and_reflection_on_the_front_and_on_ranks(running_service: ServiceProcess) -> None:
    async with AsyncFront(running_service.front) as front:
        info = await front.info()
    assert info.ready
    for target in (running_service.front, info.rank_addresses[5]):
        async with grpc.aio.insecure_channel(target) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            for service in ("", "megamoe.v1.MoELayer"):
                reply = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
                assert reply.status == health_pb2.HealthCheckResponse.SERVING
            reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
            asked = reflection.ServerReflectionInfo()
            await asked.write(reflection_pb2.ServerReflectionRequest(list_services="*"))
            answer = await asyncio.wait_for(asked.read(), 5)
            names = {service.name for service in answer.list_services_response.service}
            assert "megamoe.v1.MoELayer" in names
            assert ("megamoe.v1.Admin" in names) == (target == running_service.front)


@pytest.mark.any_backend
async def test_paths_are_switched_at_one_agreed_step(group: AsyncMoeGroup) -> None:
    counts = [4, 0, 0, 1, 0, 0, 0, 2]
    batches = group_rows(counts, seed=70)

    async def path_of_a_step() -> MoePath:
        async with group.step(counts) as step:
            outs = await step.layer(0, batches)
        seen = {report.path for reports in outs.reports_per_rank for report in reports}
        assert len(seen) == 1, "ranks never split"
        return seen.pop()

    version = (await group.front.policy()).version
    assert await path_of_a_step() is MoePath.SMALL_M
    try:
        policy = await group.front.set_path_enabled("small_m", False)
        assert policy.version == version + 1
        assert await path_of_a_step() is MoePath.FIXED_SLOT
        await group.front.set_path_enabled("fixed_slot", False)
        assert await path_of_a_step() is MoePath.COMPACT
        assert (await group.front.info()).policy.small_m_enabled is False
    finally:
        await group.front.set_path_enabled("fixed_slot", True)
        await group.front.set_path_enabled("small_m", True)
    assert await path_of_a_step() is MoePath.SMALL_M
    with pytest.raises(RemoteError, match="compact: it can never be switched off"):
        await group.front.set_path_enabled("compact", False)
    async with grpc.aio.insecure_channel(group.front.address) as channel:
        admin: Any = AdminStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await admin.SetPathEnabled(pb.SetPathEnabledRequest(path=0, enabled=True), timeout=5)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await works(group)
