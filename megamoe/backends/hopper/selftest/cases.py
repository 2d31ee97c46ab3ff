"""What is checked: two shapes, the deployments that build all paths of them, and layer calls as values."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from megamoe import mx
from megamoe.batch import MoeBatch
from megamoe.bundle import Deployment, Path, RowFormat
from megamoe.routing import route_rank
from megamoe.shape import MoeShape
from megamoe.weights import LayerWeights, random_layer_weights

SHAPE = MoeShape(
    name="hopper-selftest",
    hidden=1024,
    intermediate=512,
    num_experts=64,
    num_topk=6,
    num_ranks=8,
    num_layers=4,
    swiglu_limit=10.0,
)
ODD_SHAPE = replace(SHAPE, name="hopper-odd", hidden=1056, intermediate=352, num_experts=40, num_topk=3)
"""Neither dimension is a multiple of 128, top-k is no power of two."""
FEW_EXPERTS = replace(ODD_SHAPE, name="hopper-few-experts", num_experts=16, num_topk=4)
"""Many rows an expert, for the FP8 kernel: without large_m, which binds compact to the tiled kernel."""
SHAPES = (SHAPE, ODD_SHAPE, FEW_EXPERTS)
CAPACITY, ODD_CAPACITY = 128, 32
PATHS = (Path.FIXED_SLOT, Path.COMPACT, Path.SMALL_M, Path.LARGE_M)
STAGED = (Path.FIXED_SLOT, Path.COMPACT)
"""Paths that launch the same GEMM kernels, and so agree bitwise."""
COUNTERS = {
    Path.FIXED_SLOT: (0, 0, 4, 0),
    Path.COMPACT: (1, 1, 5, 1),
    Path.SMALL_M: (0, 0, 1, 0),
    Path.LARGE_M: (1, 1, 2, 0),
}
"""Count exchanges, prepare passes, launches, group-wide barriers."""
IDENTITY_SLOT = 2
UNBOUND_SLOT = 3
"""Without weights on the last rank, with identity experts on all others."""


@dataclass(frozen=True)
class Case:
    """One layer call: which rows, on which path, against which slot."""

    path: Path
    num_rows_per_rank: tuple[int, ...]
    distribution: str = "uniform"
    slot_idx: int = 0
    no_expert_share: float = 0.1
    duplicate_share: float = 0.1
    quantized: bool = False
    exact: bool = False
    """Rows that MXFP8 holds exactly and power-of-two weights: transport must be bitwise."""
    poison: bool = False
    """A NaN in rank 1's first row."""
    seed: int = 0

    def __str__(self) -> str:
        extra = "".join(f" {name}" for name in ("quantized", "exact", "poison") if getattr(self, name))
        return (
            f"{self.path} {self.distribution} slot {self.slot_idx} max {max(self.num_rows_per_rank)}{extra}"
        )


def batch_of(case: Case, shape: MoeShape, rank: int) -> MoeBatch:
    """The rows of one rank, on the host."""
    rows = case.num_rows_per_rank[rank]
    ids, weights = route_rank(
        shape,
        case.distribution,
        rows,
        seed=case.seed,
        rank=rank,
        no_expert_share=case.no_expert_share,
        duplicate_share=case.duplicate_share,
    )
    generator = torch.Generator().manual_seed(1000 * case.seed + rank)
    if case.exact:
        x = torch.randint(-8, 9, (rows, shape.hidden), generator=generator).bfloat16()
        weights = torch.exp2(torch.randint(-2, 2, weights.shape, generator=generator).float())
    else:
        x = torch.randn(rows, shape.hidden, generator=generator).bfloat16()
    if case.poison and rank == min(1, shape.num_ranks - 1):
        x[0, 5] = float("nan")
    if case.quantized:
        codes, scales = mx.quantize_mxfp8(x)
        return MoeBatch.of(shape, codes, ids, weights, scales)
    return MoeBatch.of(shape, x, ids, weights)


def deployment_of(shape: MoeShape, row_format: RowFormat) -> Deployment:
    """What is checked: all four paths, but large_m not with few experts; fewer rows at the odd shape."""
    capacity = ODD_CAPACITY if shape.name == ODD_SHAPE.name else CAPACITY
    large_m = shape.name != FEW_EXPERTS.name
    return Deployment(
        shape=shape,
        backend="hopper",
        max_tokens_per_rank=capacity,
        fixed_slot_max=capacity,
        small_m_capacities=(capacity,),
        small_m_enabled=True,
        large_m_capacity=capacity if large_m else 2 * capacity,
        large_m_min_tokens=capacity * 3 // 4,
        large_m_enabled=large_m,
        combine_row_format=row_format,
    )


def weights_of(shape: MoeShape) -> list[LayerWeights]:
    """Of two layers. In the second one expert's scales lie too far apart for the FP8 kernel."""
    first, second = (random_layer_weights(shape, seed=5, layer_idx=layer) for layer in range(2))
    scales = second.w2_scales.clone()
    scales.view(torch.uint8)[0, 3, 0] -= 20
    return [first, replace(second, w2_scales=scales)]


def uneven(shape: MoeShape, maximum: int) -> tuple[int, ...]:
    """Counts with a full rank, empty ones and odd ones."""
    pattern = (maximum, 0, 1, maximum, maximum // 3, 7, maximum // 2, 0)
    return tuple(min(pattern[rank % 8], maximum) for rank in range(shape.num_ranks))
