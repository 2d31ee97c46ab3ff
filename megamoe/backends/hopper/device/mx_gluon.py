"""MXFP8 rounding inside Gluon kernels; the numbers of megamoe.mx.quantize_mxfp8, rule "up"."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _exponents_of(top):
    """From the largest magnitude bits of a block: its E8M0 exponent, and whether a value was not finite."""
    exponent = (top >> 23) - 8 + ((top & 0x007FFFFF) > 0x600000).to(gl.int32)
    return gl.maximum(gl.minimum(exponent, 254), 0), top >= 0x7F800000


@gluon.jit
def mx_exponents(blocks):
    """E8M0 exponents [a, b] (int32, 0 to 254) of blocks [a, b, 32], and whether a block holds a non-finite value."""
    return _exponents_of(gl.max(blocks.to(gl.int32, bitcast=True) & 0x7FFFFFFF, axis=2))


@gluon.jit
def power_of_two(exponent):
    """2^(exponent - 127) as fp32 for exponents from 0 to 254; 0 is the subnormal 2^-127."""
    bits = gl.where(exponent > 0, exponent << 23, 0x00400000)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def _rounded(blocks, exponent, bad):
    value = (blocks * power_of_two(254 - exponent)).to(gl.float8e4nv).to(gl.float32) * power_of_two(exponent)
    return gl.where(bad, float("nan"), value)


@gluon.jit
def mxfp8_rounded(x, rows: gl.constexpr, columns: gl.constexpr):
    """x [rows, columns] fp32 rounded to MXFP8 along columns and back; a block with a non-finite value becomes NaN."""
    blocks = gl.reshape(x, [rows, columns // 32, 32])
    exponent, bad = mx_exponents(blocks)
    return gl.reshape(_rounded(blocks, gl.expand_dims(exponent, 2), gl.expand_dims(bad, 2)), [rows, columns])


@gluon.jit
def mxfp8_rounded_columns(blocks):
    """blocks [a, 32, columns] fp32, the same along the middle dimension."""
    exponent, bad = _exponents_of(gl.max(blocks.to(gl.int32, bitcast=True) & 0x7FFFFFFF, axis=1))
    return _rounded(blocks, gl.expand_dims(exponent, 1), gl.expand_dims(bad, 1))


@gluon.jit
def mxfp8_codes(blocks):
    """blocks [n, 32] fp32: their e4m3 codes (uint8) and E8M0 exponents [n]; a block with a non-finite value becomes
    zeros with exponent 255."""
    exponent, bad = _exponents_of(gl.max(blocks.to(gl.int32, bitcast=True) & 0x7FFFFFFF, axis=1))
    scaled = blocks * power_of_two(254 - exponent)[:, None]
    codes = gl.where(bad[:, None], 0.0, scaled).to(gl.float8e4nv).to(gl.uint8, bitcast=True)
    return codes, gl.where(bad, 255, exponent)
