"""What follows from a step's routing alone: orders and counts, ready before any clock starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megamoe.shape import MoeShape


@dataclass(frozen=True)
class Routes:
    """One rank's part of a step's routing, for one bf16 row a routed row.

    sent [rows]: token of each row, by owner and expert. splits: rows to each rank. received_splits: rows from each.
    by_expert [rows received]: order that sorts them by local expert; ends int32 [experts]: where each one's end.
    home [n, num_topk]: place in `sent` of each (token, slot); weights fp32 [n, num_topk], 0 where there is no expert.
    """

    sent: torch.Tensor
    splits: list[int]
    received_splits: list[int]
    by_expert: torch.Tensor
    ends: torch.Tensor
    home: torch.Tensor
    weights: torch.Tensor


def routes_of(
    shape: MoeShape, routes: Sequence[tuple[torch.Tensor, torch.Tensor]], rank: int, device: torch.device
) -> Routes:
    """routes: (ids, weights) of every rank. A slot without expert is none of the rows."""
    per_rank = shape.num_experts_per_rank
    orders = [torch.sort(ids.flatten(), stable=True) for ids, _ in routes]
    experts = [values[values >= 0] for values, _ in orders]
    splits = [torch.bincount(values // per_rank, minlength=shape.num_ranks).tolist() for values in experts]
    ids, weights = routes[rank]
    order = orders[rank].indices[len(ids.flatten()) - len(experts[rank]) :]
    home = torch.zeros(ids.numel(), dtype=torch.int64)
    home[order] = torch.arange(len(order))
    received = torch.cat([values[values // per_rank == rank] for values in experts]) - rank * per_rank
    return Routes(
        sent=(order // shape.num_topk).to(device),
        splits=splits[rank],
        received_splits=[split[rank] for split in splits],
        by_expert=torch.sort(received, stable=True).indices.to(device),
        ends=torch.bincount(received, minlength=per_rank).cumsum(0).to(torch.int32).to(device),
        home=home.view(ids.shape).to(device),
        weights=torch.where(ids >= 0, weights, 0.0).to(device),
    )
