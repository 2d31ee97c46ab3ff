"""MXFP8 on whole tensors with few passes: what megamoe.mx defines, at the speed that a layer call needs.

Codes are e4m3, one E8M0 scale per 32 elements by the round-up rule: the smallest power of two with which the block's
maximum fits into 448. A block with a non-finite value has scale 0xFF and decodes to NaN; an all-zero block has scale
0. Tests hold both functions to megamoe.mx bit by bit.
"""

from __future__ import annotations

import torch

from megamoe.shape import MX_BLOCK

_F32_INF_BITS = 0x7F800000
_ROUND_UP_BITS = 0x1FFFFF
"""Added to fp32 bits, it carries into the exponent exactly when the mantissa is above 1.75 (448 = 1.75 * 2^8)."""
_E4M3_MAX_EXPONENT = 8
_SF_NAN = 0xFF
_SF_EXACT_LIMIT = 247
"""From here on 2^8 * scale is not an fp32 number and decoding takes the long way."""
_HALF_KEEP = -16512  # 0xBF80: sign, and the code's seven low bits at the top of fp16's exponent and mantissa


def _scale_table(exponent_offset: int) -> torch.Tensor:
    exponents = torch.arange(256, dtype=torch.float64) - 127 + exponent_offset
    table = torch.pow(2.0, exponents).to(torch.float32)
    table[_SF_NAN] = float("nan")
    return table


_SCALE = _scale_table(0)
_SCALE_OF_HALF = _scale_table(8)


def quantize_mxfp8(values: torch.Tensor, codes: torch.Tensor, sf: torch.Tensor) -> None:
    """Quantize rows. values [m, k] float32 is overwritten; codes [m, k] uint8 and sf [m, k / 32] uint8 are written.

    All three may be strided along rows; columns must be contiguous.
    """
    blocks = values.unflatten(-1, (-1, MX_BLOCK))
    # abs_ last: the sign bit of a NaN must not make its bits negative.
    amax = torch.maximum(blocks.amax(-1), blocks.amin(-1).neg_()).abs_()
    bits = amax.view(torch.int32)
    exponent = ((bits + _ROUND_UP_BITS) >> 23).sub_(_E4M3_MAX_EXPONENT).clamp_(min=0)
    inverse = (254 - exponent).bitwise_left_shift_(23).view(torch.float32)
    blocks.mul_(inverse.unsqueeze(-1))
    codes.view(torch.float8_e4m3fn).copy_(values)
    sf.copy_(exponent.masked_fill_(bits >= _F32_INF_BITS, _SF_NAN))


def dequantize_mxfp8(
    codes: torch.Tensor, sf: torch.Tensor, out: torch.Tensor, half: torch.Tensor | None = None
) -> torch.Tensor:
    """Decode codes [m, k] uint8 with sf [m, k / 32] uint8 into out [m, k] float32; returns out.

    half: optional int16 work space of out's size. A code's bits, moved to where fp16 has exponent and mantissa, are
    the code's value times 2^-8, subnormals included: three integer passes instead of a slow float8 conversion. NaN
    codes are not decoded: their blocks have scale NaN.
    """
    work = torch.empty(codes.shape, dtype=torch.int16) if half is None else half
    work.copy_(codes.view(torch.int8))
    work.mul_(128).bitwise_and_(_HALF_KEEP)
    out.copy_(work.view(torch.float16))
    index = sf.to(torch.int32).view(-1)
    table = _SCALE_OF_HALF
    # + 1 wraps NaN to 0, which leaves the finite scales to be compared.
    if index.numel() and int((sf + 1).max()) > _SF_EXACT_LIMIT:
        out.mul_(256.0)
        table = _SCALE
    scales = table.index_select(0, index).view(sf.shape)
    out.unflatten(-1, (-1, MX_BLOCK)).mul_(scales.unsqueeze(-1))
    return out


def mark_nan_blocks(codes: torch.Tensor, sf: torch.Tensor) -> None:
    """Give blocks that hold a NaN code the scale NaN, in place: rows from outside may carry such codes."""
    nan = codes.bitwise_and(0x7F).eq_(0x7F)
    if bool(nan.any()):
        sf.masked_fill_(nan.view(*sf.shape, MX_BLOCK).any(-1), _SF_NAN)
