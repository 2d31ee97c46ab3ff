"""dispatch_gemm1: dispatch and GEMM1 in one launch. Workgroups meet once between the two, when all rows are listed.

The grid must be co-resident: ranks wait for each other's rows, and workgroups for each other's lists.
"""

import flydsl.compiler as flyc
import flydsl.expr as fx

from megamoe.backends.gfx950.kernels import dispatch, flags, gemm1, index, tile
from megamoe.backends.gfx950.kernels.lang import WAVE


@flyc.kernel
def dispatch_gemm1_kernel(
    control: fx.Int64,
    bases: fx.Int64,
    heap: fx.Int64,
    rows: fx.Int64,
    meta: fx.Int64,
    token_slots: fx.Int64,
    sent_counts: fx.Int64,
    experts: fx.Int64,
    row_table: fx.Int64,
    weights: fx.Int64,
    weight_scales: fx.Int64,
    inner: fx.Int64,
    rank: fx.Int32,
    num_groups: fx.Int32,
    BLOCK_M: fx.Constexpr[int],
    COMPACT: fx.Constexpr[int],
    HIDDEN: fx.Constexpr[int],
    INTERMEDIATE: fx.Constexpr[int],
    ROW_BYTES: fx.Constexpr[int],
    INNER_BYTES: fx.Constexpr[int],
    META_WORDS: fx.Constexpr[int],
    TOPK: fx.Constexpr[int],
    NUM_EXPERTS: fx.Constexpr[int],
    NUM_RANKS: fx.Constexpr[int],
    LIMIT_MILLI: fx.Constexpr[int],
):
    threads = tile.threads_of(BLOCK_M)
    allocator = fx.SharedAllocator()
    lds = allocator.allocate(flags.FlagLds).peek()
    tables = allocator.allocate(index.lds_of(NUM_EXPERTS, threads // WAVE)).peek()
    staging = allocator.allocate(gemm1.lds_of(BLOCK_M)).peek()
    came = dispatch.exchange(
        lds, tables, control, bases, heap, rows, meta, token_slots, sent_counts, experts, row_table, rank,
        fx.Int32(BLOCK_M.bit_length() - 1), num_groups, COMPACT, ROW_BYTES, META_WORDS, TOPK, NUM_EXPERTS, NUM_RANKS,
        threads,
    )  # fmt: skip
    flags.meet(control, num_groups)
    gemm1.multiply_units(
        staging, control, heap, experts, row_table, weights, weight_scales, inner, num_groups, came,
        BLOCK_M, HIDDEN, INTERMEDIATE, NUM_EXPERTS, ROW_BYTES, INNER_BYTES, LIMIT_MILLI,
    )  # fmt: skip


@flyc.jit
def compile_kernel(
    BLOCK_M: fx.Constexpr[int],
    COMPACT: fx.Constexpr[int],
    HIDDEN: fx.Constexpr[int],
    INTERMEDIATE: fx.Constexpr[int],
    ROW_BYTES: fx.Constexpr[int],
    INNER_BYTES: fx.Constexpr[int],
    META_WORDS: fx.Constexpr[int],
    TOPK: fx.Constexpr[int],
    NUM_EXPERTS: fx.Constexpr[int],
    NUM_RANKS: fx.Constexpr[int],
    LIMIT_MILLI: fx.Constexpr[int],
):
    z, one = fx.Int64(0), fx.Int32(1)
    dispatch_gemm1_kernel(
        z, z, z, z, z, z, z, z, z, z, z, z, one, one, BLOCK_M, COMPACT, HIDDEN, INTERMEDIATE, ROW_BYTES, INNER_BYTES,
        META_WORDS, TOPK, NUM_EXPERTS, NUM_RANKS, LIMIT_MILLI,
    ).launch(grid=(1, 1, 1), block=(tile.threads_of(BLOCK_M), 1, 1))  # fmt: skip
