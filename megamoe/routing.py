"""The named routing distributions, deterministic by seed, so that any rank can predict the global answer.

Names and the V4-Pro numbers are the sources' (reference table): hot60, zipf 1.3, one_rank, boundary,
rank_balanced_hot. At other shapes (protocol): hot experts are the first num_topk; boundary takes rank 0's first
num_topk - 2 and last 2 experts; zipf is by expert id; rank_balanced_hot spreads a token over min(num_topk, num_ranks)
distinct ranks, the rest round-robin, and takes local expert 0 of each with 60 % probability. A token never names an
expert twice unless that is asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from megamoe.errors import InvalidArgumentError, must_be
from megamoe.shape import MoeShape

DISTRIBUTIONS = ("uniform", "hot60", "zipf", "one_rank", "boundary", "rank_balanced_hot")
FILLINGS: dict[str, tuple[tuple[int, ...], float]] = {
    "even": ((4,) * 8, 0.0),
    "uneven": ((1, 12, 3, 7, 2, 9, 4, 5), 0.0),
    "idle": ((6, 0, 3, 0, 0, 8, 0, 1), 0.0),
    "empty": ((0,) * 8, 0.0),
    "no expert": ((5,) * 8, 0.4),
    "one token": ((0, 1, 0, 0, 0, 0, 0, 0), 0.0),
    "capacity": ((-1, 3, -1, 0, 5, -1, 2, -1), 0.05),
}
"""Named ways to fill up to 8 ranks: rows of each (-1: as many as a runtime serves), share of slots without expert."""
HOT_SHARE = 0.6
ZIPF_EXPONENT = 1.3


def route(
    shape: MoeShape,
    distribution: str,
    num_rows_per_rank: Sequence[int],
    *,
    seed: int,
    no_expert_share: float = 0.0,
    duplicate_share: float = 0.0,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`route_rank` of every rank: [(topk_ids [n, num_topk] int32, topk_weights [n, num_topk] fp32), ...].

    Raises InvalidArgumentError when num_rows_per_rank has not one entry a rank.
    """
    if len(num_rows_per_rank) != shape.num_ranks:
        wanted = f"one count for each of {shape.num_ranks} ranks"
        raise InvalidArgumentError(must_be("num_rows_per_rank", wanted, list(num_rows_per_rank)))
    return [
        route_rank(
            shape,
            distribution,
            num_rows,
            seed=seed,
            rank=rank,
            no_expert_share=no_expert_share,
            duplicate_share=duplicate_share,
        )
        for rank, num_rows in enumerate(num_rows_per_rank)
    ]


def route_rank(
    shape: MoeShape,
    distribution: str,
    num_rows: int,
    *,
    seed: int,
    rank: int,
    no_expert_share: float = 0.0,
    duplicate_share: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank's routes. The same arguments give the same routes in every process.

    no_expert_share: share of slots set to -1. duplicate_share: share of tokens whose last slot repeats the first.
    Weights are positive and sum to 1 over a token's slots, -1 slots included. Raises InvalidArgumentError for an
    unknown distribution, a negative num_rows or a share outside [0, 1].
    """
    if num_rows < 0:
        raise InvalidArgumentError(must_be("num_rows", "at least 0", num_rows))
    for name, share in (("no_expert_share", no_expert_share), ("duplicate_share", duplicate_share)):
        if not 0.0 <= share <= 1.0:
            raise InvalidArgumentError(must_be(name, "from 0 to 1", share))
    digest = hashlib.sha256(f"{seed}:{rank}:{distribution}:{num_rows}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    ids = _ids(shape, distribution, num_rows, generator)
    weights = torch.rand(num_rows, shape.num_topk, generator=generator) + 0.1
    weights /= weights.sum(-1, keepdim=True)
    if duplicate_share and shape.num_topk > 1:
        twice = torch.rand(num_rows, generator=generator) < duplicate_share
        ids[twice, -1] = ids[twice, 0]
    if no_expert_share:
        ids[torch.rand(ids.shape, generator=generator) < no_expert_share] = -1
    return ids.to(torch.int32), weights


def _ids(shape: MoeShape, distribution: str, num_rows: int, generator: torch.Generator) -> torch.Tensor:
    num_experts, num_topk = shape.num_experts, shape.num_topk
    if distribution == "uniform":
        return _distinct(torch.ones(num_experts), num_rows, num_topk, generator)
    if distribution == "zipf":
        popularity = torch.arange(1, num_experts + 1).double() ** -ZIPF_EXPONENT
        return _distinct(popularity, num_rows, num_topk, generator)
    if distribution == "one_rank":
        return torch.arange(num_topk).repeat(num_rows, 1)
    if distribution == "boundary":
        return _boundary(shape).repeat(num_rows, 1)
    if distribution == "hot60":
        ids = _distinct(torch.ones(num_experts), num_rows, num_topk, generator)
        ids[: int(HOT_SHARE * num_rows)] = torch.arange(num_topk)  # floor
        return ids
    if distribution == "rank_balanced_hot":
        return _rank_balanced_hot(shape, num_rows, generator)
    raise InvalidArgumentError(
        must_be("distribution", f"one of {', '.join(DISTRIBUTIONS)}", repr(distribution))
    )


def _distinct(
    popularity: torch.Tensor, num_rows: int, num_topk: int, generator: torch.Generator
) -> torch.Tensor:
    """num_topk distinct experts a row, drawn without replacement by popularity (exponential races)."""
    races = torch.empty(num_rows, len(popularity), dtype=torch.float64).exponential_(generator=generator)
    return (races / popularity).topk(num_topk, dim=-1, largest=False).indices


def _boundary(shape: MoeShape) -> torch.Tensor:
    """Rank 0's first num_topk - 2 and last 2 experts (V4-Pro: 0, 1, 2, 3, 46, 47); on to rank 1 where it has fewer."""
    num_last = min(2, shape.num_topk)
    first = torch.arange(shape.num_topk - num_last)
    last = shape.num_experts_per_rank - num_last
    if last < len(first):  # rank 0 is smaller than num_topk: the nearest experts, no one twice
        return torch.arange(shape.num_topk)
    return torch.cat([first, torch.arange(last, last + num_last)])


def _rank_balanced_hot(shape: MoeShape, num_rows: int, generator: torch.Generator) -> torch.Tensor:
    num_experts_per_rank, num_visited = shape.num_experts_per_rank, min(shape.num_topk, shape.num_ranks)
    owners = torch.rand(num_rows, shape.num_ranks, generator=generator).argsort(-1)[:, :num_visited]
    # A token's order of experts on each rank it visits: local expert 0 comes first with HOT_SHARE, else last, so that
    # slots which come round to the same rank again take distinct experts.
    draws = torch.rand(num_rows, num_visited, num_experts_per_rank, generator=generator)
    hot = torch.rand(num_rows, num_visited, generator=generator) < HOT_SHARE
    draws[..., 0] = torch.where(hot, -1.0, 2.0)
    num_rounds = -(-shape.num_topk // num_visited)
    local = draws.topk(num_rounds, dim=-1, largest=False, sorted=True).indices
    ids = owners.unsqueeze(-1) * num_experts_per_rank + local
    return ids.transpose(1, 2).flatten(1)[:, : shape.num_topk]
