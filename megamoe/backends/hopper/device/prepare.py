"""compact's prepare step: count this rank's rows for every destination, give each row its place, tell all ranks.

A count is needed before any row may travel. Every thread block counts all tokens before its own itself, so that none
waits for another; the last has seen all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megamoe.backends.hopper.device import chain, flags
from megamoe.backends.hopper.record import Word

NUM_ROWS = tl.constexpr(int(Word.NUM_ROWS))
INFO = tl.constexpr(int(Word.INFO))
IDS_PTR = tl.constexpr(int(Word.IDS_PTR))
COUNTS_OFFSET = tl.constexpr(int(Word.COUNTS_OFFSET))


@triton.jit
def goes_to(ids, token, inside, dst, NUM_TOPK: tl.constexpr, EXPERTS_PER_RANK: tl.constexpr):
    """[tokens, ranks] int32: 1 where a slot of the token names an expert of the rank."""
    first = dst * EXPERTS_PER_RANK
    found = tl.zeros([token.shape[0], dst.shape[0]], tl.int32)
    for slot in tl.static_range(NUM_TOPK):
        expert = tl.load(ids + token * NUM_TOPK + slot, mask=inside, other=-1)
        mine = (expert[:, None] >= first[None, :]) & (expert[:, None] < first[None, :] + EXPERTS_PER_RANK)
        found = found | mine.to(tl.int32)
    return found


@triton.jit(do_not_specialize=["own_rank"])
def prepare_kernel(
    control, bases, token_index,
    own_rank, NUM_RANKS: tl.constexpr, NUM_TOPK: tl.constexpr, EXPERTS_PER_RANK: tl.constexpr,
    COUNTS_WORDS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """token_index [n, NUM_RANKS] int32: a token's place among this rank's rows for a destination, -1 = none."""
    chain.after_previous()
    ids = tl.load(control + IDS_PTR).to(tl.pointer_type(tl.int32))
    num_rows = tl.load(control + NUM_ROWS).to(tl.int32)
    dst = tl.arange(0, NUM_RANKS)
    first = tl.program_id(0) * BLOCK_TOKENS
    if (first < num_rows) | (first == 0):
        earlier = tl.zeros([BLOCK_TOKENS, NUM_RANKS], tl.int32)
        for start in range(0, first, BLOCK_TOKENS):
            token = start + tl.arange(0, BLOCK_TOKENS)
            earlier += goes_to(ids, token, token < num_rows, dst, NUM_TOPK, EXPERTS_PER_RANK)
        counts = tl.sum(earlier, axis=0)
        token = first + tl.arange(0, BLOCK_TOKENS)
        inside = token < num_rows
        found = goes_to(ids, token, inside, dst, NUM_TOPK, EXPERTS_PER_RANK)
        place = counts[None, :] + tl.cumsum(found, axis=0) - 1
        where = token_index + token[:, None] * NUM_RANKS + dst[None, :]
        tl.store(where, tl.where(found == 1, place, -1), mask=inside[:, None])
        counts += tl.sum(found, axis=0)
        if first + BLOCK_TOKENS >= num_rows:
            offset = tl.load(control + COUNTS_OFFSET) + own_rank * COUNTS_WORDS * 4
            for peer in tl.static_range(NUM_RANKS):
                row = (tl.load(bases + peer) + offset).to(tl.pointer_type(tl.int32))
                tl.store(row + dst, counts)
            flags.post(control, bases, flags.COUNTS_FLAG, tl.load(control + INFO), own_rank, dst)
