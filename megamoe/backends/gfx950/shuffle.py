"""Weights in MFMA order: what a lane loads is what its matrix instruction takes. Packing and its inverse.

`v_mfma_scale_f32_16x16x128` takes weights as first operand: lane 16 g + r holds row r of a block of 16 at k = 32 g to
32 g + 31, 16 bytes of e2m1. A wave works on 64 columns, four such blocks, so packed codes are
[experts, groups of 64 columns, K / 128, block, lane, 16 bytes]: a wave's load is 1 KiB without gaps, K follows it.
Scales are [experts, groups, K / 512, lane, block, K block of 128]: 16 bytes a lane, one byte picked by the instruction.

Which columns a block holds is chosen so that a lane ends with consecutive ones (row 4 g + i of a result is in lane
group g). W2: column 16 g + 4 block + i of the group. W1: blocks 0 and 1 are gate columns 8 g + 4 block + i of 32,
blocks 2 and 3 the up columns beside them. Missing columns and K are zero codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megamoe.shape import MX_BLOCK, MoeShape
from megamoe.weights import LayerWeights

COLUMNS = 64
BLOCK_K = 128
GROUP_K = 512


@dataclass(frozen=True)
class Packed:
    """A matrix of all experts, uint8. codes [E, groups, K blocks, 4, 64, 16], scales [E, groups, K groups, 64, 16]."""

    codes: torch.Tensor
    scales: torch.Tensor


def w2_columns(hidden: int) -> torch.Tensor:
    """[groups, 4, 16] int64: the column that each row of a block is, -1 = none."""
    block, row = torch.arange(4)[:, None], torch.arange(16)[None, :]
    within = 16 * (row // 4) + 4 * block + row % 4
    columns = torch.arange(-(-hidden // COLUMNS))[:, None, None] * COLUMNS + within
    return torch.where(columns < hidden, columns, -1)


def w13_columns(intermediate: int) -> torch.Tensor:
    """[groups, 4, 16] int64: rows of W13, gate rows first, then up rows (intermediate is a multiple of 32)."""
    block, row = torch.arange(4)[:, None], torch.arange(16)[None, :]
    within = 8 * (row // 4) + 4 * (block % 2) + row % 4 + (block // 2) * intermediate
    return torch.arange(intermediate // 32)[:, None, None] * 32 + within


def pack(codes: torch.Tensor, scales: torch.Tensor, columns: torch.Tensor) -> Packed:
    """codes [E, N, K / 2], scales [E, N, K / 32] uint8 in canonical packing -> MFMA order."""
    num_experts, _, half_k = codes.shape
    num_blocks = -(-2 * half_k // BLOCK_K)
    num_groups = -(-num_blocks // 4)
    rows = columns.flatten().clamp(min=0)
    real = (columns.flatten() >= 0)[None, :, None]
    shape = (num_experts, len(columns), 4, 16)
    code_rows = _padded(codes[:, rows] * real, num_blocks * BLOCK_K // 2).view(*shape, num_blocks, 4, 16)
    scale_rows = _padded(scales[:, rows] * real, num_groups * GROUP_K // MX_BLOCK).view(
        *shape, num_groups, 4, 4
    )
    packed_codes = code_rows.permute(0, 1, 4, 2, 5, 3, 6).reshape(
        num_experts, len(columns), num_blocks, 4, 64, 16
    )
    packed_scales = scale_rows.permute(0, 1, 4, 6, 3, 2, 5).reshape(
        num_experts, len(columns), num_groups, 64, 16
    )
    return Packed(packed_codes.contiguous(), packed_scales.contiguous())


def unpack(packed: Packed, columns: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The canonical codes [E, N, K / 2] and scales [E, N, K / 32] of a packed matrix: the inverse of `pack`."""
    num_experts, groups, num_blocks = packed.codes.shape[:3]
    num_groups = packed.scales.shape[2]
    codes = packed.codes.view(num_experts, groups, num_blocks, 4, 4, 16, 16).permute(0, 1, 3, 5, 2, 4, 6)
    scales = packed.scales.view(num_experts, groups, num_groups, 4, 16, 4, 4).permute(0, 1, 5, 4, 2, 6, 3)
    rows = columns.flatten()
    num_rows = int(rows.max()) + 1
    out_codes = torch.zeros(num_experts, num_rows, k // 2, dtype=torch.uint8)
    out_scales = torch.zeros(num_experts, num_rows, k // MX_BLOCK, dtype=torch.uint8)
    real = rows >= 0
    out_codes[:, rows[real]] = codes.reshape(num_experts, len(rows), -1)[:, real, : k // 2]
    out_scales[:, rows[real]] = scales.reshape(num_experts, len(rows), -1)[:, real, : k // MX_BLOCK]
    return out_codes, out_scales


def pack_layer(weights: LayerWeights, shape: MoeShape) -> tuple[Packed, Packed]:
    """(W13, W2) of one rank's experts in MFMA order, on the device where the weights are."""
    views = weights.as_bytes()
    device = views.w13_codes.device
    return (
        pack(views.w13_codes, views.w13_scales, w13_columns(shape.intermediate).to(device)),
        pack(views.w2_codes, views.w2_scales, w2_columns(shape.hidden).to(device)),
    )


def row_scales(scales: torch.Tensor) -> torch.Tensor:
    """Scales of rows [m, K / 32] as the second operand takes them: [m, 16 ceil(K / 512)], groups of (4 g + K block)."""
    m, count = scales.shape
    groups = -(-count // 16)
    return _padded(scales, 16 * groups).view(m, groups, 4, 4).transpose(2, 3).reshape(m, 16 * groups)


def plain_scales(scales: torch.Tensor, count: int) -> torch.Tensor:
    """The inverse of `row_scales`: [m, 16 groups] -> [m, count]."""
    m, width = scales.shape
    return scales.view(m, width // 16, 4, 4).transpose(2, 3).reshape(m, width)[:, :count]


def _padded(x: torch.Tensor, last: int) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, last - x.shape[-1]))
