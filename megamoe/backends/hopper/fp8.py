"""MXFP4 weights and MXFP8 rows as E4M3 operands of Hopper's FP8 tensor cores: which weights fit, and in which order.

A tensor core sums a whole chunk of 128 of K before it gives the sum away, so inside a chunk there can be no scales.
Weights: e2m1 magnitudes times 2^d are exact in E4M3 for d from MIN_SHIFT to MAX_SHIFT, of which a table of 8 bytes
holds all magnitudes; so scales of a row that lie within these 12 octaves go into its codes, with one scale a row for
the end. A matrix of which one row has scales further apart (blocks of zeros do not count), or a NaN, does not fit and
is multiplied as bf16. Rows of tokens: `group_rows` gives their four blocks of a chunk one scale and rounds the codes
again; all but those that become subnormal keep their value, and these are off by at most 2^-17 of the group's largest.

The registers of a word (packing.py) become, in the order of an FP8 step, bytes k + 0, 2, 1, 3 of row g and of g + 8.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megamoe import mx
from megamoe.shape import MX_BLOCK

CHUNK = 128
"""Columns of K with one scale: as many as a chunk of packed weights has."""
MIN_SHIFT, MAX_SHIFT = -5, 6
"""0.5 stays normal, 6 stays below E4M3's largest value, 448."""
TABLE = (0x3C383000, 0x4C484440)
"""e4m3 bytes of the magnitudes 0, 0.5, 1, 1.5 and 2, 3, 4, 6."""
TABLE_STEP = (0x08080800, 0x08080808)
"""What is added to TABLE for each power of two."""
FACTOR_BIAS = 253
"""A row's factor is 2^(base - FACTOR_BIAS): its scale bytes are u = E8M0 + 126, and codes carry 2^(u - base)."""
MAX_RISE = 15
"""How many powers of two fp16, in which codes are multiplied, has above 1."""
MIN_BASE = FACTOR_BIAS - 126
"""Below, the factor would not be a normal number."""


@dataclass(frozen=True)
class RowScales:
    """What a matrix that fits has beside its units. base: uint8 [num_experts, padded rows], the scale byte whose blocks
    carry codes as they are; factor: float32, the same shape: what sums of a row are multiplied with."""

    base: torch.Tensor
    factor: torch.Tensor


def row_base(nibbles: torch.Tensor, scale_bytes: torch.Tensor) -> torch.Tensor | None:
    """Of one expert: uint8 [rows], or None where a row does not fit.

    nibbles: int32 [rows, K] e2m1 codes; scale_bytes: uint8 [rows, K / 32], u = E8M0 + 126 (255: NaN).
    """
    used = (nibbles.view(*scale_bytes.shape, MX_BLOCK) & 7).any(-1)
    u = scale_bytes.int()
    highest = torch.where(used, u, 0).amax(1)
    lowest = torch.where(used, u, 255).amin(1)
    empty = ~used.any(1)
    base = torch.where(empty, FACTOR_BIAS, highest - MAX_SHIFT)
    fits = empty | ((base >= MIN_BASE) & (lowest - base >= MIN_SHIFT))
    fits &= ~(u == 255).any(1)
    return base.to(torch.uint8) if bool(fits.all()) else None


def row_scales(base: torch.Tensor, out_factor: torch.Tensor) -> RowScales:
    """base: uint8 [E, rows] of row_base; out_factor: fp32 [E], with which all rows of an expert are multiplied too."""
    return RowScales(base, _power_of_two(base.int() - (FACTOR_BIAS - 127)) * out_factor.unsqueeze(1))


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """fp32 2^(exponent - 127) of int32 0 to 254."""
    return torch.where(exponent > 0, exponent << 23, 0x00400000).to(torch.int32).view(torch.float32)


