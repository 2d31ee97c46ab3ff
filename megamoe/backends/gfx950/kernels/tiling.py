"""tiling: the tiles of an owner, from how many rows each source brings to each expert (large_m). As compact has them.

Written by one workgroup: records of experts and segments (see index.py and lists.py), and on the board a word a tile:
expert << 16 | mask of the sources whose rows it holds << 8 | log2 of the tiles of a chunk.
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import gpu, range_constexpr, rocdl
from flydsl.expr.typing import Vector as Vec

from megamoe.backends.gfx950.kernels.lang import (
    WAVE,
    control_int,
    control_word,
    sum_up_to_lane,
    uniform,
    wide,
    words,
)  # fmt: skip
from megamoe.backends.gfx950.kernels.lists import SEGMENT_WORDS
from megamoe.backends.gfx950.record import BOARD_BYTES, MAX_CHUNK, MAX_RANKS, Word

TILE, PUBLISHED, DONE, IN_CHUNK, CHUNK, CHUNK_MASK = range(6)
"""Words of a place of the board; board.py says what they are."""
_GROUP = rocdl.SyncScope.Workgroup


def lds_of(num_experts, num_ranks):
    """LDS of the director: rows of each source and expert, and of its experts before; rows and first tile of each
    expert (one more: the number of tiles); tiles with rows of each source."""

    @fx.struct
    class Lds:
        counts: fx.Array[fx.Int32, num_experts * num_ranks, 4]
        before: fx.Array[fx.Int32, num_experts * num_ranks, 4]
        rows: fx.Array[fx.Int32, num_experts, 4]
        tile_bases: fx.Array[fx.Int32, num_experts + 1, 4]
        tiles_of: fx.Array[fx.Int32, MAX_RANKS, 4]

    return Lds


def place(tiles, i, word):
    """Pointer to a word of a place of the board."""
    return words(tiles) + (i * (BOARD_BYTES // 4) + word)


@flyc.jit
def lay_out(
    lds, control, heap, experts, segments, tiles, sources, BLOCK_M, COUNTS_WORDS, META_WORDS, NUM_EXPERTS, NUM_RANKS,
    THREADS,
):  # fmt: skip
    """All of it; returns the number of tiles. sources: mask of the ranks whose counts came; others bring nothing."""
    wave = uniform(fx.thread_idx.x // WAVE)
    num_waves = fx.Int32(THREADS // WAVE)
    counts = words(heap + control_word(control, Word.COUNTS_OFFSET))
    part = control_int(control, Word.CAPACITY) * (META_WORDS // 2)
    if fx.thread_idx.x < MAX_RANKS:
        fx.generic_store(lds.tiles_of.ptr + fx.thread_idx.x, fx.Int32(0))
    for src in range(wave, fx.Int32(NUM_RANKS), num_waves):
        src = fx.Int32(src)
        come = ((sources >> src) & 1) == 1
        gather_counts(lds, counts + src * COUNTS_WORDS, src * NUM_EXPERTS, come, NUM_EXPERTS)
    gpu.barrier()
    for expert in range(fx.thread_idx.x, fx.Int32(NUM_EXPERTS), fx.Int32(THREADS)):
        write_segment(lds, segments, fx.Int32(expert), part, NUM_EXPERTS, NUM_RANKS)
    gpu.barrier()
    if wave == 0:
        write_records(lds, experts, BLOCK_M, NUM_EXPERTS)
    gpu.barrier()
    for expert in range(wave, fx.Int32(NUM_EXPERTS), num_waves):
        write_tiles(lds, tiles, fx.Int32(expert), BLOCK_M, NUM_EXPERTS, NUM_RANKS)
    # Each wave waits for its own stores: wave 0 releases all of them.
    rocdl.s_waitcnt(0)
    gpu.barrier()
    return uniform(fx.generic_load(lds.tile_bases.ptr + NUM_EXPERTS))


@flyc.jit
def gather_counts(lds, counts, at, come, NUM_EXPERTS):
    """One wave: a source's rows of each expert, and of all experts before it, to LDS from index `at` on."""
    lane = fx.thread_idx.x % WAVE
    total = fx.Int32(0)
    for first in range_constexpr(0, NUM_EXPERTS, WAVE):
        known = lane + first < NUM_EXPERTS
        expert = known.select(lane + first, fx.Int32(0))
        rows = fx.Int32(0)
        if known & come:
            rows = fx.generic_load(counts + expert)
        end = total + sum_up_to_lane(rows)
        if known:
            fx.generic_store(lds.counts.ptr + (at + expert), rows)
            fx.generic_store(lds.before.ptr + (at + expert), end - rows)
        total = fx.shuffle_idx(end, WAVE - 1, WAVE)


