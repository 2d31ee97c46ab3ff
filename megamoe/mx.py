"""MX number formats: MXFP8 (e4m3) and MXFP4 (e2m1) elements with one E8M0 scale per 32 of the last dimension.

Canonical packing: codes are bytes (uint8); two FP4 codes share a byte, the even element in the low nibble; scales are
E8M0 bytes s meaning 2^(s - 127), 0xFF meaning NaN. Source: OCP Microscaling Formats (MX) v1.0.

Scale rules: "up" (default here): the smallest power of two with which the block's maximum still fits the element
type, so nothing saturates; "floor" (OCP): floor(log2(max)) - emax, where the largest values saturate.
A block with a non-finite value has scale 0xFF and decodes to NaN as a whole; an all-zero block has scale 0 and zero
codes. Scales stop at 2^-127 and 2^127: smaller blocks become subnormal codes or zero. Rounding is to nearest, ties to
even. Everything is elementwise or within a block: a row never sees another row.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch

from megamoe.errors import InvalidArgumentError, must_be

BLOCK = 32
SCALE_NAN = 0xFF
E4M3_MAX, E2M1_MAX = 448.0, 6.0
ScaleRule = Literal["up", "floor"]

# Mantissa of the largest value (448 = 1.75 * 2^8, 6 = 1.5 * 2^2) as fp32 bits, and its exponent.
_TOP = {"e4m3": (0x600000, 8), "e2m1": (0x400000, 2)}
_EXPONENT_BITS = 0x7F800000
_MANTISSA_BITS = 0x007FFFFF


def _blocks(name: str, x: torch.Tensor) -> torch.Tensor:
    if not x.dim() or x.shape[-1] % BLOCK:
        raise InvalidArgumentError(
            must_be(f"{name}'s last dimension", f"a multiple of {BLOCK}", list(x.shape))
        )
    if not x.is_floating_point():
        raise InvalidArgumentError(must_be(f"{name}.dtype", "a floating point type", x.dtype))
    return x.float().reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)


def _scale_exponents(
    blocks: torch.Tensor, element: str, rule: ScaleRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """E8M0 byte per block as int32 in [0, 254], and the mask of blocks that hold a non-finite value."""
    if rule not in ("up", "floor"):
        raise InvalidArgumentError(must_be("rule", "'up' or 'floor'", repr(rule)))
    # The sign-less bits of a float order like its magnitude, NaN and Inf above all finite values.
    top = (blocks.view(torch.int32) & 0x7FFFFFFF).amax(-1)
    bad = top >= _EXPONENT_BITS
    top_mantissa, top_exponent = _TOP[element]
    biased = (top >> 23) - top_exponent
    if rule == "up":
        biased += ((top & _MANTISSA_BITS) > top_mantissa).int()
    # An all-zero block and one whose maximum is an fp32 subnormal both end at the smallest scale, 0.
    return biased.clamp_(0, 254), bad


def _power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """2^(e - 127) as fp32 for int32 e in [0, 254]; e = 0 is the subnormal 2^-127."""
    return torch.where(exponents > 0, exponents << 23, 0x00400000).view(torch.float32)


def _scaled(x: torch.Tensor, element: str, rule: ScaleRule) -> tuple[torch.Tensor, torch.Tensor]:
    """Values divided by their block's scale (bad blocks zeroed), and the E8M0 bytes."""
    blocks = _blocks("x", x)
    exponents, bad = _scale_exponents(blocks, element, rule)
    # Multiplying by an exact reciprocal is exact, as both are powers of two; 2^127 covers scale 2^-127.
    values = blocks * _power_of_two(254 - exponents).unsqueeze(-1)
    scales = exponents.to(torch.uint8)
    if bool(bad.any()):
        values.masked_fill_(bad.unsqueeze(-1), 0.0)
        scales.masked_fill_(bad, SCALE_NAN)
    return values, scales


