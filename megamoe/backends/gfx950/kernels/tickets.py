"""tickets: how the workgroups of large_m share the units of both GEMMs.

A unit of GEMM1 is a published tile times a tile of columns; one of GEMM2 a published chunk times a tile of columns,
whose weights then serve all of its tiles. A workgroup holds one ticket of each kind, in the order of publication, until
its unit is ready: nothing is taken twice or left, and while GEMM1 waits for rows GEMM2 goes on. Every value that a
workgroup is told has an LDS word of its own, outside the staged tiles.
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import gpu, range_constexpr, rocdl

from megamoe.backends.gfx950.kernels import board
from megamoe.backends.gfx950.kernels.lang import WAVE, ballot, long, pointer, uniform, words
from megamoe.backends.gfx950.kernels.tiling import CHUNK, CHUNK_MASK, DONE, PUBLISHED, TILE, place
from megamoe.backends.gfx950.record import MAX_CHUNK, Word

NONE, GEMM1, GEMM2, END = range(4)
"""Tasks."""
_AGENT = rocdl.SyncScope.Agent
_ORDER = fx.AtomicOrdering


@fx.struct
class Lds:
    """One word for each value that a workgroup is told, and its two tickets."""

    tickets: fx.Array[fx.Int32, 2, 4]
    task: fx.Array[fx.Int32, 1, 4]
    first: fx.Array[fx.Int32, 1, 4]
    mask: fx.Array[fx.Int32, 1, 4]
    n_tile: fx.Array[fx.Int32, 1, 4]


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
def take(lds, control, tiles, NUM_1, NUM_2):
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
            # Also before the first look: 64 cycles of a unit's many thousands.
            rocdl.s_sleep(1)
            stop = uniform(fx.Int32(_look(failed)))
            seen = _look(ready)
            published, chunks = uniform(fx.Int32(seen)), uniform(fx.Int32(seen >> 32))
            complete, chunks = chunks < 0, chunks & 0x7FFFFFFF
            if (mask == 0) & (at_2 < chunks):
                fx.memory_fence(ordering=_ORDER.Acquire)
                first = uniform(fx.generic_load(place(tiles, at_2, CHUNK)))
                mask = uniform(fx.generic_load(place(tiles, at_2, CHUNK_MASK)))
            lacking = long(0)
            if mask != 0:
                wanted = (lane < MAX_CHUNK) & (((mask >> (lane % MAX_CHUNK)) & 1) == 1)
                done = _look(place(tiles, wanted.select(first + lane, first), DONE))
                lacking = ballot(wanted & (done != NUM_1))
            over = complete & (at_1 >= published) & (at_2 >= chunks)
            task = over.select(fx.Int32(END), task)
            task = (at_1 < published).select(fx.Int32(GEMM1), task)
            task = ((mask != 0) & (lacking == 0)).select(fx.Int32(GEMM2), task)
            task = (stop != 0).select(fx.Int32(END), task)
        fx.memory_fence(ordering=_ORDER.Acquire)
        n_tile = ticket_2 % NUM_2
        if task == GEMM1:
            first, mask = fx.generic_load(place(tiles, at_1, PUBLISHED)), fx.Int32(1)
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
def finish_gemm1(lds, tiles):
    """A unit of GEMM1 is done: count it, with what it wrote, for those who take the tile's units of GEMM2."""
    rocdl.s_waitcnt(0)
    gpu.barrier()
    if fx.thread_idx.x == 0:
        at = place(tiles, told(lds.first), DONE)
        fx.atomic_add(at, fx.Int32(1), syncscope=_AGENT, ordering=_ORDER.Release)


@flyc.jit
def finish_gemm2(lds, control, bases, tiles, rank, info, NUM_RANKS):
    """A unit of GEMM2 is done: count its tiles for their sources, and tell those that now have all of their rows."""
    rocdl.s_waitcnt(0)
    gpu.barrier()
    if fx.thread_idx.x <= NUM_RANKS:
        lane = fx.thread_idx.x
        first, mask = told(lds.first), told(lds.mask)
        done = fx.Int32(0)
        for i in range_constexpr(MAX_CHUNK):
            inside = (mask >> i) & 1
            word = fx.generic_load(place(tiles, first + i * inside, TILE))
            concerned = (lane == NUM_RANKS).select(fx.Int32(1), (word >> (8 + lane)) & 1)
            done = done + inside * concerned
        if done > 0:
            fx.memory_fence(ordering=_ORDER.Release)
            counter = words(control) + (2 * int(Word.FINISHED) + 2 * lane)
            before = fx.atomic_add(counter, done, syncscope=_AGENT, ordering=_ORDER.AcqRel)
            expected = fx.generic_load(words(control) + (2 * int(Word.EXPECTED) + 2 * lane))
            if before + done == expected:
                board.tell(control, bases, rank, lane, info, NUM_RANKS)