@flyc.jit
def write_segment(lds, segments, expert, part, NUM_EXPERTS, NUM_RANKS):
    """One thread: where each source's rows begin among the expert's, and in pairs what takes a row to its pair.

    part: pairs that a source has room for."""
    starts, shifts, total = [], [], fx.Int32(0)
    for src in range_constexpr(NUM_RANKS):
        at = src * NUM_EXPERTS + expert
        starts.append(total)
        shifts.append(fx.generic_load(lds.before.ptr + at) + part * src - total)
        total = total + fx.generic_load(lds.counts.ptr + at)
    fx.generic_store(lds.rows.ptr + expert, total)
    rest = [fx.Int32(0)] * (MAX_RANKS - NUM_RANKS)
    segment = starts + rest + shifts + rest
    for i in range_constexpr(SEGMENT_WORDS // 4):
        target = wide(segments) + (expert * SEGMENT_WORDS + 4 * i)
        fx.generic_store(target, Vec.from_elements(segment[4 * i : 4 * i + 4], fx.Int32))


@flyc.jit
def write_records(lds, experts, BLOCK_M, NUM_EXPERTS):
    """One wave: the records of experts, and the first tile of each."""
    lane = fx.thread_idx.x % WAVE
    row_base, tile_base = fx.Int32(0), fx.Int32(0)
    for first in range_constexpr(0, NUM_EXPERTS, WAVE):
        known = lane + first < NUM_EXPERTS
        expert = known.select(lane + first, fx.Int32(0))
        rows = known.select(fx.generic_load(lds.rows.ptr + expert), fx.Int32(0))
        num_tiles = (rows + (BLOCK_M - 1)) >> (BLOCK_M.bit_length() - 1)
        end, tile_end = row_base + sum_up_to_lane(rows), tile_base + sum_up_to_lane(num_tiles)
        if known:
            record = [rows, end - rows, tile_end - num_tiles, fx.Int32(0)]
            fx.generic_store(wide(experts) + expert * 4, Vec.from_elements(record, fx.Int32))
            fx.generic_store(lds.tile_bases.ptr + expert, tile_end - num_tiles)
        row_base = fx.shuffle_idx(end, WAVE - 1, WAVE)
        tile_base = fx.shuffle_idx(tile_end, WAVE - 1, WAVE)
    if lane == 0:
        fx.generic_store(lds.tile_bases.ptr + NUM_EXPERTS, tile_base)


@flyc.jit
def write_tiles(lds, tiles, expert, BLOCK_M, NUM_EXPERTS, NUM_RANKS):
    """One wave: the words of an expert's tiles, each counted for its sources."""
    base = fx.generic_load(lds.tile_bases.ptr + expert)
    num_tiles = fx.generic_load(lds.tile_bases.ptr + expert + 1) - base
    chunk = fx.Int32(0)
    for power in range_constexpr(1, MAX_CHUNK.bit_length()):
        chunk = (num_tiles >= 2 << power).select(fx.Int32(power), chunk)
    for tile in range(fx.thread_idx.x % WAVE, num_tiles, fx.Int32(WAVE)):
        low = fx.Int32(tile) * BLOCK_M
        start, mask = fx.Int32(0), fx.Int32(0)
        for src in range_constexpr(NUM_RANKS):
            rows = fx.generic_load(lds.counts.ptr + (src * NUM_EXPERTS + expert))
            inside = (rows > 0) & (start < low + BLOCK_M) & (start + rows > low)
            mask = mask | inside.select(fx.Int32(1 << src), fx.Int32(0))
            if inside:
                fx.atomic_add(lds.tiles_of.ptr + src, fx.Int32(1), syncscope=_GROUP)
            start = start + rows
        word = (expert << 16) | (mask << 8) | chunk
        fx.generic_store(place(tiles, base + fx.Int32(tile), TILE), word)
        fx.generic_store(place(tiles, base + fx.Int32(tile), IN_CHUNK), fx.Int32(0))
