"""Combine at the source: fp32 sum of a token's result rows in ascending slot order, then bf16.

First it tells all sources that this rank's results are there (the GEMM2 before it in the stream has written them),
then it waits for all owners. Multiplication and addition stay separate, so that the
bits are those of the oracle.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megamoe.backends.hopper.device import chain, flags
from megamoe.backends.hopper.device.dispatch import aligned
from megamoe.backends.hopper.device.quantize import scale_of
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
def multiply_rounded(a, b):
    """a * b, rounded: the oracle multiplies, rounds, and adds; a fused multiply-add would round once."""
    return tl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
    )


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
        flags.post(
            control, bases, flags.RETURN_FLAG, return_info(control, FP8), own_rank, tl.arange(0, NUM_RANKS)
        )


@triton.jit
def _load_result(row, column, block, inside, FP8: tl.constexpr, HIDDEN: tl.constexpr):
    """fp32 [blocks, 32] of a result row. block [blocks] and column [blocks, 32]: indices."""
    if FP8:
        codes = tl.load(row + column, mask=inside, other=0)
        scales = tl.load(row + HIDDEN + block, mask=block < HIDDEN // 32, other=0)
        value = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale_of(scales)[:, None]
    else:
        value = tl.load(row.to(tl.pointer_type(tl.bfloat16)) + column, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def note_peers(control, words, rank):
    """Who refused and whose rows are FP8, from all return flags, into the status words."""
    info = (words >> 32) & 0x7FFFFFFF
    refused = tl.sum(tl.where((info & flags.ERROR_BIT) != 0, 1 << rank, 0))
    fp8 = tl.sum(tl.where((info & flags.FP8_BIT) != 0, 1 << rank, 0))
    tl.store(control + REFUSED, refused.to(tl.int64))
    tl.store(control + FP8_RANKS, fp8.to(tl.int64))


@triton.jit
def sum_piece(
    control, results, ids, weights, out, token, block, column,
    NUM_RANKS: tl.constexpr, NUM_TOPK: tl.constexpr, EXPERTS_PER_RANK: tl.constexpr,
    HIDDEN: tl.constexpr, RESULT_STRIDE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """A piece of a token's output. results: this rank's combine region, [token, slot] rows of RESULT_STRIDE bytes."""
    inside = column < HIDDEN
    total = column.to(tl.float32) * 0.0
    for slot in tl.static_range(NUM_TOPK):
        expert = tl.load(ids + token * NUM_TOPK + slot)
        valid = (expert >= 0) & (expert < NUM_RANKS * EXPERTS_PER_RANK)
        row = results + (token * NUM_TOPK + slot) * RESULT_STRIDE
        value = _load_result(row, column, block, inside & valid, FP8, HIDDEN)
        if not FP8:
            value = multiply_rounded(value, tl.load(weights + token * NUM_TOPK + slot))
        total = total + tl.where(valid, value, 0.0)
    tl.store(out + token * HIDDEN + column, total.to(tl.bfloat16), mask=inside)


@triton.jit
def results_of(control, bases, own_rank):
    """This rank's combine region."""
    return aligned(tl.load(bases + own_rank) + tl.load(control + COMBINE_OFFSET))


@triton.jit(do_not_specialize=["own_rank"])
def combine_kernel(
    control, bases,
    own_rank, NUM_RANKS: tl.constexpr, NUM_TOPK: tl.constexpr, EXPERTS_PER_RANK: tl.constexpr,
    HIDDEN: tl.constexpr, RESULT_STRIDE: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr, POST: tl.constexpr,
):  # fmt: skip
    """Persistent over (token, BLOCK columns). FP8: owners of this deployment send weighted FP8 rows."""
    chain.after_previous()
    rank = tl.arange(0, NUM_RANKS)
    if POST:
        if (tl.program_id(0) == 0) & (tl.load(control + FAILED, volatile=True) == 0):
            flags.post(control, bases, flags.RETURN_FLAG, return_info(control, FP8), own_rank, rank)
    ok, words = flags.wait(control, bases, flags.RETURN_FLAG, (1 << NUM_RANKS) - 1, own_rank, rank)
    if not ok:
        return
    if tl.program_id(0) == 0:
        note_peers(control, words, rank)
    ids = tl.load(control + IDS_PTR).to(tl.pointer_type(tl.int32))
    weights = tl.load(control + WEIGHTS_PTR).to(tl.pointer_type(tl.float32))
    out = aligned(tl.load(control + OUT_PTR)).to(tl.pointer_type(tl.bfloat16))
    results = results_of(control, bases, own_rank)
    PIECES: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    num_rows = tl.load(control + NUM_ROWS).to(tl.int32)
    for item in range(tl.program_id(0), num_rows * PIECES, tl.num_programs(0)):
        token = tl.full((), 0, tl.int64) + item // PIECES
        block = item % PIECES * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
        column = block[:, None] * 32 + tl.arange(0, 32)[None, :]
        sum_piece(
            control, results, ids, weights, out, token, block, column,
            NUM_RANKS, NUM_TOPK, EXPERTS_PER_RANK, HIDDEN, RESULT_STRIDE, FP8,
        )  # fmt: skip
