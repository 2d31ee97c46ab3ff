"""Every vector arithmetic opcode that no other test states: one line each, against numpy.

A table maps assembly with `{d}` for its result register to a function of the inputs; results start as 0xDEADBEEF, so
that a statement also says what happens to the half that an instruction does not write.
"""

# ruff: noqa: E501  (tables of cases read best with one case a line)

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from megamoe.backends.gfx950.emulator.device import DeviceConfig, DeviceGroup

from .assembly import run_op

rng = np.random.default_rng(21)
A, B, C = (rng.integers(0, 2**32, 64, dtype=np.uint32) for _ in range(3))
A[:4], B[:4] = [0, 1, 0xFFFFFFFF, 0x80008000], [31, 0x10001, 0xFFFFFFFF, 0x7FFF8001]
FA, FB, FC = (rng.standard_normal(64).astype(np.float32) * 8 for _ in range(3))
HA, HB, HC = (rng.standard_normal((64, 2)).astype(np.float16) for _ in range(3))
BA, BB = (rng.standard_normal((64, 2)).astype(ml_dtypes.bfloat16) for _ in range(2))
f64, i64, u64, i32, u32 = np.float64, np.int64, np.uint64, np.int32, np.uint32
KEPT = u32(0xDEAD0000)
Table = dict[str, Callable[..., Any]]


@pytest.fixture(scope="module")
def group() -> Iterator[DeviceGroup]:
    with DeviceGroup(DeviceConfig(detect_waits=True)) as one:
        yield one


def words(x: np.ndarray) -> np.ndarray:
    """Values as registers: pairs of halves, or 32-bit values."""
    x = np.ascontiguousarray(x)
    return (
        x.view(u32).reshape(64)
        if x.ndim == 2 or x.itemsize == 4
        else x.astype(x.dtype).view(np.uint16).astype(u32)
    )


def check(
    group: DeviceGroup,
    table: Table,
    inputs: list[np.ndarray],
    arguments: list[np.ndarray],
    *,
    width: int = 1,
    rtol: float = 0,
) -> None:
    """Run a table in one kernel a chunk and compare each line; `width` registers a result."""
    lines = list(table.items())
    for at in range(0, len(lines), 12):
        chunk = lines[at : at + 12]
        body = []
        for k, (text, _) in enumerate(chunk):
            first = 40 + width * k
            body += [f"v_mov_b32_e32 v{first + n}, 0xdeadbeef" for n in range(width)]
            body.append(text.format(d=f"v{first}" if width == 1 else f"v[{first}:{first + width - 1}]"))
        got = run_op(group, "\n".join(body), inputs, width * len(chunk))
        for k, (text, function) in enumerate(chunk):
            rows = np.ascontiguousarray(got[width * k : width * (k + 1)].T)
            with np.errstate(all="ignore"):
                want = np.asarray(function(*arguments))
            have = (
                rows.view(want.dtype).reshape(want.shape)
                if want.dtype.itemsize != 2 or want.ndim == 2
                else (rows[:, 0] & 0xFFFF).astype(np.uint16).view(want.dtype)
            )
            if want.dtype.itemsize == 2 and want.ndim == 1:
                np.testing.assert_array_equal(rows[:, 0] >> 16, 0, err_msg=text)
            if rtol:
                np.testing.assert_allclose(
                    have.astype(f64), want.astype(f64), rtol=rtol, atol=rtol, err_msg=text
                )
            else:
                np.testing.assert_array_equal(have, want, err_msg=text)


def s(x: np.ndarray) -> np.ndarray:
    return x.view(i32).astype(i64)


def low(x: np.ndarray) -> np.ndarray:
    return (x & 0xFFFF).astype(i64)


def slow(x: np.ndarray) -> np.ndarray:
    return (x & 0xFFFF).astype(np.uint16).view(np.int16).astype(i64)


def s24(x: np.ndarray) -> np.ndarray:
    return (s(x) << 40) >> 40


def u24(x: np.ndarray) -> np.ndarray:
    return (x & 0xFFFFFF).astype(i64)


def bits(x: np.ndarray) -> np.ndarray:
    return (x & 0xFFFFFFFF).astype(u32)


