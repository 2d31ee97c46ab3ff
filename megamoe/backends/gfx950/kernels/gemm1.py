"""gemm1: received rows times W1, SwiGLU in fp32, straight to MXFP8 rows [intermediate codes, scales] in private memory.

Persistent: workgroups take units (m-tile, 128 intermediate columns) in turn. A wave's 64 packed columns are 32 gate and
the 32 up columns beside them: one MX block of the result, so the block's scale never leaves the wave.
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import range_constexpr, rocdl
from flydsl.expr.typing import T
from flydsl.expr.typing import Vector as Vec

from megamoe.backends.gfx950.kernels import tile
from megamoe.backends.gfx950.kernels.lang import (
    WAVE,
    absolute_bits,
    buffer,
    control_int,
    control_word,
    encode_four,
    larger,
    long,
    pointer,
    scale_of,
    sf_offset,
    uniform,
    words,
)  # fmt: skip
from megamoe.backends.gfx950.record import Word

_LOG2_E = 1.4426950408889634


def lds_of(block_m):
    """LDS of a workgroup: one K group of the tile's rows, and their scales."""

    @fx.struct
    class Lds:
        rows: fx.Array[fx.Int32, block_m * 128, 16]
        scales: fx.Array[fx.Int32, block_m * 4, 16]

    return Lds


def swiglu(gate, up, limit):
    """silu(min(gate, L)) * clamp(up, -L, L); limit: a Python number, 0 = no clamp."""
    if limit:
        bound = fx.Float32(limit)
        # A NaN fails every comparison and so passes through.
        gate = (gate > bound).select(bound, gate)
        up = (up > bound).select(bound, up)
        up = (up < -bound).select(-bound, up)
    exponential = fx.Float32(rocdl.exp2(T.f32, (gate * fx.Float32(-_LOG2_E)).ir_value()))
    return gate * fx.Float32(rocdl.rcp(T.f32, fx.Float32(1.0) + exponential)) * up


