"""Flags between ranks in device code: 64-bit words (epoch, info), posted with release, waited for with a bound.

A flag is written with one 8-byte store at system scope; its low half is the launch's 32-bit epoch, compared for
equality only, so that generations may wrap; bit 63 is always set, so that zeroed memory is no flag of epoch 0. Every
wait also looks at the abort line and gives up after the launch's timeout: it then records who is missing, tells all
peers, and the kernels that follow do nothing.

`rank` in arguments is arange(num_ranks): Gluon kernels call these functions too, and bring it in a layout of theirs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megamoe.backends.hopper import record
from megamoe.backends.hopper.device import chain
from megamoe.backends.hopper.record import INFO_ERROR, INFO_FP8, INFO_ROWS_MASK, POSTED, Word
from megamoe.layout import CACHE_LINE_BYTES, FlagKind

EPOCH = tl.constexpr(int(Word.EPOCH))
TIMEOUT_NS = tl.constexpr(int(Word.TIMEOUT_NS))
ABORTS_OFFSET = tl.constexpr(int(Word.ABORTS_OFFSET))
FLAGS_OFFSET = tl.constexpr(int(Word.FLAGS_OFFSET))
FAILED = tl.constexpr(int(Word.FAILED))
MISSING = tl.constexpr(int(Word.MISSING))
FAILED_KIND = tl.constexpr(int(Word.FAILED_KIND))
FAILED_SRC = tl.constexpr(int(Word.FAILED_SRC))
FAILED_SEEN = tl.constexpr(int(Word.FAILED_SEEN))
ROWS_PER_RANK = tl.constexpr(int(Word.ROWS_PER_RANK))
LINE_BYTES = tl.constexpr(CACHE_LINE_BYTES)
COUNTS_FLAG = tl.constexpr(int(FlagKind.COUNTS))
PAYLOAD_FLAG = tl.constexpr(int(FlagKind.PAYLOAD))
RETURN_FLAG = tl.constexpr(int(FlagKind.RETURN))
CLOSE_FLAG = tl.constexpr(int(FlagKind.CLOSE))
POSTED_BIT = tl.constexpr(POSTED)
ERROR_BIT = tl.constexpr(INFO_ERROR)
FP8_BIT = tl.constexpr(INFO_FP8)
ROWS_MASK = tl.constexpr(INFO_ROWS_MASK)
LOW_HALF = tl.constexpr(0xFFFFFFFF)
MAX_RANKS = tl.constexpr(record.MAX_RANKS)


@triton.jit
def now_ns():
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def fence_system():
    """Order everything before against everything after, for all GPUs: with relaxed polls it makes an acquire."""
    tl.inline_asm_elementwise(
        "fence.acq_rel.sys;\nmov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def word64(address):
    return address.to(tl.pointer_type(tl.int64))


@triton.jit
def flag_line(control, kind):
    """Offset of the flags of a kind, one per source rank."""
    return tl.load(control + FLAGS_OFFSET) + kind * LINE_BYTES


@triton.jit
def post(control, bases, kind, info, own_rank, rank):
    """Set this rank's flag of a kind at every rank. info: [num_ranks] or scalar int64; what was written before by
    this thread block, or by blocks that it has acquired from, is visible to whoever sees the flag."""
    address = tl.load(bases + rank) + flag_line(control, kind) + 8 * own_rank
    value = tl.load(control + EPOCH) | ((info | POSTED_BIT) << 32)
    tl.debug_barrier()
    tl.atomic_xchg(word64(address), value + 0 * rank.to(tl.int64), sem="release", scope="sys")


@triton.jit
def abort(control, bases, missing, own_rank, rank):
    """Post in every rank's abort line that the ranks of mask `missing` (int64) did not come to this launch."""
    address = tl.load(bases + rank) + tl.load(control + ABORTS_OFFSET) + 8 * own_rank
    value = tl.load(control + EPOCH) | ((missing | POSTED_BIT) << 32)
    tl.atomic_xchg(word64(address), value + 0 * rank.to(tl.int64), sem="release", scope="sys")


@triton.jit
def _lacking(words, given_up, wanted, epoch, rank):
    """(mask of wanted ranks whose flags are not here, whether a peer gave this launch up)."""
    here = (words < 0) & ((words & LOW_HALF) == epoch)
    gone = (given_up < 0) & ((given_up & LOW_HALF) == epoch)
    return tl.sum(tl.where(wanted & (here == 0), 1 << rank, 0)), tl.sum(gone.to(tl.int32)) != 0


