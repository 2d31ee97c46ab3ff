"""Ranks find each other's memory, in one process or several, or say who is missing; the door says what it needs."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from megamoe import SHM_DIR, Deployment, MoeShape, plan_bundle
from megamoe.backends import open_backend
from megamoe.backends.hopper import group
from megamoe.errors import ConfigError, HeapError, PeerTimeoutError
from megamoe.shm import SharedSegment


@pytest.fixture
def name() -> str:
    return f"megamoe-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def join(name: str, rank: int, num_ranks: int = 4, fingerprint: str = "same", timeout_s: float = 20.0):
    heap = torch.zeros(64 + rank, dtype=torch.uint8)
    return group.join(
        name, rank=rank, num_ranks=num_ranks, fingerprint=fingerprint, heap=heap, timeout_s=timeout_s
    )


def left_behind(name: str) -> list[str]:
    return [path.name for path in SHM_DIR.glob(name + "*")]


def test_ranks_of_a_process_share_their_tensors(name: str) -> None:
    with ThreadPoolExecutor(4) as threads:
        joined = list(threads.map(lambda rank: join(name, rank), range(4)))
    assert len({tuple(one.addresses()) for one in joined}) == 1
    assert [len(joined[0].heaps[rank]) for rank in range(4)] == [64, 65, 66, 67]
    assert left_behind(name) == []
    for rank in range(4):
        group.leave(joined[rank], rank)
    assert (name, 0) not in group._own


def test_missing_ranks_are_named(name: str) -> None:
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(join, name, rank, 4, "same", 0.3) for rank in (0, 3)]
        errors = [future.exception() for future in futures]
    assert all(isinstance(error, PeerTimeoutError) for error in errors)
    assert all({1, 2} <= set(error.missing_ranks) for error in errors)
    assert left_behind(name) == []


def test_other_deployments_are_refused_on_all_ranks(name: str) -> None:
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(join, name, rank, 2, f"digest{rank}") for rank in range(2)]
        errors = [future.exception() for future in futures]
    assert all(isinstance(error, ConfigError) for error in errors)
    assert all("rank 0: digest0, rank 1: digest1" in str(error) for error in errors)


def test_a_rank_joins_once(name: str) -> None:
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(join, name, 0, 2)
        while not left_behind(name):
            pass
        with pytest.raises(HeapError, match="exists already"):
            join(name, 0, 2)
        second = join(name, 1, 2)
        assert first.result().addresses() == second.addresses()


_PEER = """
import sys, torch
from megamoe.backends.hopper import group
group.share = lambda heap: b"rank 1's"
group.open_shared = lambda handle, rank, device: torch.zeros(len(handle), dtype=torch.uint8)
joined = group.join(sys.argv[1], rank=1, num_ranks=2, fingerprint="same", heap=torch.zeros(7), timeout_s=20.0)
print([len(joined.heaps[rank]) for rank in range(2)])
"""


def test_a_rank_of_another_process_is_reached_by_its_handle(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "share", lambda heap: b"of rank 0")
    monkeypatch.setattr(
        group, "open_shared", lambda handle, rank, device: torch.zeros(len(handle), dtype=torch.uint8)
    )
    with subprocess.Popen([sys.executable, "-c", _PEER, name], stdout=subprocess.PIPE, text=True) as peer:
        joined = join(name, 0, 2)
        said, _ = peer.communicate(timeout=30)
    assert said.strip() == "[9, 7]"
    assert [len(joined.heaps[rank]) for rank in range(2)] == [64, 8]


class Opened:
    """Memory of another process, open. closed: how often it was closed."""

    address = 4096

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("why", ["rank 2 cannot be opened", "nobody reads this card"])
def test_a_group_that_does_not_come_about_keeps_nothing_open(
    name: str, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Two ranks of other processes have put their cards there, and do no more than that."""
    opened: Any = Opened()

    def open_shared(handle: bytes, rank: int, device: torch.device) -> group.RemoteHeap:
        if rank == 2 and "opened" in why:
            raise ConfigError("cannot be opened")
        return group.RemoteHeap(opened, 0)

    monkeypatch.setattr(group, "open_shared", open_shared)
    cards = [SharedSegment.create(f"{name}-device-{rank}", 4096) for rank in (1, 2)]
    try:
        for card in cards:
            card.buf[group._FINGERPRINT] = b"same".ljust(32)
            card.buf[group._PROCESS] = b"x" * 32
            group._fill_handle(card, b"a handle")
            group._say(card, 0)
        with pytest.raises(ConfigError if "opened" in why else PeerTimeoutError):
            join(name, 0, 3, timeout_s=0.3)
    finally:
        for card in cards:
            card.unlink()
    assert opened.closed == (1 if "opened" in why else 2)
    assert (name, 0) not in group._own
    assert left_behind(name) == []


def test_memory_that_cannot_be_shared_between_processes_is_refused() -> None:
    assert group.share(torch.zeros(1)) == b""
    with pytest.raises(ConfigError, match="heap of rank 3 must be device memory"):
        group.open_shared(b"", 3, torch.device("cpu"))


def test_the_door_says_what_is_not_here() -> None:
    """Here there is no GPU, and perhaps no Triton: either is named."""
    if torch.cuda.is_available():
        return
    shape = MoeShape(hidden=128, intermediate=64, num_experts=8, num_topk=2, num_ranks=1)
    bundle = plan_bundle(Deployment(shape=shape, backend="hopper", max_tokens_per_rank=16))
    with pytest.raises(ConfigError, match="triton|CUDA"):
        open_backend("hopper", bundle, rank=0, group_name="megamoe-none", num_slots=1, timeout_s=1.0)
