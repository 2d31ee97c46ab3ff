"""Opcode families against numpy's statement of the ISA, on the same random words."""

# ruff: noqa: E501  (tables of cases read best with one case a line)

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from megamoe.backends.gfx950.emulator.device import DeviceConfig, DeviceGroup

from .assembly import run_op

rng = np.random.default_rng(1)
A, B, C = (rng.integers(0, 2**32, 64, dtype=np.uint32) for _ in range(3))
A[:4], B[:4] = [0, 1, 0xFFFFFFFF, 0x80000000], [31, 0, 0xFFFFFFFF, 1]
FA, FB, FC = (rng.standard_normal(64).astype(np.float32) * 8 for _ in range(3))
FA[:6], FB[:6] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40], [1.0, 0.0, 2.0, 3.0, 4.0, 1e-40]
LANE = np.arange(64, dtype=np.uint32)
u64, i64, i32, f64 = np.uint64, np.int64, np.int32, np.float64
Fn = Callable[..., Any]


@pytest.fixture(scope="module")
def group() -> Iterator[DeviceGroup]:
    with DeviceGroup(DeviceConfig(detect_waits=True)) as one:
        yield one


def i(x: np.ndarray) -> np.ndarray:
    return x.view(i32)


def wide(x: np.ndarray) -> np.ndarray:
    return x.astype(u64)


def reversed_bits(x: np.ndarray) -> np.ndarray:
    return np.array([int(f"{int(v):032b}"[::-1], 2) for v in x], np.uint32)


