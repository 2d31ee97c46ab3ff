"""Flags between ranks: 64-bit words (epoch, info), posted with release, waited for with a bound.

A flag's low half is the launch's epoch, compared for equality only, so that generations may wrap; bit 63 is always set,
so that zeroed memory is no flag of epoch 0. A wait also watches the abort line and ends after the launch's timeout: it
then records who is missing, tells all peers, and the kernels that follow send nothing.
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import const_expr, gpu, rocdl

from megamoe.backends.gfx950.kernels.lang import ballot, clock, control_word, long, pointer, words
from megamoe.backends.gfx950.record import INFO_ROWS_MASK, MAX_RANKS, POSTED, Word
from megamoe.layout import CACHE_LINE_BYTES

_AGENT = rocdl.SyncScope.Agent
_ORDER = fx.AtomicOrdering
_LOW = 0xFFFFFFFF


@fx.struct
class FlagLds:
    """One word for each value that a workgroup is told."""

    last: fx.Array[fx.Int32, 1, 4]
    came: fx.Array[fx.Int32, 1, 4]
    infos: fx.Array[fx.Int32, MAX_RANKS, 4]


def flag_word(heap, offset, rank):
    """Pointer to a rank's 64-bit word of the line at `offset` of a heap."""
    return pointer(heap + offset, fx.Int64, 8) + rank


def peer_heap(bases, rank):
    """Base address of a rank's heap."""
    return fx.generic_load(pointer(bases, fx.Int64, 8) + rank)


@flyc.jit
def arrive(lds, control, num_groups, word=Word.ARRIVALS):
    """Every workgroup calls this after its last store: 1 in all threads of the one that came last, else 0.

    What all workgroups wrote before is then visible to whoever acquires what that one releases. A barrier alone covers
    no stores of other waves: each wave waits for its own first. word: of the control block, 0 before, that counts; a
    kernel in which workgroups arrive more than once takes another for each time.
    """
    rocdl.s_waitcnt(0)
    gpu.barrier()
    if fx.thread_idx.x == 0:
        fx.memory_fence(ordering=_ORDER.Release)
        counter = words(control) + 2 * word
        before = fx.atomic_add(counter, fx.Int32(1), syncscope=_AGENT, ordering=_ORDER.AcqRel)
        last = before == num_groups - 1
        if last:
            fx.generic_store(counter, fx.Int32(0))
        fx.generic_store(lds.last.ptr, last.select(fx.Int32(1), fx.Int32(0)))
    gpu.barrier()
    return fx.generic_load(lds.last.ptr)


@flyc.jit
def meet(control, num_groups):
    """Every workgroup of the grid, which must be co-resident, waits here for all others and sees what they wrote."""
    rocdl.s_waitcnt(0)
    gpu.barrier()
    if fx.thread_idx.x == 0:
        fx.memory_fence(ordering=_ORDER.Release, syncscope=_AGENT)
        counter = words(control) + 2 * int(Word.MET)
        fx.atomic_add(counter, fx.Int32(1), syncscope=_AGENT, ordering=_ORDER.AcqRel)
        seen = fx.generic_load(counter, memory_order=_ORDER.Monotonic, syncscope=_AGENT, volatile=True)
        while seen != num_groups:
            rocdl.s_sleep(1)
            seen = fx.generic_load(counter, memory_order=_ORDER.Monotonic, syncscope=_AGENT, volatile=True)
        fx.memory_fence(ordering=_ORDER.Acquire, syncscope=_AGENT)
    gpu.barrier()


@flyc.jit
def post(control, bases, rank, kind, info, NUM_RANKS):
    """Set this rank's flag of a kind at every rank; threads below NUM_RANKS each at one. info: Int32 of this thread."""
    if fx.thread_idx.x < NUM_RANKS:
        post_to(control, bases, rank, kind, info, fx.thread_idx.x)


@flyc.jit
def post_to(control, bases, rank, kind, info, dst_rank):
    """Set this rank's flag of a kind at one rank: each active lane that of its dst_rank."""
    word = control_word(control, Word.INFO) | long(info) | POSTED
    value = control_word(control, Word.EPOCH) | (word << 32)
    offset = control_word(control, Word.FLAGS_OFFSET) + int(kind) * CACHE_LINE_BYTES
    flag = flag_word(peer_heap(bases, dst_rank), offset, rank)
    fx.generic_store(flag, value, memory_order=_ORDER.Release, volatile=True)


def poll(word):
    """A load that goes past the caches, for words that others change meanwhile."""
    return fx.generic_load(word, memory_order=_ORDER.Monotonic, volatile=True)


def has_failed(control):
    """Whether a wait of this launch has failed so far, Int64; others may say so at any time."""
    return poll(pointer(control, fx.Int64, 8) + int(Word.FAILED))


