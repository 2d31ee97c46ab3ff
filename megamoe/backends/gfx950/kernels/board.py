"""board: which tiles of an owner can run, and who runs them (large_m).

One workgroup directs: it waits for all counts, lays the tiles out as compact does, and publishes them as the rows of
their sources arrive, in that order. The others take units by ticket: of GEMM1 a published tile times a tile of columns;
of GEMM2 a chunk of tiles of one expert that were published together, times one tile of columns whose weights then serve
all of them. A ticket is kept until its unit is ready, so that nothing is taken twice or left, and while GEMM1 waits
for rows GEMM2 goes on. A source whose tiles are all done is told so by its ROWS flag, everyone by RETURN at the end.

A place of the board holds a tile's word (expert << 16 | mask of sources << 8 | log2 of the tiles of a chunk); of the
published tiles the one that has this place in their order; units of GEMM1 done of the tile; and of the published chunks
the one that has this place: its first tile, and the mask of its tiles from there on.
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import gpu, range_constexpr, rocdl
from flydsl.expr.typing import Vector as Vec

from megamoe.backends.gfx950.kernels import flags
from megamoe.backends.gfx950.kernels.lang import (
    WAVE,
    ballot,
    control_int,
    control_word,
    lanes_below,
    long,
    pointer,
    popcount,
    sum_up_to_lane,
    uniform,
    wide,
    words,
)
from megamoe.backends.gfx950.kernels.lists import SEGMENT_WORDS
from megamoe.backends.gfx950.record import BOARD_BYTES, MAX_RANKS, Word
from megamoe.layout import FlagKind

NONE, GEMM1, GEMM2, END = 0, 1, 2, 3
"""Tasks."""
MAX_CHUNK = 8
"""Tiles of a chunk at most: of an expert with 16 tiles or more; with fewer 4, 2 or 1, so that chunks stay many."""
_AGENT = rocdl.SyncScope.Agent
_GROUP = rocdl.SyncScope.Workgroup
_ORDER = fx.AtomicOrdering
_COMPLETE = 1 << 31


def lds_of(num_experts, num_ranks):
    """LDS of a workgroup: what the director lays tiles out with, and a word for each value that a task has."""

    @fx.struct
    class Lds:
        counts: fx.Array[fx.Int32, num_experts * num_ranks, 4]
        before: fx.Array[fx.Int32, num_experts * num_ranks, 4]
        rows: fx.Array[fx.Int32, num_experts, 4]
        tile_bases: fx.Array[fx.Int32, num_experts + 1, 4]
        expected: fx.Array[fx.Int32, MAX_RANKS + 1, 4]
        tickets: fx.Array[fx.Int32, 2, 4]
        task: fx.Array[fx.Int32, 1, 4]
        first: fx.Array[fx.Int32, 1, 4]
        mask: fx.Array[fx.Int32, 1, 4]
        n_tile: fx.Array[fx.Int32, 1, 4]

    return Lds


_TILE, _PUBLISHED, _DONE, _CHUNK, _CHUNK_MASK = range(5)


def _at(board, place, word):
    """Pointer to a word of a place of the board."""
    return words(board) + (place * (BOARD_BYTES // 4) + word)


@flyc.jit
def clear(board, max_tiles, num_groups, THREADS):
    """Every workgroup its part of what counts up from 0. Seen by all once the counts of this rank have come."""
    first = fx.block_idx.x * THREADS + fx.thread_idx.x
    for at in range(first, max_tiles, num_groups * THREADS):
        fx.generic_store(_at(board, fx.Int32(at), _DONE), fx.Int32(0))


# ------------------------------------------------------------------------------------------------------ director


@flyc.jit
def direct(
    lds, counted, news, control, bases, heap, experts, segments, board, rank, info,
    BLOCK_M, NUM_2, COUNTS_WORDS, META_WORDS, NUM_EXPERTS, NUM_RANKS, THREADS,
):  # fmt: skip
    """One workgroup: from the counts of all sources to the last published tile. Sources without rows by the agreed
    counts are not waited for. Ends early when a source does not come: the control block then says so."""
    needed = control_int(control, Word.SOURCES) | (fx.Int32(1) << rank)
    came = flags.wait(counted, control, bases, heap, rank, FlagKind.COUNTS, needed, NUM_RANKS)
    if came == 1:
        num_tiles = lay_out(
            lds, control, bases, heap, experts, segments, board, rank, needed, info,
            BLOCK_M, NUM_2, COUNTS_WORDS, META_WORDS, NUM_EXPERTS, NUM_RANKS, THREADS,
        )  # fmt: skip
        arrived, num_published, num_chunks = fx.Int32(0), fx.Int32(0), fx.Int32(0)
        going = fx.Int32(1)
        if num_tiles == 0:
            announce(control, fx.Int32(0), fx.Int32(_COMPLETE))
            going = fx.Int32(0)
        while going == 1:
            more = flags.wait(
                news, control, bases, heap, rank, FlagKind.PAYLOAD, needed & ~arrived, NUM_RANKS, True
            )
            more = uniform(more)
            # Everyone has read the word before the next wait writes it.
            gpu.barrier()
            if more != 0:
                if fx.thread_idx.x < WAVE:
                    num_published, num_chunks = publish(
                        lds, control, board, num_tiles, arrived, arrived | more, num_published, num_chunks
                    )  # fmt: skip
            arrived = arrived | more
            going = ((more != 0) & (arrived != needed)).select(fx.Int32(1), fx.Int32(0))


@flyc.jit
def lay_out(
    lds, control, bases, heap, experts, segments, board, rank, sources, info,
    BLOCK_M, NUM_2, COUNTS_WORDS, META_WORDS, NUM_EXPERTS, NUM_RANKS, THREADS,
):  # fmt: skip
    """Records of experts, their segments, tiles, and what is expected of each source. Returns the number of tiles."""
    thread = fx.thread_idx.x
    lane = thread % WAVE
    wave = uniform(thread // WAVE)
    shift = BLOCK_M.bit_length() - 1
    counts = words(heap + control_word(control, Word.COUNTS_OFFSET))
    part = control_int(control, Word.CAPACITY) * (META_WORDS // 2)
    if thread <= MAX_RANKS:
        fx.generic_store(lds.expected.ptr + thread, fx.Int32(0))
    for src in range(wave, fx.Int32(NUM_RANKS), fx.Int32(THREADS // WAVE)):
        src = fx.Int32(src)
        total = fx.Int32(0)
        for first in range_constexpr(0, NUM_EXPERTS, WAVE):
            known = lane + first < NUM_EXPERTS
            expert = known.select(lane + first, fx.Int32(0))
            count = fx.generic_load(counts + (src * COUNTS_WORDS + expert))
            count = (known & (((sources >> src) & 1) == 1)).select(count, fx.Int32(0))
            end = total + sum_up_to_lane(count)
            if known:
                fx.generic_store(lds.counts.ptr + (src * NUM_EXPERTS + expert), count)
                fx.generic_store(lds.before.ptr + (src * NUM_EXPERTS + expert), end - count)
            total = fx.shuffle_idx(end, WAVE - 1, WAVE)
    gpu.barrier()
    for expert in range(thread, fx.Int32(NUM_EXPERTS), fx.Int32(THREADS)):
        expert = fx.Int32(expert)
        starts, shifts = [], []
        total = fx.Int32(0)
        for src in range_constexpr(NUM_RANKS):
            at = src * NUM_EXPERTS + expert
            starts.append(total)
            shifts.append(fx.generic_load(lds.before.ptr + at) + part * src - total)
            total = total + fx.generic_load(lds.counts.ptr + at)
        fx.generic_store(lds.rows.ptr + expert, total)
        rest = [fx.Int32(0)] * (MAX_RANKS - NUM_RANKS)
        segment = starts + rest + shifts + rest
        for i in range_constexpr(SEGMENT_WORDS // 4):
            at = wide(segments) + (expert * SEGMENT_WORDS + 4 * i)
            fx.generic_store(at, Vec.from_elements(segment[4 * i : 4 * i + 4], fx.Int32))
    gpu.barrier()
    if thread < WAVE:
        row_base, tile_base = fx.Int32(0), fx.Int32(0)
        for first in range_constexpr(0, NUM_EXPERTS, WAVE):
            known = lane + first < NUM_EXPERTS
            expert = known.select(lane + first, fx.Int32(0))
            count = known.select(fx.generic_load(lds.rows.ptr + expert), fx.Int32(0))
            num_tiles = (count + (BLOCK_M - 1)) >> shift
            rows, tiles = row_base + sum_up_to_lane(count), tile_base + sum_up_to_lane(num_tiles)
            if known:
                record = [count, rows - count, tiles - num_tiles, fx.Int32(0)]
                fx.generic_store(wide(experts) + expert * 4, Vec.from_elements(record, fx.Int32))
                fx.generic_store(lds.tile_bases.ptr + expert, tiles - num_tiles)
            row_base = fx.shuffle_idx(rows, WAVE - 1, WAVE)
            tile_base = fx.shuffle_idx(tiles, WAVE - 1, WAVE)
        if lane == 0:
            fx.generic_store(lds.tile_bases.ptr + NUM_EXPERTS, tile_base)
    gpu.barrier()
    for expert in range(wave, fx.Int32(NUM_EXPERTS), fx.Int32(THREADS // WAVE)):
        expert = fx.Int32(expert)
        _tiles_of(lds, board, expert, lane, BLOCK_M, NUM_EXPERTS, NUM_RANKS)
    gpu.barrier()
    num_tiles = uniform(fx.generic_load(lds.tile_bases.ptr + NUM_EXPERTS))
    if thread <= NUM_RANKS:
        expected = fx.generic_load(lds.expected.ptr + thread)
        expected = (thread == NUM_RANKS).select(num_tiles, expected) * NUM_2
        fx.generic_store(words(control) + (2 * int(Word.EXPECTED) + 2 * thread), expected)
        if expected == 0:
            _tell(control, bases, rank, thread, info, NUM_RANKS)
    rocdl.s_waitcnt(0)
    gpu.barrier()
    return num_tiles


@flyc.jit
def _tiles_of(lds, board, expert, lane, BLOCK_M, NUM_EXPERTS, NUM_RANKS):
    """One wave writes the words of an expert's tiles and counts them for their sources."""
    count = fx.generic_load(lds.rows.ptr + expert)
    base = fx.generic_load(lds.tile_bases.ptr + expert)
    num_tiles = fx.generic_load(lds.tile_bases.ptr + expert + 1) - base
    chunk = fx.Int32(0)
    for power in range_constexpr(1, MAX_CHUNK.bit_length()):
        chunk = (num_tiles >= 2 << power).select(fx.Int32(power), chunk)
    for tile in range(lane, num_tiles, fx.Int32(WAVE)):
        tile = fx.Int32(tile)
        low = tile * BLOCK_M
        high = low + BLOCK_M
        start, mask = fx.Int32(0), fx.Int32(0)
        for src in range_constexpr(NUM_RANKS):
            rows = fx.generic_load(lds.counts.ptr + (src * NUM_EXPERTS + expert))
            inside = (rows > 0) & (start < high) & (start + rows > low)
            mask = mask | inside.select(fx.Int32(1 << src), fx.Int32(0))
            if inside:
                fx.atomic_add(lds.expected.ptr + src, fx.Int32(1), syncscope=_GROUP)
            start = start + rows
        fx.generic_store(_at(board, base + tile, _TILE), (expert << 16) | (mask << 8) | chunk)