def num_n_tiles(intermediate, block_m):
    """Tiles of columns side by side."""
    num_waves = tile.waves_along_n(block_m)
    return (intermediate // 32 + num_waves - 1) // num_waves


@flyc.jit
def multiply_unit(
    lds, rows, payload_row, weights, weight_scales, inner, expert, first_row, left, n_tile,
    BLOCK_M, HIDDEN, INTERMEDIATE, ROW_BYTES, INNER_BYTES, LIMIT_MILLI, STREAMING=True,
):  # fmt: skip
    """One tile of an expert's rows, from routed row first_row on, times one tile of columns.

    rows: address of the payload; payload_row(i): where routed row i lies in it. Rows past `left`, the index of the
    expert's last in the tile, repeat it; what they give is not stored."""
    thread = fx.thread_idx.x
    lane = thread % WAVE
    wave = uniform(thread // WAVE)
    num_waves = tile.waves_along_n(BLOCK_M)
    wave_rows = BLOCK_M // tile.waves_along_m(BLOCK_M)
    num_blocks = (HIDDEN + 127) // 128
    num_k_groups = (num_blocks + 3) // 4
    num_columns = INTERMEDIATE // 32

    def payload_offset(row):
        inside = (row < left).select(row, left)
        return payload_row(first_row + inside) * ROW_BYTES

    offsets = [payload_offset(row) for row in tile.staged_rows(BLOCK_M)]
    sf_at = payload_offset(thread % BLOCK_M) + HIDDEN
    column = n_tile * num_waves + wave % num_waves
    inside = (column < num_columns).select(column, fx.Int32(num_columns - 1))
    at = expert * num_columns + inside
    acc = tile.multiply(
        lds, buffer(rows), offsets, sf_at,
        buffer(weights + long(at) * (num_blocks * 4096)),
        buffer(weight_scales + long(at) * (num_k_groups * 1024)), HIDDEN, BLOCK_M,
        tile.ring_of(BLOCK_M, 4), STREAMING,
    )  # fmt: skip
    for m in range_constexpr(wave_rows // 16):
        values = [
            swiglu(acc[m][n][i], acc[m][n + 2][i], LIMIT_MILLI / 1000)
            for n in range_constexpr(2)
            for i in range_constexpr(4)
        ]
        top = absolute_bits(values[0])
        for i in range_constexpr(1, 8):
            top = larger(top, absolute_bits(values[i]))
        for distance in (16, 32):
            top = larger(top, fx.shuffle_xor(top, distance, WAVE))
        byte, reciprocal, finite = scale_of(top)
        codes = [encode_four(values[4 * i : 4 * i + 4], reciprocal, finite) for i in range_constexpr(2)]
        row = wave // num_waves * wave_rows + m * 16 + lane % 16
        if (row <= left) & (column < num_columns):
            out = inner + long(first_row + row) * INNER_BYTES
            fx.generic_store(
                pointer(out + long(column * 32 + lane // 16 * 8), fx.Int32, 8),
                Vec.from_elements(codes, fx.Int32),
            )
            if lane < 16:
                fx.generic_store(
                    pointer(out + long(INTERMEDIATE + sf_offset(column)), fx.Uint8, 1), fx.Uint8(byte)
                )


@flyc.jit
def multiply_units(
    lds, control, heap, experts, row_table, weights, weight_scales, inner, num_groups, proceed,
    BLOCK_M, HIDDEN, INTERMEDIATE, NUM_EXPERTS, ROW_BYTES, INNER_BYTES, LIMIT_MILLI,
):  # fmt: skip
    """This workgroup's units, one in num_groups; none unless proceed is 1."""
    num_n = num_n_tiles(INTERMEDIATE, BLOCK_M)
    num_units = tile.num_m_tiles(experts, NUM_EXPERTS, BLOCK_M.bit_length() - 1) * num_n
    num_units = (proceed == 1).select(num_units, fx.Int32(0))
    rows = heap + control_word(control, Word.ROWS_OFFSET)
    for unit in range(fx.block_idx.x, num_units, num_groups):
        unit = fx.Int32(unit)
        expert, first_row, left = tile.find_tile(experts, unit // num_n, NUM_EXPERTS, BLOCK_M)
        multiply_unit(
            lds, rows, lambda i: fx.generic_load(words(row_table) + i * 4), weights, weight_scales, inner, expert,
            first_row, left, unit % num_n,
            BLOCK_M, HIDDEN, INTERMEDIATE, ROW_BYTES, INNER_BYTES, LIMIT_MILLI,
        )  # fmt: skip


@flyc.kernel
def gemm1_kernel(
    control: fx.Int64,
    heap: fx.Int64,
    experts: fx.Int64,
    row_table: fx.Int64,
    weights: fx.Int64,
    weight_scales: fx.Int64,
    inner: fx.Int64,
    num_groups: fx.Int32,
    BLOCK_M: fx.Constexpr[int],
    HIDDEN: fx.Constexpr[int],
    INTERMEDIATE: fx.Constexpr[int],
    NUM_EXPERTS: fx.Constexpr[int],
    ROW_BYTES: fx.Constexpr[int],
    INNER_BYTES: fx.Constexpr[int],
    LIMIT_MILLI: fx.Constexpr[int],
):
    """GEMM1 alone, on rows that are there: what a binding is checked with."""
    lds = fx.SharedAllocator().allocate(lds_of(BLOCK_M)).peek()
    proceed = (control_int(control, Word.FAILED) == 0).select(fx.Int32(1), fx.Int32(0))
    multiply_units(
        lds, control, heap, experts, row_table, weights, weight_scales, inner, num_groups, proceed,
        BLOCK_M, HIDDEN, INTERMEDIATE, NUM_EXPERTS, ROW_BYTES, INNER_BYTES, LIMIT_MILLI,
    )  # fmt: skip


@flyc.jit
def compile_kernel(
    BLOCK_M: fx.Constexpr[int],
    HIDDEN: fx.Constexpr[int],
    INTERMEDIATE: fx.Constexpr[int],
    NUM_EXPERTS: fx.Constexpr[int],
    ROW_BYTES: fx.Constexpr[int],
    INNER_BYTES: fx.Constexpr[int],
    LIMIT_MILLI: fx.Constexpr[int],
):
    z = fx.Int64(0)
    gemm1_kernel(
        z,
        z,
        z,
        z,
        z,
        z,
        z,
        fx.Int32(1),
        BLOCK_M,
        HIDDEN,
        INTERMEDIATE,
        NUM_EXPERTS,
        ROW_BYTES,
        INNER_BYTES,
        LIMIT_MILLI,
    ).launch(grid=(1, 1, 1), block=(tile.threads_of(BLOCK_M), 1, 1))