@triton.jit
def record_failure(control, bases, kind, lacking, gone, words, given_up, own_rank, rank):
    """Where a peer gave this launch up (`gone`), or the ranks of mask `lacking` did not come in time: say so in the
    status words, and in the second case tell all peers. Does nothing where neither is so."""
    epoch = tl.load(control + EPOCH)
    if gone:
        masks = tl.where((given_up < 0) & ((given_up & LOW_HALF) == epoch), (given_up >> 32) & 0xFF, 0)
        tl.store(control + MISSING, tl.reduce_or(masks, 0))
        tl.store(control + FAILED_KIND, kind)
        tl.store(control + FAILED_SRC, -1)
        tl.store(control + FAILED, 1)
    elif lacking != 0:
        first = tl.min(tl.where(((lacking >> rank) & 1) == 1, rank, MAX_RANKS))
        abort(control, bases, lacking.to(tl.int64), own_rank, rank)
        tl.store(control + MISSING, lacking.to(tl.int64))
        tl.store(control + FAILED_KIND, kind)
        tl.store(control + FAILED_SRC, first)
        tl.store(control + FAILED_SEEN, tl.sum(tl.where(rank == first, words, 0)))
        tl.store(control + FAILED, 1)


@triton.jit
def wait(control, bases, kind, needed, own_rank, rank):
    """Wait for the flags of the ranks in the mask `needed`. Returns (all came, words [num_ranks] int64).

    On a timeout, or when a peer gave this launch up, status words say who is missing and the result is False; so it
    is at once if an earlier wait of this launch failed.
    """
    own = tl.load(bases + own_rank)
    line = word64(own + flag_line(control, kind) + 8 * rank)
    aborts = word64(own + tl.load(control + ABORTS_OFFSET) + 8 * rank)
    epoch = tl.load(control + EPOCH)
    timeout = tl.load(control + TIMEOUT_NS)
    wanted = ((needed >> rank) & 1) == 1
    failed = tl.load(control + FAILED, volatile=True) != 0
    words = tl.load(line, volatile=True)
    given_up = tl.load(aborts, volatile=True)
    lacking, gone = _lacking(words, given_up, wanted, epoch, rank)
    started = now_ns()
    late = failed
    while (lacking != 0) & (gone == 0) & (late == 0):
        words = tl.load(line, volatile=True)
        given_up = tl.load(aborts, volatile=True)
        lacking, gone = _lacking(words, given_up, wanted, epoch, rank)
        late = now_ns() - started > timeout
    if failed == 0:
        record_failure(control, bases, kind, lacking, gone, words, given_up, own_rank, rank)
    fence_system()
    return (lacking == 0) & (gone == 0) & (failed == 0), words


@triton.jit
def ranks_with_rows(control, rank):
    """Mask of the ranks that bring rows by the agreed counts."""
    agreed = tl.load(control + ROWS_PER_RANK + rank)
    return tl.sum(tl.where(agreed > 0, 1 << rank, 0))


@triton.jit
def arrived_rows(control, words, rank):
    """From payload flags of sources: int32 (rows that have come, rows to come in all). A source that refused its call
    brings none, and one without rows by the agreed counts is not looked at."""
    agreed = tl.load(control + ROWS_PER_RANK + rank).to(tl.int32)
    here = (words < 0) & ((words & LOW_HALF) == tl.load(control + EPOCH)) & (agreed > 0)
    info = (words >> 32) & 0x7FFFFFFF
    refused = here & ((info & ERROR_BIT) != 0)
    return tl.where(here, (info & ROWS_MASK).to(tl.int32), 0), tl.where(refused, 0, agreed)


@triton.jit(do_not_specialize=["own_rank"])
def await_kernel(
    control, bases, own_rank, KIND: tl.constexpr, ONLY_WITH_ROWS: tl.constexpr, NUM_RANKS: tl.constexpr
):
    """One thread block waits, so that the many of the next kernel need not: see Kernels.await_flags."""
    chain.after_previous()
    rank = tl.arange(0, NUM_RANKS)
    if ONLY_WITH_ROWS:
        needed = ranks_with_rows(control, rank)
    else:
        needed = (1 << NUM_RANKS) - 1
    wait(control, bases, KIND, needed, own_rank, rank)