def _is_of(flag, epoch):
    return (flag < 0) & ((flag & _LOW) == epoch)


@flyc.jit
def wait(lds, control, bases, heap, rank, kind, needed, NUM_RANKS, UNLESS=None):
    """Wait for the flags of the ranks in the mask `needed` (Int32), whole workgroups at a time.

    Returns 1 if all came, else 0 (at once if an earlier wait of this launch failed). lds.infos then holds the info half
    of every rank's flag, of no meaning for ranks that were not needed.
    UNLESS: a function. Then the wait ends as soon as one of them has come, or it holds; returns the mask of those that
    have, -1 if the wait failed.
    """
    if fx.thread_idx.x < 64:
        lane = fx.thread_idx.x
        watched = lane < NUM_RANKS
        place = watched.select(lane, fx.Int32(0))
        epoch = control_word(control, Word.EPOCH)
        timeout = control_word(control, Word.TIMEOUT_TICKS)
        offset = control_word(control, Word.FLAGS_OFFSET) + int(kind) * CACHE_LINE_BYTES
        word = flag_word(heap, offset, place)
        abort = flag_word(heap, control_word(control, Word.ABORTS_OFFSET), place)
        watched = watched & (((needed >> place) & 1) == 1)
        failed = has_failed(control)
        flag, given_up = poll(word), poll(abort)
        lacking = ballot(watched & (_is_of(flag, epoch) == False))  # noqa: E712
        gone = ballot((lane < NUM_RANKS) & _is_of(given_up, epoch))
        enough = long(needed) - 1 if const_expr(UNLESS) else long(0)
        started = clock()
        late = failed != 0
        stopped = UNLESS() if const_expr(UNLESS) else lacking <= enough
        while (lacking > enough) & (gone == 0) & (late == False) & (stopped == False):  # noqa: E712
            rocdl.s_sleep(2)
            flag, given_up = poll(word), poll(abort)
            lacking = ballot(watched & (_is_of(flag, epoch) == False))  # noqa: E712
            gone = ballot((lane < NUM_RANKS) & _is_of(given_up, epoch))
            late = clock() - started > timeout
            if const_expr(UNLESS):
                stopped = UNLESS()
        came = ((lacking <= enough) | stopped) & (gone == 0) & (failed == 0)
        if (came == False) & (failed == 0):  # noqa: E712
            _give_up(control, bases, rank, kind, flag, given_up, lacking, gone, epoch, NUM_RANKS)
        fx.memory_fence(ordering=_ORDER.Acquire)
        if lane < NUM_RANKS:
            fx.generic_store(lds.infos.ptr + lane, fx.Int32(flag >> 32))
        if lane == 0:
            result = fx.Int32(1)
            if const_expr(UNLESS):
                result = needed & ~fx.Int32(lacking)
            fx.generic_store(lds.came.ptr, came.select(result, fx.Int32(-1 if UNLESS else 0)))
    gpu.barrier()
    return fx.generic_load(lds.came.ptr)


@flyc.jit
def _give_up(control, bases, rank, kind, flag, given_up, lacking, gone, epoch, NUM_RANKS):
    """Record who is missing. A rank that gives up by itself tells all ranks; one that was told says who told it."""
    lane = fx.thread_idx.x
    status = pointer(control, fx.Int64, 8)
    if lane < NUM_RANKS:
        if gone == 0:
            value = epoch | ((lacking | POSTED) << 32)
            offset = control_word(control, Word.ABORTS_OFFSET)
            fx.generic_store(
                flag_word(peer_heap(bases, lane), offset, rank),
                value,
                memory_order=_ORDER.Release,
                volatile=True,
            )
            if ((lacking >> long(lane)) & 1) == 1:
                fx.atomic_or(status + int(Word.MISSING), fx.Int64(1) << long(lane), syncscope=_AGENT)
                _store_status(status, Word.FAILED_SEEN, flag)
        else:
            if _is_of(given_up, epoch):
                fx.atomic_or(status + int(Word.MISSING), (given_up >> 32) & 0xFF, syncscope=_AGENT)
    if lane == 0:
        _store_status(status, Word.FAILED_KIND, fx.Int64(int(kind)))
        _store_status(status, Word.FAILED, fx.Int64(1))


def _store_status(status, word, value):
    fx.generic_store(status + int(word), value, memory_order=_ORDER.Monotonic, volatile=True)


def rows_announced(info):
    """Rows of a payload flag's info half."""
    return info & INFO_ROWS_MASK


def has_bit(info, bit):
    return (info & bit) != 0


__all__ = [
    "FlagLds", "arrive", "flag_word", "has_bit", "has_failed", "meet", "peer_heap", "poll", "post", "post_to",
    "rows_announced", "wait",
]  # fmt: skip
