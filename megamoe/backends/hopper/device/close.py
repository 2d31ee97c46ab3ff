"""Ends of a launch: the closing flag of a cut step, so that nobody leaves its last sub-step before all ranks are done
with the buffers; and the abort of a rank that cannot go on, so that its peers need not wait until their deadline."""

from __future__ import annotations

import triton
import triton.language as tl

from megamoe.backends.hopper.device import chain, flags
from megamoe.backends.hopper.record import Word

FAILED = tl.constexpr(int(Word.FAILED))


@triton.jit(do_not_specialize=["own_rank"])
def close_kernel(control, bases, own_rank, NUM_RANKS: tl.constexpr):
    chain.after_previous()
    rank = tl.arange(0, NUM_RANKS)
    if tl.load(control + FAILED, volatile=True) == 0:
        flags.post(control, bases, flags.CLOSE_FLAG, 0 * rank.to(tl.int64), own_rank, rank)
        flags.wait(control, bases, flags.CLOSE_FLAG, (1 << NUM_RANKS) - 1, own_rank, rank)


@triton.jit(do_not_specialize=["own_rank"])
def abort_kernel(control, bases, own_rank, NUM_RANKS: tl.constexpr):
    chain.after_previous()
    rank = tl.arange(0, NUM_RANKS)
    missing = tl.full((), 1, tl.int64) << own_rank
    flags.abort(control, bases, missing, own_rank, rank)
