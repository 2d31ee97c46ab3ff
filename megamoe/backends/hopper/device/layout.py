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
    cut_tiled,
    tiles_of_width,
    write_entries,
)

EXPERT_WORDS = tl.constexpr(board.EXPERT_WORDS)


@triton.jit
def _counts_of(counts, src, expert, EXPERTS_PER_RANK: tl.constexpr, COUNTS_WORDS: tl.constexpr, brings):
    return tl.load(counts + src * COUNTS_WORDS + expert, mask=(expert < EXPERTS_PER_RANK) & brings, other=0)


@triton.jit
def _lay_out_expert(
    control, bases, entries, block_info, tables, expert, bin_idx, some, own_rank,
    NUM_RANKS: tl.constexpr, EXPERTS_PER_RANK: tl.constexpr, COUNTS_WORDS: tl.constexpr,
    WIDTHS: tl.constexpr, CUTS: tl.constexpr,
):  # fmt: skip
    """One expert's part of the tables (see board.BoardLayout), its entries and its blocks."""
    counts = (tl.load(bases + own_rank) + tl.load(control + COUNTS_OFFSET)).to(tl.pointer_type(tl.int32))
    total = 0 * bin_idx
    for src in tl.static_range(NUM_RANKS):
        brings = tl.load(control + flags.ROWS_PER_RANK + src) > 0
        total += _counts_of(counts, src, bin_idx, EXPERTS_PER_RANK, COUNTS_WORDS, brings)
    before = bin_idx < expert
    blocks = (total + BLOCK_ROWS - 1) // BLOCK_ROWS
    first_block = tl.sum(tl.where(before, blocks, 0))
    begin = first_block * BLOCK_ROWS
    for src in tl.static_range(NUM_RANKS):
        brings = tl.load(control + flags.ROWS_PER_RANK + src) > 0
        tl.store(tables + src * EXPERTS_PER_RANK + expert, begin)
        begin += _counts_of(counts, src, expert, EXPERTS_PER_RANK, COUNTS_WORDS, brings)
    count = tl.sum(tl.where(bin_idx == expert, total, 0))
    own_blocks = (count + BLOCK_ROWS - 1) // BLOCK_ROWS
    for start in range(0, own_blocks, some.shape[0]):
        j = start + some
        tl.store(
            block_info + first_block + j, tl.minimum(count - j * BLOCK_ROWS, BLOCK_ROWS), mask=j < own_blocks
        )
    own_full, own_first, own_second = cut_tiled(count, 0, WIDTHS, CUTS)
    of_expert = tables + NUM_RANKS * EXPERTS_PER_RANK + expert
    tl.store(of_expert, first_block * BLOCK_ROWS)
    tl.store(of_expert + EXPERTS_PER_RANK, own_full * WIDTHS[0])
    tl.store(of_expert + 2 * EXPERTS_PER_RANK, own_first)
    # Entries lie as compact's do: by width, the widest first, then by expert.
    num_full, first, second = cut_tiled(total, 0, WIDTHS, CUTS)
    padded = 0 - tl.sum(total)
    first_entry = 0 * count
    of_width = tables + (NUM_RANKS + EXPERT_WORDS) * EXPERTS_PER_RANK
    for i in tl.static_range(len(WIDTHS)):
        number, _ = tiles_of_width(num_full, first, second, WIDTHS[i], WIDTHS[0])
        own_number, begin = tiles_of_width(own_full, own_first, own_second, WIDTHS[i], WIDTHS[0])
        entry = first_entry + tl.sum(tl.where(before, number, 0))
        write_entries(
            entries + entry * ENTRY_WORDS, expert, first_block * BLOCK_ROWS + begin, WIDTHS[i], WIDTHS[i],
            count - begin, own_number, some,
        )  # fmt: skip
        last = entry
        if i == 0:
            tl.store(of_expert + 3 * EXPERTS_PER_RANK, entry)
            last += own_full
        tl.store(of_expert + 4 * EXPERTS_PER_RANK, last, mask=own_first == WIDTHS[i])
        last += (own_first == WIDTHS[i]).to(tl.int32)
        tl.store(of_expert + 5 * EXPERTS_PER_RANK, last, mask=own_second == WIDTHS[i])
        if expert == 0:
            tl.store(of_width + 2 * i, tl.sum(number))
            tl.store(of_width + 2 * i + 1, first_entry)
        first_entry += tl.sum(number)
        padded += tl.sum(number) * WIDTHS[i]
    if expert == 0:
        tl.store(control + ROWS_RECEIVED, tl.sum(total).to(tl.int64))
        tl.store(control + PADDED_ROWS, padded.to(tl.int64))


@triton.jit
def lay_out_experts(
    control, bases, entries, block_info, tables, rank, bin_idx, some, own_rank,
    NUM_RANKS: tl.constexpr, EXPERTS_PER_RANK: tl.constexpr, COUNTS_WORDS: tl.constexpr,
    WIDTHS: tl.constexpr, CUTS: tl.constexpr,
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
                    NUM_RANKS, EXPERTS_PER_RANK, COUNTS_WORDS, WIDTHS, CUTS,
                )  # fmt: skip
        sync.arrive(control + sync.INDEXED)
    sync.await_count(control + sync.INDEXED, tl.minimum(EXPERTS_PER_RANK, tl.num_programs(0)))
