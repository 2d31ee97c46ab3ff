"""MXFP8 in Triton: the numbers of megamoe.mx, rule "up", in blocks of 32 along a row."""

from __future__ import annotations

import triton
import triton.language as tl

SCALE_NAN = tl.constexpr(255)


@triton.jit
def power_of_two(exponent):
    """2^(exponent - 127) as fp32 for exponents from 0 to 254; 0 is the subnormal 2^-127."""
    return tl.where(exponent > 0, exponent << 23, 0x00400000).to(tl.float32, bitcast=True)


@triton.jit
def quantize(blocks):
    """blocks [n, 32] fp32 -> (codes [n, 32] uint8, scales [n] uint8); a non-finite block has scale 255, codes 0."""
    top = tl.max(blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    exponent = (top >> 23) - 8 + ((top & 0x007FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.maximum(tl.minimum(exponent, 254), 0)
    bad = top >= 0x7F800000
    scaled = blocks * power_of_two(254 - exponent)[:, None]
    scaled = tl.where(bad[:, None], 0.0, scaled)
    return scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True), tl.where(bad, SCALE_NAN, exponent).to(
        tl.uint8
    )


@triton.jit
def scale_of(scales):
    """E8M0 bytes -> fp32; 255 gives NaN."""
    exponent = scales.to(tl.int32)
    return tl.where(exponent == SCALE_NAN, float("nan"), power_of_two(tl.minimum(exponent, 254)))


@triton.jit
def dequantize(codes, scales, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """codes [ROWS, COLUMNS] uint8, scales [ROWS, COLUMNS / 32] uint8 -> fp32; scale 255 gives NaN."""
    value = tl.reshape(codes.to(tl.float8e4nv, bitcast=True).to(tl.float32), [ROWS, COLUMNS // 32, 32])
    return tl.reshape(value * scale_of(scales)[:, :, None], [ROWS, COLUMNS])
