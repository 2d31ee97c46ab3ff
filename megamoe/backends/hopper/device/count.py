"""large_m's first launch: count this rank's rows of every expert, tell the owners, and quantize all rows.

A row's place among this source's rows of its expert is found here, where the order is known, and travels with it: the
owner then lays rows out as they come, without looking at any other. One thread block an expert counts; the rest
quantize.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megamoe.backends.hopper import board
from megamoe.backends.hopper.device import chain, flags
from megamoe.backends.hopper.device.dispatch import IDS_PTR, INFO, NUM_ROWS, SF_PTR, plain_row, quantized_row
from megamoe.backends.hopper.record import Word

COUNTS_OFFSET = tl.constexpr(int(Word.COUNTS_OFFSET))
PLACE_SHIFT = tl.constexpr(board.PLACE_SHIFT)


@triton.jit
def _count(ids, places, number, expert, local, BLOCK: tl.constexpr):
    """Rows of an expert among `number` (token, slot) pairs; each one's place goes to `places`."""
    listed = 0
    for start in range(0, number, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        mine = tl.load(ids + pair, mask=pair < number, other=-1) == expert
        place = listed + tl.cumsum(mine.to(tl.int32), axis=0) - 1
        tl.store(places + pair, (place << PLACE_SHIFT) | local, mask=mine)
        listed += tl.sum(mine.to(tl.int32))
    return listed


@triton.jit
def _quantize(control, rows, item, HIDDEN: tl.constexpr, ROW_BYTES: tl.constexpr, BLOCK: tl.constexpr):
    """One piece of a row: codes, then from byte HIDDEN on scales, as rows travel."""
    PIECES: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    token = item // PIECES
    block = item % PIECES * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    column = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    if tl.load(control + SF_PTR) != 0:
        code, scale = quantized_row(control, token, block, column, HIDDEN)
    else:
        code, scale = plain_row(control, token, column, HIDDEN)
    row = rows + token.to(tl.int64) * ROW_BYTES
    tl.store(row + column, code, mask=column < HIDDEN)
    tl.store(row + HIDDEN + block, scale, mask=block < HIDDEN // 32)


@triton.jit(do_not_specialize=["own_rank", "board_words"])
def quantize_kernel(
    control, bases, places, rows, board_at, ticket, board_words, own_rank,
    NUM_RANKS: tl.constexpr, NUM_TOPK: tl.constexpr, EXPERTS_PER_RANK: tl.constexpr,
    HIDDEN: tl.constexpr, ROW_BYTES: tl.constexpr, COUNTS_WORDS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    """places int32 [n, NUM_TOPK]: place and local expert of every slot that names one. rows: uint8 [n, ROW_BYTES].
    board_at: zeroed here. ticket: int32, zero, counts thread blocks that have told their count."""
    chain.after_previous()
    num_rows = tl.load(control + NUM_ROWS).to(tl.int32)
    NUM_EXPERTS: tl.constexpr = NUM_RANKS * EXPERTS_PER_RANK
    program = tl.program_id(0)
    if program < NUM_EXPERTS:
        for start in range(program * 256, board_words, NUM_EXPERTS * 256):
            word = start + tl.arange(0, 256)
            tl.store(board_at + word, 0, mask=word < board_words)
        ids = tl.load(control + IDS_PTR).to(tl.pointer_type(tl.int32))
        dst = program // EXPERTS_PER_RANK
        local = program % EXPERTS_PER_RANK
        count = _count(ids, places, num_rows * NUM_TOPK, program, local, BLOCK_PAIRS)
        words = (tl.load(bases + dst) + tl.load(control + COUNTS_OFFSET)).to(tl.pointer_type(tl.int32))
        tl.store(words + own_rank * COUNTS_WORDS + local, count)
        tl.debug_barrier()
        if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == NUM_EXPERTS - 1:
            tl.store(ticket, 0)
            rank = tl.arange(0, NUM_RANKS)
            flags.post(control, bases, flags.COUNTS_FLAG, tl.load(control + INFO), own_rank, rank)
    else:
        num_items = num_rows * ((HIDDEN + BLOCK - 1) // BLOCK)
        for item in range(program - NUM_EXPERTS, num_items, tl.num_programs(0) - NUM_EXPERTS):
            _quantize(control, rows, item, HIDDEN, ROW_BYTES, BLOCK)
