"""The matrix loop of both GEMMs: BLOCK_M routed rows against 64 packed weight columns a wave.

Weights are the first matrix operand: they stream from memory straight into registers, 16 bytes a lane, one group of
512 along K ahead. Rows are the second: the waves stage them in LDS together. So a lane ends with consecutive columns
of one row of 16. K is summed in blocks of 128 in ascending order whatever the tile: a row's bits do not depend on it.
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import const_expr, gpu, range_constexpr, rocdl
from flydsl.expr.typing import Vector as Vec

from megamoe.backends.gfx950.kernels.lang import (
    WAVE,
    ballot,
    load_wide,
    opaque,
    popcount,
    uniform,
    wide,
    words,
)


def threads_of(block_m):
    """Workgroup of a tile: four waves, eight from 64 rows on, which share what is staged."""
    return (4 if block_m < 64 else 8) * WAVE


def waves_along_m(block_m):
    """Waves that share their columns: a wave multiplies at most 64 rows, for want of registers."""
    return 2 if block_m > 64 else 1


def waves_along_n(block_m):
    """Waves side by side, 64 packed columns each."""
    return threads_of(block_m) // WAVE // waves_along_m(block_m)


def ring_of(block_m, blocks):
    """K blocks of weights on their way to a wave: `blocks` where weights alone bound the speed, 2 in larger tiles."""
    return blocks if block_m < 64 else 2


COLUMNS = 64
"""Packed weight columns of a wave: four blocks of 16."""
GROUP = 512
"""Elements along K that are staged together: four matrix instructions of 128."""
_E4M3, _E2M1 = 0, 4


def find_expert(experts, m_tile, num_experts):
    """Local expert of an m-tile: the last one whose first tile is not above it. experts: [E] records of four words."""
    lane = fx.thread_idx.x % WAVE
    found = fx.Int32(0)
    for first in range_constexpr(0, num_experts, WAVE):
        known = lane + first < num_experts
        at = known.select(lane + first, fx.Int32(0))
        tile_base = fx.generic_load(words(experts) + (at * 4 + 2))
        found = found + popcount(ballot(known & (tile_base <= m_tile)))
    return uniform(found) - 1


def num_m_tiles(experts, num_experts, tile_shift):
    """M-tiles of all experts together."""
    last = fx.generic_load(wide(experts) + (num_experts - 1) * 4, count=4)
    return uniform(last[2] + ((last[0] + (1 << tile_shift) - 1) >> tile_shift))


def find_tile(experts, m_tile, num_experts, block_m):
    """(local expert, first routed row, index of the expert's last row from there on) of an m-tile."""
    expert = find_expert(experts, m_tile, num_experts)
    record = fx.generic_load(wide(experts) + expert * 4, count=4)
    count, row_base, tile_base = uniform(record[0]), uniform(record[1]), uniform(record[2])
    first = (m_tile - tile_base) * block_m
    return expert, row_base + first, count - first - 1


def load_rows(rows, offsets, k_group, columns):
    """This thread's 16-byte pieces of the tile's rows in a K group. columns: a Python number, what the group has of a
    row; past it: zero codes."""
    column = fx.thread_idx.x % 32 * 16
    inside = column < columns
    if const_expr(columns < GROUP):
        column = inside.select(column, fx.Int32(0))
    pieces = []
    for offset in offsets:
        piece = load_wide(rows, offset + column, k_group * GROUP)
        if const_expr(columns < GROUP):
            piece = Vec.from_elements([inside.select(piece[i], fx.Int32(0)) for i in range(4)], fx.Int32)
        pieces.append(piece)
    return pieces


def store_rows(lds_rows, pieces, stride):
    """Pieces to LDS: 512 bytes a row, 16-byte places swapped by row so that 8 rows meet all banks.

    stride: rows between a thread's pieces, a multiple of 8: one address serves all of them."""
    row = fx.thread_idx.x // 32
    at = lds_rows + (row * 128 + (fx.thread_idx.x % 32 ^ row % 8) * 4)
    for i in range_constexpr(len(pieces)):
        fx.generic_store(at + i * stride * 128, pieces[i])


def load_weights(weights, k_group, j, streaming):
    """One 16x128 block of each of the wave's four column blocks: the j-th along K from the first of a K group."""
    at = fx.thread_idx.x % WAVE * 16
    return [load_wide(weights, at + n * 1024, k_group * 16384 + j * 4096, streaming) for n in range(4)]


def load_weight_scales(scales, k_group, streaming):
    """Four words, one a column block; byte j of each is the scale of the group's j-th K block."""
    return load_wide(scales, fx.thread_idx.x % WAVE * 16, k_group * 1024, streaming)


def read_rows(lds_rows, j, m):
    """The second operand of 16 rows and one K block, from LDS. j, m: Python numbers."""
    lane = fx.thread_idx.x % WAVE
    row, place = lane % 16, lane // 16
    low, high = [
        fx.generic_load(lds_rows + (row * 128 + (start ^ row % 8) * 4) + (m * 2048 + j * 32), count=4)
        for start in (place, place + 4)
    ]
    return Vec.from_elements([low[i] for i in range(4)] + [high[i] for i in range(4)], fx.Int32)


def staged_rows(block_m):
    """The rows of a tile that this thread stages, in the order of its pieces."""
    stride = threads_of(block_m) // 32
    return [fx.thread_idx.x // 32 + stride * i for i in range(block_m // stride)]


def multiply_group(
    acc, lds_rows, lds_scales, ring, weight_scales, weights, k_group, num_blocks, num_left, streaming
):  # fmt: skip
    """acc [m][4] += the num_blocks K blocks of a group; returns (acc, ring).

    ring: operands of the blocks to come, block j at j % len(ring); a place is filled again once its block is done, as
    long as the columns have more blocks: num_left from this group's first on.
    Steps are kept apart: the scheduler would otherwise read the operands of all rows first and run out of registers. In
    large tiles they are read one step ahead of their use; in small ones other workgroups cover the wait instead.
    """
    num_m, ring = len(acc), list(ring)
    row_scales = read_row_scales(lds_scales, num_m)
    steps = [(j, m) for j in range(num_blocks) for m in range(num_m)]
    lookahead = num_m > 2
    x = read_rows(lds_rows, *steps[0]) if lookahead else None
    for at, (j, m) in enumerate(steps):
        following = read_rows(lds_rows, *steps[at + 1]) if lookahead and at + 1 < len(steps) else None
        x = x if lookahead else read_rows(lds_rows, j, m)
        acc[m] = [
            Vec(
                rocdl.mfma_scale_f32_16x16x128_f8f6f4(
                    Vec.make_type(4, fx.Float32),
                    [
                        ring[j % len(ring)][n],
                        x,
                        acc[m][n],
                        _E2M1,
                        _E4M3,
                        j,
                        weight_scales[n],
                        j,
                        row_scales[m],
                    ],
                ),
                (4,),
                fx.Float32,
            )
            for n in range(4)
        ]
        if m == num_m - 1 and j + len(ring) < num_left:
            # Behind the instructions that take the old operands, so that the new ones find the same registers free.
            rocdl.sched_barrier(0)
            ring[j % len(ring)] = load_weights(weights, k_group, j + len(ring), streaming)
        rocdl.sched_barrier(0)
        x = following
    return acc, ring


def read_row_scales(lds_scales, num_m):
    """One word a lane for every 16 rows: the scales of its K quarter in the group's four blocks."""
    lane = fx.thread_idx.x % WAVE
    at = lds_scales + (lane % 16 * 4 + lane // 16)
    return [fx.generic_load(at + m * 64) for m in range(num_m)]


@flyc.jit
def stage(lds, pieces, scales, BLOCK_M):
    """Put the next K group of the rows into LDS once every wave is done with the one before."""
    gpu.barrier()
    store_rows(lds.rows.ptr, pieces, threads_of(BLOCK_M) // 32)
    if fx.thread_idx.x < BLOCK_M:
        fx.generic_store(lds.scales.ptr + fx.thread_idx.x * 4, scales)
    gpu.barrier()


def load_row_scales(rows, sf_offset, k_group):
    """16 scales of one row, threads below BLOCK_M one row each (others repeat one)."""
    return load_wide(rows, sf_offset, k_group * 16)


@flyc.jit
def multiply(lds, rows, offsets, sf_offset, weights, weight_scales, K, BLOCK_M, RING, STREAMING):
    """[rows of a wave / 16][4] vectors of four Float32: the wave's rows of the tile times its 64 columns.

    rows: descriptor from which offsets (rows that this thread stages) and sf_offset (scales of row thread_idx) count.
    weights, weight_scales: descriptors of the wave's 64 columns, all of K. RING: K blocks of weights on their way.
    STREAMING: whether weights pass the caches by, as where one tile alone reads them.
    """
    wave_rows = BLOCK_M // waves_along_m(BLOCK_M)
    first_row = uniform(fx.thread_idx.x // WAVE // waves_along_n(BLOCK_M)) * wave_rows
    lds_rows, lds_scales = lds.rows.ptr + first_row * 128, lds.scales.ptr + first_row * 4
    num_blocks = (K + 127) // 128
    num_groups = (num_blocks + 3) // 4
    tail = K - GROUP * (num_groups - 1)
    first = fx.Int32(0)
    acc = [[Vec.filled(4, 0.0, fx.Float32) for _ in range(4)] for _ in range(wave_rows // 16)]
    pieces = load_rows(rows, offsets, first, min(K, GROUP))
    scales = load_row_scales(rows, sf_offset, first)
    ahead_scales = load_weight_scales(weight_scales, first, STREAMING)
    # Loads are waited for in order of issue: what the loop needs first comes first here too.
    rocdl.sched_barrier(0)
    ring = [load_weights(weights, first, j, STREAMING) for j in range(min(RING, num_blocks))]
    # Iterations whose next group is whole, and so has rows without missing columns and all blocks to fetch.
    num_whole = num_groups - (1 if tail == GROUP else 2)
    if const_expr(num_whole > 0):
        for k_group in range(fx.Int32(0), opaque(num_whole), fx.Int32(1)):
            k_group = fx.Int32(k_group)
            stage(lds, pieces, scales, BLOCK_M)
            pieces = load_rows(rows, offsets, k_group + 1, GROUP)
            scales = load_row_scales(rows, sf_offset, k_group + 1)
            now_scales = ahead_scales
            ahead_scales = load_weight_scales(weight_scales, k_group + 1, STREAMING)
            acc, ring = multiply_group(
                acc, lds_rows, lds_scales, ring, now_scales, weights, k_group, 4, 8, STREAMING
            )
    if const_expr(num_groups > 1 and tail < GROUP):
        k_group = fx.Int32(num_groups - 2)
        stage(lds, pieces, scales, BLOCK_M)
        pieces = load_rows(rows, offsets, k_group + 1, tail)
        scales = load_row_scales(rows, sf_offset, k_group + 1)
        now_scales = ahead_scales
        ahead_scales = load_weight_scales(weight_scales, k_group + 1, STREAMING)
        num_left = num_blocks - 4 * (num_groups - 2)
        acc, ring = multiply_group(
            acc, lds_rows, lds_scales, ring, now_scales, weights, k_group, 4, num_left, STREAMING
        )
    stage(lds, pieces, scales, BLOCK_M)
    k_group = fx.Int32(num_groups - 1)
    num_left = num_blocks - 4 * (num_groups - 1)
    acc, _ = multiply_group(
        acc, lds_rows, lds_scales, ring, ahead_scales, weights, k_group, num_left, num_left, STREAMING
    )
    return acc
