"""Expand: the payload rows of every expert as bf16 token operands, in the order in which its GEMM kernel reads them.

An e4m3 code times its E8M0 scale is exact in bf16, so this is a change of layout, not of numbers. For the streaming
kernel a block of 16 rows is [chunk][8 rows][4 pieces][lane][16 B], lane 4g + t holding 8 of K of row g's block t a
piece; for the tiled kernel rows are row-major with K permuted inside each 128 (see wgmma_loop.py). Both take the
same bytes. Columns past the row's end are zeros: weights there are zero, but zero times garbage need not be.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megamoe.backends.hopper import plan
from megamoe.backends.hopper.device import chain
from megamoe.backends.hopper.device.index import STREAM_FLAG
from megamoe.backends.hopper.device.quantize import dequantize
from megamoe.backends.hopper.record import Word

ROWS_OFFSET = tl.constexpr(int(Word.ROWS_OFFSET))
ROWS = tl.constexpr(plan.BLOCK_ROWS)
NUM_BLOCKS = tl.constexpr(plan.Counter.NUM_BLOCKS)
EXPAND_COLUMNS = 512
"""Columns that a thread block expands at a time (PIECE in kernels): four chunks."""


@triton.jit
def load_rows(
    payload, slots, inside_row, column, HIDDEN: tl.constexpr, ROW_BYTES: tl.constexpr, PIECE: tl.constexpr
):
    """fp32 [ROWS, PIECE] of the payload rows in `slots`, zero past the row's end."""
    base = payload + slots.to(tl.int64)[:, None] * ROW_BYTES
    codes = tl.load(base + column[None, :], mask=inside_row[:, None] & (column < HIDDEN)[None, :], other=0)
    block = tl.min(column) // 32 + tl.arange(0, PIECE // 32)
    mask = inside_row[:, None] & (block < HIDDEN // 32)[None, :]
    scales = tl.load(base + HIDDEN + block[None, :], mask=mask, other=0)
    return dequantize(codes, scales, ROWS, PIECE)


@triton.jit(do_not_specialize=["own_rank"])
def expand_kernel(
    control, bases, image, row_slot, block_info, work,
    own_rank, HIDDEN: tl.constexpr, ROW_BYTES: tl.constexpr, COLUMNS: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """Persistent over (16 rows, PIECE columns). image: bf16 [padded rows, COLUMNS]."""
    chain.after_previous()
    payload = (tl.load(bases + own_rank) + tl.load(control + ROWS_OFFSET)).to(tl.pointer_type(tl.uint8))
    num_items = tl.load(work + NUM_BLOCKS) * (COLUMNS // PIECE)
    row = tl.arange(0, ROWS)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        block = item // (COLUMNS // PIECE)
        first = item % (COLUMNS // PIECE) * PIECE
        info = tl.load(block_info + block)
        inside = row < (info & 0xFF)
        slots = tl.load(row_slot + block * ROWS + row, mask=inside, other=0)
        column = first + tl.arange(0, PIECE)
        value = load_rows(payload, slots, inside, column, HIDDEN, ROW_BYTES, PIECE).to(tl.bfloat16)
        out = image + block.to(tl.int64) * (ROWS * COLUMNS)
        if info >= STREAM_FLAG:
            # rows: half, g; columns: chunk, t, piece of 8, k -> chunk, half, piece, g, t, k
            split = tl.reshape(value, [2, 8, PIECE // 128, 4, 4, 8])
            streamed = tl.reshape(tl.permute(split, [2, 0, 4, 1, 3, 5]), [ROWS * PIECE])
            tl.store(out + first * ROWS + tl.arange(0, ROWS * PIECE), streamed)
        else:
            # columns: chunk, t, step j, i, lo -> chunk, j, i, t, lo
            steps = tl.reshape(value, [ROWS, PIECE // 128, 4, 8, 2, 2])
            permuted = tl.reshape(tl.permute(steps, [0, 1, 3, 4, 2, 5]), [ROWS, PIECE])
            tl.store(out + row[:, None] * COLUMNS + column[None, :], permuted, mask=inside[:, None])
