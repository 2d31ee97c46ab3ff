"""The servicer of one rank on real gRPC, in front of a rank that answers at once: what a caller can do to it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megamoe import PathPolicy, unlink_all
from service.client.stream import RankStream
from service.config import load_config
from service.metrics import RankMetrics
from service.net import wire
from service.net.grpc_server import LAYER_SERVICE, Health, listen, make_server
from service.net.info import State, service_info
from service.pb import moe_pb2 as pb
from service.rank.colocated import Colocated
from service.rank.server import RankServicer
from service.ring.async_ring import AsyncRing
from service.ring.ring import RingProducer
from tests.service.fake_rank import FakeRank

CONFIG = load_config(env=False)
SHAPE = CONFIG.moe_shape
STEP_TIMEOUT_S = 2.0


@dataclass
class ServedRank:
    rank: FakeRank
    address: str
    ring: AsyncRing
    health: Health
    metrics: RankMetrics

    def stream(self) -> RankStream:
        return RankStream(0, self.address, max_message_bytes=CONFIG.message_bytes)


class NoLoop:
    """The door to the step loop of a rank that opens no rings."""

    memory_kinds = ()

    def check_lease(self, serial: int) -> None:
        pass

    def with_lock(self) -> Any:
        return contextlib.nullcontext()


def no_rings() -> Colocated:
    """Colocated of a rank whose setting is 0 rings."""
    return Colocated(
        NoLoop(),  # type: ignore[arg-type]
        CONFIG.deployment,
        group_name="megamoe-none",
        rank=0,
        bell=("megamoe-none", 0, 0),
        max_rings=0,
        num_control_slots=8,
        timeout_s=STEP_TIMEOUT_S,
    )


@pytest.fixture
async def served() -> AsyncIterator[ServedRank]:
    name = f"megamoe-t{os.getpid()}-rs"
    rank = FakeRank(name, CONFIG.deployment)
    producer = RingProducer.attach(name, 0, 0, rank.bell)
    ring = AsyncRing(producer)
    metrics = RankMetrics(rank=0, model_name="demo", bundle=CONFIG.bundle)
    state = State(generation=3, policy=PathPolicy.of(CONFIG.deployment))
    servicer = RankServicer(
        shape=SHAPE,
        ring=ring,
        info=lambda: service_info(CONFIG, state),
        metrics=metrics,
        step_timeout_s=STEP_TIMEOUT_S,
        colocated=no_rings(),
    )
    limit = CONFIG.message_bytes
    server, health = make_server(
        {LAYER_SERVICE: servicer.handlers()}, max_receive_bytes=limit, max_send_bytes=limit
    )
    port = listen(server, "127.0.0.1", 0, "port")
    await server.start()
    yield ServedRank(rank, f"127.0.0.1:{port}", ring, health, metrics)
    await server.stop(None)
    await ring.close()
    producer.close()
    rank.close()
    metrics.close()
    unlink_all(name)


def layer_call(num_rows: int, **change: Any) -> tuple[pb.ForwardRequest, tuple[wire.Buffer, ...]]:
    writer = wire.PayloadWriter()
    hidden = torch.arange(num_rows * SHAPE.hidden).remainder(100).to(torch.bfloat16)
    tensors = [
        writer.add("hidden_states", change.pop("hidden", hidden.view(num_rows, SHAPE.hidden))),
        writer.add("topk_ids", change.pop("ids", torch.zeros(num_rows, SHAPE.num_topk, dtype=torch.int32))),
        writer.add("topk_weights", torch.ones(num_rows, SHAPE.num_topk)),
    ]
    call = pb.LayerCall(lease_serial=7, sequence=11, plan_id=pb.PlanId(generation=3, step_id=5), **change)
    call.tensors.extend(tensors)
    return pb.ForwardRequest(layer_call=call), tuple(writer.parts)
