"""The matrix loop of both GEMMs: BLOCK_M routed rows against 64 packed weight columns a wave.

Weights are the first matrix operand: they stream from memory straight into registers, 16 bytes a lane, one group of
512 along K ahead. Rows are the second: four waves stage them in LDS together. So a lane ends with consecutive columns
of one row of 16. K is summed in blocks of 128 in ascending order whatever the tile: a row's bits do not depend on it.
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import const_expr, gpu, range_constexpr, rocdl
from flydsl.expr.typing import Vector as Vec

from megamoe.backends.gfx950.kernels.lang import WAVE, ballot, long, popcount, uniform, wide, words

NUM_WAVES = 4
THREADS = NUM_WAVES * WAVE
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


def load_rows(rows, offsets, k_group, K):
    """This thread's 16-byte pieces of the tile's rows in one K group. Past the end of a row: zero codes."""
    column = k_group * GROUP + fx.thread_idx.x % 32 * 16
    inside = column < K
    if const_expr(K % GROUP != 0):
        column = inside.select(column, fx.Int32(0))
    pieces = []
    for offset in offsets:
        piece = fx.generic_load(wide(rows + long(offset + column)), count=4)
        if const_expr(K % GROUP != 0):
            piece = Vec.from_elements([inside.select(piece[i], fx.Int32(0)) for i in range(4)], fx.Int32)
        pieces.append(piece)
    return pieces


def store_rows(lds_rows, pieces):
    """Pieces to LDS: 512 bytes a row, 16-byte places swapped by row so that 16 rows meet all banks."""
    place = fx.thread_idx.x % 32
    for i in range_constexpr(len(pieces)):
        row = fx.thread_idx.x // 32 + 8 * i
        fx.generic_store(lds_rows + (row * 128 + (place ^ (row % 16)) * 4), pieces[i])


def load_weights(weights, block):
    """One 16x128 block of each of the wave's four column blocks. block: Int32 index along K from the wave's first."""
    lane = fx.thread_idx.x % WAVE
    return [
        fx.generic_load(wide(weights) + ((block * 4 + n) * 256 + lane * 4), count=4, nontemporal=True)
        for n in range(4)
    ]


def load_weight_scales(scales, k_group):
    """Four words, one a column block; byte j of each is the scale of the group's j-th K block."""
    lane = fx.thread_idx.x % WAVE
    return fx.generic_load(wide(scales) + (k_group * 256 + lane * 4), count=4, nontemporal=True)


def multiply_block(acc, lds_rows, row_scales, weights, weight_scales, j, num_m):
    """acc [num_m][4] += one K block of 128. j: its place in the group, a Python number."""
    lane = fx.thread_idx.x % WAVE
    place = j * 8 + lane // 16
    out = []
    for m in range(num_m):
        row = m * 16 + lane % 16
        at = lds_rows + row * 128
        low = fx.generic_load(at + (place ^ (row % 16)) * 4, count=4)
        high = fx.generic_load(at + ((place + 4) ^ (row % 16)) * 4, count=4)
        x = Vec.from_elements([low[i] for i in range(4)] + [high[i] for i in range(4)], fx.Int32)
        line = []
        for n in range(4):
            result = rocdl.mfma_scale_f32_16x16x128_f8f6f4(
                Vec.make_type(4, fx.Float32),
                [weights[n], x, acc[m][n], _E2M1, _E4M3, j, weight_scales[n], j, row_scales[m]],
            )
            line.append(Vec(result, (4,), fx.Float32))
        out.append(line)
    return out


def read_row_scales(lds_scales, num_m):
    """One word a lane for every 16 rows: the scales of its K quarter in the group's four blocks."""
    lane = fx.thread_idx.x % WAVE
    return [fx.generic_load(lds_scales + ((m * 16 + lane % 16) * 4 + lane // 16)) for m in range(num_m)]


def stage(lds, pieces, scales, block_m):
    """Put the next K group of the rows into LDS once every wave is done with the one before."""
    gpu.barrier()
    store_rows(lds.rows.ptr, pieces)
    if fx.thread_idx.x < block_m:
        fx.generic_store(lds.scales.ptr + fx.thread_idx.x * 4, scales)
    gpu.barrier()


stage = flyc.jit(stage)


def load_row_scales(rows, sf_offset, k_group):
    """16 scales of one row, threads below BLOCK_M one row each (others repeat one)."""
    return fx.generic_load(wide(rows + long(sf_offset) + long(k_group * 16)), count=4)


@flyc.jit
def multiply(lds, rows, offsets, sf_offset, weights, weight_scales, K, BLOCK_M):
    """[BLOCK_M / 16][4] vectors of four Float32: the tile's rows times the wave's 64 columns.

    rows: address (Int64) that offsets (this thread's rows, every eighth of the tile) and sf_offset (scales of row
    thread_idx) count from. weights, weight_scales: addresses of the wave's 64 columns, all of K.
    """
    num_m = BLOCK_M // 16
    num_blocks = (K + 127) // 128
    num_groups = (num_blocks + 3) // 4
    last = num_blocks - 4 * (num_groups - 1)
    acc = [[Vec.filled(4, 0.0, fx.Float32) for _ in range(4)] for _ in range(num_m)]
    first = fx.Int32(0)
    pieces = load_rows(rows, offsets, first, K)
    scales = load_row_scales(rows, sf_offset, first)
    ahead = [load_weights(weights, fx.Int32(j)) for j in range(4 if num_groups > 1 else last)]
    ahead_scales = load_weight_scales(weight_scales, first)
    # Iterations that fetch a whole group ahead: all but the last, and but the one before a shorter last one.
    num_whole = num_groups - 1 if last == 4 else num_groups - 2
    if const_expr(num_whole > 0):
        for k_group in range(fx.Int32(0), fx.Int32(num_whole), fx.Int32(1)):
            following = fx.Int32(k_group) + 1
            stage(lds, pieces, scales, BLOCK_M)
            pieces = load_rows(rows, offsets, following, K)
            scales = load_row_scales(rows, sf_offset, following)
            row_scales = read_row_scales(lds.scales.ptr, num_m)
            now_scales = ahead_scales
            ahead_scales = load_weight_scales(weight_scales, following)
            for j in range_constexpr(4):
                acc = multiply_block(acc, lds.rows.ptr, row_scales, ahead[j], now_scales, j, num_m)
                fresh = load_weights(weights, following * 4 + j)
                ahead = [fresh if i == j else ahead[i] for i in range(4)]
    if const_expr(num_groups > 1 and last < 4):
        following = fx.Int32(num_groups - 1)
        stage(lds, pieces, scales, BLOCK_M)
        pieces = load_rows(rows, offsets, following, K)
        scales = load_row_scales(rows, sf_offset, following)
        row_scales = read_row_scales(lds.scales.ptr, num_m)
        now_scales = ahead_scales
        ahead_scales = load_weight_scales(weight_scales, following)
        for j in range_constexpr(4):
            acc = multiply_block(acc, lds.rows.ptr, row_scales, ahead[j], now_scales, j, num_m)
            if const_expr(j < last):
                fresh = load_weights(weights, following * 4 + j)
                ahead = [fresh if i == j else ahead[i] for i in range(4)]
    stage(lds, pieces, scales, BLOCK_M)
    row_scales = read_row_scales(lds.scales.ptr, num_m)
    for j in range_constexpr(last):
        acc = multiply_block(acc, lds.rows.ptr, row_scales, ahead[j], ahead_scales, j, num_m)
    return acc
