"""ForwardStep calls at the front, before a rank that answers at once: cancelled ones, and a group that goes away."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megamoe import MoeBatch, Phase
from megamoe.errors import UnavailableError
from service.config import load_config
from service.front.group import FrontGroup, StepJob
from service.messages import LeaseRequest
from service.ring.ring import RingProducer
from service.ring.step_codec import LayerHead
from tests.service.fake_rank import FakeRank

CONFIG = load_config(overrides={"num_ranks": 1}, env=False)
SHAPE = CONFIG.moe_shape


@dataclass
class Served:
    rank: FakeRank
    front: FrontGroup

    def submit(self, layer_idx: int = 0, phase: Phase = Phase.DECODE) -> Future[Any]:
        batch = MoeBatch.of(
            SHAPE,
            torch.zeros(2, SHAPE.hidden, dtype=torch.bfloat16),
            torch.zeros(2, SHAPE.num_topk, dtype=torch.int32),
            torch.zeros(2, SHAPE.num_topk),
        )
        job = StepJob(layer_idx=layer_idx, batches=(batch,), phases=(phase,), timeout_s=5.0)
        return self.front.forward_step(job, lambda done: done.sequence)


@pytest.fixture
def served(group_name: str) -> Iterator[Served]:
    rank = FakeRank(group_name, CONFIG.deployment)
    front = FrontGroup([RingProducer.attach(group_name, 0, 0, rank.bell)], step_timeout_s=5.0)
    yield Served(rank, front)
    front.close()
    rank.close()


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_calls_run_in_order_of_arrival_whatever_their_phase(served: Served) -> None:
    """Long prefill steps cannot starve decode, nor the other way round: each waits for those before it only."""
    served.rank.hold.clear()
    phases = [Phase.PREFILL, Phase.PREFILL, Phase.DECODE, Phase.PREFILL, Phase.DECODE, Phase.DECODE]
    calls = [served.submit(idx, phase) for idx, phase in enumerate(phases)]
    served.rank.hold.set()
    assert [call.result(5) for call in calls] == list(range(11, 17)), "one sequence after the other"
    heads = [item for item in served.rank.seen if isinstance(item, LayerHead)]
    assert [head.layer_idx for head in heads] == list(range(6))


def test_the_lease_goes_back_although_the_last_callers_went_away(served: Served) -> None:
    """Else every caller group is refused until the lease ends by itself."""
    served.rank.hold.clear()
    first, second, third = (served.submit() for _ in range(3))
    until(first.running)
    assert second.cancel()
    assert third.cancel()
    served.rank.hold.set()
    assert first.result(5) == 11
    until(lambda: isinstance(served.rank.seen[-1], LeaseRequest))
    assert served.rank.seen[-1].release  # type: ignore[attr-defined]
    assert sum(isinstance(item, LayerHead) for item in served.rank.seen) == 1, "cancelled calls did not run"


def test_a_group_that_goes_away_answers_every_call(served: Served) -> None:
    served.rank.hold.clear()
    calls = [served.submit() for _ in range(4)]
    until(calls[0].running)
    assert calls[2].cancel()
    told: list[str] = []

    def drain() -> None:
        with pytest.raises(UnavailableError) as caught:
            served.front.drain(True)
        told.append(str(caught.value))

    admin = threading.Thread(target=drain)
    admin.start()
    until(lambda: served.front._num_users == 2)
    served.front.close()
    for call in (calls[0], calls[1], calls[3]):
        with pytest.raises(UnavailableError, match="restart"):
            call.result(0)
    admin.join(1)
    assert told == ["a rank is gone: the group restarts"]
    with pytest.raises(UnavailableError, match="restart"):
        served.submit()
