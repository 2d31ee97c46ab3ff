"""Where rows go before any has come: from all sources' counts to the GEMMs' entries, in large_m."""

from __future__ import annotations

import triton
import triton.language as tl

from megamoe.backends.hopper import board
from megamoe.backends.hopper.device import flags, sync
from megamoe.backends.hopper.device.count import COUNTS_OFFSET
from megamoe.backends.hopper.device.work import (
    BLOCK_ROWS,
    ENTRY_WORDS,
    PADDED_ROWS,
    ROWS_RECEIVED,
    write_entries,
)

NARROW = tl.constexpr(board.NARROW_ROWS)


@triton.jit
def _counts_of(counts, src, expert, EXPERTS_PER_RANK: tl.constexpr, COUNTS_WORDS: tl.constexpr, brings):
    return tl.load(counts + src * COUNTS_WORDS + expert, mask=(expert < EXPERTS_PER_RANK) & brings, other=0)


@triton.jit
def _lay_out_expert(
    control, bases, entries, block_info, tables, expert, bin_idx, some, own_rank,
    NUM_RANKS: tl.constexpr, EXPERTS_PER_RANK: tl.constexpr, COUNTS_WORDS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One expert's part of the tables (see board.BoardLayout), its entries and its blocks."""
    counts = (tl.load(bases + own_rank) + tl.load(control + COUNTS_OFFSET)).to(tl.pointer_type(tl.int32))
    total = 0 * bin_idx
    for src in tl.static_range(NUM_RANKS):
        brings = tl.load(control + flags.ROWS_PER_RANK + src) > 0
        total += _counts_of(counts, src, bin_idx, EXPERTS_PER_RANK, COUNTS_WORDS, brings)
    before = bin_idx < expert
    blocks = (total + BLOCK_ROWS - 1) // BLOCK_ROWS
    cuts = (total + BLOCK_N - 1) // BLOCK_N
    count = tl.sum(tl.where(bin_idx == expert, total, 0))
    first_block = tl.sum(tl.where(before, blocks, 0))
    first_entry = tl.sum(tl.where(before, cuts, 0))
    begin = first_block * BLOCK_ROWS
    for src in tl.static_range(NUM_RANKS):
        brings = tl.load(control + flags.ROWS_PER_RANK + src) > 0
        tl.store(tables + src * EXPERTS_PER_RANK + expert, begin)
        begin += _counts_of(counts, src, expert, EXPERTS_PER_RANK, COUNTS_WORDS, brings)
    first_row = tables + NUM_RANKS * EXPERTS_PER_RANK
    tl.store(first_row + expert, first_block * BLOCK_ROWS)
    tl.store(first_row + EXPERTS_PER_RANK + expert, first_entry)
    own_cuts = (count + BLOCK_N - 1) // BLOCK_N
    write_entries(
        entries + first_entry * ENTRY_WORDS,
        expert,
        first_block * BLOCK_ROWS,
        BLOCK_N,
        BLOCK_N,
        count,
        own_cuts,
        some,
    )
    own_blocks = (count + BLOCK_ROWS - 1) // BLOCK_ROWS
    for start in range(0, own_blocks, some.shape[0]):
        j = start + some
        tl.store(
            block_info + first_block + j, tl.minimum(count - j * BLOCK_ROWS, BLOCK_ROWS), mask=j < own_blocks
        )
    if expert == 0:
        tl.store(first_row + 2 * EXPERTS_PER_RANK, tl.sum(cuts))
        tl.store(control + ROWS_RECEIVED, tl.sum(total).to(tl.int64))
        rest = total % BLOCK_N
        saved = tl.where((rest > 0) & (rest <= NARROW) & (BLOCK_N > NARROW), BLOCK_N - NARROW, 0)
        tl.store(control + PADDED_ROWS, (tl.sum(cuts * BLOCK_N - saved - total)).to(tl.int64))


@triton.jit
def lay_out_experts(
    control, bases, entries, block_info, tables, rank, bin_idx, some, own_rank,
    NUM_RANKS: tl.constexpr, EXPERTS_PER_RANK: tl.constexpr, COUNTS_WORDS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Wait for the counts of all that bring rows, and write the tables. Returns when all of them are there, or the wait
    has failed. bin_idx [at least experts], some [any]: indices in the caller's layouts."""
    if tl.program_id(0) < EXPERTS_PER_RANK:
        needed = flags.ranks_with_rows(control, rank)
        ok, _ = flags.wait(control, bases, flags.COUNTS_FLAG, needed, own_rank, rank)
        if ok:
            for expert in range(tl.program_id(0), EXPERTS_PER_RANK, tl.num_programs(0)):
                _lay_out_expert(
                    control, bases, entries, block_info, tables, expert, bin_idx, some, own_rank,
                    NUM_RANKS, EXPERTS_PER_RANK, COUNTS_WORDS, BLOCK_N,
                )  # fmt: skip
        sync.arrive(control + sync.INDEXED)
    sync.await_count(control + sync.INDEXED, tl.minimum(EXPERTS_PER_RANK, tl.num_programs(0)))
