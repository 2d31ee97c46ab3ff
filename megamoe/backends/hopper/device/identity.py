"""Experts that give a row back as it came, instead of both GEMMs: tests of transport need no arithmetic."""

from __future__ import annotations

import triton
import triton.language as tl

from megamoe.backends.hopper.device import chain
from megamoe.backends.hopper.device.dispatch import aligned
from megamoe.backends.hopper.device.expand import NUM_BLOCKS, ROWS, payload_of
from megamoe.backends.hopper.device.quantize import quantize, scale_of


@triton.jit
def return_piece(
    payload, row_slot, row_address, row_weight, block_info, block, first, unit, within,
    HIDDEN: tl.constexpr, ROW_BYTES: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """One block of 16 rows, from MX block `first` on: payload rows -> result rows at their sources. unit [16 * number
    of MX blocks], within [1, 32]: indices in the caller's layouts."""
    row = unit % ROWS
    sf = first + unit // ROWS
    inside = (row < (tl.load(block_info + block) & 0xFF)) & (sf < HIDDEN // 32)
    place = block * ROWS + row
    base = tl.load(row_slot + place, mask=inside, other=0).to(tl.int64) * ROW_BYTES
    column = (sf * 32)[:, None] + within
    codes = tl.load(payload + (base[:, None] + column), mask=inside[:, None], other=0)
    scales = tl.load(payload + (base + HIDDEN + sf), mask=inside, other=0)
    value = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale_of(scales)[:, None]
    address = tl.load(row_address + place, mask=inside, other=0)
    out = aligned(address)[:, None]
    if FP8:
        weight = tl.load(row_weight + place, mask=inside, other=0.0)
        codes, scales = quantize(value * weight[:, None])
        tl.store(out + column, codes, mask=inside[:, None])
        tl.store((address + HIDDEN + sf).to(tl.pointer_type(tl.uint8)), scales, mask=inside)
    else:
        tl.store(out.to(tl.pointer_type(tl.bfloat16)) + column, value.to(tl.bfloat16), mask=inside[:, None])


@triton.jit(do_not_specialize=["own_rank"])
def identity_kernel(
    control, bases, row_slot, row_address, row_weight, block_info, work,
    own_rank, HIDDEN: tl.constexpr, ROW_BYTES: tl.constexpr, FP8: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """Persistent over (16 rows, PIECE columns)."""
    chain.after_previous()
    payload = payload_of(control, bases, own_rank)
    PIECES: tl.constexpr = (HIDDEN + PIECE - 1) // PIECE
    num_items = tl.load(work + NUM_BLOCKS) * PIECES
    unit = tl.arange(0, ROWS * (PIECE // 32))
    within = tl.arange(0, 32)[None, :]
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        return_piece(
            payload, row_slot, row_address, row_weight, block_info, item // PIECES, item % PIECES * (PIECE // 32),
            unit, within, HIDDEN, ROW_BYTES, FP8,
        )  # fmt: skip
