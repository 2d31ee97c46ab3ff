"""The layer from other parts: rows to their experts' ranks, experts, rows back, sum."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megamoe.backends.hopper.baseline.routes import Routes
from megamoe.shape import MoeShape

Exchange = Callable[[torch.Tensor, Sequence[int], Sequence[int]], torch.Tensor]
"""(rows in the order of destinations, rows to each rank, rows from each rank) -> rows in the order of sources."""


class Baseline(ABC):
    """One rank's experts and what is round them."""

    def __init__(self, shape: MoeShape) -> None:
        self.shape = shape

    @abstractmethod
    def experts(self, received: torch.Tensor, routes: Routes) -> torch.Tensor:
        """Rows bf16 [n, hidden] as they came -> result rows [n, hidden] in the same order; n may be 0."""

    def outgoing(self, x: torch.Tensor, routes: Routes) -> torch.Tensor:
        return x[routes.sent]

    def combine(self, back: torch.Tensor, routes: Routes) -> torch.Tensor:
        """bf16 [n, hidden]."""
        rows = back[routes.home.flatten()].view(*routes.home.shape, back.shape[1])
        return (routes.weights.to(rows.dtype).unsqueeze(1) @ rows).squeeze(1)

    def layer(self, x: torch.Tensor, routes: Routes, exchange: Exchange) -> torch.Tensor:
        received = exchange(self.outgoing(x, routes), routes.splits, routes.received_splits)
        rows = self.experts(received, routes)
        return self.combine(exchange(rows, routes.received_splits, routes.splits), routes)


def all_to_all(rows: torch.Tensor, splits: Sequence[int], received_splits: Sequence[int]) -> torch.Tensor:
    """The exchange over NCCL; of one rank alone there is none."""
    if len(splits) == 1:
        return rows
    received = rows.new_empty((sum(received_splits), rows.shape[1]))
    dist.all_to_all_single(received, rows, list(received_splits), list(splits))
    return received
