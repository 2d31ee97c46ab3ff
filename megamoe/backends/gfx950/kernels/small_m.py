"""small_m: a whole sub-step in one launch, for few rows: quantize, dispatch, GEMM1, GEMM2 and combine.

All workgroups go through the stages together. Ranks wait for each other only by flags: an owner for the sources that
have rows, a source for its owners' results. Inside a rank workgroups wait for words (ready.py): for the lists of all
experts, and, before a tile of GEMM2, for the units of GEMM1 that made its rows. A workgroup makes all that others may
wait for before it waits itself, so any grid that the device holds at once comes to its end.

An owner with many rows, or with many of one expert, is heavy: weights are read by several tiles, so they go through the
caches, and where the format is auto its result rows are FP8. Others stream weights past the caches and send bf16. The
return flag says which, and combine reads each owner's rows as they are.
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import const_expr, range_constexpr

from megamoe.backends.gfx950.kernels import (
    combine,
    dispatch,
    flags,
    gemm1,
    gemm2,
    identity,
    index,
    quantize_dispatch,
    ready,
    split,
    tile,
)
from megamoe.backends.gfx950.kernels.lang import WAVE, control_int, control_word, uniform, wide, words
from megamoe.backends.gfx950.record import AUTO, INFO_ERROR, INFO_FP8, Word
from megamoe.layout import FlagKind


@flyc.jit
def list_rows(
    lds, ready_lds, tables, control, bases, heap, experts, row_table, listed, rank, num_groups,
    BLOCK_M, META_WORDS, TOPK, NUM_EXPERTS, NUM_RANKS, THREADS,
):  # fmt: skip
    """Wait for the sources, list the rows of this workgroup's experts and wait for all others' lists. Returns 1, or 0
    if a source did not come."""
    num_listers = (num_groups < NUM_EXPERTS).select(num_groups, fx.Int32(NUM_EXPERTS))
    shift = BLOCK_M.bit_length() - 1
    now = ready.generation(control)
    if fx.block_idx.x < num_listers:
        needed = dispatch.needed_sources(control, False, NUM_RANKS)
        came = flags.wait(lds, control, bases, heap, rank, FlagKind.PAYLOAD, needed, NUM_RANKS)
        if came == 1:
            ends = dispatch.rows_of_sources(lds, needed, False, NUM_RANKS)
            beside = heap + control_word(control, Word.META_OFFSET)
            for expert in range(fx.block_idx.x, fx.Int32(NUM_EXPERTS), num_groups):
                index.index_expert(
                    tables, beside, experts, row_table, fx.Int32(expert), rank * NUM_EXPERTS, ends,
                    control_int(control, Word.CAPACITY), shift, NUM_EXPERTS, TOPK, META_WORDS, THREADS,
                )  # fmt: skip
        ready.mark(listed, fx.block_idx.x, now)
    return ready.wait(ready_lds, control, listed, fx.Int32(0), num_listers, now)


@flyc.jit
def multiply(
    lds, ready_lds, control, bases, heap, experts, row_table, ready_tiles, w13, w13_scales, w2, w2_scales, inner, rank,
    num_groups, proceed,
    BLOCK_M, HIDDEN, INTERMEDIATE, ROW_BYTES, INNER_BYTES, NUM_EXPERTS, LIMIT_MILLI, FP8, STREAMING,
):  # fmt: skip
    """This workgroup's units of both GEMMs; none unless proceed is 1."""
    now = ready.generation(control)
    num_1, num_2 = gemm1.num_n_tiles(INTERMEDIATE, BLOCK_M), gemm2.num_n_tiles(HIDDEN, BLOCK_M)
    num_tiles = tile.num_m_tiles(experts, NUM_EXPERTS, BLOCK_M.bit_length() - 1)
    num_tiles = (proceed == 1).select(num_tiles, fx.Int32(0))
    rows = heap + control_word(control, Word.ROWS_OFFSET)

    def payload_row(i):
        return fx.generic_load(words(row_table) + i * 4)

    def record_of(i):
        return fx.generic_load(wide(row_table) + i * 4, count=4)

    first, end, step = split.share(num_tiles * num_1, num_groups)
    for unit in range(first, end, step):
        expert, first_row, left, m_tile, n_tile = split.find_unit(
            experts, fx.Int32(unit), num_1, NUM_EXPERTS, BLOCK_M
        )
        gemm1.multiply_unit(
            lds, rows, payload_row, w13, w13_scales, inner, expert, first_row, left, n_tile,
            BLOCK_M, HIDDEN, INTERMEDIATE, ROW_BYTES, INNER_BYTES, LIMIT_MILLI, STREAMING,
        )  # fmt: skip
        ready.mark(ready_tiles, m_tile * num_1 + n_tile, now)
    first, end, step = split.share(num_tiles * num_2, num_groups)
    for unit in range(first, end, step):
        expert, first_row, left, m_tile, n_tile = split.find_unit(
            experts, fx.Int32(unit), num_2, NUM_EXPERTS, BLOCK_M
        )
        if ready.wait(ready_lds, control, ready_tiles, m_tile * num_1, fx.Int32(num_1), now) == 1:
            gemm2.multiply_unit(
                lds, control, bases, record_of, w2, w2_scales, inner, rank, expert, first_row, left, n_tile,
                BLOCK_M, HIDDEN, INTERMEDIATE, INNER_BYTES, FP8, STREAMING,
            )  # fmt: skip


