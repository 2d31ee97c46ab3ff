"""board: the tiles that an owner has, and which of them can run (large_m). One workgroup, the director, writes it.

It waits for the counts of all sources, lays the tiles out as compact does (tiling.py), and publishes them as the rows
of their sources arrive, in that order. A source whose tiles are all done is told so by its ROWS flag, and everyone by
RETURN at the end: so a late source holds up only the tiles that its rows belong to.

A place of the board holds a tile's word (expert << 16 | mask of sources << 8 | log2 of the tiles of a chunk); of the
published tiles the one that has this place in their order; units of GEMM1 done of the tile; and of the published chunks
the one that has this place: its first tile, and the mask of its tiles from there on. A chunk: tiles of one expert that
were published together.
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import gpu, range_constexpr

from megamoe.backends.gfx950.kernels import flags, tiling
from megamoe.backends.gfx950.kernels.lang import (
    WAVE,
    ballot,
    control_int,
    lanes_below,
    long,
    pointer,
    popcount,
    uniform,
    words,
)  # fmt: skip
from megamoe.backends.gfx950.kernels.tiling import CHUNK, CHUNK_MASK, DONE, PUBLISHED, TILE, place
from megamoe.backends.gfx950.record import Word
from megamoe.layout import FlagKind

COMPLETE = 1 << 31
"""In the upper half of Word.READY: all tiles are published."""


@flyc.jit
def clear(tiles, max_tiles, num_groups, THREADS):
    """Every workgroup its part of what counts up from 0. Seen by all once the counts of this rank have come."""
    first = fx.block_idx.x * THREADS + fx.thread_idx.x
    for at in range(first, max_tiles, num_groups * THREADS):
        fx.generic_store(place(tiles, fx.Int32(at), DONE), fx.Int32(0))


@flyc.jit
def direct(
    lds, counted, news, control, bases, heap, experts, segments, tiles, rank, info,
    BLOCK_M, NUM_2, COUNTS_WORDS, META_WORDS, NUM_EXPERTS, NUM_RANKS, THREADS,
):  # fmt: skip
    """One workgroup: from the counts of all sources to the last published tile. Sources without rows by the agreed
    counts are not waited for. Ends early when a source does not come: the control block then says so.

    info: bits for the flags that say what is done; NUM_2: units of GEMM2 of a tile."""
    needed = control_int(control, Word.SOURCES) | (fx.Int32(1) << rank)
    came = flags.wait(counted, control, bases, heap, rank, FlagKind.COUNTS, needed, NUM_RANKS)
    if came == 1:
        num_tiles = tiling.lay_out(
            lds, control, heap, experts, segments, tiles, needed,
            BLOCK_M, COUNTS_WORDS, META_WORDS, NUM_EXPERTS, NUM_RANKS, THREADS,
        )  # fmt: skip
        expect(lds, control, bases, rank, num_tiles, info, NUM_2, NUM_RANKS)
        arrived, num_published, num_chunks = fx.Int32(0), fx.Int32(0), fx.Int32(0)
        going = fx.Int32(1)
        while going == 1:
            more = uniform(
                flags.wait(
                    news, control, bases, heap, rank, FlagKind.PAYLOAD, needed & ~arrived, NUM_RANKS, True
                )
            )
            # Everyone has read the word before the next wait writes it.
            gpu.barrier()
            if more != 0:
                if fx.thread_idx.x < WAVE:
                    num_published, num_chunks = publish(
                        lds, control, tiles, num_tiles, arrived, arrived | more, num_published, num_chunks
                    )
            arrived = arrived | more
            going = ((more != 0) & (arrived != needed)).select(fx.Int32(1), fx.Int32(0))


@flyc.jit
def expect(lds, control, bases, rank, num_tiles, info, NUM_2, NUM_RANKS):
    """How many units of GEMM2 make the rows of each source, and of all, complete; those that need none are told now."""
    lane = fx.thread_idx.x
    if lane <= NUM_RANKS:
        source = (lane < NUM_RANKS).select(lane, fx.Int32(0))
        expected = (lane < NUM_RANKS).select(fx.generic_load(lds.tiles_of.ptr + source), num_tiles) * NUM_2
        fx.generic_store(words(control) + (2 * int(Word.EXPECTED) + 2 * lane), expected)
        if expected == 0:
            tell(control, bases, rank, lane, info, NUM_RANKS)
    if (num_tiles == 0) & (lane == 0):
        announce(control, fx.Int32(0), fx.Int32(COMPLETE))


@flyc.jit
def publish(lds, control, tiles, num_tiles, before, arrived, num_published, num_chunks):
    """One wave publishes the tiles that are complete with the sources in `arrived` and were not with those in `before`.
    Returns (published tiles, chunks) from the start of the launch."""
    lane = fx.thread_idx.x % WAVE
    for base in range(fx.Int32(0), num_tiles, fx.Int32(WAVE)):
        base = fx.Int32(base)
        inside = base + lane < num_tiles
        tile = inside.select(base + lane, num_tiles - 1)
        word = fx.generic_load(place(tiles, tile, TILE))
        sources = (word >> 8) & 0xFF
        complete = inside & ((sources & ~arrived) == 0) & ((sources & ~before) != 0)
        mask = ballot(complete)
        if mask != 0:
            # A chunk: the tiles of one expert among 1 << size neighbours from a multiple of it on, so none is cut here.
            size, expert = word & 0xFF, word >> 16
            first_of_expert = fx.generic_load(lds.tile_bases.ptr + expert)
            end_of_expert = fx.generic_load(lds.tile_bases.ptr + expert + 1)
            aligned = (tile >> size) << size
            first = (aligned > first_of_expert).select(aligned, first_of_expert)
            end = aligned + (fx.Int32(1) << size)
            end = (end < end_of_expert).select(end, end_of_expert)
            members = fx.Int32(mask >> long(first - base)) & ((fx.Int32(1) << (end - first)) - 1)
            leads = complete & ((members & ((fx.Int32(1) << (tile - first)) - 1)) == 0)
            leading = ballot(leads)
            if complete:
                fx.generic_store(place(tiles, num_published + lanes_below(mask), PUBLISHED), tile)
            if leads:
                at = num_chunks + lanes_below(leading)
                fx.generic_store(place(tiles, at, CHUNK), first)
                fx.generic_store(place(tiles, at, CHUNK_MASK), members)
            num_published = num_published + popcount(mask)
            num_chunks = num_chunks + popcount(leading)
            last = (num_published == num_tiles).select(fx.Int32(COMPLETE), fx.Int32(0))
            if lane == 0:
                announce(control, num_published, num_chunks | last)
    return num_published, num_chunks


def announce(control, num_published, num_chunks):
    """Let the others see what this wave has published."""
    value = (long(num_chunks) << 32) | long(num_published)
    ready = pointer(control, fx.Int64, 8) + int(Word.READY)
    fx.generic_store(ready, value, memory_order=fx.AtomicOrdering.Release, volatile=True)


@flyc.jit
def tell(control, bases, rank, lane, info, NUM_RANKS):
    """Lane i tells source i that its rows are back, the lane after the last rank all of them that this one is done."""
    if lane < NUM_RANKS:
        flags.post_to(control, bases, rank, FlagKind.ROWS, info, lane)
    else:
        for dst_rank in range_constexpr(NUM_RANKS):
            flags.post_to(control, bases, rank, FlagKind.RETURN, info, fx.Int32(dst_rank))
