"""Combine at the source: fp32 sum of a token's result rows in ascending slot order, then bf16.

First it tells all sources that this rank's results are there (the GEMM2 before it in the stream has written them),
then it waits for all owners. Multiplication and addition stay separate, so that the bits are those of the oracle.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megamoe.backends.hopper.device import chain, flags
from megamoe.backends.hopper.device.quantize import dequantize
from megamoe.backends.hopper.record import Word

NUM_ROWS = tl.constexpr(int(Word.NUM_ROWS))
INFO = tl.constexpr(int(Word.INFO))
IDS_PTR = tl.constexpr(int(Word.IDS_PTR))
WEIGHTS_PTR = tl.constexpr(int(Word.WEIGHTS_PTR))
OUT_PTR = tl.constexpr(int(Word.OUT_PTR))
COMBINE_OFFSET = tl.constexpr(int(Word.COMBINE_OFFSET))
FAILED = tl.constexpr(int(Word.FAILED))
REFUSED = tl.constexpr(int(Word.REFUSED))
FP8_RANKS = tl.constexpr(int(Word.FP8))


@triton.jit
def return_info(control, FP8: tl.constexpr):
    """Info bits of this rank's return flag."""
    info = tl.load(control + INFO)
    if FP8:
        info = info | flags.FP8_BIT
    return info


@triton.jit(do_not_specialize=["own_rank"])
def post_return_kernel(control, bases, own_rank, NUM_RANKS: tl.constexpr, FP8: tl.constexpr):
    """The return flags alone, for where ranks take turns on one thread of execution."""
    chain.after_previous()
    if tl.load(control + FAILED, volatile=True) == 0:
        flags.post(control, bases, flags.RETURN_FLAG, return_info(control, FP8), own_rank, NUM_RANKS)


@triton.jit
def _load_result(row, column, inside, FP8: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    if FP8:
        codes = tl.load(row + column, mask=inside, other=0)
        block = tl.min(column) // 32 + tl.arange(0, BLOCK // 32)
        scales = tl.load(row + HIDDEN + block, mask=block < HIDDEN // 32, other=0)
        value = tl.reshape(dequantize(codes[None, :], scales[None, :], 1, BLOCK), [BLOCK])
    else:
        value = tl.load(row.to(tl.pointer_type(tl.bfloat16)) + column, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit(do_not_specialize=["own_rank"])
def combine_kernel(
    control, bases,
    own_rank, NUM_RANKS: tl.constexpr, NUM_TOPK: tl.constexpr, EXPERTS_PER_RANK: tl.constexpr,
    HIDDEN: tl.constexpr, RESULT_STRIDE: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr, POST: tl.constexpr,
):  # fmt: skip
    """Persistent over (token, BLOCK columns). FP8: owners of this deployment send weighted FP8 rows."""
    chain.after_previous()
    if POST:
        if (tl.program_id(0) == 0) & (tl.load(control + FAILED, volatile=True) == 0):
            flags.post(control, bases, flags.RETURN_FLAG, return_info(control, FP8), own_rank, NUM_RANKS)
    ok, words = flags.wait(control, bases, flags.RETURN_FLAG, (1 << NUM_RANKS) - 1, own_rank, NUM_RANKS)
    if not ok:
        return
    info = (words >> 32) & 0x7FFFFFFF
    if tl.program_id(0) == 0:
        rank = tl.arange(0, NUM_RANKS)
        refused = tl.sum(tl.where((info & flags.ERROR_BIT) != 0, 1 << rank, 0))
        tl.store(control + REFUSED, refused.to(tl.int64))
        tl.store(
            control + FP8_RANKS, tl.sum(tl.where((info & flags.FP8_BIT) != 0, 1 << rank, 0)).to(tl.int64)
        )
    ids = tl.load(control + IDS_PTR).to(tl.pointer_type(tl.int32))
    weights = tl.load(control + WEIGHTS_PTR).to(tl.pointer_type(tl.float32))
    out = tl.load(control + OUT_PTR).to(tl.pointer_type(tl.bfloat16))
    results = (tl.load(bases + own_rank) + tl.load(control + COMBINE_OFFSET)).to(tl.pointer_type(tl.uint8))
    PIECES: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    num_rows = tl.load(control + NUM_ROWS).to(tl.int32)
    for item in range(tl.program_id(0), num_rows * PIECES, tl.num_programs(0)):
        token = tl.full((), 0, tl.int64) + item // PIECES
        column = item % PIECES * BLOCK + tl.arange(0, BLOCK)
        inside = column < HIDDEN
        total = tl.zeros([BLOCK], tl.float32)
        for slot in tl.static_range(NUM_TOPK):
            expert = tl.load(ids + token * NUM_TOPK + slot)
            valid = (expert >= 0) & (expert < NUM_RANKS * EXPERTS_PER_RANK)
            row = results + (token * NUM_TOPK + slot) * RESULT_STRIDE
            value = _load_result(row, column, inside & valid, FP8, HIDDEN, BLOCK)
            if not FP8:
                value = value * tl.load(weights + token * NUM_TOPK + slot)
            total = total + tl.where(valid, value, 0.0)
        tl.store(out + token * HIDDEN + column, total.to(tl.bfloat16), mask=inside)
