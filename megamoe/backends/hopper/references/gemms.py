"""The expert GEMMs, or experts that give rows back, and the way of their rows to the sources."""

from __future__ import annotations

import torch

from megamoe import mx
from megamoe.backends.hopper import packing
from megamoe.backends.hopper.buffers import BoundLayer
from megamoe.backends.hopper.plan import BLOCK_ROWS
from megamoe.backends.hopper.references.group import Group
from megamoe.backends.hopper.references.index import entries_of
from megamoe.bundle import RowFormat
from megamoe.shape import MoeShape


def _rows_of(image: torch.Tensor, streaming: bool, first: int, count: int) -> torch.Tensor:
    if streaming:
        blocks = range(first, first + count, BLOCK_ROWS)
        return torch.cat([packing.from_stream_order(image[row : row + BLOCK_ROWS]) for row in blocks])[:count]
    return packing.from_tiled_order(image[first : first + count])


class Experts(dict[int, torch.Tensor]):
    """Of a matrix, fp32 [padded rows, padded columns], each unpacked when it is asked for first."""

    def __init__(self, matrix: packing.PackedMatrix) -> None:
        self._matrix = matrix

    def __missing__(self, expert: int) -> torch.Tensor:
        part = slice(expert, expert + 1)
        matrix = self._matrix
        one = packing.PackedMatrix(
            matrix.units[part], matrix.out_factor[part], matrix.num_rows, matrix.num_columns
        )
        self[expert] = packing.unpack_matrix(one)[0]
        return self[expert]


def swiglu_rows(both: torch.Tensor, shape: MoeShape) -> torch.Tensor:
    """fp32 [n, packed rows of w13] -> [n, padded features]."""
    gate, up = (half.flatten(1) for half in both.view(len(both), -1, 2, 8).unbind(2))
    if shape.swiglu_limit:
        gate, up = gate.clamp(max=shape.swiglu_limit), up.clamp(-shape.swiglu_limit, shape.swiglu_limit)
    act = torch.nn.functional.silu if shape.activation == "silu" else torch.nn.functional.gelu
    return act(gate) * up


def gemm1(group: Group, rank: int, layer: BoundLayer) -> None:
    """Rows times gate and up, SwiGLU, MXFP8, as GEMM2's token operand."""
    assert layer.w13 is not None
    buffers = group.ranks[rank]
    experts = Experts(layer.w13)
    for streaming, expert, first, count in entries_of(buffers):
        x = _rows_of(buffers.image, streaming, first, count).float()
        h = swiglu_rows(x @ experts[expert].T, buffers.shape)
        h = mx.dequantize_mxfp8(*mx.quantize_mxfp8(h)).bfloat16()
        if streaming:
            padded = -(-count // BLOCK_ROWS) * BLOCK_ROWS
            rows = torch.zeros((padded, h.shape[1]), dtype=torch.bfloat16, device=h.device)
            rows[:count] = h
            for row in range(0, padded, BLOCK_ROWS):
                block = packing.to_stream_order(rows[row : row + BLOCK_ROWS])
                buffers.middle[first + row : first + row + BLOCK_ROWS] = block
        else:
            buffers.middle[first : first + count] = packing.to_tiled_order(h)


def _write_rows(group: Group, addresses: torch.Tensor, rows: torch.Tensor) -> None:
    """rows [n, bytes] uint8 to their addresses, in any rank's heap."""
    columns = torch.arange(rows.shape[1], device=rows.device)
    for memory in group.heaps:
        offset = addresses - memory.data_ptr()
        mine = ((offset >= 0) & (offset < memory.numel())).nonzero().flatten()
        memory[offset[mine, None] + columns] = rows[mine]


def return_rows(group: Group, rank: int, first: int, rows: torch.Tensor, row_format: RowFormat) -> None:
    """Result rows fp32 [n, hidden], the routed rows from `first` on, to their addresses."""
    buffers = group.ranks[rank]
    part = slice(first, first + len(rows))
    if row_format is RowFormat.FP8:
        packed = torch.cat(mx.quantize_mxfp8(rows * buffers.row_weight[part, None]), dim=1)
    else:
        packed = rows.bfloat16().view(torch.uint8)
    _write_rows(group, buffers.row_address[part], packed)


def gemm2(group: Group, rank: int, layer: BoundLayer, row_format: RowFormat) -> None:
    """Intermediate rows times the down projection, to their sources."""
    assert layer.w2 is not None
    buffers = group.ranks[rank]
    experts = Experts(layer.w2)
    for streaming, expert, first, count in entries_of(buffers):
        h = _rows_of(buffers.middle, streaming, first, count).float()
        return_rows(group, rank, first, (h @ experts[expert].T)[:, : buffers.shape.hidden], row_format)


def identity(group: Group, rank: int, row_format: RowFormat) -> None:
    """The payload rows themselves, to their sources."""
    buffers = group.ranks[rank]
    hidden, sf_bytes = buffers.shape.hidden, buffers.layout.sf_bytes
    payload = group.payload(rank)
    for _, _, first, count in entries_of(buffers):
        slots = buffers.row_slot[first : first + count].long()
        rows = mx.dequantize_mxfp8(payload[slots, :hidden], payload[slots, hidden : hidden + sf_bytes])
        return_rows(group, rank, first, rows, row_format)