@flyc.jit
def publish(lds, control, board, num_tiles, before, arrived, num_published, num_chunks):
    """One wave publishes the tiles that are complete with the sources in `arrived` and were not with those in `before`.
    Returns (published tiles, chunks) from the start of the launch."""
    lane = fx.thread_idx.x % WAVE
    for base in range(fx.Int32(0), num_tiles, fx.Int32(WAVE)):
        base = fx.Int32(base)
        inside = base + lane < num_tiles
        tile = inside.select(base + lane, num_tiles - 1)
        word = fx.generic_load(_at(board, tile, _TILE))
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
            tiles = fx.Int32(mask >> long(first - base)) & ((fx.Int32(1) << (end - first)) - 1)
            leads = complete & ((tiles & ((fx.Int32(1) << (tile - first)) - 1)) == 0)
            leading = ballot(leads)
            if complete:
                fx.generic_store(_at(board, num_published + lanes_below(mask), _PUBLISHED), tile)
            if leads:
                at = num_chunks + lanes_below(leading)
                fx.generic_store(_at(board, at, _CHUNK), first)
                fx.generic_store(_at(board, at, _CHUNK_MASK), tiles)
            num_published = num_published + popcount(mask)
            num_chunks = num_chunks + popcount(leading)
            last = (num_published == num_tiles).select(fx.Int32(_COMPLETE), fx.Int32(0))
            if lane == 0:
                announce(control, num_published, num_chunks | last)
    return num_published, num_chunks