def half(x: np.ndarray) -> np.ndarray:
    """A 16-bit result with a zero upper half."""
    return (x & 0xFFFF).astype(np.uint16)


def pieces(x: np.ndarray, size: int, signed: bool) -> np.ndarray:
    """Fields of `size` bits, lowest first."""
    out = np.stack([x >> u32(k) & u32((1 << size) - 1) for k in range(0, 32, size)], 1).astype(i64)
    return np.where(out >> (size - 1) & 1, out - (1 << size), out) if signed else out


def dot(a: np.ndarray, b: np.ndarray, size: int, signed: bool) -> np.ndarray:
    return (pieces(a, size, signed) * pieces(b, size, signed)).sum(1)


def median(*x: np.ndarray) -> np.ndarray:
    return np.sort(np.stack(x), 0)[1]


INTEGER: Table = {
    "v_mul_i32_i24_e32 {d}, v10, v11": lambda a, b, c: bits(s24(a) * s24(b)),
    "v_mul_hi_i32_i24_e32 {d}, v10, v11": lambda a, b, c: bits(s24(a) * s24(b) >> 32),
    "v_mul_hi_u32_u24_e32 {d}, v10, v11": lambda a, b, c: bits(u24(a) * u24(b) >> 32),
    "v_mad_i32_i24 {d}, v10, v11, v12": lambda a, b, c: bits(s24(a) * s24(b) + c),
    "v_min_i32_e32 {d}, v10, v11": lambda a, b, c: bits(np.minimum(s(a), s(b))),
    "v_max_u32_e32 {d}, v10, v11": lambda a, b, c: np.maximum(a, b),
    "v_min3_i32 {d}, v10, v11, v12": lambda a, b, c: bits(np.minimum(np.minimum(s(a), s(b)), s(c))),
    "v_max3_i32 {d}, v10, v11, v12": lambda a, b, c: bits(np.maximum(np.maximum(s(a), s(b)), s(c))),
    "v_min3_u32 {d}, v10, v11, v12": lambda a, b, c: np.minimum(np.minimum(a, b), c),
    "v_med3_u32 {d}, v10, v11, v12": median,
    "v_add_i32 {d}, v10, v11": lambda a, b, c: a + b,
    "v_sub_i32 {d}, v10, v11": lambda a, b, c: a - b,
    "v_add_i32 {d}, v10, v11 clamp": lambda a, b, c: bits(np.clip(s(a) + s(b), -(2**31), 2**31 - 1)),
    "v_sub_i32 {d}, v10, v11 clamp": lambda a, b, c: bits(np.clip(s(a) - s(b), -(2**31), 2**31 - 1)),
    "v_bfm_b32 {d}, v10, v11": lambda a, b, c: bits(((1 << (a & 31).astype(i64)) - 1) << (b & 31).astype(i64)),
    "v_ffbh_i32_e32 {d}, v10": lambda a, b, c: np.array([31 - (int(x) if x < 2**31 else ~int(x) & 0xFFFFFFFF).bit_length() + 1 if x not in (0, 0xFFFFFFFF) else 0xFFFFFFFF for x in a], u32),
    "v_sad_hi_u8 {d}, v10, v11, v12": lambda a, b, c: bits((np.abs(pieces(a, 8, False) - pieces(b, 8, False)).sum(1) << 16) + c),
    "v_sad_u16 {d}, v10, v11, v12": lambda a, b, c: bits(np.abs(pieces(a, 16, False) - pieces(b, 16, False)).sum(1) + c),
    "v_sad_u32 {d}, v10, v11, v12": lambda a, b, c: bits(np.abs(a.astype(i64) - b) + c),
    "v_lerp_u8 {d}, v10, v11, v12": lambda a, b, c: ((pieces(a, 8, False) + pieces(b, 8, False) + (pieces(c, 8, False) & 1)) >> 1).astype(np.uint8).view(u32)[:, 0],
    "v_cvt_pk_i16_i32 {d}, v10, v11": lambda a, b, c: np.stack([s(a), s(b)], 1).clip(-32768, 32767).astype(np.int16),
    "v_sat_pk_u8_i16_e32 {d}, v10": lambda a, b, c: np.concatenate([pieces(a, 16, True).clip(0, 255).astype(np.uint8), np.zeros((64, 2), np.uint8)], 1).view(u32)[:, 0],
    "v_ashr_pk_i8_i32 {d}, v10, v11, v12": lambda a, b, c: np.stack([(s(x) >> (c & 31)).clip(-128, 127) for x in (a, b)], 1).astype(np.int8).view(np.uint16)[:, 0],
    "v_ashr_pk_u8_i32 {d}, v10, v11, v12": lambda a, b, c: np.stack([(s(x) >> (c & 31)).clip(0, 255) for x in (a, b)], 1).astype(np.uint8).view(np.uint16)[:, 0],
    "v_mad_u32_u16 {d}, v10, v11, v12": lambda a, b, c: bits(low(a) * low(b) + c),
    "v_mad_i32_i16 {d}, v10, v11, v12": lambda a, b, c: bits(slow(a) * slow(b) + c),
    "v_mad_u16 {d}, v10, v11, v12": lambda a, b, c: bits(low(a) * low(b) + c) & u32(0xFFFF) | KEPT,
    "v_mad_i16 {d}, v10, v11, v12": lambda a, b, c: bits(low(a) * low(b) + c) & u32(0xFFFF) | KEPT,
    "v_mad_legacy_i16 {d}, v10, v11, v12": lambda a, b, c: half(low(a) * low(b) + low(c)),
    "v_add_i16 {d}, v10, v11": lambda a, b, c: half(low(a) + low(b)),
    "v_sub_i16 {d}, v10, v11": lambda a, b, c: half(low(a) - low(b)),
    "v_add_i16 {d}, v10, v11 clamp": lambda a, b, c: half((slow(a) + slow(b)).clip(-32768, 32767)),
    "v_sub_u16_e32 {d}, v10, v11": lambda a, b, c: half(low(a) - low(b)),
    "v_subrev_u16_e32 {d}, v10, v11": lambda a, b, c: half(low(b) - low(a)),
    "v_mul_lo_u16_e32 {d}, v10, v11": lambda a, b, c: half(low(a) * low(b)),
    "v_lshlrev_b16_e32 {d}, v10, v11": lambda a, b, c: half(low(b) << (a & 15)),
    "v_lshrrev_b16_e32 {d}, v10, v11": lambda a, b, c: half(low(b) >> (a & 15)),
    "v_ashrrev_i16_e32 {d}, v10, v11": lambda a, b, c: half(slow(b) >> (a & 15)),
    "v_max_i16_e32 {d}, v10, v11": lambda a, b, c: half(np.maximum(slow(a), slow(b))),
    "v_min_i16_e32 {d}, v10, v11": lambda a, b, c: half(np.minimum(slow(a), slow(b))),
    "v_min_u16_e32 {d}, v10, v11": lambda a, b, c: half(np.minimum(low(a), low(b))),
    "v_max3_i16 {d}, v10, v11, v12": lambda a, b, c: half(np.maximum(np.maximum(slow(a), slow(b)), slow(c))),
    "v_min3_i16 {d}, v10, v11, v12": lambda a, b, c: half(np.minimum(np.minimum(slow(a), slow(b)), slow(c))),
    "v_max3_u16 {d}, v10, v11, v12": lambda a, b, c: half(np.maximum(np.maximum(low(a), low(b)), low(c))),
    "v_min3_u16 {d}, v10, v11, v12": lambda a, b, c: half(np.minimum(np.minimum(low(a), low(b)), low(c))),
    "v_med3_i16 {d}, v10, v11, v12": lambda a, b, c: half(median(slow(a), slow(b), slow(c))),
    "v_med3_u16 {d}, v10, v11, v12": lambda a, b, c: half(median(low(a), low(b), low(c))),
    "v_dot2_i32_i16 {d}, v10, v11, v12": lambda a, b, c: bits(dot(a, b, 16, True) + c),
    "v_dot2_u32_u16 {d}, v10, v11, v12": lambda a, b, c: bits(dot(a, b, 16, False) + c),
    "v_dot4_u32_u8 {d}, v10, v11, v12": lambda a, b, c: bits(dot(a, b, 8, False) + c),
    "v_dot8_i32_i4 {d}, v10, v11, v12": lambda a, b, c: bits(dot(a, b, 4, True) + c),
    "v_dot8_u32_u4 {d}, v10, v11, v12": lambda a, b, c: bits(dot(a, b, 4, False) + c),
    "v_mov_b32_e32 {d}, v12\nv_dot2c_i32_i16_e32 {d}, v10, v11": lambda a, b, c: bits(dot(a, b, 16, True) + c),
    "v_mov_b32_e32 {d}, v12\nv_dot4c_i32_i8_e32 {d}, v10, v11": lambda a, b, c: bits(dot(a, b, 8, True) + c),
    "v_mov_b32_e32 {d}, v12\nv_dot8c_i32_i4_e32 {d}, v10, v11": lambda a, b, c: bits(dot(a, b, 4, True) + c),
    "v_pk_add_i16 {d}, v10, v11 clamp": lambda a, b, c: (pieces(a, 16, True) + pieces(b, 16, True)).clip(-32768, 32767).astype(np.int16),
    "v_pk_sub_i16 {d}, v10, v11": lambda a, b, c: (pieces(a, 16, True) - pieces(b, 16, True)).astype(np.int16),
    "v_pk_sub_u16 {d}, v10, v11 clamp": lambda a, b, c: (pieces(a, 16, False) - pieces(b, 16, False)).clip(0, 65535).astype(np.uint16),
    "v_pk_mad_i16 {d}, v10, v11, v12": lambda a, b, c: (pieces(a, 16, True) * pieces(b, 16, True) + pieces(c, 16, True)).astype(np.int16),
    "v_pk_mad_u16 {d}, v10, v11, v12": lambda a, b, c: (pieces(a, 16, False) * pieces(b, 16, False) + pieces(c, 16, False)).astype(np.uint16),
    "v_pk_lshlrev_b16 {d}, v10, v11": lambda a, b, c: (pieces(b, 16, False) << (pieces(a, 16, False) & 15)).astype(np.uint16),
    "v_pk_lshrrev_b16 {d}, v10, v11": lambda a, b, c: (pieces(b, 16, False) >> (pieces(a, 16, False) & 15)).astype(np.uint16),
    "v_pk_ashrrev_i16 {d}, v10, v11": lambda a, b, c: (pieces(b, 16, True) >> (pieces(a, 16, False) & 15)).astype(np.int16),
    "v_pk_max_i16 {d}, v10, v11": lambda a, b, c: np.maximum(pieces(a, 16, True), pieces(b, 16, True)).astype(np.int16),
    "v_pk_min_i16 {d}, v10, v11": lambda a, b, c: np.minimum(pieces(a, 16, True), pieces(b, 16, True)).astype(np.int16),
    "v_pk_max_u16 {d}, v10, v11": lambda a, b, c: np.maximum(pieces(a, 16, False), pieces(b, 16, False)).astype(np.uint16),
    "v_pk_min_u16 {d}, v10, v11": lambda a, b, c: np.minimum(pieces(a, 16, False), pieces(b, 16, False)).astype(np.uint16),
    "v_prng_b32_e32 {d}, v10": lambda a, b, c: a << 1 ^ np.where(a >> 31, u32(0xC5), u32(0)),
    "v_cvt_off_f32_i4_e32 {d}, v10": lambda a, b, c: (pieces(a, 4, True)[:, 0] / 16).astype(np.float32),
    "v_cvt_f32_ubyte0_e32 {d}, v10": lambda a, b, c: (a & 255).astype(np.float32),
    "v_cvt_f32_ubyte1_e32 {d}, v10": lambda a, b, c: (a >> 8 & 255).astype(np.float32),
    "v_cvt_f32_ubyte2_e32 {d}, v10": lambda a, b, c: (a >> 16 & 255).astype(np.float32),
    "v_cvt_f32_ubyte3_e32 {d}, v10": lambda a, b, c: (a >> 24).astype(np.float32),
    "v_cvt_f16_u16_e32 {d}, v10": lambda a, b, c: low(a).astype(np.float16),
    "v_cvt_f16_i16_e32 {d}, v10": lambda a, b, c: slow(a).astype(np.float16),
    "v_accvgpr_write_b32 a3, v10\nv_accvgpr_mov_b32 a4, a3\nv_accvgpr_read_b32 {d}, a4": lambda a, b, c: a,
    "v_mov_b32_e32 v38, v10\nv_mov_b32_e32 {d}, v11\nv_swap_b32 {d}, v38": lambda a, b, c: a,
    "v_sub_co_u32_e32 v38, vcc, v10, v11\nv_subbrev_co_u32_e32 {d}, vcc, v10, v12, vcc": lambda a, b, c: c - a - (a < b),
    "v_subrev_co_u32_e32 v38, vcc, v10, v11\nv_addc_co_u32_e32 {d}, vcc, v10, v12, vcc": lambda a, b, c: a + c + (b < a),
    "v_add_co_u32_e32 v38, vcc, v10, v11\nv_subb_co_u32_e32 {d}, vcc, v10, v12, vcc": lambda a, b, c: a - c - (a.astype(u64) + b >= 2**32),
}  # fmt: skip