INTEGER: dict[str, Fn] = {
    "v_mov_b32_e32 v40, v10": lambda a, b, c: a,
    "v_not_b32_e32 v40, v10": lambda a, b, c: ~a,
    "v_bfrev_b32_e32 v40, v10": lambda a, b, c: reversed_bits(a),
    "v_ffbh_u32_e32 v40, v10": lambda a, b, c: np.array([32 - int(v).bit_length() if v else 0xFFFFFFFF for v in a], np.uint32),
    "v_ffbl_b32_e32 v40, v10": lambda a, b, c: np.array([(int(v) & -int(v)).bit_length() - 1 if v else 0xFFFFFFFF for v in a], np.uint32),
    "v_add_u32_e32 v40, v10, v11": lambda a, b, c: a + b,
    "v_sub_u32_e32 v40, v10, v11": lambda a, b, c: a - b,
    "v_subrev_u32_e32 v40, v10, v11": lambda a, b, c: b - a,
    "v_add_u32_e64 v40, v10, v11 clamp": lambda a, b, c: np.minimum(wide(a) + wide(b), 2**32 - 1).astype(np.uint32),
    "v_sub_u32_e64 v40, v10, v11 clamp": lambda a, b, c: np.where(a > b, a - b, 0).astype(np.uint32),
    "v_and_b32_e32 v40, 0x12345678, v11": lambda a, b, c: b & 0x12345678,
    "v_xnor_b32_e32 v40, v10, v11": lambda a, b, c: ~(a ^ b),
    "v_lshlrev_b32_e32 v40, v10, v11": lambda a, b, c: b << (a & 31),
    "v_lshrrev_b32_e32 v40, -5, v11": lambda a, b, c: b >> 27,
    "v_ashrrev_i32_e32 v40, v10, v11": lambda a, b, c: (i(b) >> i(a & 31)).view(np.uint32),
    "v_mul_lo_u32 v40, v10, v11": lambda a, b, c: a * b,
    "v_mul_hi_u32 v40, v10, v11": lambda a, b, c: (wide(a) * wide(b) >> u64(32)).astype(np.uint32),
    "v_mul_hi_i32 v40, v10, v11": lambda a, b, c: (i(a).astype(i64) * i(b) >> 32).astype(i32).view(np.uint32),
    "v_mul_u32_u24_e32 v40, v10, v11": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF),
    "v_max_i32_e32 v40, v10, v11": lambda a, b, c: np.maximum(i(a), i(b)).view(np.uint32),
    "v_min_u32_e32 v40, v10, v11": lambda a, b, c: np.minimum(a, b),
    "v_bcnt_u32_b32 v40, v10, v11": lambda a, b, c: np.bitwise_count(a).astype(np.uint32) + b,
    "v_mbcnt_lo_u32_b32 v40, -1, v11": lambda a, b, c: np.minimum(LANE, 32) + b,
    "v_mbcnt_hi_u32_b32 v40, -1, v11": lambda a, b, c: np.maximum(LANE, 32) - 32 + b,
    "v_add3_u32 v40, v10, v11, v12": lambda a, b, c: a + b + c,
    "v_lshl_add_u32 v40, v10, v11, v12": lambda a, b, c: (a << (b & 31)) + c,
    "v_and_or_b32 v40, v10, v11, v12": lambda a, b, c: (a & b) | c,
    "v_xad_u32 v40, v10, v11, v12": lambda a, b, c: (a ^ b) + c,
    "v_bfi_b32 v40, v10, v11, v12": lambda a, b, c: (a & b) | (~a & c),
    "v_bfe_u32 v40, v10, 5, 9": lambda a, b, c: a >> 5 & 511,
    "v_bfe_i32 v40, v10, 5, 9": lambda a, b, c: (i(a << 18) >> 23).view(np.uint32),
    "v_alignbit_b32 v40, v10, v11, 7": lambda a, b, c: ((wide(a) << u64(32) | b) >> u64(7)).astype(np.uint32),
    "v_alignbyte_b32 v40, v10, v11, 3": lambda a, b, c: ((wide(a) << u64(32) | b) >> u64(24)).astype(np.uint32),
    "v_med3_i32 v40, v10, v11, v12": lambda a, b, c: np.sort(np.stack([i(a), i(b), i(c)]), 0)[1].view(np.uint32),
    "v_max3_u32 v40, v10, v11, v12": lambda a, b, c: np.maximum(np.maximum(a, b), c),
    "v_perm_b32 v40, v10, v11, v12": lambda a, b, c: np.array([_perm(*map(int, t)) for t in zip(a, b, c)], np.uint32),
    "v_bitop3_b32 v40, v10, v11, v12 bitop3:0x6c": lambda a, b, c: (~a & b) | (a & b & ~c) | (a & ~b & c),
    "v_sad_u8 v40, v10, v11, v12": lambda a, b, c: np.abs(a.view(np.uint8).reshape(64, 4).astype(int) - b.view(np.uint8).reshape(64, 4)).sum(1).astype(np.uint32) + c,
    "v_dot4_i32_i8 v40, v10, v11, v12": lambda a, b, c: (a.view(np.int8).reshape(64, 4).astype(i32) * b.view(np.int8).reshape(64, 4)).sum(1).astype(i32).view(np.uint32) + c,
    "v_pk_add_u16 v40, v10, v11": lambda a, b, c: (a.view(np.uint16) + b.view(np.uint16)).view(np.uint32),
    "v_pk_mul_lo_u16 v40, v10, v11 op_sel:[1,0] op_sel_hi:[0,1]": lambda a, b, c: (a.view(np.uint16).reshape(64, 2)[:, ::-1] * b.view(np.uint16).reshape(64, 2)).copy().view(np.uint32)[:, 0],
    "v_cvt_pk_u16_u32 v40, v10, v11": lambda a, b, c: np.minimum(a, 65535) | np.minimum(b, 65535) << 16,
    "v_mad_u32_u24 v40, v10, v11, v12": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c,
    "v_add_u32_sdwa v40, v10, v11 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:BYTE_2 src1_sel:WORD_1": lambda a, b, c: ((a >> 16 & 255) + (b >> 16)) << 16,
    "v_mov_b32_dpp v40, v10 quad_perm:[3,2,1,0] row_mask:0xf bank_mask:0xf": lambda a, b, c: a.reshape(16, 4)[:, ::-1].reshape(-1),
    "v_mov_b32_dpp v40, v10 row_shr:3 row_mask:0xf bank_mask:0xf bound_ctrl:0": lambda a, b, c: np.pad(a.reshape(4, 16), ((0, 0), (3, 0)))[:, :16].reshape(-1),
    "v_add_u32_dpp v40, v10, v11 row_ror:5 row_mask:0x5 bank_mask:0xf": lambda a, b, c: np.where(LANE // 16 % 2 == 0, np.roll(a.reshape(4, 16), 5, 1).reshape(-1) + b, 0),
    "v_mov_b32_dpp v40, v10 row_bcast:15 row_mask:0xa bank_mask:0xf": lambda a, b, c: np.where(LANE // 16 % 2 == 1, a[(LANE // 16 * 16).astype(int) - 1], 0),
    "ds_bpermute_b32 v40, v10, v11": lambda a, b, c: b[(a >> 2 & 63).astype(int)],
    "ds_swizzle_b32 v40, v10 offset:swizzle(SWAP,16)": lambda a, b, c: a[(LANE ^ 16).astype(int)],
    "v_mov_b32_e32 v40, v10\nv_mov_b32_e32 v41, v11\nv_permlane32_swap_b32 v40, v41": lambda a, b, c: np.concatenate([a[:32], b[:32]]),
    "v_readlane_b32 s8, v10, 17\nv_mov_b32_e32 v40, s8": lambda a, b, c: np.full(64, a[17]),
    "v_readfirstlane_b32 s8, v10\nv_writelane_b32 v40, s8, 9": lambda a, b, c: np.where(LANE == 9, a[0], 0),
    "v_cmp_gt_i32_e32 vcc, v10, v11\nv_cndmask_b32_e32 v40, v10, v11, vcc": lambda a, b, c: np.where(i(a) > i(b), b, a),
    "v_cmp_lt_u16_e64 s[8:9], v10, v11\nv_cndmask_b32_e64 v40, 0, 1, s[8:9]": lambda a, b, c: ((a & 0xFFFF) < (b & 0xFFFF)).astype(np.uint32),
    "v_cmpx_ne_u32_e32 v10, v11\nv_mov_b32_e32 v40, 7": lambda a, b, c: np.where(a != b, 7, 0),
    "v_accvgpr_write_b32 a3, v10\ns_nop 3\nv_accvgpr_read_b32 v40, a3": lambda a, b, c: a,
}  # fmt: skip


def _perm(a: int, b: int, sel: int) -> int:
    data, out = a << 32 | b, 0
    for k in range(4):
        s = sel >> 8 * k & 255
        byte = (
            data >> 8 * s & 255
            if s < 8
            else (255 if data >> (16 * (s - 8) + 15) & 1 else 0)
            if s < 12
            else 0
            if s == 12
            else 255
        )
        out |= byte << 8 * k
    return out


@pytest.mark.parametrize("body", INTEGER)
def test_integer(group: DeviceGroup, body: str) -> None:
    with np.errstate(over="ignore"):
        want = np.asarray(INTEGER[body](A, B, C)).astype(np.uint32)
    np.testing.assert_array_equal(run_op(group, body, [A, B, C], 1)[0], want)
    assert group.reports() == []


FLOAT: dict[str, tuple[Fn, float]] = {
    "v_add_f32_e32 v40, v10, v11": (lambda a, b, c: a + b, 0),
    "v_sub_f32_e64 v40, |v10|, -v11": (lambda a, b, c: np.abs(a) + b, 0),
    "v_mul_f32_e64 v40, v10, v11 mul:4": (lambda a, b, c: a * b * 4, 0),
    "v_add_f32_e64 v40, v10, v11 clamp": (lambda a, b, c: np.where(np.isnan(a + b), 0, np.clip(a + b, 0, 1)), 0),
    "v_max_f32_e32 v40, v10, v11": (lambda a, b, c: np.fmax(a, b), 0),
    "v_min_f32_e32 v40, v10, v11": (lambda a, b, c: np.fmin(a, b), 0),
    "v_fma_f32 v40, v10, v11, v12": (lambda a, b, c: (a.astype(f64) * b + c).astype(np.float32), 0),
    "v_mov_b32_e32 v40, v12\nv_fmac_f32_e32 v40, v10, v11": (lambda a, b, c: (a.astype(f64) * b + c).astype(np.float32), 0),
    "v_med3_f32 v40, v12, v11, 1.0": (lambda a, b, c: np.sort(np.stack([c, b, np.ones(64, np.float32)]), 0)[1], 0),
    "v_floor_f32_e32 v40, v10": (lambda a, b, c: np.floor(a), 0),
    "v_rndne_f32_e32 v40, v10": (lambda a, b, c: np.rint(a), 0),
    "v_exp_f32_e32 v40, v10": (lambda a, b, c: np.exp2(a), 1e-6),
    "v_rcp_f32_e32 v40, v11": (lambda a, b, c: 1 / b, 1e-6),
    "v_sqrt_f32_e64 v40, |v10|": (lambda a, b, c: np.sqrt(np.abs(a)), 1e-6),
    "v_ldexp_f32 v40, v11, 3": (lambda a, b, c: b * 8, 0),
    "v_cvt_f32_f16_e32 v40, v10": (lambda a, b, c: (a.view(np.uint32) & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float32), 0),
    "v_pk_mov_b32 v[42:43], v[10:11], v[12:13] op_sel:[1,0]\nv_mov_b32_e32 v40, v42": (lambda a, b, c: b, 0),
    "v_pk_mul_f32 v[42:43], v[10:11], v[12:13] neg_lo:[1,0]\nv_mov_b32_e32 v40, v42": (lambda a, b, c: -a * c, 0),
    "v_fma_mix_f32 v40, v10, v11, v12 op_sel_hi:[0,0,0]": (lambda a, b, c: (a.astype(f64) * b + c).astype(np.float32), 0),
    "v_div_fixup_f32 v40, v12, v11, v10": (lambda a, b, c: a / b, 0),
    "v_maximum3_f32 v40, v10, v11, v12": (lambda a, b, c: np.maximum(np.maximum(a, b), c), 0),
    "v_cvt_pk_bf16_f32 v42, v10, v11\nv_and_b32_e32 v40, 0xffff0000, v42": (lambda a, b, c: b.astype(ml_dtypes.bfloat16).astype(np.float32), 0),
}  # fmt: skip


@pytest.mark.parametrize("body", FLOAT)
def test_float(group: DeviceGroup, body: str) -> None:
    function, tolerance = FLOAT[body]
    with np.errstate(all="ignore"):
        want = np.asarray(function(FA, FB, FC)).astype(np.float32)
    got = run_op(group, body, [FA, FB, FC], 1)[0].view(np.float32)
    if tolerance:
        np.testing.assert_allclose(got, want, rtol=tolerance)
    else:
        np.testing.assert_array_equal(got, want)


DOUBLE: dict[str, Fn] = {
    "v_add_f64 v[40:41], v[10:11], v[12:13]": lambda a, b: a + b,
    "v_mul_f64 v[40:41], v[10:11], -v[12:13]": lambda a, b: a * -b,
    "v_fma_f64 v[40:41], v[10:11], 2.0, v[12:13]": lambda a, b: a * 2 + b,
    "v_max_f64 v[40:41], v[10:11], v[12:13]": np.maximum,
    "v_floor_f64_e32 v[40:41], v[10:11]": lambda a, b: np.floor(a),
    "v_cvt_f32_f64_e32 v42, v[10:11]\nv_cvt_f64_f32_e32 v[40:41], v42": lambda a, b: a.astype(
        np.float32
    ).astype(f64),
}


@pytest.mark.parametrize("body", DOUBLE)
def test_double(group: DeviceGroup, body: str) -> None:
    a, b = rng.standard_normal((2, 64)) * 100
    rows = [x.view(np.uint32).reshape(64, 2)[:, k].copy() for x in (a, b) for k in range(2)]
    got = run_op(group, body, rows, 2)
    np.testing.assert_array_equal(np.ascontiguousarray(got.T).view(f64)[:, 0], DOUBLE[body](a, b))


SCALAR: dict[str, int] = {
    "s_add_u32 s8, -1, 2\ns_addc_u32 s9, 5, 6": 12,
    "s_mul_hi_u32 s9, 0x80000000, 6": 3,
    "s_mov_b32 s8, 0x80008\ns_bfe_u32 s9, 0xabcd1234, s8": 0x12,
    "s_ashr_i64 s[8:9], 0x80000000, 31\ns_mov_b32 s9, s8": 0xFFFFFFFF,
    "s_mov_b64 s[10:11], 0x5555\ns_bcnt1_i32_b64 s9, s[10:11]": 8,
    "s_cmp_lt_i32 -3, 2\ns_cselect_b32 s9, 11, 22": 11,
    "s_movk_i32 s9, 0x8000\ns_cmpk_eq_i32 s9, 0x8000\ns_cselect_b32 s9, s9, 1": 0xFFFF8000,
    "s_ff1_i32_b32 s9, 0x100": 8,
    "s_flbit_i32_b32 s9, 0x100": 23,
    "s_lshl3_add_u32 s9, 5, 2": 42,
    "s_getreg_b32 s9, hwreg(HW_REG_XCC_ID)": 0,
    "s_mov_b32 s9, 3\ns_mov_b32 s8, 0\nloop:\ns_add_u32 s8, s8, s9\ns_sub_u32 s9, s9, 1\ns_cmp_lg_u32 s9, 0\ns_cbranch_scc1 loop\ns_mov_b32 s9, s8": 6,
    "s_mov_b32 s8, 0x11112222\ns_pack_lh_b32_b16 s9, s8, 0x33334444": 0x33332222,
    "s_brev_b32 s9, 1": 0x80000000,
    "s_abs_i32 s9, -7": 7,
}  # fmt: skip


@pytest.mark.parametrize("body", SCALAR)
def test_scalar(group: DeviceGroup, body: str) -> None:
    got = run_op(group, body + "\nv_mov_b32_e32 v40, s9", [], 1)[0]
    assert set(got.tolist()) == {SCALAR[body]}


def _to_fp8(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).astype(np.uint32)


def test_float8_conversions(group: DeviceGroup) -> None:
    x, y = (rng.standard_normal(64).astype(np.float32) * 30 for _ in range(2))
    got = run_op(
        group, "v_cvt_pk_fp8_f32 v40, v10, v11\nv_cvt_pk_fp8_f32 v40, v11, v10 op_sel:[0,0,1]", [x, y], 1
    )[0]
    np.testing.assert_array_equal(got, _to_fp8(x) | _to_fp8(y) << 8 | _to_fp8(y) << 16 | _to_fp8(x) << 24)
    back = run_op(
        group, "v_cvt_pk_f32_fp8_e32 v[40:41], v10\nv_cvt_f32_fp8_sdwa v42, v10 src0_sel:BYTE_2", [got], 3
    ).view(np.float32)
    values = got.view(np.uint8).reshape(64, 4).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(back, values[:, :3].T)


@pytest.mark.parametrize("exponent", [-3, 0, 5])
def test_scaled_conversions(group: DeviceGroup, exponent: int) -> None:
    scale = np.full(64, 2.0**exponent * 1.7, np.float32)  # only the exponent counts
    x, y = (rng.standard_normal(64).astype(np.float32) * 2.0**exponent * 3 for _ in range(2))
    got = run_op(
        group,
        "v_cvt_scalef32_pk_fp8_f32 v40, v10, v11, v12\nv_cvt_scalef32_pk_fp4_f32 v41, v10, v11, v12 op_sel:[0,0,1,0]",
        [x, y, scale],
        2,
    )
    np.testing.assert_array_equal(got[0], _to_fp8(x / 2.0**exponent) | _to_fp8(y / 2.0**exponent) << 8)
    four = [
        (v / 2.0**exponent).astype(ml_dtypes.float4_e2m1fn).view(np.uint8).astype(np.uint32) & 15
        for v in (x, y)
    ]
    np.testing.assert_array_equal(got[1], (four[0] | four[1] << 4) << 8)
    back = run_op(
        group, "v_cvt_scalef32_pk_f32_fp4 v[40:41], v10, v11 op_sel:[1,0,0]", [got[1], scale], 2
    ).view(np.float32)
    want = (
        np.stack([f.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32) for f in four])
        * 2.0**exponent
    )
    np.testing.assert_array_equal(back, want)