def group_rows(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP8 rows, codes [n, K] (8 bit, K a multiple of 128) and scales uint8 [n, K / 32] -> codes float8_e4m3fn [n, K],
    scales fp32 [n, K / 128].

    Scales are powers of two, by the rule of megamoe.mx.quantize_mxfp8 ("up"), but codes grow by 2^MAX_RISE at most; a
    group with a non-finite value has scale NaN and zero codes.
    """
    values = mx.dequantize_mxfp8(codes, scales).view(len(codes), -1, CHUNK)
    top = values.abs().amax(-1).contiguous().view(torch.int32)
    top = torch.where(values.isnan().any(-1), 0x7FC00000, top)
    bad = top >= 0x7F800000
    exponent = ((top >> 23) - 8 + ((top & 0x007FFFFF) > 0x600000).int()).clamp(0, 254)
    blocks = scales.view(len(codes), -1, CHUNK // MX_BLOCK).int()
    zero = (codes.view(torch.uint8).view(*blocks.shape, MX_BLOCK) & 0x7F == 0).all(-1)
    exponent = torch.maximum(exponent, blocks.masked_fill(zero, 0).amax(-1) - MAX_RISE)
    scale = _power_of_two(exponent)
    grouped = (values / scale.unsqueeze(-1)).masked_fill(bad.unsqueeze(-1), 0.0).to(torch.float8_e4m3fn)
    return grouped.view(codes.shape), scale.masked_fill(bad, float("nan"))


def to_fp8_order(codes: torch.Tensor) -> torch.Tensor:
    """[n, K], 8 bit -> K permuted inside each 128, so that a thread's four bytes of a step are those of one word:
    position 32 j + 16 i + 4 t + b holds k = 32 t + 8 j + 4 i + (0, 2, 1, 3)[b]."""
    bytes_ = codes.view(torch.uint8).view(len(codes), -1, 4, 4, 2, 2, 2)  # t, j, i, k bit 1, k bit 0
    return bytes_.permute(0, 1, 3, 4, 2, 6, 5).reshape(codes.shape).view(codes.dtype)


def from_fp8_order(codes: torch.Tensor) -> torch.Tensor:
    bytes_ = codes.view(torch.uint8).view(len(codes), -1, 4, 2, 4, 2, 2)
    return bytes_.permute(0, 1, 4, 2, 3, 6, 5).reshape(codes.shape).view(codes.dtype)


def to_scale_order(scales: torch.Tensor) -> torch.Tensor:
    """[n, K / 128] -> [K / 128, n], of 16 rows row 8 j + 2 t + lo at place 4 t + 2 j + lo: a thread's four together.
    n: a multiple of 16."""
    return scales.t().reshape(scales.shape[1], -1, 2, 4, 2).transpose(2, 3).reshape(scales.shape[1], -1)


def from_scale_order(scales: torch.Tensor) -> torch.Tensor:
    return scales.view(len(scales), -1, 4, 2, 2).transpose(2, 3).reshape(scales.shape).t()


def decode_words(words: torch.Tensor, shift: tuple[int, int]) -> torch.Tensor:
    """int32 [...] -> float8_e4m3fn [..., 2, 4]: bytes of rows g and g + 8, whose codes are multiplied by 2^shift of
    theirs: what the kernel computes (fragments_fp8.decode), in torch."""
    w = words.long() & 0xFFFFFFFF
    out = []
    for row, (nibbles, signs) in enumerate(_PLACES):
        low, high = (TABLE[half] + shift[row] * TABLE_STEP[half] & 0xFFFFFFFF for half in range(2))
        table = torch.tensor([(low | high << 32) >> 8 * i & 0xFF for i in range(8)])
        for nibble, sign in zip(nibbles, signs, strict=True):
            magnitude = sum(((w >> bit) & 1) << i for i, bit in enumerate(nibble))
            out.append(table[magnitude] | ((w >> sign) & 1) << 7)
    return torch.stack(out, dim=-1).to(torch.uint8).view(torch.float8_e4m3fn).view(*words.shape, 2, 4)


_PLACES = (
    (((6, 7, 8), (10, 11, 12), (22, 23, 24), (26, 27, 28)), (15, 19, 31, 3)),
    (((0, 1, 2), (4, 13, 14), (16, 17, 18), (20, 29, 30)), (9, 21, 25, 5)),
)
"""Of rows g and g + 8, in the order of bytes: where a word (packing.py) has the bits of a magnitude, and the sign."""