def test_integers(group: DeviceGroup) -> None:
    check(group, INTEGER, [A, B, C], [A, B, C])


def h(x: np.ndarray) -> np.ndarray:
    return np.asarray(x).astype(np.float16)


def kept(x: np.ndarray) -> np.ndarray:
    """A half result beside the kept upper half."""
    return h(x).view(np.uint16).astype(u32) | KEPT


# a, b, c: [64] low halves in double precision, so that one rounding is left.
HALF: Table = {
    "v_add_f16_e32 {d}, v10, v11": lambda a, b, c: h(a + b),
    "v_sub_f16_e32 {d}, v10, v11": lambda a, b, c: h(a - b),
    "v_subrev_f16_e32 {d}, v10, v11": lambda a, b, c: h(b - a),
    "v_mul_f16_e64 {d}, |v10|, -v11": lambda a, b, c: h(np.abs(a) * -b),
    "v_max_f16_e32 {d}, v10, v11": lambda a, b, c: h(np.maximum(a, b)),
    "v_min_f16_e32 {d}, v10, v11": lambda a, b, c: h(np.minimum(a, b)),
    "v_mad_f16 {d}, v10, v11, v12": lambda a, b, c: kept(h(a * b).astype(f64) + c),
    "v_mad_legacy_f16 {d}, v10, v11, v12": lambda a, b, c: h(h(a * b).astype(f64) + c),
    "v_fma_legacy_f16 {d}, v10, v11, v12": lambda a, b, c: h(a * b + c),
    "v_madmk_f16 {d}, v10, 0x4000, v11": lambda a, b, c: h(h(a * 2).astype(f64) + b),
    "v_min3_f16 {d}, v10, v11, v12": lambda a, b, c: h(np.minimum(np.minimum(a, b), c)),
    "v_max3_f16 {d}, v10, v11, v12": lambda a, b, c: h(np.maximum(np.maximum(a, b), c)),
    "v_med3_f16 {d}, v10, v11, v12": lambda a, b, c: h(median(a, b, c)),
    "v_floor_f16_e32 {d}, v10": lambda a, b, c: h(np.floor(a)),
    "v_ceil_f16_e32 {d}, v10": lambda a, b, c: h(np.ceil(a)),
    "v_trunc_f16_e32 {d}, v10": lambda a, b, c: h(np.trunc(a)),
    "v_rndne_f16_e32 {d}, v10": lambda a, b, c: h(np.rint(a)),
    "v_fract_f16_e32 {d}, v10": lambda a, b, c: h(a - np.floor(a)),
    "v_frexp_mant_f16_e32 {d}, v10": lambda a, b, c: h(np.frexp(a)[0]),
    "v_frexp_exp_i16_f16_e32 {d}, v10": lambda a, b, c: np.frexp(a)[1].astype(np.int16),
    "v_ldexp_f16_e32 {d}, v10, v13": lambda a, b, c: h(np.ldexp(a, 3)),
    "v_cvt_u16_f16_e32 {d}, v10": lambda a, b, c: np.trunc(a).clip(0, 65535).astype(np.uint16),
    "v_cvt_i16_f16_e32 {d}, v10": lambda a, b, c: np.trunc(a).astype(np.int16),
    "v_cvt_norm_i16_f16_e32 {d}, v10": lambda a, b, c: np.rint(a.clip(-1, 1) * 32767).astype(np.int16),
    "v_cvt_norm_u16_f16_e32 {d}, v10": lambda a, b, c: np.rint(a.clip(0, 1) * 65535).astype(np.uint16),
    "v_div_fixup_legacy_f16 {d}, v12, v11, v10": lambda a, b, c: h(a / b),
    "v_div_fixup_f16 {d}, v12, v11, v10": lambda a, b, c: kept(a / b),
}  # fmt: skip
HALF_FUNCTIONS: Table = {
    "v_rcp_f16_e32 {d}, v10": lambda a, b, c: h(1 / a),
    "v_sqrt_f16_e64 {d}, |v10|": lambda a, b, c: h(np.sqrt(np.abs(a))),
    "v_rsq_f16_e64 {d}, |v10|": lambda a, b, c: h(1 / np.sqrt(np.abs(a))),
    "v_log_f16_e64 {d}, |v10|": lambda a, b, c: h(np.log2(np.abs(a))),
    "v_exp_f16_e32 {d}, v10": lambda a, b, c: h(np.exp2(a)),
    "v_sin_f16_e32 {d}, v10": lambda a, b, c: h(np.sin(2 * np.pi * a)),
    "v_cos_f16_e32 {d}, v10": lambda a, b, c: h(np.cos(2 * np.pi * a)),
}  # fmt: skip


