"""Index: wait for payload, find this rank's routed rows, and lay out the GEMMs' work. One thread block an expert.

The routed rows of an expert are ordered (source rank, token, slot), as on every backend, and start at a multiple of
16. Every block counts all experts' rows itself (a histogram of the ids that arrived), so that no block waits for
another; then it lists its own expert's rows and cuts them into entries. Rows of all sources are one sequence here, so
that few rows from many sources take one look.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl

from megamoe.backends.hopper import plan
from megamoe.backends.hopper.device import chain, flags
from megamoe.backends.hopper.device.dispatch import count_table
from megamoe.backends.hopper.record import Word

CAPACITY = tl.constexpr(int(Word.CAPACITY))
META_OFFSET = tl.constexpr(int(Word.META_OFFSET))
COMBINE_OFFSET = tl.constexpr(int(Word.COMBINE_OFFSET))
REFUSED = tl.constexpr(int(Word.REFUSED))
ROWS_RECEIVED = tl.constexpr(int(Word.ROWS_RECEIVED))
PADDED_ROWS = tl.constexpr(int(Word.PADDED_ROWS))
BYTES_SENT = tl.constexpr(int(Word.BYTES_SENT))
BLOCK_ROWS = tl.constexpr(plan.BLOCK_ROWS)
ENTRY_WORDS = tl.constexpr(plan.ENTRY_WORDS)
WIDEST_ROWS = tl.constexpr(plan.WIDEST_ROWS)
NUM_STREAM_ENTRIES = tl.constexpr(plan.Counter.NUM_STREAM_ENTRIES)
NUM_TILED_ENTRIES = tl.constexpr(plan.Counter.NUM_TILED_ENTRIES)
NUM_BLOCKS = tl.constexpr(plan.Counter.NUM_BLOCKS)
NUM_ROUTED_ROWS = tl.constexpr(plan.Counter.NUM_ROUTED_ROWS)
STREAM_FLAG = tl.constexpr(1 << 8)
"""In a block's info: its expert goes to the streaming kernel. The low byte is the block's rows."""


@triton.jit
def cut(count, stream_max_rows):
    """Of experts with `count` rows: (streaming entries, their width in blocks of 8 rows)."""
    twice = count > WIDEST_ROWS
    entries = tl.where(count <= stream_max_rows, tl.where(count == 0, 0, tl.where(twice, 2, 1)), 0)
    return entries, tl.where(twice, 2, (count + 7) // 8)


@triton.jit
def cut_tiled(count, stream_max_rows, WIDTHS: tl.constexpr, CUTS: tl.constexpr):
    """Of experts with `count` rows: (tiles of the greatest width before the last up to two, widths of these two, 0 =
    none), see plan.tile_rows."""
    tiled = tl.where(count <= stream_max_rows, 0, count)
    num_full = tl.maximum((tiled + WIDTHS[0] - 1) // WIDTHS[0] - 2, 0)
    rest = tiled - num_full * WIDTHS[0]
    first = 0 * rest
    second = 0 * rest
    for i in tl.static_range(len(CUTS)):
        # Those for most rows come first: what is narrower and still fits replaces them.
        fits = (rest > 0) & (rest <= CUTS[i][0])
        first = tl.where(fits, CUTS[i][1], first)
        second = tl.where(fits, CUTS[i][2], second)
    return num_full, first, second


@triton.jit
def tiles_of_width(num_full, first, second, WIDTH: tl.constexpr, WIDEST: tl.constexpr):
    """How many tiles of an expert have that width, and the row in front of which they all stand. They follow each
    other, since the widest come first."""
    number = (first == WIDTH).to(tl.int32) + (second == WIDTH).to(tl.int32)
    begin = num_full * WIDEST + tl.where(first == WIDTH, 0, first)
    if WIDTH == WIDEST:
        number += num_full
        begin = 0 * begin
    return number, begin


@triton.jit
def write_entries(entries, expert, first, unit, size, count, number, some):
    """entries [number, 4]: (expert, first + j * unit, rows, 0), entry j holding `size` rows from j * size on."""
    for start in range(0, number, some.shape[0]):
        j = start + some
        inside = j < number
        where = entries + j * ENTRY_WORDS
        tl.store(where, expert + 0 * j, mask=inside)
        tl.store(where + 1, first + j * unit, mask=inside)
        tl.store(where + 2, tl.minimum(count - j * size, size), mask=inside)
        tl.store(where + 3, 0 * j, mask=inside)


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
def index_expert(
    control, bases, row_slot, row_address, row_weight, block_info, work,
    stream_offset, tiled_offset, stream_max_rows, expert, rows_from, first_slot, rank, lane, bin_idx, some, own_rank,
    NUM_RANKS: tl.constexpr, NUM_TOPK: tl.constexpr, EXPERTS_PER_RANK: tl.constexpr,
    META_WORDS: tl.constexpr, RESULT_STRIDE: tl.constexpr, RESULT_BYTES: tl.constexpr,
    WIDTHS: tl.constexpr, CUTS: tl.constexpr, SLOTS: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """One expert's part of the tables (see index_kernel). rank [NUM_RANKS], lane [tokens * SLOTS], bin_idx [at least
    experts + 1], some [any]: indices in the caller's layouts, LAYOUT that of bin_idx."""
    BINS: tl.constexpr = bin_idx.shape[0]
    BLOCK_TOKENS: tl.constexpr = lane.shape[0] // SLOTS
    meta = (tl.load(bases + own_rank) + tl.load(control + META_OFFSET)).to(tl.pointer_type(tl.int32))
    begins, shifts, results = _sources(control, bases, rows_from, first_slot, rank, NUM_RANKS)
    num_rows = tl.sum(rows_from)
    token_in, slot = lane // SLOTS, lane % SLOTS
    first_expert = own_rank * EXPERTS_PER_RANK

    # How many rows every expert has.
    counts = 0 * bin_idx
    for start in range(0, num_rows, BLOCK_TOKENS):
        position = start + token_in
        inside = (position < num_rows) & (slot < NUM_TOPK)
        row = position + _of_source(position, begins, shifts, NUM_RANKS)
        local = tl.load(meta + row.to(tl.int64) * META_WORDS + 1 + slot, mask=inside, other=-1) - first_expert
        mine = inside & (local >= 0) & (local < EXPERTS_PER_RANK)
        counts += _histogram(tl.where(mine, local, 0), mine, BINS, LAYOUT)
    blocks = (counts + BLOCK_ROWS - 1) // BLOCK_ROWS
    stream, width = cut(counts, stream_max_rows)
    num_full, first, second = cut_tiled(counts, stream_max_rows, WIDTHS, CUTS)
    before = bin_idx < expert
    count = tl.sum(tl.where(bin_idx == expert, counts, 0))
    first_block = tl.sum(tl.where(before, blocks, 0))
    first_row = first_block * BLOCK_ROWS

    # This expert's rows, in order.
    listed = 0
    remote = 0
    for start in range(0, num_rows, BLOCK_TOKENS):
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

    # Its blocks and entries.
    own_stream, own_width = cut(count, stream_max_rows)
    own_full, own_first, own_second = cut_tiled(count, stream_max_rows, WIDTHS, CUTS)
    kind = tl.where(count <= stream_max_rows, STREAM_FLAG, 0)
    own_blocks = (count + BLOCK_ROWS - 1) // BLOCK_ROWS
    for start in range(0, own_blocks, some.shape[0]):
        j = start + some
        rows = tl.minimum(count - j * BLOCK_ROWS, BLOCK_ROWS)
        tl.store(block_info + first_block + j, rows | kind, mask=j < own_blocks)
    # Streaming entries lie by width, then by expert.
    earlier = (width < own_width) | ((width == own_width) & before)
    stream_entries = work + stream_offset + tl.sum(tl.where(earlier, stream, 0)) * ENTRY_WORDS
    size = tl.where(own_stream == 2, BLOCK_ROWS, WIDEST_ROWS)
    write_entries(stream_entries, expert, first_block, 1, size, count, own_stream, some)
    # Tiled entries lie by width, the widest first, then by expert.
    tiled_entries = work + tiled_offset
    padded = tl.sum(stream * width) * 8 - tl.sum(counts)
    for i in tl.static_range(len(WIDTHS)):
        number, _ = tiles_of_width(num_full, first, second, WIDTHS[i], WIDTHS[0])
        own_number, begin = tiles_of_width(own_full, own_first, own_second, WIDTHS[i], WIDTHS[0])
        own_entries = tiled_entries + tl.sum(tl.where(before, number, 0)) * ENTRY_WORDS
        write_entries(
            own_entries, expert, first_row + begin, WIDTHS[i], WIDTHS[i], count - begin, own_number, some
        )
        tiled_entries += tl.sum(number) * ENTRY_WORDS
        padded += tl.sum(number) * WIDTHS[i]
        if expert == 0:
            tl.store(work + NUM_TILED_ENTRIES + i, tl.sum(number))
    if expert == 0:
        for blocks_of_8 in tl.static_range(1, WIDEST_ROWS // 8 + 1):
            of_width = tl.sum(tl.where(width == blocks_of_8, stream, 0))
            tl.store(work + NUM_STREAM_ENTRIES + blocks_of_8 - 1, of_width)
        tl.store(work + NUM_BLOCKS, tl.sum(blocks))
        tl.store(work + NUM_ROUTED_ROWS, tl.sum(counts))
        tl.store(control + ROWS_RECEIVED, tl.sum(counts).to(tl.int64))
        tl.store(control + PADDED_ROWS, padded.to(tl.int64))


@triton.jit(do_not_specialize=["own_rank", "stream_max_rows"])
def index_kernel(
    control, bases, row_slot, row_address, row_weight, block_info, work,
    stream_offset, tiled_offset, stream_max_rows,
    own_rank, NUM_RANKS: tl.constexpr, NUM_TOPK: tl.constexpr, EXPERTS_PER_RANK: tl.constexpr,
    META_WORDS: tl.constexpr, COUNTS_WORDS: tl.constexpr, RESULT_STRIDE: tl.constexpr, RESULT_BYTES: tl.constexpr,
    COMPACT: tl.constexpr, WIDTHS: tl.constexpr, CUTS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, SLOTS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Tables out: row_slot int32, row_address int64, row_weight fp32 by routed row; block_info int32 by
    16 rows; work int32, see plan.py. SLOTS, BINS: num_topk and experts + 1, rounded up to powers of two."""
    chain.after_previous()
    rank = tl.arange(0, NUM_RANKS)
    rows_from, first_slot = rows_by_source(control, bases, own_rank, rank, NUM_RANKS, COUNTS_WORDS, COMPACT)
    index_expert(
        control, bases, row_slot, row_address, row_weight, block_info, work,
        stream_offset, tiled_offset, stream_max_rows, tl.program_id(0), rows_from, first_slot,
        rank, tl.arange(0, BLOCK_TOKENS * SLOTS), tl.arange(0, BINS), tl.arange(0, 128), own_rank,
        NUM_RANKS, NUM_TOPK, EXPERTS_PER_RANK, META_WORDS, RESULT_STRIDE, RESULT_BYTES,
        WIDTHS, CUTS, SLOTS, None,
    )  # fmt: skip
