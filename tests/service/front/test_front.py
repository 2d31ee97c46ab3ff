"""ForwardStep requests as jobs: refusals name the rank; HTTP answers of the front."""

from __future__ import annotations

import json
import socket

import pytest
import torch

from megamoe import PathPolicy, Phase
from megamoe.errors import ConfigError, InvalidArgumentError, UnavailableError
from service.config import load_config
from service.front.front import Front, read_job
from service.net import wire
from service.net.info import Addresses, State
from service.pb import moe_pb2 as pb

CONFIG = load_config(env=False)
SHAPE = CONFIG.moe_shape


def request_of(*ranks: tuple[int, int, int]) -> wire.Envelope[pb.ForwardStepRequest]:
    """(rank, rows, phase) each."""
    writer = wire.PayloadWriter()
    message = pb.ForwardStepRequest(layer_idx=2)
    for rank, num_rows, phase in ranks:
        tensors = [
            writer.add("hidden_states", torch.zeros(num_rows, SHAPE.hidden, dtype=torch.bfloat16)),
            writer.add("topk_ids", torch.zeros(num_rows, SHAPE.num_topk, dtype=torch.int32)),
            writer.add("topk_weights", torch.zeros(num_rows, SHAPE.num_topk)),
        ]
        message.ranks.add(rank=rank, phase=phase, tensors=tensors)  # type: ignore[arg-type]
    return wire.Envelope(message, tuple(writer.parts))


def test_ranks_that_are_not_listed_have_no_rows() -> None:
    job = read_job(CONFIG, request_of((5, 3, pb.PHASE_prefill), (1, 2, pb.PHASE_UNSPECIFIED), (2, 0, 0)))
    assert job.counts == (0, 2, 0, 0, 0, 3, 0, 0)
    assert job.phases == (Phase.IDLE, Phase.DECODE) + (Phase.IDLE,) * 3 + (Phase.PREFILL,) + (Phase.IDLE,) * 2
    assert (job.layer_idx, job.timeout_s, job.dtype) == (2, CONFIG.step_timeout_s, "bfloat16")


def test_refusals_name_the_rank() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"ranks\[\].rank must be each of 0 to 7 at most once, got 8"
    ):
        read_job(CONFIG, request_of((8, 1, 0)))
    with pytest.raises(InvalidArgumentError, match="at most once, got 3"):
        read_job(CONFIG, request_of((3, 1, 0), (3, 1, 0)))
    with pytest.raises(InvalidArgumentError, match="rank 3: phase must be PHASE_prefill or"):
        read_job(CONFIG, request_of((3, 1, 77)))
    bad = request_of((4, 1, 0))
    bad.message.ranks[0].tensors[0].dtype = "float32"
    with pytest.raises(InvalidArgumentError, match="rank 4: hidden_states"):
        read_job(CONFIG, bad)


def test_a_shorter_timeout_is_taken_and_a_longer_one_is_not() -> None:
    envelope = request_of((0, 1, 0))
    for said, want in ((0.5, 0.5), (1000.0, CONFIG.step_timeout_s)):
        envelope.message.timeout_s = said
        assert read_job(CONFIG, envelope).timeout_s == want


@pytest.mark.parametrize("said", [-1.0, float("nan")])
def test_a_timeout_that_is_none_is_refused(said: float) -> None:
    envelope = request_of((0, 1, 0))
    envelope.message.timeout_s = said
    with pytest.raises(InvalidArgumentError, match=f"timeout_s must be a number of at least 0, got {said}"):
        read_job(CONFIG, envelope)


def test_http_answers() -> None:
    state = State(generation=1, policy=PathPolicy.of(CONFIG.deployment))
    state.addresses = Addresses(metrics=("10.0.0.1:9410", "10.0.0.1:9411"))
    front = Front(CONFIG, state)
    assert json.loads(front.http_answer("/sd")[2]) == [
        {"targets": ["10.0.0.1:9410", "10.0.0.1:9411"], "labels": {"profile": "demo"}}
    ]
    assert front.http_answer("/healthz")[::2] == (200, b"ok\n")
    assert front.http_answer("/readyz")[::2] == (503, b"starting\n")
    state.not_ready_reason = ""
    assert front.http_answer("/readyz?verbose=1")[::2] == (200, b"ready\n")
    state.draining = True
    assert front.http_answer("/readyz/")[::2] == (503, b"draining\n")
    assert front.http_answer("/metrics")[0] == 404


async def test_taken_ports_are_refused_by_name() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name, other in (("port", "http_port"), ("http_port", "port")):
            config = load_config(overrides={name: port, other: 0}, env=False)
            front = Front(config, State(generation=1, policy=PathPolicy.of(config.deployment)))
            with pytest.raises(ConfigError, match=f"{name} 127.0.0.1:{port} must be free to listen on"):
                front.start_http()
            if name == "port":
                with pytest.raises(ConfigError, match=f"port 127.0.0.1:{port} must be free to listen on"):
                    await front.start()
            await front.stop()


async def test_a_path_that_the_backend_cannot_switch_on_is_refused_before_any_rank_hears_of_it() -> None:
    """On hopper compact has FP8 GEMMs in large steps, whose bits large_m has not; off it may always be."""
    overrides = {"profile": "deepseek-v4-pro-ep8", "backend": "hopper", "large_m_enabled": False}
    state = State(generation=1, policy=PathPolicy())
    front = Front(load_config(overrides=overrides, env=False), state)
    with pytest.raises(ConfigError, match="large_m on hopper must be on from the start"):
        await front.set_path_enabled(pb.SetPathEnabledRequest(path=pb.PATH_large_m, enabled=True))
    assert state.policy == PathPolicy()
    with pytest.raises(UnavailableError, match="no group is up"):
        await front.set_path_enabled(pb.SetPathEnabledRequest(path=pb.PATH_large_m, enabled=False))
