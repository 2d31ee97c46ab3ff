"""board: the tiles that an owner has, and which of them can run (large_m). One workgroup, the director, writes it.

It waits for the counts of all sources, lays the tiles out as compact does (tiling.py), and publishes them as the rows
of their sources arrive: to GEMM1 each tile at once; to GEMM2 in chunks of neighbours of one expert, whole ones as long
as there is other work, else what there is. A source whose tiles are all done is told so by its ROWS flag, and everyone
by RETURN at the end. So a late source holds up only the tiles that its rows belong to.

A place of the board holds a tile's word (see tiling.py); of the tiles published to GEMM1 the one that has this place in
their order; units of GEMM1 done of the tile; 1 once the tile is in a chunk; and of the chunks the one that has this
place: its first tile, and the mask of its tiles from there on.
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import gpu, range_constexpr, rocdl

from megamoe.backends.gfx950.kernels import flags, tiling
from megamoe.backends.gfx950.kernels.lang import (
    WAVE,
    ballot,
    control_int,
    lanes_below,
    larger,
    long,
    pointer,
    popcount,
    uniform,
    words,
)  # fmt: skip
from megamoe.backends.gfx950.kernels.tiling import CHUNK, CHUNK_MASK, DONE, IN_CHUNK, PUBLISHED, TILE, place
from megamoe.backends.gfx950.record import Word
from megamoe.layout import FlagKind

_AGENT = rocdl.SyncScope.Agent
COMPLETE = 1 << 31
"""In the upper half of Word.READY: all tiles are published, and in chunks."""


@flyc.jit
def clear(tiles, max_tiles, num_groups, THREADS):
    """Every workgroup its part of what counts up from 0. Seen by all once the counts of this rank have come."""
    first = fx.block_idx.x * THREADS + fx.thread_idx.x
    for at in range(first, max_tiles, num_groups * THREADS):
        fx.generic_store(place(tiles, fx.Int32(at), DONE), fx.Int32(0))


@flyc.jit
def direct(
    lds, counted, news, control, bases, heap, experts, segments, tiles, rank, info,
    num_groups, BLOCK_M, NUM_1, NUM_2, COUNTS_WORDS, META_WORDS, NUM_EXPERTS, NUM_RANKS, THREADS,
):  # fmt: skip
    """One workgroup: from the counts of all sources to the last published tile. Ranks without rows by the agreed counts
    are not waited for. Ends early when a source does not come: the control block then says so.

    info: bits for the flags that say what is done; NUM_1, NUM_2: units of a tile in both GEMMs."""
    needed = control_int(control, Word.SOURCES) | (fx.Int32(1) << rank)
    came = flags.wait(counted, control, bases, heap, rank, FlagKind.COUNTS, needed, NUM_RANKS)
    if came == 1:
        num_tiles = tiling.lay_out(
            lds, control, heap, experts, segments, tiles, needed,
            BLOCK_M, COUNTS_WORDS, META_WORDS, NUM_EXPERTS, NUM_RANKS, THREADS,
        )  # fmt: skip
        expect(lds, control, bases, rank, num_tiles, info, NUM_2, NUM_RANKS)
        # Payload flags of sources without rows here are not looked at: this rank may be done before they come, and then
        # those ranks may post the ones of a later launch.
        bringing = fx.Int32(0)
        for src in range_constexpr(NUM_RANKS):
            some = fx.generic_load(lds.tiles_of.ptr + src) > 0
            bringing = bringing | some.select(fx.Int32(1 << src), fx.Int32(0))
        bringing = uniform(bringing)
        arrived, num_published, num_chunks, num_chunked = [fx.Int32(0) for _ in range(4)]
        going = (bringing != 0).select(fx.Int32(1), fx.Int32(0))
        while going == 1:

            def starving(published=num_published, chunked=num_chunked):
                """Tiles wait for their neighbours, and half of the workgroups for units of GEMM1."""
                drawn = fx.generic_load(
                    words(control) + 2 * int(Word.TICKETS_1),
                    memory_order=fx.AtomicOrdering.Monotonic, syncscope=_AGENT, volatile=True,
                )  # fmt: skip
                return (published > chunked) & (drawn - published * NUM_1 >= num_groups // 2)

            more = flags.wait(
                news, control, bases, heap, rank, FlagKind.PAYLOAD, bringing & ~arrived, NUM_RANKS, starving
            )
            more = uniform(more)
            # Everyone has read the word before the next wait writes it.
            gpu.barrier()
            before = arrived
            arrived = (more > 0).select(arrived | more, arrived)
            if (more >= 0) & (fx.thread_idx.x < WAVE):
                num_published = publish_tiles(
                    control, tiles, num_tiles, before, arrived, num_published, num_chunks
                )
                num_chunks, num_chunked = publish_chunks(
                    lds, control, tiles, num_tiles, arrived, more == 0, num_published, num_chunks, num_chunked
                )
            going = ((more >= 0) & (arrived != bringing)).select(fx.Int32(1), fx.Int32(0))


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
def publish_tiles(control, tiles, num_tiles, before, arrived, num_published, num_chunks):
    """One wave publishes the tiles that are complete with the sources in `arrived` and were not with those in `before`.
    Returns how many are published from the start of the launch."""
    lane = fx.thread_idx.x % WAVE
    for base in range(fx.Int32(0), num_tiles, fx.Int32(WAVE)):
        tile = fx.Int32(base) + lane
        sources = sources_of(tiles, tile, num_tiles)
        complete = (tile < num_tiles) & ((sources & ~arrived) == 0) & ((sources & ~before) != 0)
        mask = ballot(complete)
        if mask != 0:
            if complete:
                fx.generic_store(place(tiles, num_published + lanes_below(mask), PUBLISHED), tile)
            num_published = num_published + popcount(mask)
            if lane == 0:
                announce(control, num_published, num_chunks)
    return num_published


def sources_of(tiles, tile, num_tiles):
    """Mask of the sources whose rows a tile holds; of the last one for what is past it."""
    word = fx.generic_load(place(tiles, (tile < num_tiles).select(tile, num_tiles - 1), TILE))
    return (word >> 8) & 0xFF


@flyc.jit
def publish_chunks(
    lds, control, tiles, num_tiles, arrived, all_of_them, num_published, num_chunks, num_chunked
):
    """One wave publishes complete tiles in chunks: where all tiles of a chunk are complete, or as they are.

    Returns (chunks, tiles in them) from the start of the launch."""
    lane = fx.thread_idx.x % WAVE
    for base in range(fx.Int32(0), num_tiles, fx.Int32(WAVE)):
        base = fx.Int32(base)
        inside = base + lane < num_tiles
        tile = inside.select(base + lane, num_tiles - 1)
        complete = inside & ((sources_of(tiles, tile, num_tiles) & ~arrived) == 0)
        fresh = complete & (fx.generic_load(place(tiles, tile, IN_CHUNK)) == 0)
        # A chunk: the tiles of one expert among 1 << size neighbours from a multiple of it on, so none is cut here.
        word = fx.generic_load(place(tiles, tile, TILE))
        size, expert = word & 0xFF, word >> 16
        first = larger((tile >> size) << size, fx.generic_load(lds.tile_bases.ptr + expert))
        end = ((tile >> size) + 1) << size
        end_of_expert = fx.generic_load(lds.tile_bases.ptr + expert + 1)
        end = (end < end_of_expert).select(end, end_of_expert)
        every = (fx.Int32(1) << (end - first)) - 1
        whole = (fx.Int32(ballot(complete) >> long(first - base)) & every) == every
        chosen = fresh & (whole | all_of_them)
        mask = ballot(chosen)
        if mask != 0:
            members = fx.Int32(mask >> long(first - base)) & every
            leads = chosen & ((members & ((fx.Int32(1) << (tile - first)) - 1)) == 0)
            leading = ballot(leads)
            if chosen:
                fx.generic_store(place(tiles, tile, IN_CHUNK), fx.Int32(1))
            if leads:
                at = num_chunks + lanes_below(leading)
                fx.generic_store(place(tiles, at, CHUNK), first)
                fx.generic_store(place(tiles, at, CHUNK_MASK), members)
            num_chunks = num_chunks + popcount(leading)
            num_chunked = num_chunked + popcount(mask)
            last = (num_chunked == num_tiles).select(fx.Int32(COMPLETE), fx.Int32(0))
            if lane == 0:
                announce(control, num_published, num_chunks | last)
    return num_chunks, num_chunked


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
