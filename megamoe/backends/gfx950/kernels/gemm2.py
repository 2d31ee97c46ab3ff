"""gemm2: intermediate rows times W2; each result row goes straight to its (token, slot) place at its source rank.

Persistent: workgroups take units (m-tile, 256 columns) in turn; the last one to finish posts the return flags. A lane
ends with 16 consecutive columns of a row: 16-byte stores, 128 consecutive bytes a row and wave.
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import const_expr, range_constexpr

from megamoe.backends.gfx950.kernels import flags, results, tile
from megamoe.backends.gfx950.kernels.lang import (
    WAVE,
    ballot,
    buffer,
    control_int,
    control_word,
    larger,
    long,
    pointer,
    popcount,
    uniform,
    words,
)
from megamoe.backends.gfx950.record import INFO_FP8, Word
from megamoe.layout import FlagKind


def lds_of(block_m):
    """LDS of a workgroup: one K group of the tile's rows, their scales, and what flags need."""

    @fx.struct
    class Lds:
        rows: fx.Array[fx.Int32, block_m * 128, 16]
        scales: fx.Array[fx.Int32, block_m * 4, 16]
        last: fx.Array[fx.Int32, 1, 4]

    return Lds


def num_n_tiles(hidden, block_m):
    """Tiles of columns side by side."""
    num_waves = tile.waves_along_n(block_m)
    return ((hidden + tile.COLUMNS - 1) // tile.COLUMNS + num_waves - 1) // num_waves


@flyc.jit
def multiply_unit(
    lds, control, bases, record_of, weights, weight_scales, inner, rank, expert, first_row, left, n_tile,
    BLOCK_M, HIDDEN, INTERMEDIATE, INNER_BYTES, FP8, STREAMING=True,
):  # fmt: skip
    """One tile of an expert's intermediate rows, from routed row first_row on, times one tile of columns, sent back.

    record_of(i): the record of routed row i (see index.py). Rows past `left`, the index of the expert's last in the
    tile, repeat it; what they give is not stored."""
    thread = fx.thread_idx.x
    lane = thread % WAVE
    wave = uniform(thread // WAVE)
    num_waves = tile.waves_along_n(BLOCK_M)
    wave_rows = BLOCK_M // tile.waves_along_m(BLOCK_M)
    num_blocks = (INTERMEDIATE + 127) // 128
    num_k_groups = (num_blocks + 3) // 4
    num_columns = (HIDDEN + tile.COLUMNS - 1) // tile.COLUMNS
    combine_offset = control_word(control, Word.COMBINE_OFFSET)

    def inner_offset(row):
        inside = (row < left).select(row, left)
        return inside * INNER_BYTES

    rows = inner + long(first_row) * INNER_BYTES
    offsets = [inner_offset(row) for row in tile.staged_rows(BLOCK_M)]
    sf_at = inner_offset(thread % BLOCK_M) + INTERMEDIATE
    group = n_tile * num_waves + wave % num_waves
    inside = (group < num_columns).select(group, fx.Int32(num_columns - 1))
    at = expert * num_columns + inside
    acc = tile.multiply(
        lds, buffer(rows), offsets, sf_at,
        buffer(weights + long(at) * (num_blocks * 4096)),
        buffer(weight_scales + long(at) * (num_k_groups * 1024)), INTERMEDIATE,
        BLOCK_M, tile.ring_of(BLOCK_M, 2), STREAMING,
    )  # fmt: skip
    column = group * tile.COLUMNS + lane // 16 * 16
    for m in range_constexpr(wave_rows // 16):
        row = wave // num_waves * wave_rows + m * 16 + lane % 16
        values = [acc[m][n][i] for n in range_constexpr(4) for i in range_constexpr(4)]
        place = (row < left).select(row, left)
        out, src, weight = results.destination(
            bases, combine_offset, record_of(first_row + place), 2 * HIDDEN
        )
        stored = (row <= left) & (column < HIDDEN)
        if const_expr(FP8):
            values, byte, reciprocal, finite = results.block_scale(
                values, weight, lambda top: larger(top, fx.shuffle_xor(top, 16, WAVE))
            )
            if stored:
                results.store_codes(out, column, values, reciprocal, finite)
                if lane // 16 % 2 == 0:
                    results.store_scale(out, HIDDEN, column, byte)
        else:
            if stored:
                results.store_bf16(out, column, values)
        away = popcount(ballot((lane < 16) & (row <= left) & (src != rank)))
        if (group == 0) & (lane == 0):
            fx.atomic_add(
                words(control) + 2 * int(Word.ROWS_RETURNED), away, syncscope=fx.rocdl.SyncScope.Agent
            )


@flyc.kernel
def gemm2_kernel(
    control: fx.Int64,
    bases: fx.Int64,
    experts: fx.Int64,
    row_table: fx.Int64,
    weights: fx.Int64,
    weight_scales: fx.Int64,
    inner: fx.Int64,
    rank: fx.Int32,
    num_groups: fx.Int32,
    BLOCK_M: fx.Constexpr[int],
    HIDDEN: fx.Constexpr[int],
    INTERMEDIATE: fx.Constexpr[int],
    NUM_EXPERTS: fx.Constexpr[int],
    NUM_RANKS: fx.Constexpr[int],
    INNER_BYTES: fx.Constexpr[int],
    FP8: fx.Constexpr[int],
):
    lds = fx.SharedAllocator().allocate(lds_of(BLOCK_M)).peek()
    num_n = num_n_tiles(HIDDEN, BLOCK_M)
    failed = control_int(control, Word.FAILED)
    num_units = tile.num_m_tiles(experts, NUM_EXPERTS, BLOCK_M.bit_length() - 1) * num_n
    num_units = (failed == 0).select(num_units, fx.Int32(0))

    def record_of(i):
        return fx.generic_load(pointer(row_table, fx.Int32, 16) + i * 4, count=4)

    for unit in range(fx.block_idx.x, num_units, num_groups):
        unit = fx.Int32(unit)
        expert, first_row, left = tile.find_tile(experts, unit // num_n, NUM_EXPERTS, BLOCK_M)
        multiply_unit(
            lds, control, bases, record_of, weights, weight_scales, inner, rank, expert, first_row, left, unit % num_n,
            BLOCK_M, HIDDEN, INTERMEDIATE, INNER_BYTES, FP8,
        )  # fmt: skip
    last = flags.arrive(lds, control, num_groups)
    if (last == 1) & (failed == 0):
        flags.post(control, bases, rank, FlagKind.RETURN, fx.Int32(INFO_FP8 if FP8 else 0), NUM_RANKS)


@flyc.jit
def compile_kernel(
    BLOCK_M: fx.Constexpr[int],
    HIDDEN: fx.Constexpr[int],
    INTERMEDIATE: fx.Constexpr[int],
    NUM_EXPERTS: fx.Constexpr[int],
    NUM_RANKS: fx.Constexpr[int],
    INNER_BYTES: fx.Constexpr[int],
    FP8: fx.Constexpr[int],
):
    z, one = fx.Int64(0), fx.Int32(1)
    gemm2_kernel(
        z,
        z,
        z,
        z,
        z,
        z,
        z,
        one,
        one,
        BLOCK_M,
        HIDDEN,
        INTERMEDIATE,
        NUM_EXPERTS,
        NUM_RANKS,
        INNER_BYTES,
        FP8,
    ).launch(grid=(1, 1, 1), block=(tile.threads_of(BLOCK_M), 1, 1))
