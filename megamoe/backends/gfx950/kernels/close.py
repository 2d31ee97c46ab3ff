"""close: the end of a launch beyond its own flags. All ranks meet (after a cut step), or this one gives up."""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import const_expr

from megamoe.backends.gfx950.kernels import flags
from megamoe.backends.gfx950.kernels.lang import control_word
from megamoe.backends.gfx950.record import POSTED, Word
from megamoe.layout import FlagKind

THREADS = 64


@flyc.kernel(known_block_size=[THREADS, 1, 1])
def close_kernel(
    control: fx.Int64,
    bases: fx.Int64,
    heap: fx.Int64,
    rank: fx.Int32,
    ABORT: fx.Constexpr[int],
    NUM_RANKS: fx.Constexpr[int],
):
    lds = fx.SharedAllocator().allocate(flags.FlagLds).peek()
    if const_expr(ABORT):
        if fx.thread_idx.x < NUM_RANKS:
            mask = (fx.Int64(1) << fx.Int64(rank)) | POSTED
            line = control_word(control, Word.ABORTS_OFFSET)
            word = flags.flag_word(flags.peer_heap(bases, fx.thread_idx.x), line, rank)
            value = control_word(control, Word.EPOCH) | (mask << 32)
            fx.generic_store(word, value, memory_order=fx.AtomicOrdering.Release, volatile=True)
    else:
        flags.post(control, bases, rank, FlagKind.CLOSE, fx.Int32(0), NUM_RANKS)
        flags.wait(lds, control, bases, heap, rank, FlagKind.CLOSE, fx.Int32((1 << NUM_RANKS) - 1), NUM_RANKS)


@flyc.jit
def compile_kernel(
    ABORT: fx.Constexpr[int],
    NUM_RANKS: fx.Constexpr[int],
):
    z = fx.Int64(0)
    close_kernel(z, z, z, fx.Int32(1), ABORT, NUM_RANKS).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))
