"""The GEMMs' work: every expert's rows cut into blocks and entries, the rules of plan.py on the device."""

from __future__ import annotations

import triton
import triton.language as tl

from megamoe.backends.hopper import plan
from megamoe.backends.hopper.record import Word

ROWS_RECEIVED = tl.constexpr(int(Word.ROWS_RECEIVED))
PADDED_ROWS = tl.constexpr(int(Word.PADDED_ROWS))
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
    none), see widths.tile_rows."""
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
def write_work(
    control, block_info, work, stream_offset, tiled_offset, stream_max_rows, expert, counts, bin_idx, some,
    WIDTHS: tl.constexpr, CUTS: tl.constexpr,
):  # fmt: skip
    """One expert's blocks and entries; expert 0's caller also writes the counters. counts: rows of every expert by
    bin_idx. some [any]: indices in the caller's layout."""
    blocks = (counts + BLOCK_ROWS - 1) // BLOCK_ROWS
    stream, width = cut(counts, stream_max_rows)
    num_full, first, second = cut_tiled(counts, stream_max_rows, WIDTHS, CUTS)
    before = bin_idx < expert
    count = tl.sum(tl.where(bin_idx == expert, counts, 0))
    first_block = tl.sum(tl.where(before, blocks, 0))
    first_row = first_block * BLOCK_ROWS
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