def announce(control, num_published, num_chunks):
    """Let the others see what this wave has published."""
    value = (long(num_chunks) << 32) | long(num_published)
    ready = pointer(control, fx.Int64, 8) + int(Word.READY)
    fx.generic_store(ready, value, memory_order=_ORDER.Release, volatile=True)


# ------------------------------------------------------------------------------------------------------ the others


@flyc.jit
def draw(lds, control):
    """A workgroup's first tickets."""
    if fx.thread_idx.x == 0:
        for i in range_constexpr(2):
            ticket = _draw(control, (int(Word.TICKETS_1), int(Word.TICKETS_2))[i])
            fx.generic_store(lds.tickets.ptr + i, ticket)


def _draw(control, word):
    return fx.atomic_add(words(control) + 2 * word, fx.Int32(1), syncscope=_AGENT)


def _look(word):
    return fx.generic_load(word, memory_order=_ORDER.Monotonic, syncscope=_AGENT, volatile=True)


@flyc.jit
def take(lds, control, board, NUM_1, NUM_2):
    """Wait for this workgroup's next unit: returns its task; `told` reads the words first (tile), mask (of tiles from
    there) and n_tile (of columns) until the next call.

    NUM_1, NUM_2: tiles of columns. GEMM2 goes first, so that rows return and memory is read again while it is warm.
    """
    gpu.barrier()
    if fx.thread_idx.x < WAVE:
        lane = fx.thread_idx.x
        ready = pointer(control, fx.Int64, 8) + int(Word.READY)
        failed = pointer(control, fx.Int64, 8) + int(Word.FAILED)
        ticket_1 = uniform(fx.generic_load(lds.tickets.ptr))
        ticket_2 = uniform(fx.generic_load(lds.tickets.ptr + 1))
        at_1, at_2 = ticket_1 // NUM_1, ticket_2 // NUM_2
        first, mask = fx.Int32(0), fx.Int32(0)
        task = fx.Int32(NONE)
        while task == NONE:
            stop = uniform(fx.Int32(_look(failed)))
            seen = _look(ready)
            published, chunks = uniform(fx.Int32(seen)), uniform(fx.Int32(seen >> 32))
            complete, chunks = chunks < 0, chunks & 0x7FFFFFFF
            if (mask == 0) & (at_2 < chunks):
                fx.memory_fence(ordering=_ORDER.Acquire)
                first = uniform(fx.generic_load(_at(board, at_2, _CHUNK)))
                mask = uniform(fx.generic_load(_at(board, at_2, _CHUNK_MASK)))
            lacking = long(0)
            if mask != 0:
                wanted = (lane < MAX_CHUNK) & (((mask >> (lane % MAX_CHUNK)) & 1) == 1)
                done = _look(_at(board, wanted.select(first + lane, first), _DONE))
                lacking = ballot(wanted & (done != NUM_1))
            over = complete & (at_1 >= published) & (at_2 >= chunks)
            task = over.select(fx.Int32(END), task)
            task = (at_1 < published).select(fx.Int32(GEMM1), task)
            task = ((mask != 0) & (lacking == 0)).select(fx.Int32(GEMM2), task)
            task = (stop != 0).select(fx.Int32(END), task)
            if task == NONE:
                rocdl.s_sleep(2)
        fx.memory_fence(ordering=_ORDER.Acquire)
        n_tile = ticket_2 % NUM_2
        if task == GEMM1:
            first, mask = fx.generic_load(_at(board, at_1, _PUBLISHED)), fx.Int32(1)
            n_tile = ticket_1 % NUM_1
        if lane == 0:
            fx.generic_store(lds.task.ptr, task)
            fx.generic_store(lds.first.ptr, first)
            fx.generic_store(lds.mask.ptr, mask)
            fx.generic_store(lds.n_tile.ptr, n_tile)
            if task == GEMM1:
                fx.generic_store(lds.tickets.ptr, _draw(control, int(Word.TICKETS_1)))
            if task == GEMM2:
                fx.generic_store(lds.tickets.ptr + 1, _draw(control, int(Word.TICKETS_2)))
    gpu.barrier()
    return told(lds.task)