def quantize_mxfp8(x: torch.Tensor, rule: ScaleRule = "up") -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., k] float -> (codes [..., k] uint8 e4m3, scales [..., k / 32] uint8 E8M0).

    Raises InvalidArgumentError when k is not a multiple of 32 or x is not floating point.
    """
    values, scales = _scaled(x, "e4m3", rule)
    if rule == "floor":
        values.clamp_(-E4M3_MAX, E4M3_MAX)
    return values.to(torch.float8_e4m3fn).view(torch.uint8).reshape(x.shape), scales


def dequantize_mxfp8(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes [..., k] (uint8 or float8_e4m3fn), scales [..., k / 32] (uint8 or float8_e8m0fnu) -> [..., k] fp32."""
    codes, scales = codes.view(torch.uint8), scales.view(torch.uint8)
    _check_scales(codes.shape, scales, BLOCK)
    # e4m3's sign, 4-bit exponent and 3-bit mantissa sit in fp16's top bits after a shift; fp16's exponent bias is 8
    # larger, which the factor 2^8 undoes, subnormals included (its own step: times a large scale it would overflow).
    magnitude = codes.to(torch.int16)
    bits = ((magnitude & 0x80) << 8) | ((magnitude & 0x7F) << 7)
    values = bits.view(torch.float16).float().mul_(256.0)
    out = values.view(*scales.shape, BLOCK).mul_(_scale_values(scales).unsqueeze(-1)).view(codes.shape)
    nan = (magnitude & 0x7F) == 0x7F
    if bool(nan.any()):
        out.masked_fill_(nan, float("nan"))
    return out


def quantize_mxfp4(x: torch.Tensor, rule: ScaleRule = "up") -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., k] float -> (codes [..., k / 2] uint8, two e2m1 a byte, even element low; scales [..., k / 32])."""
    values, scales = _scaled(x, "e2m1", rule)
    magnitude = values.abs()
    # e2m1 magnitudes 0 .5 1 1.5 2 3 4 6: steps of .5 below 2, of 1 below 4, of 2 above; torch.round is ties-to-even,
    # and evenness of the step count is evenness of the code in each piece.
    low = torch.round(magnitude * 2.0)
    middle = torch.round(magnitude) + 2.0
    high = torch.round(magnitude * 0.5) + 4.0
    code = torch.where(magnitude < 2.0, low, torch.where(magnitude < 4.0, middle, high)).clamp_(max=7.0)
    code = code.to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)
    code = code.reshape(x.shape)
    return code[..., 0::2] | (code[..., 1::2] << 4), scales


def dequantize_mxfp4(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes [..., k / 2] uint8 (or float4_e2m1fn_x2), scales [..., k / 32] -> [..., k] fp32."""
    codes, scales = codes.view(torch.uint8), scales.view(torch.uint8)
    _check_scales(codes.shape, scales, BLOCK // 2)
    pairs = _e2m1_pairs(codes.device)[codes.int()]
    return (
        pairs.view(*scales.shape, BLOCK).mul_(_scale_values(scales).unsqueeze(-1)).view(*codes.shape[:-1], -1)
    )


def _check_scales(codes_shape: torch.Size, scales: torch.Tensor, codes_per_block: int) -> None:
    wanted = (*codes_shape[:-1], codes_shape[-1] // codes_per_block)
    if codes_shape[-1] % codes_per_block or tuple(scales.shape) != wanted:
        raise InvalidArgumentError(must_be("scales.shape", list(wanted), list(scales.shape)))


@cache
def _e2m1_pairs(device: torch.device) -> torch.Tensor:
    """[256, 2] fp32: both values of every byte."""
    half = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([half, -half])
    byte = torch.arange(256)
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=-1).to(device)


@cache
def _e8m0_table(device: torch.device) -> torch.Tensor:
    table = _power_of_two(torch.arange(256, dtype=torch.int32).clamp(max=254))
    table[SCALE_NAN] = float("nan")
    return table.to(device)


def _scale_values(scales: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes -> fp32 factors; 0xFF -> NaN."""
    return _e8m0_table(scales.device)[scales.int()]
