"""Rows as operands of the FP8 kernel: `expand_fp8` lays out payload rows by expert, `regroup` what GEMM1 has left.

Both take MXFP8 (a scale for 32 codes) and give e4m3 with a scale for 128, in the order of fp8.to_fp8_order and
fp8.to_scale_order; the numbers are those of fp8.group_rows. A word is four codes of a row; of a chunk's 32 words the
one at place 4 j + t of the operand is word j of block t. A thread has words of all four blocks, so that it writes 16
bytes in a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megamoe.backends.hopper import fp8, plan
from megamoe.backends.hopper.device import chain
from megamoe.backends.hopper.device.expand import NUM_BLOCKS, payload_of

ROWS = tl.constexpr(plan.BLOCK_ROWS)
MAX_RISE = tl.constexpr(fp8.MAX_RISE)
PIECE_CHUNKS = 2
"""Chunks that a thread block makes at a time of 16 rows (PIECE in kernels)."""


LARGEST = tl.constexpr(
    "{.reg .b16 l, h; .reg .b32 x, y;\nmov.b32 {l, h}, $1;\n"
    "cvt.rn.f16x2.e4m3x2 x, l;\ncvt.rn.f16x2.e4m3x2 y, h;\nabs.f16x2 x, x;\nabs.f16x2 y, y;\n"
    "max.NaN.f16x2 x, x, y;\nmov.b32 {l, h}, x;\nmax.NaN.f16 l, l, h;\ncvt.f32.f16 $0, l;}"
)
"""The largest magnitude of four codes, fp32."""
SCALED = tl.constexpr(
    "{.reg .b16 l, h; .reg .b32 f, x, y;\ncvt.rn.f16x2.f32 f, $2, $2;\nmov.b32 {l, h}, $1;\n"
    "cvt.rn.f16x2.e4m3x2 x, l;\ncvt.rn.f16x2.e4m3x2 y, h;\nmul.rn.f16x2 x, x, f;\nmul.rn.f16x2 y, y, f;\n"
    "cvt.rn.satfinite.e4m3x2.f16x2 l, x;\ncvt.rn.satfinite.e4m3x2.f16x2 h, y;\nmov.b32 x, {l, h};\n"
    "prmt.b32 $0, x, 0, 0x3120;}"
)
"""Four codes times a power of two, rounded, in the order 0, 2, 1, 3. fp16 holds every code from 2^15 to 2^-24 times as
large, as far as it will not be zero."""


@triton.jit
def _power_of_two(exponent):
    """2^(exponent - 127) as fp32 for exponents from 0 to 254; 255 gives infinity: codes beside it are zero, and zero
    times infinity is the NaN that is wanted."""
    return tl.where(exponent > 0, exponent << 23, 0x00400000).to(tl.float32, bitcast=True)


@triton.jit
def _largest(words):
    return tl.inline_asm_elementwise(LARGEST, "=f,r", [words], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _magnitude(largest, exponent):
    return (largest * _power_of_two(exponent)).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scaled(words, shift, bad):
    factor = ((tl.maximum(shift, -126) + 127) << 23).to(tl.float32, bitcast=True)
    out = tl.inline_asm_elementwise(SCALED, "=r,r,f", [words, factor], dtype=tl.int32, is_pure=True, pack=1)
    return tl.where(bad, 0, out)


@triton.jit
def _store_regrouped(image, scales, stride, row, chunk, words, exponents, COLUMNS: tl.constexpr):
    """row, chunk [n, 1] of n groups; words: word j of their four blocks, int32 [n, 8] each; exponents: E8M0 of the
    blocks, int32 [n, 8] each."""
    w0, w1, w2, w3 = words
    e0, e1, e2, e3 = exponents
    l0, l1, l2, l3 = _largest(w0), _largest(w1), _largest(w2), _largest(w3)
    top = tl.maximum(
        tl.maximum(_magnitude(l0, e0), _magnitude(l1, e1)), tl.maximum(_magnitude(l2, e2), _magnitude(l3, e3))
    )
    used = tl.maximum(
        tl.maximum(tl.where(l0 > 0.0, e0, 0), tl.where(l1 > 0.0, e1, 0)),
        tl.maximum(tl.where(l2 > 0.0, e2, 0), tl.where(l3 > 0.0, e3, 0)),
    )
    top = tl.max(top, axis=1, keep_dims=True)
    exponent = (top >> 23) - 8 + ((top & 0x007FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.maximum(tl.minimum(exponent, 254), 0)
    exponent = tl.maximum(exponent, tl.max(used, axis=1, keep_dims=True) - MAX_RISE)
    bad = top >= 0x7F800000
    even = tl.join(_scaled(w0, e0 - exponent, bad), _scaled(w2, e2 - exponent, bad))
    odd = tl.join(_scaled(w1, e1 - exponent, bad), _scaled(w3, e3 - exponent, bad))
    out = tl.reshape(tl.join(even, odd), [w0.shape[0], 32])
    at = row.to(tl.int64) * (COLUMNS // 4) + chunk * 32
    tl.store(image + at + tl.arange(0, 32)[None, :], out)
    # Of 16 rows row 8 j + 2 t + lo stands at place 4 t + 2 j + lo.
    home = row // ROWS * ROWS + row % 8 // 2 * 4 + row % ROWS // 8 * 2 + row % 2
    tl.store(scales + chunk * stride + home, tl.where(bad, float("nan"), _power_of_two(exponent)))


@triton.jit(do_not_specialize=["own_rank"])
def expand_fp8_kernel(
    control, bases, image, scales, stride, row_slot, block_info, work,
    own_rank, HIDDEN: tl.constexpr, ROW_BYTES: tl.constexpr, COLUMNS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Persistent over (16 rows, PIECE chunks). image: e4m3 [padded rows, COLUMNS], as int32; scales fp32 [COLUMNS /
    128, stride]."""
    chain.after_previous()
    payload = payload_of(control, bases, own_rank)
    num_items = tl.load(work + NUM_BLOCKS) * (COLUMNS // 128 // PIECE)
    group = tl.arange(0, ROWS * PIECE)[:, None]
    j = tl.arange(0, 8)[None, :]
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        block = item // (COLUMNS // 128 // PIECE)
        chunk = item % (COLUMNS // 128 // PIECE) * PIECE + group % PIECE
        row = block * ROWS + group // PIECE
        inside = group // PIECE < (tl.load(block_info + block) & 0xFF)
        slot = tl.load(row_slot + row, mask=inside, other=0).to(tl.int64)
        codes_at = payload.to(tl.pointer_type(tl.int32)) + slot * (ROW_BYTES // 4) + chunk * 32 + j
        exponents_at = payload + slot * ROW_BYTES + HIDDEN + chunk * 4
        words = ()
        exponents = ()
        for t in tl.static_range(4):
            mask = inside & (chunk * 4 + t < HIDDEN // 32)
            words = words + (tl.load(codes_at + t * 8, mask=mask & (j < 8), other=0),)
            exponents = exponents + (tl.load(exponents_at + t, mask=mask, other=0).to(tl.int32) + 0 * j,)
        _store_regrouped(image, scales, stride, row, chunk, words, exponents, COLUMNS)


@triton.jit
def regroup_kernel(
    features, scales, middle, exponents, stride, work, COLUMNS: tl.constexpr, PIECE: tl.constexpr
):
    """Persistent over (16 rows, PIECE chunks). middle: e4m3 codes [padded rows, COLUMNS], exponents E8M0 [COLUMNS / 32,
    stride]; features, scales out, as image and scales of expand_fp8. Codes as int32."""
    chain.after_previous()
    num_items = tl.load(work + NUM_BLOCKS) * (COLUMNS // 128 // PIECE)
    group = tl.arange(0, ROWS * PIECE)[:, None]
    j = tl.arange(0, 8)[None, :]
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        chunk = item % (COLUMNS // 128 // PIECE) * PIECE + group % PIECE
        row = item // (COLUMNS // 128 // PIECE) * ROWS + group // PIECE
        codes_at = middle + row.to(tl.int64) * (COLUMNS // 4) + chunk * 32 + j
        words = ()
        blocks = ()
        for t in tl.static_range(4):
            words = words + (tl.load(codes_at + t * 8),)
            blocks = blocks + (tl.load(exponents + (chunk * 4 + t) * stride + row).to(tl.int32) + 0 * j,)
        _store_regrouped(features, scales, stride, row, chunk, words, blocks, COLUMNS)