@flyc.jit
def give_back(
    control, bases, heap, experts, row_table, rank, num_groups, proceed, HIDDEN, ROW_BYTES, NUM_EXPERTS, FP8, THREADS
):  # fmt: skip
    """Identity experts: this workgroup's parts of routed rows; none unless proceed is 1."""
    num_waves = THREADS // WAVE
    wave = uniform(fx.block_idx.x * num_waves + fx.thread_idx.x // WAVE)
    num_parts = (HIDDEN + identity.ELEMENTS - 1) // identity.ELEMENTS
    last = fx.generic_load(wide(experts) + (NUM_EXPERTS - 1) * 4, count=4)
    num_units = (proceed == 1).select(uniform(last[0] + last[1]) * num_parts, fx.Int32(0))
    rows = heap + control_word(control, Word.ROWS_OFFSET)
    combine_offset = control_word(control, Word.COMBINE_OFFSET)
    for unit in range(wave, num_units, num_groups * num_waves):
        unit = fx.Int32(unit)
        record = fx.generic_load(wide(row_table) + unit // num_parts * 4, count=4)
        identity.give_back(
            control, bases, rows, combine_offset, record, unit % num_parts, rank, HIDDEN, ROW_BYTES, FP8
        )


@flyc.jit
def sum_rows(
    lds, control, bases, heap, meta, rank, num_groups, HIDDEN, META_WORDS, TOPK, NUM_EXPERTS, NUM_RANKS, THREADS
):  # fmt: skip
    """Wait for all owners' results and sum this workgroup's tokens."""
    came = flags.wait(
        lds, control, bases, heap, rank, FlagKind.RETURN, fx.Int32((1 << NUM_RANKS) - 1), NUM_RANKS
    )
    if came == 1:
        fp8 = combine.owners_with(lds, INFO_FP8, NUM_RANKS)
        if (fx.block_idx.x == 0) & (fx.thread_idx.x == 0):
            combine.record_end(control, fp8, combine.owners_with(lds, INFO_ERROR, NUM_RANKS))
        combine.sum_tokens(
            control, heap, meta, fp8, num_groups, THREADS // WAVE, HIDDEN, META_WORDS, TOPK, NUM_EXPERTS
        )


@flyc.kernel
def small_m_kernel(
    control: fx.Int64,
    bases: fx.Int64,
    heap: fx.Int64,
    meta: fx.Int64,
    experts: fx.Int64,
    row_table: fx.Int64,
    listed: fx.Int64,
    ready_tiles: fx.Int64,
    w13: fx.Int64,
    w13_scales: fx.Int64,
    w2: fx.Int64,
    w2_scales: fx.Int64,
    inner: fx.Int64,
    rank: fx.Int32,
    num_groups: fx.Int32,
    BLOCK_M: fx.Constexpr[int],
    HIDDEN: fx.Constexpr[int],
    INTERMEDIATE: fx.Constexpr[int],
    ROW_BYTES: fx.Constexpr[int],
    INNER_BYTES: fx.Constexpr[int],
    META_WORDS: fx.Constexpr[int],
    TOPK: fx.Constexpr[int],
    NUM_EXPERTS: fx.Constexpr[int],
    NUM_RANKS: fx.Constexpr[int],
    LIMIT_MILLI: fx.Constexpr[int],
    FORMAT: fx.Constexpr[int],
    IDENTITY: fx.Constexpr[int],
):
    """listed: a readiness word for each workgroup that lists; ready_tiles: for each unit of GEMM1. FORMAT: of result
    rows: 0 bf16, 1 FP8, AUTO as the rank is heavy or not. IDENTITY: experts give rows back, no weights are read."""
    threads = tile.threads_of(BLOCK_M)
    allocator = fx.SharedAllocator()
    lds = allocator.allocate(flags.FlagLds).peek()
    ready_lds = allocator.allocate(ready.ReadyLds).peek()
    tables = allocator.allocate(index.lds_of(NUM_EXPERTS, threads // WAVE)).peek()
    staging = allocator.allocate(gemm1.lds_of(BLOCK_M)).peek()
    quantize_dispatch.send(
        control, bases, rank, meta, num_groups, HIDDEN, ROW_BYTES, META_WORDS, TOPK, NUM_EXPERTS, NUM_RANKS, threads
    )  # fmt: skip
    dispatch.announce(lds, control, bases, rank, None, num_groups, False, NUM_RANKS)
    proceed = list_rows(
        lds, ready_lds, tables, control, bases, heap, experts, row_table, listed, rank, num_groups,
        BLOCK_M, META_WORDS, TOPK, NUM_EXPERTS, NUM_RANKS, threads,
    )  # fmt: skip
    heavy = fx.Int32(0)
    if proceed == 1:
        heavy = split.is_heavy(control, experts, NUM_EXPERTS)
    for one in range_constexpr(2):
        fp8 = one if FORMAT == AUTO else FORMAT
        mine = (heavy == one).select(proceed, fx.Int32(0))
        if mine == 1:
            if const_expr(IDENTITY):
                give_back(
                    control, bases, heap, experts, row_table, rank, num_groups, mine,
                    HIDDEN, ROW_BYTES, NUM_EXPERTS, fp8, threads,
                )  # fmt: skip
            else:
                multiply(
                    staging, ready_lds, control, bases, heap, experts, row_table, ready_tiles, w13, w13_scales, w2,
                    w2_scales, inner, rank, num_groups, mine, BLOCK_M, HIDDEN, INTERMEDIATE, ROW_BYTES, INNER_BYTES,
                    NUM_EXPERTS, LIMIT_MILLI, fp8, one == 0,
                )  # fmt: skip
    last = flags.arrive(lds, control, num_groups, int(Word.MULTIPLIED))
    if (last == 1) & (flags.has_failed(control) == 0):
        is_fp8 = heavy == 1 if FORMAT == AUTO else fx.Int32(FORMAT) == 1
        info = is_fp8.select(fx.Int32(INFO_FP8), fx.Int32(0))
        flags.post(control, bases, rank, FlagKind.RETURN, info, NUM_RANKS)
    sum_rows(
        lds, control, bases, heap, meta, rank, num_groups, HIDDEN, META_WORDS, TOPK, NUM_EXPERTS, NUM_RANKS, threads
    )  # fmt: skip


@flyc.jit
def compile_kernel(
    BLOCK_M: fx.Constexpr[int],
    HIDDEN: fx.Constexpr[int],
    INTERMEDIATE: fx.Constexpr[int],
    ROW_BYTES: fx.Constexpr[int],
    INNER_BYTES: fx.Constexpr[int],
    META_WORDS: fx.Constexpr[int],
    TOPK: fx.Constexpr[int],
    NUM_EXPERTS: fx.Constexpr[int],
    NUM_RANKS: fx.Constexpr[int],
    LIMIT_MILLI: fx.Constexpr[int],
    FORMAT: fx.Constexpr[int],
    IDENTITY: fx.Constexpr[int],
):
    z, one = fx.Int64(0), fx.Int32(1)
    small_m_kernel(
        z, z, z, z, z, z, z, z, z, z, z, z, z, one, one, BLOCK_M, HIDDEN, INTERMEDIATE, ROW_BYTES, INNER_BYTES,
        META_WORDS, TOPK, NUM_EXPERTS, NUM_RANKS, LIMIT_MILLI, FORMAT, IDENTITY,
    ).launch(grid=(1, 1, 1), block=(tile.threads_of(BLOCK_M), 1, 1))  # fmt: skip