def told(word):
    """A word of LDS that one wave wrote for all."""
    return uniform(fx.generic_load(word.ptr))


@flyc.jit
def finish_gemm1(lds, board):
    """A unit of GEMM1 is done: count it, with what it wrote, for those who take the tile's units of GEMM2."""
    rocdl.s_waitcnt(0)
    gpu.barrier()
    if fx.thread_idx.x == 0:
        at = _at(board, told(lds.first), _DONE)
        fx.atomic_add(at, fx.Int32(1), syncscope=_AGENT, ordering=_ORDER.Release)


@flyc.jit
def finish_gemm2(lds, control, bases, board, rank, info, NUM_RANKS):
    """A unit of GEMM2 is done: count its tiles for their sources, and tell those that now have all of their rows."""
    rocdl.s_waitcnt(0)
    gpu.barrier()
    if fx.thread_idx.x <= NUM_RANKS:
        lane = fx.thread_idx.x
        first, mask = told(lds.first), told(lds.mask)
        tiles = fx.Int32(0)
        for i in range_constexpr(MAX_CHUNK):
            inside = (mask >> i) & 1
            word = fx.generic_load(_at(board, first + i * inside, _TILE))
            concerned = (lane == NUM_RANKS).select(fx.Int32(1), (word >> (8 + lane)) & 1)
            tiles = tiles + inside * concerned
        if tiles > 0:
            fx.memory_fence(ordering=_ORDER.Release)
            counter = words(control) + (2 * int(Word.FINISHED) + 2 * lane)
            before = fx.atomic_add(counter, tiles, syncscope=_AGENT, ordering=_ORDER.AcqRel)
            expected = fx.generic_load(words(control) + (2 * int(Word.EXPECTED) + 2 * lane))
            if before + tiles == expected:
                _tell(control, bases, rank, lane, info, NUM_RANKS)


@flyc.jit
def _tell(control, bases, rank, lane, info, NUM_RANKS):
    """Lane i tells source i that its rows are back, the lane after the last rank all of them that this one is done."""
    if lane < NUM_RANKS:
        flags.post_to(control, bases, rank, FlagKind.ROWS, info, lane)
    else:
        for dst_rank in range_constexpr(NUM_RANKS):
            flags.post_to(control, bases, rank, FlagKind.RETURN, info, fx.Int32(dst_rank))


__all__ = [
    "END",
    "GEMM1",
    "GEMM2",
    "NONE",
    "clear",
    "direct",
    "draw",
    "finish_gemm1",
    "finish_gemm2",
    "lds_of",
    "take",
    "told",
]