def test_lds_and_scratch(group: DeviceGroup) -> None:
    body = """v_mul_u32_u24_e32 v2, 16, v0
    ds_write_b64 v2, v[10:11]
    ds_write_b32 v2, v12 offset:8
    s_waitcnt lgkmcnt(0)
    v_xor_b32_e32 v3, 16, v2
    ds_read_b96 v[40:42], v3
    ds_read_u16 v43, v3 offset:2
    ds_add_rtn_u32 v44, v2, v11 offset:8
    scratch_store_dwordx2 off, v[10:11], off offset:8
    s_waitcnt vmcnt(0) lgkmcnt(0)
    scratch_load_dword v45, off, off offset:12
    ds_read_b32 v46, v2 offset:8"""
    got = run_op(group, body, [A, B, C], 7, lds_bytes=1024, scratch_bytes=16)
    swap = (LANE ^ 1).astype(int)
    for k, want in enumerate([A[swap], B[swap], C[swap], A[swap] >> 16, C, B, B + C]):
        np.testing.assert_array_equal(got[k], want, err_msg=str(k))


def test_transposing_read(group: DeviceGroup) -> None:
    tile = np.arange(4 * 4 * 16, dtype=np.uint16).reshape(
        4, 4, 16
    )  # four groups of lanes, depth 4, 16 columns
    rows = tile.reshape(64, 4).view(np.uint32)
    body = "v_lshlrev_b32_e32 v2, 3, v0\nds_write_b64 v2, v[10:11]\ns_waitcnt lgkmcnt(0)\nds_read_b64_tr_b16 v[40:41], v2"
    got = run_op(group, body, [rows[:, 0].copy(), rows[:, 1].copy()], 2, lds_bytes=512)
    np.testing.assert_array_equal(
        np.ascontiguousarray(got.T).view(np.uint16).reshape(4, 16, 4), tile.transpose(0, 2, 1)
    )