def test_halves(group: DeviceGroup) -> None:
    rows = [words(HA), words(HB), words(HC), np.full(64, 3, u32)]
    arguments = [x[:, 0].astype(f64) for x in (HA, HB, HC)]
    check(group, HALF, rows, arguments)
    check(group, HALF_FUNCTIONS, rows, arguments, rtol=2e-3)


# a, b, c: [64, 2] pairs of halves in double precision.
PACKED_HALF: Table = {
    "v_pk_add_f16 {d}, v10, v11": lambda a, b, c: h(a + b),
    "v_pk_mul_f16 {d}, v10, v11 neg_lo:[1,0] neg_hi:[0,1]": lambda a, b, c: h(-(a * b)),
    "v_pk_fma_f16 {d}, v10, v11, v12 clamp": lambda a, b, c: h((a * b + c).clip(0, 1)),
    "v_pk_min_f16 {d}, v10, v11 op_sel:[1,0] op_sel_hi:[0,1]": lambda a, b, c: h(np.minimum(a[:, ::-1], b)),
    "v_pk_max_f16 {d}, v10, v11": lambda a, b, c: h(np.maximum(a, b)),
    "v_pk_minimum3_f16 {d}, v10, v11, v12": lambda a, b, c: h(np.minimum(np.minimum(a, b), c)),
    "v_pk_maximum3_f16 {d}, v10, v11, v12": lambda a, b, c: h(np.maximum(np.maximum(a, b), c)),
    "v_pack_b32_f16 {d}, v10, v11 op_sel:[1,0,0]": lambda a, b, c: h(np.stack([a[:, 1], b[:, 0]], 1)),
    "v_dot2_f32_f16 {d}, v10, v11, v14": lambda a, b, c: (a * b).sum(1).astype(np.float32) + FC,
    "v_mov_b32_e32 {d}, v14\nv_dot2c_f32_f16_e32 {d}, v10, v11": lambda a, b, c: (a * b).sum(1).astype(np.float32) + FC,
    "v_fma_mixlo_f16 {d}, v10, v11, v12 op_sel_hi:[1,1,1]": lambda a, b, c: kept(a[:, 0] * b[:, 0] + c[:, 0]),
    "v_fma_mixhi_f16 {d}, v10, v11, v12 op_sel:[1,0,0] op_sel_hi:[1,1,1]": lambda a, b, c: h(a[:, 1] * b[:, 0] + c[:, 0]).view(np.uint16).astype(u32) << 16 | u32(0xBEEF),
}  # fmt: skip


