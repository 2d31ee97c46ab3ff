"""Ranks of one process find each other, or say who is missing; the door says what it needs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megamoe import Deployment, MoeShape, plan_bundle
from megamoe.backends import open_backend
from megamoe.backends.hopper import group
from megamoe.errors import ConfigError, PeerTimeoutError


def join(name: str, rank: int, num_ranks: int = 4, fingerprint: str = "same", timeout_s: float = 20.0):
    heap = torch.zeros(64 + rank, dtype=torch.uint8)
    return group.join(
        name, rank=rank, num_ranks=num_ranks, fingerprint=fingerprint, heap=heap, timeout_s=timeout_s
    )


def test_all_ranks_get_the_same_addresses() -> None:
    with ThreadPoolExecutor(4) as threads:
        joined = list(threads.map(lambda rank: join("megamoe-group-a", rank), range(4)))
    assert all(one is joined[0] for one in joined)
    addresses = joined[0].addresses()
    assert [joined[0].heaps[rank].data_ptr() for rank in range(4)] == addresses
    assert len(set(addresses)) == 4
    for rank in range(4):
        group.leave(joined[0], rank)
    assert "megamoe-group-a" not in group._groups


def test_missing_ranks_are_named() -> None:
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(join, "megamoe-group-b", rank, 4, "same", 0.2) for rank in (0, 3)]
        errors = [future.exception() for future in futures]
    assert all(isinstance(error, PeerTimeoutError) for error in errors)
    assert {1, 2} <= set(errors[0].missing_ranks)


def test_a_rank_joins_once() -> None:
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(join, "megamoe-group-c", 0, 2)
        while not group._groups.get("megamoe-group-c") or not group._groups["megamoe-group-c"].heaps:
            pass
        with pytest.raises(ConfigError, match="rank must be one that group megamoe-group-c does not have"):
            join("megamoe-group-c", 0, 2)
        with pytest.raises(ConfigError, match="deployment of rank 1"):
            join("megamoe-group-c", 1, 2, "other")
        join("megamoe-group-c", 1, 2)
        group.leave(first.result(), 0)
        group.leave(first.result(), 1)


def test_the_door_says_what_is_not_here() -> None:
    """Here there is no GPU, and perhaps no Triton: either is named."""
    if torch.cuda.is_available():
        return
    shape = MoeShape(hidden=128, intermediate=64, num_experts=8, num_topk=2, num_ranks=1)
    bundle = plan_bundle(Deployment(shape=shape, backend="hopper", max_tokens_per_rank=16))
    with pytest.raises(ConfigError, match="triton|CUDA"):
        open_backend("hopper", bundle, rank=0, group_name="megamoe-none", num_slots=1, timeout_s=1.0)