def test_buffer_bounds_give_zero(group: DeviceGroup) -> None:
    body = """s_mov_b32 s8, s4
    s_mov_b32 s9, s5
    s_mov_b32 s10, 128
    s_mov_b32 s11, 0x27000
    buffer_load_dword v40, v1, s[8:11], 0 offen offset:4"""
    got = run_op(group, body, [A, B], 1)[0]
    np.testing.assert_array_equal(got, np.where(LANE < 31, np.roll(A, -1), 0))


@pytest.mark.parametrize(("size", "regs"), [(16, 4), (32, 16)])
def test_mfma_bf16(group: DeviceGroup, size: int, regs: int) -> None:
    depth = 32 if size == 16 else 16
    a, b = (rng.standard_normal((size, depth)).astype(ml_dtypes.bfloat16) for _ in range(2))
    each = depth * size // 64

    def rows(x: np.ndarray) -> list[np.ndarray]:
        lanes = x.reshape(size, 64 // size, each).transpose(1, 0, 2).reshape(64, each)
        return [
            np.ascontiguousarray(lanes[:, 2 * k : 2 * k + 2]).view(np.uint32)[:, 0] for k in range(each // 2)
        ]

    body = f"v_mfma_f32_{size}x{size}x{depth}_bf16 v[40:{39 + regs}], v[10:13], v[14:17], 0\ns_nop 15"
    got = run_op(group, body, [*rows(a), *rows(b)], regs).view(np.float32)
    r, lane = np.meshgrid(np.arange(regs), np.arange(64), indexing="ij")
    row = 4 * (lane // 16) + r if size == 16 else 8 * (r // 4) + 4 * (lane // 32) + r % 4
    want = (a.astype(f64) @ b.astype(f64).T)[row, lane % size]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


ATOMICS: dict[str, tuple[Fn, Any]] = {
    "add": (lambda o, d: o + d, np.uint32), "sub": (lambda o, d: o - d, np.uint32), "smin": (min, i32), "umax": (max, np.uint32),
    "and": (lambda o, d: o & d, np.uint32), "xor": (lambda o, d: o ^ d, np.uint32), "swap": (lambda o, d: d, np.uint32),
    "inc": (lambda o, d: 0 if o >= d else o + 1, np.uint32), "dec": (lambda o, d: d if o == 0 or o > d else o - 1, np.uint32),
}  # fmt: skip


@pytest.mark.parametrize("name", ATOMICS)
def test_global_atomics_return_the_old_value(group: DeviceGroup, name: str) -> None:
    body = f"v_and_b32_e32 v2, 12, v1\nglobal_atomic_{name} v40, v2, v10, s[6:7] offset:256 sc0"
    got = run_op(group, body, [A], 2)
    step, dtype = ATOMICS[name]
    memory, old = np.zeros(4, dtype), []
    with np.errstate(over="ignore"):
        for lane in range(64):
            old.append(memory[lane % 4].copy())
            memory[lane % 4] = step(memory[lane % 4], A.view(dtype)[lane])
    np.testing.assert_array_equal(got[0].view(dtype), np.array(old, dtype))
