"""MX number formats: MXFP8 (e4m3) and MXFP4 (e2m1) elements with one E8M0 scale per 32 of the last dimension.

Canonical packing: codes are bytes (uint8); two FP4 codes share a byte, the even element in the low nibble; scales are
E8M0 bytes s meaning 2^(s - 127), 0xFF meaning NaN. Source: OCP Microscaling Formats (MX) v1.0.

Scale rules: "up" (default here): the smallest power of two with which the block's maximum still fits the element
type, so nothing saturates; "floor" (OCP): floor(log2(max)) - emax, where the largest values saturate.
A block with a non-finite value has scale 0xFF, zero codes, and decodes to NaN as a whole; an all-zero block has scale
0 and zero codes but for signs (-0 stays -0). Scales stop at 2^-127: smaller blocks become subnormal codes or zero.
Rounding is to nearest, ties to even. Everything is elementwise or within a block: a row never sees another row.

The `_into` forms write into memory of the caller, which may be strided along rows. Nanoseconds per element on one core
of an AMD EPYC with AVX-512, torch 2.13, 1536 x 1024 (a plain fp32 copy takes 0.1): MXFP8 encode 1.1, of which torch's
own float8 conversion is 0.5, decode 0.5; MXFP4 encode 1.9, decode 0.5. Calls on few rows cost 30 to 60 us.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import cache
from typing import Literal

import torch

from megamoe.errors import InvalidArgumentError, must_be

BLOCK = 32
SCALE_NAN = 0xFF
E4M3_MAX, E2M1_MAX = 448.0, 6.0
ScaleRule = Literal["up", "floor"]

_CHUNK_ELEMENTS = 1 << 18
"""1 MiB of fp32: work space stays in the caches, and the calls into torch are few (2 us each)."""
_SMALL_ELEMENTS = 1 << 14
"""Up to here the allocator is quicker than the lookup of work space."""
_FIRST_NON_FINITE = 0x7F800000
_E2M1_MAGIC = 1.5 * 2.0**22
_SF_SAFE_WITH_256 = 246
"""Up to this E8M0 byte, 2^8 times the scale is an fp32 number."""


def _int32(value: int) -> torch.Tensor:
    """An operand for int32 tensors on any device; torch takes twice as long for a Python number."""
    return torch.tensor(value, dtype=torch.int32)


_INF_BITS, _MAGNITUDE_BITS, _ONE_BITS = _int32(0x7F800000), _int32(0x7FFFFFFF), _int32(0x3F800000)
_SCALE_254, _SEVEN, _SHIFT_22, _SHIFT_23, _SHIFT_31 = (_int32(value) for value in (254 << 23, 7, 22, 23, 31))
_HALF_SHIFT, _HALF_MASK = torch.tensor(7, dtype=torch.int16), torch.tensor(-0x4080, dtype=torch.int16)
# By element and scale rule, what takes the bits of a block's maximum to those of its scale: minus the exponent of the
# largest value (448 = 1.75 * 2^8, 6 = 1.5 * 2^2), plus what carries from the mantissa into the exponent exactly when
# the mantissa is above that value's.
_TO_SCALE = {
    ("e4m3", "up"): _int32(0x1FFFFF - (8 << 23)),
    ("e4m3", "floor"): _int32(-8 << 23),
    ("e2m1", "up"): _int32(0x3FFFFF - (2 << 23)),
    ("e2m1", "floor"): _int32(-2 << 23),
}


def quantize_mxfp8(x: torch.Tensor, rule: ScaleRule = "up") -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., k] float -> (codes [..., k] uint8 e4m3, scales [..., k / 32] uint8 E8M0).

    Raises InvalidArgumentError when k is not a multiple of 32 or x is not floating point.
    """
    rows = _rows(x)
    codes, scales = _new(x, rows.shape[1]), _new(x, rows.shape[1] // BLOCK)
    m, k = rows.shape
    quantize_mxfp8_into(codes.view(m, k), scales.view(m, k // BLOCK), rows, rule)
    return codes, scales


def quantize_mxfp8_into(
    codes: torch.Tensor, scales: torch.Tensor, x: torch.Tensor, rule: ScaleRule = "up"
) -> None:
    """x [m, k] float -> codes [m, k] uint8, scales [m, k / 32] uint8. All three may be strided along rows."""
    rows = _rows(x)
    _check_shape("codes", codes, rows.shape)
    _check_shape("scales", scales, (rows.shape[0], rows.shape[1] // BLOCK))
    typed = codes.view(torch.float8_e4m3fn)
    for x_part, typed_part, scales_part in _chunks(rows, typed, scales):
        values = _scaled(x_part, scales_part, "e4m3", rule)
        if rule == "floor":  # torch's own conversion saturates in some versions and gives NaN in others
            values.clamp_(-E4M3_MAX, E4M3_MAX)
        typed_part.copy_(values)


def dequantize_mxfp8(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes [..., k] (uint8 or float8_e4m3fn), scales [..., k / 32] (uint8 or float8_e8m0fnu) -> [..., k] fp32."""
    codes, scales = _bytes("codes", codes), _bytes("scales", scales)
    _check_shape("scales", scales, (*codes.shape[:-1], codes.shape[-1] // BLOCK))
    out = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    if out.numel():
        k = codes.shape[-1]
        dequantize_mxfp8_into(out.view(-1, k), codes.reshape(-1, k), scales.reshape(-1, k // BLOCK))
    return out


def dequantize_mxfp8_into(
    out: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, *, nan_codes: bool = True
) -> None:
    """codes [m, k] uint8, scales [m, k / 32] uint8 -> out [m, k] fp32. All three may be strided along rows.

    nan_codes: False promises that no code is NaN (0x7F, 0xFF); the encoders never write one, callers might.
    """
    _check_shape("out", out, codes.shape)
    _check_shape("scales", scales, (codes.shape[0], codes.shape[1] // BLOCK))
    for out_part, codes_part, scales_part in _chunks(out, codes, scales):
        # e4m3's sign, 4-bit exponent and 3-bit mantissa moved to fp16's top bits are the code's value times 2^-8,
        # subnormals included. int8's sign extension fills bit 14, which the mask clears.
        half = _work("half", torch.int16, out_part).copy_(codes_part.view(torch.int8))
        half.bitwise_left_shift_(_HALF_SHIFT).bitwise_and_(_HALF_MASK)
        out_part.copy_(half.view(torch.float16))
        # + 1 wraps NaN to 0, which leaves the finite scales to be compared.
        safe = int((scales_part + 1).max()) <= _SF_SAFE_WITH_256 + 1
        if not safe:
            out_part.mul_(256.0)
        factors = _scale_values(scales_part, 8 if safe else 0)
        out_part.unflatten(-1, (-1, BLOCK)).mul_(factors.unsqueeze(-1))
        if nan_codes and (int(codes_part.max()) == 0xFF or int(codes_part.view(torch.int8).max()) == 0x7F):
            out_part.masked_fill_(codes_part & 0x7F == 0x7F, float("nan"))


def quantize_mxfp4(x: torch.Tensor, rule: ScaleRule = "up") -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., k] float -> (codes [..., k / 2] uint8, two e2m1 a byte, even element low; scales [..., k / 32])."""
    rows = _rows(x)
    m, k = rows.shape
    codes, scales = _new(x, k // 2), _new(x, k // BLOCK)
    for x_part, packed, scales_part in _chunks(rows, codes.view(m, k // 2), scales.view(m, k // BLOCK)):
        values = _scaled(x_part, scales_part, "e2m1", rule)
        sign = (values.view(torch.int32) >> _SHIFT_31).to(torch.uint8).bitwise_and_(8)
        values.abs_().clamp_(max=E2M1_MAX)
        # e2m1 steps by .5 below 2, by 1 below 4, by 2 above: half of p, the power of two below the value, at least 1.
        # Adding 1.5 * 2^23 steps leaves the value rounded to even, in steps, in the last bits; the code counts on
        # by 2 with each doubling of p.
        p = torch.bitwise_and(values.view(torch.int32), _INF_BITS, out=_work("bits", torch.int32, values))
        p.clamp_(min=_ONE_BITS)
        steps = values.add_(p.view(torch.float32), alpha=_E2M1_MAGIC).view(torch.int32).bitwise_and_(_SEVEN)
        code = steps.add_(p.sub_(_ONE_BITS).bitwise_right_shift_(_SHIFT_22)).to(torch.uint8).bitwise_or_(sign)
        pairs = code.view(torch.int16)
        packed.copy_(pairs.bitwise_or_(pairs >> 4).bitwise_and_(0xFF))
    return codes, scales


def dequantize_mxfp4(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes [..., k / 2] uint8 (or float4_e2m1fn_x2), scales [..., k / 32] -> [..., k] fp32."""
    codes, scales = _bytes("codes", codes), _bytes("scales", scales)
    half_k = codes.shape[-1]
    _check_shape("scales", scales, (*codes.shape[:-1], 2 * half_k // BLOCK))
    out = torch.empty((*codes.shape[:-1], 2 * half_k), dtype=torch.float32, device=codes.device)
    if not out.numel():
        return out
    # One gather fetches both values of a byte, as one 64-bit word.
    pairs = _e2m1_pairs(codes.device).view(torch.int64).flatten()
    rows = out.view(-1, 2 * half_k)
    code_rows, scale_rows = codes.reshape(-1, half_k), scales.reshape(-1, 2 * half_k // BLOCK)
    for out_part, codes_part, scales_part in _chunks(rows, code_rows, scale_rows):
        index = _work("bits", torch.int32, codes_part).copy_(codes_part)
        torch.index_select(pairs, 0, index.flatten(), out=out_part.view(torch.int64).flatten())
        out_part.unflatten(-1, (-1, BLOCK)).mul_(_scale_values(scales_part).unsqueeze(-1))
    return out


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x as [rows, k], after the checks of every encoder."""
    if not x.dim() or x.shape[-1] % BLOCK or not x.shape[-1]:
        raise InvalidArgumentError(must_be("x's last dimension", f"a multiple of {BLOCK}", list(x.shape)))
    if not x.is_floating_point():
        raise InvalidArgumentError(must_be("x.dtype", "a floating point type", x.dtype))
    return x.detach().reshape(-1, x.shape[-1])


def _new(x: torch.Tensor, last: int) -> torch.Tensor:
    return torch.empty((*x.shape[:-1], last), dtype=torch.uint8, device=x.device)


def _bytes(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.itemsize != 1 or not tensor.dim():
        raise InvalidArgumentError(must_be(name, "bytes of at least one dimension", tensor.dtype))
    return tensor.view(torch.uint8)


def _check_shape(name: str, tensor: torch.Tensor, wanted: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != tuple(wanted):
        raise InvalidArgumentError(must_be(f"{name}.shape", list(wanted), list(tensor.shape)))


def _chunks(*tensors: torch.Tensor) -> Iterable[tuple[torch.Tensor, ...]]:
    """The tensors cut alike along rows, the first into about _CHUNK_ELEMENTS elements; uncut on a device."""
    num_rows, k = tensors[0].shape
    if not num_rows * k:
        return ()
    step = max(_CHUNK_ELEMENTS // k, 1)
    if num_rows <= step or tensors[0].device.type != "cpu":
        return (tensors,)
    return zip(*(tensor.split(step) for tensor in tensors), strict=True)


class _WorkSpace(threading.local):
    """Chunk-sized buffers of this thread by name. Fresh ones would come from the kernel page by page each time."""

    def __init__(self) -> None:
        self.buffers: dict[str, torch.Tensor] = {}


_work_space = _WorkSpace()


def _work(name: str, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """Undefined contents of dtype in the shape and on the device of `like`; good until `name` is asked for again."""
    num_elements = like.numel()
    if num_elements <= _SMALL_ELEMENTS or num_elements > _CHUNK_ELEMENTS or like.device.type != "cpu":
        return torch.empty(like.shape, dtype=dtype, device=like.device)
    buffer = _work_space.buffers.get(name)
    if buffer is None:
        buffer = _work_space.buffers[name] = torch.empty(_CHUNK_ELEMENTS, dtype=dtype)
    return buffer[:num_elements].view(like.shape)


def _scaled(rows: torch.Tensor, scales: torch.Tensor, element: str, rule: ScaleRule) -> torch.Tensor:
    """Writes the E8M0 bytes of rows [m, k] to scales; returns rows divided by them, fp32, bad blocks zeroed,
    in work space."""
    to_scale = _TO_SCALE.get((element, rule))
    if to_scale is None:
        raise InvalidArgumentError(must_be("rule", "'up' or 'floor'", repr(rule)))
    blocks = rows.float().unflatten(-1, (-1, BLOCK))
    # The sign-less bits of a float order like its magnitude, NaN and Inf above all finite values.
    magnitude = _work("bits", torch.int32, blocks)
    top = torch.bitwise_and(blocks.view(torch.int32), _MAGNITUDE_BITS, out=magnitude).amax(-1)
    # Bits of the scale, a power of two but for 0, which here means 2^-127. Its reciprocal is exact and always a normal
    # number, as scales stay below 2^127. What the product loses to underflow would become a zero code anyway.
    scale_bits = top.add(to_scale).clamp_(min=0).bitwise_and_(_INF_BITS)
    reciprocals = (_SCALE_254 - scale_bits).view(torch.float32).unsqueeze(-1)
    values = torch.mul(blocks, reciprocals, out=_work("values", torch.float32, blocks))
    scales.copy_(scale_bits >> _SHIFT_23)
    if int(top.max()) >= _FIRST_NON_FINITE:
        bad = top >= _FIRST_NON_FINITE
        values.masked_fill_(bad.unsqueeze(-1), 0.0)
        scales.masked_fill_(bad, SCALE_NAN)
    return values.view(rows.shape)


@cache
def _e2m1_pairs(device: torch.device) -> torch.Tensor:
    """[256, 2] fp32: both values of every byte."""
    half = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([half, -half])
    byte = torch.arange(256)
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=-1).to(device)


@cache
def _e8m0_table(device: torch.device, exponent: int) -> torch.Tensor:
    table = torch.pow(2.0, torch.arange(256, dtype=torch.float64) - 127 + exponent).float()
    table[SCALE_NAN] = float("nan")
    return table.to(device)


def _scale_values(scales: torch.Tensor, exponent: int = 0) -> torch.Tensor:
    """E8M0 bytes -> a new tensor of fp32 factors, times 2^exponent; 0xFF -> NaN."""
    table = _e8m0_table(scales.device, exponent)
    return table.index_select(0, scales.int().view(-1)).view(scales.shape)
