"""Readiness inside a rank: 64-bit words, one for each thing that workgroups of a launch wait for from each other.

Who has made the thing stores the launch's generation there, with release; who needs it waits until the word equals
that. Nothing is counted, so nothing has to be set back, and generations may wrap. What is waited for is always in the
hands of a running workgroup that waits for nobody here, so these waits end. The one reason why it may not come is that
a wait for other ranks has failed (see flags.py), which they watch.
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import gpu, rocdl

from megamoe.backends.gfx950.kernels import flags
from megamoe.backends.gfx950.kernels.lang import WAVE, ballot, control_word, pointer, uniform
from megamoe.backends.gfx950.record import POSTED, Word

_AGENT = rocdl.SyncScope.Agent
_ORDER = fx.AtomicOrdering


@fx.struct
class ReadyLds:
    """Whether the workgroup goes on after a wait."""

    proceed: fx.Array[fx.Int32, 1, 4]


def generation(control):
    """What a word is set to in this launch: its epoch, marked so that zeroed memory is none."""
    return control_word(control, Word.EPOCH) | (POSTED << 32)


@flyc.jit
def mark(ready, place, value):
    """Every wave of a workgroup comes here after its stores: they are there for whoever then finds the word set."""
    rocdl.s_waitcnt(0)
    gpu.barrier()
    if fx.thread_idx.x == 0:
        word = pointer(ready, fx.Int64, 8) + place
        fx.generic_store(word, value, memory_order=_ORDER.Release, syncscope=_AGENT, volatile=True)


def _look(word):
    return fx.generic_load(word, memory_order=_ORDER.Monotonic, syncscope=_AGENT, volatile=True)


@flyc.jit
def wait(lds, control, ready, first, count, value):
    """The workgroup waits for `count` words from `first` on. Returns 1, or 0 once the launch has failed."""
    gpu.barrier()  # of two waits in a row, nobody still reads what the first one said
    if fx.thread_idx.x < WAVE:
        lane = fx.thread_idx.x
        failed = uniform(fx.Int32(flags.has_failed(control)))
        for start in range(fx.Int32(0), count, fx.Int32(WAVE)):
            place = fx.Int32(start) + lane
            watched = place < count
            word = pointer(ready, fx.Int64, 8) + (first + watched.select(place, fx.Int32(0)))
            lacking = ballot(watched & (_look(word) != value))
            while (lacking != 0) & (failed == 0):
                rocdl.s_sleep(1)
                lacking = ballot(watched & (_look(word) != value))
                failed = uniform(fx.Int32(flags.has_failed(control)))
        fx.memory_fence(ordering=_ORDER.Acquire, syncscope=_AGENT)
        # Who marked a word may have failed before it did.
        failed = uniform(fx.Int32(flags.has_failed(control)))
        if lane == 0:
            fx.generic_store(lds.proceed.ptr, (failed == 0).select(fx.Int32(1), fx.Int32(0)))
    gpu.barrier()
    return fx.generic_load(lds.proceed.ptr)


__all__ = ["ReadyLds", "generation", "mark", "wait"]
