"""Stages of the FP8 kernel's steps: rows and the intermediate as its operands, and both GEMMs on them."""

from __future__ import annotations

import torch

from megamoe import mx
from megamoe.backends.hopper import fp8
from megamoe.backends.hopper.buffers import BoundLayer
from megamoe.backends.hopper.plan import BLOCK_ROWS, Counter
from megamoe.backends.hopper.references.gemms import Experts, return_rows, swiglu_rows
from megamoe.backends.hopper.references.group import Group
from megamoe.backends.hopper.references.index import entries_of
from megamoe.bundle import RowFormat


def _blocks(group: Group, rank: int) -> range:
    """First rows of all blocks of 16."""
    buffers = group.ranks[rank]
    return range(0, int(buffers.work[Counter.NUM_BLOCKS]) * BLOCK_ROWS, BLOCK_ROWS)


def _write(
    operand: torch.Tensor, scales: torch.Tensor, first: int, codes: torch.Tensor, sf: torch.Tensor
) -> None:
    """MXFP8 rows (up to 16, uint8), padded with zeros, as an operand's."""
    padded = torch.zeros((BLOCK_ROWS, operand.shape[1]), dtype=torch.uint8, device=codes.device)
    padded_sf = torch.zeros(
        (BLOCK_ROWS, operand.shape[1] // mx.BLOCK), dtype=torch.uint8, device=codes.device
    )
    padded[: len(codes), : codes.shape[1]] = codes
    padded_sf[: len(sf), : sf.shape[1]] = sf
    grouped, groups = fp8.group_rows(padded, padded_sf)
    part = slice(first, first + BLOCK_ROWS)
    operand.view(torch.uint8)[part] = fp8.to_fp8_order(grouped).view(torch.uint8)
    scales[:, part] = fp8.to_scale_order(groups)


def _rows(operand: torch.Tensor, scales: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """fp32 values of an operand's rows. first: a multiple of 16."""
    stop = first + -(-count // BLOCK_ROWS) * BLOCK_ROWS
    codes = fp8.from_fp8_order(operand[first:stop]).float().view(stop - first, -1, fp8.CHUNK)
    groups = fp8.from_scale_order(scales[:, first:stop].contiguous())
    return (codes * groups.unsqueeze(-1)).flatten(1)[:count]


def expand_fp8(group: Group, rank: int) -> None:
    """Payload rows, by expert."""
    buffers = group.ranks[rank]
    hidden, sf_bytes = buffers.shape.hidden, buffers.layout.sf_bytes
    payload = group.payload(rank)
    for first in _blocks(group, rank):
        count = int(buffers.block_info[first // BLOCK_ROWS]) & 0xFF
        slots = buffers.row_slot[first : first + count].long()
        codes, sf = payload[slots, :hidden], payload[slots, hidden : hidden + sf_bytes]
        _write(buffers.fp8.rows, buffers.fp8.row_scales, first, codes, sf)


def gemm1_fp8(group: Group, rank: int, layer: BoundLayer) -> None:
    """Rows times gate and up, SwiGLU, MXFP8."""
    assert layer.w13 is not None
    buffers = group.ranks[rank]
    experts = Experts(layer.w13)
    for _, expert, first, count in entries_of(buffers):
        x = _rows(buffers.fp8.rows, buffers.fp8.row_scales, first, count)
        codes, scales = mx.quantize_mxfp8(swiglu_rows(x @ experts[expert].T, buffers.shape))
        buffers.fp8.middle[first : first + count] = codes
        buffers.fp8.exponents[:, first : first + count] = scales.T


def regroup(group: Group, rank: int) -> None:
    """What GEMM1 has left, as GEMM2's operand."""
    operands = group.ranks[rank].fp8
    for first in _blocks(group, rank):
        part = slice(first, first + BLOCK_ROWS)
        exponents = operands.exponents[:, part].T.contiguous()
        _write(operands.features, operands.feature_scales, first, operands.middle[part], exponents)


def gemm2_fp8(group: Group, rank: int, layer: BoundLayer) -> None:
    """The intermediate times the down projection, bf16 rows to their sources."""
    assert layer.w2 is not None
    buffers = group.ranks[rank]
    experts = Experts(layer.w2)
    for _, expert, first, count in entries_of(buffers):
        h = _rows(buffers.fp8.features, buffers.fp8.feature_scales, first, count)
        return_rows(group, rank, first, (h @ experts[expert].T)[:, : buffers.shape.hidden], RowFormat.BF16)
