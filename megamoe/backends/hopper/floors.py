"""What a layer costs at least, and how benches measure: what the backend's bench and its baseline have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megamoe.shape import MoeShape

HBM_BYTES_PER_S = 4.3e12
"""Device-to-device copy, H200."""
BF16_FLOPS_PER_S = 671e12
"""bf16 8192^3 matmul on random data, H200 (reference table)."""
CALLS = 8
"""Layer calls of a captured graph."""
REPEATS = 7


def ranks_of(shape: MoeShape, num_ranks: int) -> MoeShape:
    """A group of num_ranks with as many experts a rank as EP8 of `shape` has: rows and weights a rank are EP8's."""
    experts = shape.num_experts // 8 * num_ranks
    return replace(shape, num_experts=experts, num_ranks=num_ranks, name=f"{shape.name}-ep{num_ranks}")


def work_of(shape: MoeShape, rows: int, experts_hit: int) -> tuple[float, float]:
    """(weight bytes, floating-point operations) of a layer on one rank."""
    weights = 3.0 * shape.hidden * shape.intermediate
    return experts_hit * weights * (0.5 + 1 / 32), 2.0 * rows * weights


def floor_us(shape: MoeShape, rows: int, experts_hit: int) -> float:
    num_bytes, flops = work_of(shape, rows, experts_hit)
    return 1e6 * max(num_bytes / HBM_BYTES_PER_S, flops / BF16_FLOPS_PER_S)


def busiest(shape: MoeShape, ids: Sequence[torch.Tensor]) -> tuple[int, int]:
    """(routed rows, experts hit) of the rank with the highest floor."""
    counts = torch.bincount(torch.cat([part.flatten() for part in ids]).long(), minlength=shape.num_experts)
    per_rank = counts.view(shape.num_ranks, -1)
    work = [(int(row.sum()), int((row > 0).sum())) for row in per_rank]
    return max(work, key=lambda one: floor_us(shape, *one))