def test_packed_halves(group: DeviceGroup) -> None:
    rows = [words(HA), words(HB), words(HC), A, words(FC)]
    exact = {text: function for text, function in PACKED_HALF.items() if "dot2" not in text}
    arguments = [x.astype(f64) for x in (HA, HB, HC)]
    check(group, exact, rows, arguments)
    check(
        group,
        {text: function for text, function in PACKED_HALF.items() if "dot2" in text},
        rows,
        arguments,
        rtol=1e-6,
    )


BFLOAT: Table = {
    "v_dot2_f32_bf16 {d}, v10, v11, v12": lambda a, b: (a * b).sum(1).astype(np.float32) + FC,
    "v_mov_b32_e32 {d}, v12\nv_dot2c_f32_bf16_e32 {d}, v10, v11": lambda a, b: (a * b).sum(1).astype(np.float32) + FC,
    "v_cvt_f32_bf16_e32 {d}, v10": lambda a, b: a[:, 0].astype(np.float32),
}  # fmt: skip


def test_bfloats(group: DeviceGroup) -> None:
    check(group, BFLOAT, [words(BA), words(BB), words(FC)], [BA.astype(f64), BB.astype(f64)], rtol=1e-6)


def single(x: np.ndarray) -> np.ndarray:
    return np.asarray(x).astype(np.float32)


