"""Index: wait for payload, find this rank's routed rows, and lay out the GEMMs' work. One thread block an expert.

The routed rows of an expert are ordered (source rank, token, slot), as on every backend, and start at a multiple of
16. Every block counts all experts' rows itself (a histogram of the ids that arrived), so that no block waits for
another; then it lists its own expert's rows and cuts them into entries.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
def cut(count, STREAM_MAX_ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of experts with `count` rows: (streaming entries, their width in blocks of 8 rows, tiled entries)."""
    streaming = count <= STREAM_MAX_ROWS
    twice = count > WIDEST_ROWS
    entries = tl.where(streaming, tl.where(count == 0, 0, tl.where(twice, 2, 1)), 0)
    width = tl.where(twice, 2, (count + 7) // 8)
    return entries, width, tl.where(streaming, 0, (count + BLOCK_N - 1) // BLOCK_N)


@triton.jit
def _write_entries(entries, expert, first, unit, size, count, number):
    """entries [number, 4]: (expert, first + j * unit, rows, 0), entry j holding `size` rows from j * size on."""
    for start in range(0, number, 128):
        j = start + tl.arange(0, 128)
        inside = j < number
        where = entries + j * ENTRY_WORDS
        tl.store(where, expert + tl.zeros([128], tl.int32), mask=inside)
        tl.store(where + 1, first + j * unit, mask=inside)
        tl.store(where + 2, tl.minimum(count - j * size, size), mask=inside)
        tl.store(where + 3, tl.zeros([128], tl.int32), mask=inside)


@triton.jit(do_not_specialize=["own_rank"])
def index_kernel(
    control, bases, row_slot, row_address, row_return, row_weight, block_info, work, image,
    stream_offset, tiled_offset,
    own_rank, NUM_RANKS: tl.constexpr, NUM_TOPK: tl.constexpr, EXPERTS_PER_RANK: tl.constexpr,
    META_WORDS: tl.constexpr, COUNTS_WORDS: tl.constexpr, RESULT_STRIDE: tl.constexpr, RESULT_BYTES: tl.constexpr,
    IMAGE_STRIDE: tl.constexpr, APART: tl.constexpr, COMPACT: tl.constexpr,
    STREAM_MAX_ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, SLOTS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Tables out: row_slot int32, row_address, row_return int64, row_weight fp32 by routed row; block_info int32 by
    16 rows; work int32, see plan.py. SLOTS, BINS: num_topk and experts + 1, rounded up to powers of two."""
    chain.after_previous()
    expert = tl.program_id(0)
    rank = tl.arange(0, NUM_RANKS)
    if COMPACT:
        needed = (1 << NUM_RANKS) - 1
    else:
        needed = flags.ranks_with_rows(control, NUM_RANKS)
    ok, words = flags.wait(control, bases, flags.PAYLOAD_FLAG, needed, own_rank, NUM_RANKS)
    info = (words >> 32) & 0x7FFFFFFF
    wanted = ((needed >> rank) & 1) == 1
    if COMPACT:
        table = count_table(control, bases, own_rank, NUM_RANKS, COUNTS_WORDS)
        rows_from = tl.sum(tl.where(rank[None, :] == own_rank, table, 0), axis=1)
        first_slot = tl.cumsum(rows_from, axis=0) - rows_from
    else:
        rows_from = tl.where(wanted, (info & flags.ROWS_MASK).to(tl.int32), 0)
        first_slot = rank * tl.load(control + CAPACITY).to(tl.int32)
    rows_from = tl.where(ok, rows_from, 0)
    meta = (tl.load(bases + own_rank) + tl.load(control + META_OFFSET)).to(tl.pointer_type(tl.int32))

    # How many rows every expert has.
    lane = tl.arange(0, BLOCK_TOKENS * SLOTS)
    token_in, slot = lane // SLOTS, lane % SLOTS
    counts = tl.zeros([BINS], tl.int32)
    for src in range(NUM_RANKS):
        num_rows = tl.sum(tl.where(rank == src, rows_from, 0))
        first = tl.sum(tl.where(rank == src, first_slot, 0))
        for start in range(0, num_rows, BLOCK_TOKENS):
            token = start + token_in
            inside = (token < num_rows) & (slot < NUM_TOPK)
            local = tl.load(
                meta + (first + token).to(tl.int64) * META_WORDS + 1 + slot, mask=inside, other=-1
            )
            local = local - own_rank * EXPERTS_PER_RANK
            mine = (local >= 0) & (local < EXPERTS_PER_RANK)
            counts += tl.histogram(tl.where(mine, local, BINS - 1), BINS)
    bin_idx = tl.arange(0, BINS)
    counts = tl.where(bin_idx < EXPERTS_PER_RANK, counts, 0)
    blocks = (counts + BLOCK_ROWS - 1) // BLOCK_ROWS
    stream, width, tiled = cut(counts, STREAM_MAX_ROWS, BLOCK_N)
    before = bin_idx < expert
    count = tl.sum(tl.where(bin_idx == expert, counts, 0))
    first_block = tl.sum(tl.where(before, blocks, 0))
    first_row = first_block * BLOCK_ROWS

    # This expert's rows, in order.
    listed = 0
    remote = 0
    for src in range(NUM_RANKS):
        num_rows = tl.sum(tl.where(rank == src, rows_from, 0))
        first = tl.sum(tl.where(rank == src, first_slot, 0))
        results = tl.load(bases + src) + tl.load(control + COMBINE_OFFSET)
        before_src = listed
        for start in range(0, num_rows, BLOCK_TOKENS):
            token = start + token_in
            inside = (token < num_rows) & (slot < NUM_TOPK)
            words_at = meta + (first + token).to(tl.int64) * META_WORDS
            local = tl.load(words_at + 1 + slot, mask=inside, other=-1) - own_rank * EXPERTS_PER_RANK
            mine = inside & (local == expert)
            place = first_row + listed + tl.cumsum(mine.to(tl.int32), axis=0) - 1
            src_token = tl.load(words_at, mask=mine, other=0)
            weight = tl.load(words_at + 1 + NUM_TOPK + slot, mask=mine, other=0)
            tl.store(row_slot + place, first + token, mask=mine)
            result = (src_token * NUM_TOPK + slot).to(tl.int64)
            home = results + result * RESULT_STRIDE
            if APART:
                # GEMM2 leaves a peer's row in its own place of the image, whose rows GEMM1 has consumed by then.
                here = image.to(tl.int64) + place.to(tl.int64) * IMAGE_STRIDE
                peers = src != own_rank
                tl.store(row_address + place, tl.where(peers, here, home), mask=mine)
                tl.store(row_return + place, tl.where(peers, home, 0), mask=mine)
            else:
                tl.store(row_address + place, home, mask=mine)
            tl.store(row_weight + place, weight.to(tl.float32, bitcast=True), mask=mine)
            listed += tl.sum(mine.to(tl.int32))
        if src != own_rank:
            remote += listed - before_src
    tl.atomic_add(control + BYTES_SENT, remote.to(tl.int64) * RESULT_BYTES, sem="relaxed")

    # Its blocks and entries.
    own_stream, own_width, own_tiled = cut(count, STREAM_MAX_ROWS, BLOCK_N)
    kind = tl.where(count <= STREAM_MAX_ROWS, STREAM_FLAG, 0)
    own_blocks = (count + BLOCK_ROWS - 1) // BLOCK_ROWS
    for start in range(0, own_blocks, 128):
        j = start + tl.arange(0, 128)
        rows = tl.minimum(count - j * BLOCK_ROWS, BLOCK_ROWS)
        tl.store(block_info + first_block + j, rows | kind, mask=j < own_blocks)
    # Streaming entries lie by width, then by expert.
    earlier = (width < own_width) | ((width == own_width) & before)
    stream_entries = work + stream_offset + tl.sum(tl.where(earlier, stream, 0)) * ENTRY_WORDS
    size = tl.where(own_stream == 2, BLOCK_ROWS, WIDEST_ROWS)
    _write_entries(stream_entries, expert, first_block, 1, size, count, own_stream)
    tiled_entries = work + tiled_offset + tl.sum(tl.where(before, tiled, 0)) * ENTRY_WORDS
    _write_entries(tiled_entries, expert, first_row, BLOCK_N, BLOCK_N, count, own_tiled)
    if expert == 0:
        for blocks_of_8 in tl.static_range(1, WIDEST_ROWS // 8 + 1):
            of_width = tl.sum(tl.where(width == blocks_of_8, stream, 0))
            tl.store(work + NUM_STREAM_ENTRIES + blocks_of_8 - 1, of_width)
        tl.store(work + NUM_TILED_ENTRIES, tl.sum(tiled))
        tl.store(work + NUM_BLOCKS, tl.sum(blocks))
        tl.store(work + NUM_ROUTED_ROWS, tl.sum(counts))
        tl.store(control + ROWS_RECEIVED, tl.sum(counts).to(tl.int64))
        padded = tl.sum(stream * width) * 8 + tl.sum(tiled) * BLOCK_N - tl.sum(counts)
        tl.store(control + PADDED_ROWS, padded.to(tl.int64))
        refused = wanted & ((info & flags.ERROR_BIT) != 0)
        tl.store(control + REFUSED, tl.sum(tl.where(refused, 1 << rank, 0)).to(tl.int64))
