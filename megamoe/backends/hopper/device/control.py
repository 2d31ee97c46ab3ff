"""The two ends of every sub-step: the request comes in from pinned host memory, the status goes out to it.

Kernels rather than copies, which between kernels cost the change to a copy engine and back.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megamoe.backends.hopper import record
from megamoe.backends.hopper.device import chain, flags
from megamoe.backends.hopper.record import Word

NUM_WORDS = tl.constexpr(record.NUM_WORDS)
FIRST_STATUS = tl.constexpr(record.FIRST_STATUS)
NUM_ROWS = tl.constexpr(int(Word.NUM_ROWS))
IDS_PTR = tl.constexpr(int(Word.IDS_PTR))
IDS_SRC = tl.constexpr(int(Word.IDS_SRC))
WEIGHTS_PTR = tl.constexpr(int(Word.WEIGHTS_PTR))
WEIGHTS_SRC = tl.constexpr(int(Word.WEIGHTS_SRC))
STARTED_NS = tl.constexpr(int(Word.STARTED_NS))
ENDED_NS = tl.constexpr(int(Word.ENDED_NS))


@triton.jit
def _bring(src, dst, count, BLOCK: tl.constexpr):
    """Copy `count` 32-bit words between two addresses, unless src is 0; thread blocks share the work."""
    src_words, dst_words = src.to(tl.pointer_type(tl.int32)), dst.to(tl.pointer_type(tl.int32))
    num_words = tl.where(src == 0, 0, count)
    for first in range(tl.program_id(0) * BLOCK, num_words, tl.num_programs(0) * BLOCK):
        word = first + tl.arange(0, BLOCK)
        inside = word < num_words
        tl.store(dst_words + word, tl.load(src_words + word, mask=inside), mask=inside)


@triton.jit
def take_kernel(control, request, NUM_TOPK: tl.constexpr, BLOCK: tl.constexpr):
    """request: pinned. Writes the whole control block, status words zero, and brings ids and weights from the host."""
    chain.after_previous()
    if tl.program_id(0) == 0:
        word = tl.arange(0, NUM_WORDS)
        asked = tl.load(request + word, mask=word < FIRST_STATUS, other=0)
        tl.store(control + word, tl.where(word == STARTED_NS, flags.now_ns(), asked))
    count = tl.load(request + NUM_ROWS).to(tl.int32) * NUM_TOPK
    _bring(tl.load(request + IDS_SRC), tl.load(request + IDS_PTR), count, BLOCK)
    _bring(tl.load(request + WEIGHTS_SRC), tl.load(request + WEIGHTS_PTR), count, BLOCK)


@triton.jit
def tell_kernel(control, report):
    """report: pinned, laid out as the control block; its status words are written."""
    chain.after_previous()
    word = FIRST_STATUS + tl.arange(0, NUM_WORDS - FIRST_STATUS)
    status = tl.load(control + word)
    tl.store(report + word, tl.where(word == ENDED_NS, flags.now_ns(), status))
