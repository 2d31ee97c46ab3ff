"""A rank from start to end, in this process: what has run before it says that it is up, and before it serves."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from megamoe import Path, Runtime, checkpoint_version, random_layer_weights, save_layer
from megamoe.errors import BindingError, ConfigError, PeerTimeoutError
from service.board.board import Board
from service.config import ServiceConfig, load_config
from service.net.info import Addresses
from service.rank.process import RankProcess
from service.rank.spec import RankSpec

SHAPE = {"hidden": 64, "intermediate": 32, "num_experts": 4, "num_topk": 2, "num_ranks": 1, "num_layers": 2}


def config_of(**change: Any) -> ServiceConfig:
    return load_config(overrides={"shape": SHAPE, **change}, env=False)


@pytest.fixture
def board(group_name: str) -> Iterator[Board]:
    threads = torch.get_num_threads()
    made = Board.create(group_name, num_ranks=1, max_micro_batches=4, generation=3)
    yield made
    made.close()
    made.unlink()
    torch.set_num_threads(threads)


def process_of(config: ServiceConfig, group_name: str) -> RankProcess:
    return RankProcess(RankSpec(config=config, rank=0, generation=3, group_name=group_name))


async def serving(port: int) -> bool:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=5)
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


async def test_every_runtime_has_run_before_a_rank_is_up_and_all_are_up_before_one_serves(
    board: Board, group_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that compile on first use must not do so under a caller's step timeout."""
    config, launched, forward = config_of(), [], Runtime.forward

    def noting(self: Runtime, *args: Any, **named: Any) -> Any:
        out = forward(self, *args, **named)
        assert not process.is_up
        launched.extend((report.path, report.runtime_capacity) for report in out.sub_steps)
        return out

    monkeypatch.setattr(Runtime, "forward", noting)
    process = process_of(config, group_name)
    up = await asyncio.to_thread(process.start)
    try:
        assert sorted(launched) == sorted((spec.path, spec.capacity) for spec in config.bundle.runtimes)
        assert {path for path, _ in launched} == set(Path)
        assert up.weights_version > 0
        await asyncio.sleep(0.6)  # more than two looks at its health
        assert not await serving(up.port), "the other ranks may not be up yet"
        process.serve(Addresses(front="127.0.0.1:1", ranks=(f"127.0.0.1:{up.port}",)))
        for _ in range(100):
            if await serving(up.port):
                break
            await asyncio.sleep(0.05)
        assert await serving(up.port)
    finally:
        await asyncio.to_thread(process.stop)


def test_a_rank_that_does_not_come_is_named_before_the_launcher_gives_up(group_name: str) -> None:
    config = config_of(shape=SHAPE | {"num_ranks": 2}, start_timeout_s=2.0)
    board = Board.create(group_name, num_ranks=2, max_micro_batches=4, generation=3)
    start = time.monotonic()
    failed = process_of(config, group_name).start_and_tell()["failed"]
    assert time.monotonic() - start < 2.0
    assert failed["code"] == PeerTimeoutError.code
    assert "[1]" in failed["message"]
    board.close()
    board.unlink()


def test_a_taken_port_is_refused_by_name_and_leaves_nothing(board: Board, group_name: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for setting in ("rank_port", "metrics_port"):
            said = process_of(config_of(**{setting: port}), group_name).start_and_tell()
            assert said["failed"]["code"] == ConfigError.code
            assert f"{setting} 127.0.0.1:{port} must be free to listen on" in said["failed"]["message"]


def test_a_checkpoint_that_is_written_while_it_is_read_is_refused(
    board: Board, group_name: str, tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else this rank, or its neighbours, would serve layers of two checkpoints under one version."""
    config = config_of(checkpoint=str(tmp_path))
    for layer_idx in range(2):
        save_layer(tmp_path, layer_idx, random_layer_weights(config.moe_shape, seed=1, layer_idx=layer_idx))
    before, bind = checkpoint_version(tmp_path, 2), Runtime.bind_layer

    def writing(self: Runtime, slot_idx: int, weights: Any) -> None:
        bind(self, slot_idx, weights)
        save_layer(tmp_path, 0, random_layer_weights(config.moe_shape, seed=2))

    monkeypatch.setattr(Runtime, "bind_layer", writing)
    failed = process_of(config, group_name).start_and_tell()["failed"]
    assert failed["code"] == BindingError.code
    assert "left alone while rank 0 reads it, got files that changed" in failed["message"]
    assert checkpoint_version(tmp_path, 2) != before
