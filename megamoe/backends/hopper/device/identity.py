"""Experts that give a row back as it came, instead of both GEMMs: tests of transport need no arithmetic."""

from __future__ import annotations

import triton
import triton.language as tl

from megamoe.backends.hopper.device import chain
from megamoe.backends.hopper.device.expand import NUM_BLOCKS, ROWS, ROWS_OFFSET, load_rows
from megamoe.backends.hopper.device.quantize import quantize


@triton.jit(do_not_specialize=["own_rank"])
def identity_kernel(
    control, bases, row_slot, row_address, row_weight, block_info, work,
    own_rank, HIDDEN: tl.constexpr, ROW_BYTES: tl.constexpr, FP8: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """Persistent over (16 rows, PIECE columns): payload rows -> result rows at their sources."""
    chain.after_previous()
    payload = (tl.load(bases + own_rank) + tl.load(control + ROWS_OFFSET)).to(tl.pointer_type(tl.uint8))
    PIECES: tl.constexpr = (HIDDEN + PIECE - 1) // PIECE
    num_items = tl.load(work + NUM_BLOCKS) * PIECES
    row = tl.arange(0, ROWS)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        block = item // PIECES
        column = item % PIECES * PIECE + tl.arange(0, PIECE)
        inside = row < (tl.load(block_info + block) & 0xFF)
        slots = tl.load(row_slot + block * ROWS + row, mask=inside, other=0)
        value = load_rows(payload, slots, inside, column, HIDDEN, ROW_BYTES, PIECE)
        address = tl.load(row_address + block * ROWS + row, mask=inside, other=0)
        mask = inside[:, None] & (column < HIDDEN)[None, :]
        if FP8:
            weight = tl.load(row_weight + block * ROWS + row, mask=inside, other=0.0)
            codes, scales = quantize(tl.reshape(value * weight[:, None], [ROWS * (PIECE // 32), 32]))
            out = (address[:, None] + column[None, :]).to(tl.pointer_type(tl.uint8))
            tl.store(out, tl.reshape(codes, [ROWS, PIECE]), mask=mask)
            sf = item % PIECES * (PIECE // 32) + tl.arange(0, PIECE // 32)
            out = (address[:, None] + HIDDEN + sf[None, :]).to(tl.pointer_type(tl.uint8))
            mask = inside[:, None] & (sf < HIDDEN // 32)[None, :]
            tl.store(out, tl.reshape(scales, [ROWS, PIECE // 32]), mask=mask)
        else:
            out = (address[:, None] + column[None, :] * 2).to(tl.pointer_type(tl.bfloat16))
            tl.store(out, value.to(tl.bfloat16), mask=mask)