# a, b, c: floats in double precision.
SINGLE: Table = {
    "v_subrev_f32_e32 {d}, v10, v11": lambda a, b, c: single(b - a),
    "v_mul_legacy_f32 {d}, v10, v11": lambda a, b, c: single(a * b),
    "v_min3_f32 {d}, v10, v11, v12": lambda a, b, c: single(np.minimum(np.minimum(a, b), c)),
    "v_max3_f32 {d}, v10, v11, v12": lambda a, b, c: single(np.maximum(np.maximum(a, b), c)),
    "v_minimum3_f32 {d}, v10, v11, v12": lambda a, b, c: single(np.minimum(np.minimum(a, b), c)),
    "v_fmaak_f32 {d}, v10, v11, 0x40000000": lambda a, b, c: single(a * b + 2),
    "v_fmamk_f32 {d}, v10, 0x40000000, v11": lambda a, b, c: single(a * 2 + b),
    "v_ceil_f32_e32 {d}, v10": lambda a, b, c: single(np.ceil(a)),
    "v_trunc_f32_e32 {d}, v10": lambda a, b, c: single(np.trunc(a)),
    "v_fract_f32_e32 {d}, v10": lambda a, b, c: single(a - np.floor(a)),
    "v_frexp_mant_f32_e32 {d}, v10": lambda a, b, c: single(np.frexp(a)[0]),
    "v_frexp_exp_i32_f32_e32 {d}, v10": lambda a, b, c: np.frexp(a)[1].astype(i32),
    "v_cvt_i32_f32_e32 {d}, v10": lambda a, b, c: np.trunc(a).astype(i32),
    "v_cvt_flr_i32_f32_e32 {d}, v10": lambda a, b, c: np.floor(a).astype(i32),
    "v_cvt_rpi_i32_f32_e32 {d}, v10": lambda a, b, c: np.floor(a + 0.5).astype(i32),
    "v_cvt_f16_f32_e32 {d}, v10": lambda a, b, c: h(a),
    "v_cvt_pk_f16_f32 {d}, v10, v11": lambda a, b, c: h(np.stack([a, b], 1)),
    "v_cvt_pkrtz_f16_f32 {d}, v10, v11": lambda a, b, c: np.where(np.abs(h(np.stack([a, b], 1)).astype(f64)) > np.abs(np.stack([a, b], 1)), np.nextafter(h(np.stack([a, b], 1)), np.float16(0)), h(np.stack([a, b], 1))),
    "v_cvt_pknorm_i16_f32 {d}, v10, v11": lambda a, b, c: np.rint(np.stack([a, b], 1).clip(-1, 1) * 32767).astype(np.int16),
    "v_cvt_pknorm_u16_f32 {d}, v10, v11": lambda a, b, c: np.rint(np.stack([a, b], 1).clip(0, 1) * 65535).astype(np.uint16),
    "v_cvt_pk_u8_f32 {d}, v10, 2, v13": lambda a, b, c: A & u32(0xFF00FFFF) | np.rint(a).clip(0, 255).astype(u32) << 16,
}  # fmt: skip
SINGLE_FUNCTIONS: Table = {
    "v_sin_f32_e32 {d}, v10": lambda a, b, c: single(np.sin(2 * np.pi * a)),
    "v_cos_f32_e32 {d}, v10": lambda a, b, c: single(np.cos(2 * np.pi * a)),
    "v_rcp_iflag_f32_e32 {d}, v10": lambda a, b, c: single(1 / a),
    "v_exp_legacy_f32_e32 {d}, v10": lambda a, b, c: single(np.exp2(a)),
    "v_log_legacy_f32_e64 {d}, |v10|": lambda a, b, c: single(np.log2(np.abs(a))),
}  # fmt: skip
PAIRS: Table = {
    "v_pk_add_f32 {d}, v[10:11], v[12:13]": lambda a, b: single(a + b),
    "v_pk_mul_f32 {d}, v[10:11], v[12:13] op_sel:[1,0] op_sel_hi:[0,1]": lambda a, b: single(a[:, ::-1] * b),
    "v_pk_fma_f32 {d}, v[10:11], v[12:13], v[10:11] neg_lo:[0,0,1] neg_hi:[0,0,1]": lambda a, b: single(a * b - a),
}  # fmt: skip


