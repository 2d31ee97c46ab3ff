"""Index: wait for payload, find this rank's routed rows, and lay out the GEMMs' work. One thread block an expert.

The routed rows of an expert are ordered (source rank, token, slot), as on every backend, and start at a multiple of
16. Every block counts all experts' rows itself (a histogram of the ids that arrived), so that no block waits for
another; then it lists its own expert's rows and cuts them into entries. Rows of all sources are one sequence here, so
that few rows from many sources take one look. In large steps a launch before counts parts of that sequence, and
several blocks list an expert's rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl

from megamoe.backends.hopper.device import chain, flags
from megamoe.backends.hopper.device.dispatch import count_table
from megamoe.backends.hopper.device.work import BLOCK_ROWS, write_work
from megamoe.backends.hopper.record import Word

CAPACITY = tl.constexpr(int(Word.CAPACITY))
META_OFFSET = tl.constexpr(int(Word.META_OFFSET))
COMBINE_OFFSET = tl.constexpr(int(Word.COMBINE_OFFSET))
REFUSED = tl.constexpr(int(Word.REFUSED))
BYTES_SENT = tl.constexpr(int(Word.BYTES_SENT))


@triton.jit
def _histogram(values, mask, BINS: tl.constexpr, LAYOUT: tl.constexpr):
    """[BINS] counts. LAYOUT: of the result in a Gluon kernel, None in a Triton kernel."""
    if LAYOUT is None:
        counts = tl.histogram(values, BINS, mask)
    else:
        counts = gl.histogram(values, BINS, mask=mask, layout=LAYOUT)
    return counts


@triton.jit
def _sources(control, bases, rows_from, first_slot, rank, NUM_RANKS: tl.constexpr):
    """Of every source, as tuples of scalars: where its rows begin in the sequence of all rows, what leads from a place
    in that sequence to its payload slot, and the address of its combine region."""
    begins = ()
    shifts = ()
    results = ()
    combine = tl.load(control + COMBINE_OFFSET)
    for src in tl.static_range(NUM_RANKS):
        begin = tl.sum(tl.where(rank < src, rows_from, 0))
        begins = begins + (begin,)
        shifts = shifts + (tl.sum(tl.where(rank == src, first_slot, 0)) - begin,)
        results = results + (tl.load(bases + src) + combine,)
    return begins, shifts, results


@triton.jit
def _of_source(position, begins, values, NUM_RANKS: tl.constexpr):
    """The value of the source to which a place in the sequence belongs."""
    value = values[0] + 0 * position
    for src in tl.static_range(1, NUM_RANKS):
        value = tl.where(position >= begins[src], values[src], value)
    return value


@triton.jit
def rows_by_source(
    control, bases, own_rank, rank, NUM_RANKS: tl.constexpr, COUNTS_WORDS: tl.constexpr, COMPACT: tl.constexpr
):
    """Wait for payload. Returns int32 [NUM_RANKS] rows of every source and its first payload slot; no rows where the
    wait failed. Status: who refused."""
    if COMPACT:
        needed = (1 << NUM_RANKS) - 1
    else:
        needed = flags.ranks_with_rows(control, rank)
    ok, words = flags.wait(control, bases, flags.PAYLOAD_FLAG, needed, own_rank, rank)
    info = (words >> 32) & 0x7FFFFFFF
    wanted = ((needed >> rank) & 1) == 1
    if COMPACT:
        table = count_table(control, bases, own_rank, NUM_RANKS, COUNTS_WORDS)
        rows_from = tl.sum(tl.where(rank[None, :] == own_rank, table, 0), axis=1)
        first_slot = tl.cumsum(rows_from, axis=0) - rows_from
    else:
        rows_from = tl.where(wanted, (info & flags.ROWS_MASK).to(tl.int32), 0)
        first_slot = rank * tl.load(control + CAPACITY).to(tl.int32)
    refused = wanted & ((info & flags.ERROR_BIT) != 0)
    tl.store(control + REFUSED, tl.sum(tl.where(refused, 1 << rank, 0)).to(tl.int64))
    return tl.where(ok, rows_from, 0), first_slot


@triton.jit
def _count(
    meta, begins, shifts, start, num_rows, token_in, slot, first_expert,
    NUM_RANKS: tl.constexpr, NUM_TOPK: tl.constexpr, EXPERTS_PER_RANK: tl.constexpr, META_WORDS: tl.constexpr,
    BINS: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """[BINS] rows that every expert gets of those from `start` on, as many as token_in has."""
    position = start + token_in
    inside = (position < num_rows) & (slot < NUM_TOPK)
    row = position + _of_source(position, begins, shifts, NUM_RANKS)
    local = tl.load(meta + row.to(tl.int64) * META_WORDS + 1 + slot, mask=inside, other=-1) - first_expert
    mine = inside & (local >= 0) & (local < EXPERTS_PER_RANK)
    return _histogram(tl.where(mine, local, 0), mine, BINS, LAYOUT)


@triton.jit
def _sum_of_parts(part_counts, num_parts, BINS: tl.constexpr):
    part = tl.arange(0, 32)
    counts = tl.zeros([BINS], tl.int32)
    for first in range(0, num_parts, 32):
        where = part_counts + (first + part)[:, None] * BINS + tl.arange(0, BINS)[None, :]
        counts += tl.sum(tl.load(where, mask=(first + part < num_parts)[:, None], other=0), axis=0)
    return counts


@triton.jit
def index_expert(
    control, bases, row_slot, row_address, row_weight, block_info, work, part_counts,
    stream_offset, tiled_offset, stream_max_rows, expert, split, rows_from, first_slot, rank, lane, bin_idx, some,
    own_rank,
    NUM_RANKS: tl.constexpr, NUM_TOPK: tl.constexpr, EXPERTS_PER_RANK: tl.constexpr,
    META_WORDS: tl.constexpr, RESULT_STRIDE: tl.constexpr, RESULT_BYTES: tl.constexpr,
    WIDTHS: tl.constexpr, CUTS: tl.constexpr, SLOTS: tl.constexpr, SPLITS: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """One expert's part of the tables (see index_kernel). rank [NUM_RANKS], lane [tokens * SLOTS], bin_idx [at least
    experts + 1], some [any]: indices in the caller's layouts, LAYOUT that of bin_idx. SPLITS > 1: that many thread
    blocks list an expert's rows, and rows have been counted by parts (count_parts_kernel)."""
    BINS: tl.constexpr = bin_idx.shape[0]
    BLOCK_TOKENS: tl.constexpr = lane.shape[0] // SLOTS
    meta = (tl.load(bases + own_rank) + tl.load(control + META_OFFSET)).to(tl.pointer_type(tl.int32))
    begins, shifts, results = _sources(control, bases, rows_from, first_slot, rank, NUM_RANKS)
    num_rows = tl.sum(rows_from)
    token_in, slot = lane // SLOTS, lane % SLOTS
    first_expert = own_rank * EXPERTS_PER_RANK

    # How many rows every expert has.
    counts = 0 * bin_idx
    if SPLITS > 1:
        counts += _sum_of_parts(part_counts, (num_rows + BLOCK_TOKENS - 1) // BLOCK_TOKENS, BINS)
    else:
        for start in range(0, num_rows, BLOCK_TOKENS):
            counts += _count(
                meta, begins, shifts, start, num_rows, token_in, slot, first_expert,
                NUM_RANKS, NUM_TOPK, EXPERTS_PER_RANK, META_WORDS, BINS, LAYOUT,
            )  # fmt: skip
    blocks = (counts + BLOCK_ROWS - 1) // BLOCK_ROWS
    first_row = tl.sum(tl.where(bin_idx < expert, blocks, 0)) * BLOCK_ROWS

    # This expert's rows, in order.
    listed = 0
    remote = 0
    for start in range(split * BLOCK_TOKENS, num_rows, SPLITS * BLOCK_TOKENS):
        if SPLITS > 1:
            listed = 0
            for part in range(0, start // BLOCK_TOKENS, some.shape[0]):
                earlier_part = part + some < start // BLOCK_TOKENS
                listed += tl.sum(
                    tl.load(part_counts + (part + some) * BINS + expert, mask=earlier_part, other=0)
                )
        position = start + token_in
        inside = (position < num_rows) & (slot < NUM_TOPK)
        row = position + _of_source(position, begins, shifts, NUM_RANKS)
        words_at = meta + row.to(tl.int64) * META_WORDS
        mine = inside & (tl.load(words_at + 1 + slot, mask=inside, other=-1) - first_expert == expert)
        place = first_row + listed + tl.cumsum(mine.to(tl.int32), axis=0) - 1
        src_token = tl.load(words_at, mask=mine, other=0)
        weight = tl.load(words_at + 1 + NUM_TOPK + slot, mask=mine, other=0)
        tl.store(row_slot + place, row, mask=mine)
        home = _of_source(position, begins, results, NUM_RANKS)
        home += (src_token * NUM_TOPK + slot).to(tl.int64) * RESULT_STRIDE
        own_begin = tl.sum(tl.where(rank < own_rank, rows_from, 0))
        own_end = tl.sum(tl.where(rank <= own_rank, rows_from, 0))
        peers = (position < own_begin) | (position >= own_end)
        tl.store(row_address + place, home, mask=mine)
        tl.store(row_weight + place, weight.to(tl.float32, bitcast=True), mask=mine)
        listed += tl.sum(mine.to(tl.int32))
        remote += tl.sum((mine & peers).to(tl.int32))
    tl.atomic_add(control + BYTES_SENT, remote.to(tl.int64) * RESULT_BYTES, sem="relaxed")

    if split == 0:
        write_work(
            control, block_info, work, stream_offset, tiled_offset, stream_max_rows, expert, counts, bin_idx, some,
            WIDTHS, CUTS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["own_rank"])
def count_parts_kernel(
    control, bases, part_counts,
    own_rank, NUM_RANKS: tl.constexpr, NUM_TOPK: tl.constexpr, EXPERTS_PER_RANK: tl.constexpr,
    META_WORDS: tl.constexpr, COUNTS_WORDS: tl.constexpr, COMPACT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, SLOTS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Before index_kernel in large steps. part_counts out: int32 [parts of BLOCK_TOKENS rows, BINS], the rows that
    every expert gets."""
    chain.after_previous()
    rank = tl.arange(0, NUM_RANKS)
    rows_from, first_slot = rows_by_source(control, bases, own_rank, rank, NUM_RANKS, COUNTS_WORDS, COMPACT)
    meta = (tl.load(bases + own_rank) + tl.load(control + META_OFFSET)).to(tl.pointer_type(tl.int32))
    begins, shifts, _ = _sources(control, bases, rows_from, first_slot, rank, NUM_RANKS)
    num_rows = tl.sum(rows_from)
    lane = tl.arange(0, BLOCK_TOKENS * SLOTS)
    for part in range(tl.program_id(0), (num_rows + BLOCK_TOKENS - 1) // BLOCK_TOKENS, tl.num_programs(0)):
        counts = _count(
            meta, begins, shifts, part * BLOCK_TOKENS, num_rows, lane // SLOTS, lane % SLOTS,
            own_rank * EXPERTS_PER_RANK, NUM_RANKS, NUM_TOPK, EXPERTS_PER_RANK, META_WORDS, BINS, None,
        )  # fmt: skip
        tl.store(part_counts + part * BINS + tl.arange(0, BINS), counts)


@triton.jit(do_not_specialize=["own_rank", "stream_max_rows"])
def index_kernel(
    control, bases, row_slot, row_address, row_weight, block_info, work, part_counts,
    stream_offset, tiled_offset, stream_max_rows,
    own_rank, NUM_RANKS: tl.constexpr, NUM_TOPK: tl.constexpr, EXPERTS_PER_RANK: tl.constexpr,
    META_WORDS: tl.constexpr, COUNTS_WORDS: tl.constexpr, RESULT_STRIDE: tl.constexpr, RESULT_BYTES: tl.constexpr,
    COMPACT: tl.constexpr, WIDTHS: tl.constexpr, CUTS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, SLOTS: tl.constexpr, BINS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Tables out: row_slot int32, row_address int64, row_weight fp32 by routed row; block_info int32 by
    16 rows; work int32, see plan.py. SLOTS, BINS: num_topk and experts + 1, rounded up to powers of two."""
    chain.after_previous()
    rank = tl.arange(0, NUM_RANKS)
    rows_from, first_slot = rows_by_source(control, bases, own_rank, rank, NUM_RANKS, COUNTS_WORDS, COMPACT)
    index_expert(
        control, bases, row_slot, row_address, row_weight, block_info, work, part_counts,
        stream_offset, tiled_offset, stream_max_rows, tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS,
        rows_from, first_slot, rank, tl.arange(0, BLOCK_TOKENS * SLOTS), tl.arange(0, BINS), tl.arange(0, 128),
        own_rank,
        NUM_RANKS, NUM_TOPK, EXPERTS_PER_RANK, META_WORDS, RESULT_STRIDE, RESULT_BYTES,
        WIDTHS, CUTS, SLOTS, SPLITS, None,
    )  # fmt: skip
