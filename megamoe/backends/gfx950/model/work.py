"""Rows and bytes of one step, from the product's own routing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from megamoe.backends.gfx950.plan import inner_bytes
from megamoe.routing import route
from megamoe.shape import MX_BLOCK, MoeShape


@dataclass(frozen=True)
class Work:
    """A step: tokens of each rank; routed rows [rank][local expert]; rows sent [source][owner], once to each owner."""

    shape: MoeShape
    num_tokens: int
    rows: tuple[tuple[int, ...], ...]
    sent: tuple[tuple[int, ...], ...]

    @property
    def row_bytes(self) -> int:
        """One MXFP8 row: codes and scales."""
        return self.shape.hidden + self.shape.hidden // MX_BLOCK

    @property
    def expert_bytes(self) -> int:
        """Weights of one expert."""
        return self.shape.weight_bytes_per_rank_and_layer // self.shape.num_experts_per_rank

    def result_bytes(self, fp8: bool) -> int:
        return self.row_bytes if fp8 else 2 * self.shape.hidden

    def weight_bytes(self, rank: int) -> int:
        """Weights of the experts of a rank that got rows: each read once at least."""
        return sum(count > 0 for count in self.rows[rank]) * self.expert_bytes

    def routed(self, rank: int) -> int:
        return sum(self.rows[rank])

    def payload_bytes(self) -> list[list[int]]:
        """[source][other rank] bytes of rows over each link, ascending by owner; none for the rank itself."""
        return [
            [count * self.row_bytes for owner, count in enumerate(counts) if owner != source]
            for source, counts in enumerate(self.sent)
        ]

    def return_bytes(self, rank: int, fp8: bool) -> float:
        """Bytes of result rows from owner `rank` over its busiest link, its rows spread evenly over the sources."""
        return (
            self.routed(rank) / self.shape.num_ranks * self.result_bytes(fp8)
            if self.shape.num_ranks > 1
            else 0
        )

    def inner_row_bytes(self) -> int:
        return inner_bytes(self.shape.intermediate)

    def memory_floor_us(self, bytes_per_us: float) -> float:
        """Least time of the step: the weights that its busiest rank must read."""
        return max(self.weight_bytes(rank) for rank in range(self.shape.num_ranks)) / bytes_per_us


def work_of(shape: MoeShape, num_tokens: int, routes: Sequence[torch.Tensor]) -> Work:
    """routes: ids [num_tokens, num_topk] of every rank, -1 for none."""
    ids = torch.stack([one.long() for one in routes])
    here = ids[ids >= 0]
    rows = torch.bincount(here, minlength=shape.num_experts).view(shape.num_ranks, -1)
    owners = torch.where(ids >= 0, ids // shape.num_experts_per_rank, -1)
    sent = torch.stack([(owners == rank).any(-1).sum(-1) for rank in range(shape.num_ranks)], dim=1)
    return Work(shape, num_tokens, *(tuple(map(tuple, table.tolist())) for table in (rows, sent)))


@lru_cache(maxsize=128)
def expected(shape: MoeShape, num_tokens: int, distribution: str = "uniform", seed: int = 0) -> Work:
    """The work of a step with the product's routing of that name and seed."""
    routes = route(shape, distribution, [num_tokens] * shape.num_ranks, seed=seed)
    return work_of(shape, num_tokens, [ids for ids, _ in routes])