def test_singles(group: DeviceGroup) -> None:
    arguments = [x.astype(f64) for x in (FA, FB, FC)]
    check(group, SINGLE, [words(FA), words(FB), words(FC), A], arguments)
    check(group, SINGLE_FUNCTIONS, [words(FA), words(FB), words(FC)], arguments, rtol=2e-6)
    pairs = [np.stack([FA, FB], 1).astype(f64), np.stack([FC, FA], 1).astype(f64)]
    check(group, PAIRS, [words(x) for x in (FA, FB, FC, FA)], pairs, width=2)


D, E = rng.standard_normal((2, 64)) * 40
DOUBLE: Table = {
    "v_min_f64 {d}, v[10:11], v[12:13]": np.minimum,
    "v_ceil_f64_e32 {d}, v[10:11]": lambda a, b: np.ceil(a),
    "v_trunc_f64_e32 {d}, v[10:11]": lambda a, b: np.trunc(a),
    "v_rndne_f64_e32 {d}, v[10:11]": lambda a, b: np.rint(a),
    "v_fract_f64_e32 {d}, v[10:11]": lambda a, b: a - np.floor(a),
    "v_frexp_mant_f64_e32 {d}, v[10:11]": lambda a, b: np.frexp(a)[0],
    "v_ldexp_f64 {d}, v[10:11], 3": lambda a, b: a * 8,
    "v_cvt_i32_f64_e32 v38, v[10:11]\nv_cvt_f64_i32_e32 {d}, v38": lambda a, b: np.trunc(a),
    "v_cvt_u32_f64_e64 v38, |v[10:11]|\nv_cvt_f64_u32_e32 {d}, v38": lambda a, b: np.trunc(np.abs(a)),
    "v_frexp_exp_i32_f64_e32 v38, v[10:11]\nv_cvt_f64_i32_e32 {d}, v38": lambda a, b: np.frexp(a)[1].astype(f64),
    "v_ashrrev_i64 {d}, 7, v[10:11]": lambda a, b: a.view(i64) >> 7,
    "v_mad_i64_i32 {d}, vcc, v10, v12, v[10:11]": lambda a, b: a.view(i64) + a.view(i32)[::2].astype(i64) * b.view(i32)[::2],
}  # fmt: skip
DOUBLE_FUNCTIONS: Table = {
    "v_rsq_f64_e64 {d}, |v[10:11]|": lambda a, b: 1 / np.sqrt(np.abs(a)),
    "v_sqrt_f64_e64 {d}, |v[10:11]|": lambda a, b: np.sqrt(np.abs(a)),
    "v_rcp_f64_e32 {d}, v[10:11]": lambda a, b: 1 / a,
}  # fmt: skip


def test_doubles(group: DeviceGroup) -> None:
    rows = [np.ascontiguousarray(x.view(u32).reshape(64, 2)[:, k]) for x in (D, E) for k in range(2)]
    check(group, DOUBLE, rows, [D, E], width=2)
    check(group, DOUBLE_FUNCTIONS, rows, [D, E], width=2, rtol=1e-7)
