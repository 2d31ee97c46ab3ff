"""large_m: dispatch, GEMM1, GEMM2 and combine in one persistent launch, overlapped: see lists, board, tickets.

All workgroups send the lists of this rank's rows; then some send the rows while the last one directs and the others
multiply what has come; in the end all sum tokens. The grid must be co-resident: ranks wait for each other, and
workgroups for the director. No workgroup that is waited for ever waits for one that waits for it: senders wait for
nobody, GEMM1 for rows, GEMM2 for GEMM1, sums for the owners.
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import const_expr

from megamoe.backends.gfx950.kernels import (
    board,
    combine,
    dispatch,
    flags,
    gemm1,
    gemm2,
    identity,
    index,
    lists,
    tickets,
    tile,
    tiling,
)
from megamoe.backends.gfx950.kernels.lang import WAVE, control_int, control_word, uniform, wide
from megamoe.backends.gfx950.record import INFO_ERROR, INFO_FP8, MAX_CHUNK, Word
from megamoe.layout import FlagKind


@flyc.kernel
def large_m_kernel(
    control: fx.Int64,
    bases: fx.Int64,
    heap: fx.Int64,
    rows: fx.Int64,
    meta: fx.Int64,
    experts: fx.Int64,
    segments: fx.Int64,
    tiles: fx.Int64,
    w13: fx.Int64,
    w13_scales: fx.Int64,
    w2: fx.Int64,
    w2_scales: fx.Int64,
    inner: fx.Int64,
    rank: fx.Int32,
    max_tiles: fx.Int32,
    num_senders: fx.Int32,
    num_groups: fx.Int32,
    BLOCK_M: fx.Constexpr[int],
    HIDDEN: fx.Constexpr[int],
    INTERMEDIATE: fx.Constexpr[int],
    ROW_BYTES: fx.Constexpr[int],
    INNER_BYTES: fx.Constexpr[int],
    COUNTS_WORDS: fx.Constexpr[int],
    META_WORDS: fx.Constexpr[int],
    TOPK: fx.Constexpr[int],
    NUM_EXPERTS: fx.Constexpr[int],
    NUM_RANKS: fx.Constexpr[int],
    LIMIT_MILLI: fx.Constexpr[int],
    FP8: fx.Constexpr[int],
    IDENTITY: fx.Constexpr[int],
):
    threads = tile.threads_of(BLOCK_M)
    num_1 = 1 if IDENTITY else gemm1.num_n_tiles(INTERMEDIATE, BLOCK_M)
    num_2 = 1 if IDENTITY else gemm2.num_n_tiles(HIDDEN, BLOCK_M)
    info = fx.Int32(INFO_FP8 if FP8 else 0)
    everyone = fx.Int32((1 << NUM_RANKS) - 1)
    # Small tiles mean that most experts have one, which alone reads their weights.
    streaming = BLOCK_M < 64
    allocator = fx.SharedAllocator()
    sent, counted, news, back, ended = [allocator.allocate(flags.FlagLds).peek() for _ in range(5)]
    tables = allocator.allocate(index.lds_of(NUM_EXPERTS, threads // WAVE)).peek()
    outline = allocator.allocate(tiling.lds_of(NUM_EXPERTS, NUM_RANKS)).peek()
    work = allocator.allocate(tickets.Lds).peek()
    staging = allocator.allocate(gemm1.lds_of(BLOCK_M)).peek()

    board.clear(tiles, max_tiles, num_groups, threads)
    lists.send(
        tables, control, bases, meta, rank, num_groups, COUNTS_WORDS, META_WORDS, TOPK, NUM_EXPERTS, NUM_RANKS, threads
    )  # fmt: skip
    if flags.arrive(sent, control, num_groups, int(Word.LISTED)) == 1:
        flags.post(control, bases, rank, FlagKind.COUNTS, control_int(control, Word.NUM_ROWS), NUM_RANKS)
    if fx.block_idx.x < num_senders:
        dispatch.send_to_all(
            sent, control, bases, rank, rows, meta, num_senders, ROW_BYTES, META_WORDS, TOPK, NUM_EXPERTS, NUM_RANKS,
            threads,
        )  # fmt: skip
    if fx.block_idx.x == num_groups - 1:
        board.direct(
            outline, counted, news, control, bases, heap, experts, segments, tiles, rank, info,
            num_groups, BLOCK_M, num_1, num_2, COUNTS_WORDS, META_WORDS, NUM_EXPERTS, NUM_RANKS, threads,
        )  # fmt: skip

    def find(m_tile):
        """(expert, first routed row, index of its last row from there on, its records) of an m-tile."""
        expert = tile.find_expert(experts, m_tile, NUM_EXPERTS)
        record = fx.generic_load(wide(experts) + expert * 4, count=4)
        count, row_base, tile_base = uniform(record[0]), uniform(record[1]), uniform(record[2])
        row = (m_tile - tile_base) * BLOCK_M
        segment = lists.read_segment(segments, expert)

        def record_of(i):
            return lists.record_of(control, heap, segment, i - row_base, TOPK, NUM_RANKS)

        return expert, row_base + row, count - row - 1, record_of

    tickets.draw(work, control)
    task = fx.Int32(tickets.NONE)
    while task != tickets.END:
        # Called in one place: of two the compiler makes one loop, and of their barriers some that not all waves meet.
        task = tickets.take(work, control, tiles, num_1, num_2)
        if task == tickets.GEMM1:
            if const_expr(not IDENTITY):
                expert, first_row, left, record_of = find(tickets.told(work.first))
                gemm1.multiply_unit(
                    staging, heap + control_word(control, Word.ROWS_OFFSET), lambda i: record_of(i)[0],
                    w13, w13_scales, inner, expert, first_row, left, tickets.told(work.n_tile),
                    BLOCK_M, HIDDEN, INTERMEDIATE, ROW_BYTES, INNER_BYTES, LIMIT_MILLI, streaming,
                )  # fmt: skip
            tickets.finish_gemm1(work, tiles)
        if task == tickets.GEMM2:
            for i in range(fx.Int32(0), fx.Int32(MAX_CHUNK), fx.Int32(1)):
                i = fx.Int32(i)
                if ((tickets.told(work.mask) >> i) & 1) == 1:
                    expert, first_row, left, record_of = find(tickets.told(work.first) + i)
                    if const_expr(IDENTITY):
                        give_back_tile(
                            control, bases, heap, record_of, rank, first_row, left,
                            BLOCK_M, HIDDEN, ROW_BYTES, FP8, threads // WAVE,
                        )  # fmt: skip
                    else:
                        gemm2.multiply_unit(
                            staging, control, bases, record_of, w2, w2_scales, inner, rank, expert, first_row, left,
                            tickets.told(work.n_tile), BLOCK_M, HIDDEN, INTERMEDIATE, INNER_BYTES, FP8, streaming,
                        )  # fmt: skip
            tickets.finish_gemm2(work, control, bases, tiles, rank, info, NUM_RANKS)

    came = flags.wait(back, control, bases, heap, rank, FlagKind.ROWS, everyone, NUM_RANKS)
    if came == 1:
        fp8 = combine.owners_with(back, INFO_FP8, NUM_RANKS)
        combine.sum_tokens(
            control, heap, meta, fp8, num_groups, threads // WAVE, HIDDEN, META_WORDS, TOPK, NUM_EXPERTS
        )
        # A launch ends alike on all ranks: none ends well before all owners are done.
        if fx.block_idx.x == 0:
            came = flags.wait(ended, control, bases, heap, rank, FlagKind.RETURN, everyone, NUM_RANKS)
            if (came == 1) & (fx.thread_idx.x == 0):
                combine.record_end(control, fp8, combine.owners_with(ended, INFO_ERROR, NUM_RANKS))


@flyc.jit
def give_back_tile(
    control, bases, heap, record_of, rank, first_row, left, BLOCK_M, HIDDEN, ROW_BYTES, FP8, NUM_WAVES
):  # fmt: skip
    """The rows of one tile as they came, for identity experts: a wave takes 512 columns of one."""
    num_parts = (HIDDEN + identity.ELEMENTS - 1) // identity.ELEMENTS
    rows = heap + control_word(control, Word.ROWS_OFFSET)
    combine_offset = control_word(control, Word.COMBINE_OFFSET)
    count = (left < BLOCK_M).select(left + 1, fx.Int32(BLOCK_M))
    for unit in range(uniform(fx.thread_idx.x // WAVE), count * num_parts, fx.Int32(NUM_WAVES)):
        unit = fx.Int32(unit)
        record = record_of(first_row + unit // num_parts)
        identity.give_back(
            control, bases, rows, combine_offset, record, unit % num_parts, rank, HIDDEN, ROW_BYTES, FP8
        )


@flyc.jit
def compile_kernel(
    BLOCK_M: fx.Constexpr[int],
    HIDDEN: fx.Constexpr[int],
    INTERMEDIATE: fx.Constexpr[int],
    ROW_BYTES: fx.Constexpr[int],
    INNER_BYTES: fx.Constexpr[int],
    COUNTS_WORDS: fx.Constexpr[int],
    META_WORDS: fx.Constexpr[int],
    TOPK: fx.Constexpr[int],
    NUM_EXPERTS: fx.Constexpr[int],
    NUM_RANKS: fx.Constexpr[int],
    LIMIT_MILLI: fx.Constexpr[int],
    FP8: fx.Constexpr[int],
    IDENTITY: fx.Constexpr[int],
):
    z, one = fx.Int64(0), fx.Int32(1)
    large_m_kernel(
        z, z, z, z, z, z, z, z, z, z, z, z, z, one, one, one, one, BLOCK_M, HIDDEN, INTERMEDIATE, ROW_BYTES,
        INNER_BYTES, COUNTS_WORDS, META_WORDS, TOPK, NUM_EXPERTS, NUM_RANKS, LIMIT_MILLI, FP8, IDENTITY,
    ).launch(grid=(1, 1, 1), block=(tile.threads_of(BLOCK_M), 1, 1))  # fmt: skip
