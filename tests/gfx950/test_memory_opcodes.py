"""LDS, buffer and flat opcodes, register indexing and sums of differences, against numpy."""

# ruff: noqa: E501  (tables of cases read best with one case a line)

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal, localcontext

import numpy as np
import pytest

from megamoe.backends.gfx950.emulator.device import DeviceConfig, DeviceGroup
from megamoe.backends.gfx950.emulator.errors import UnimplementedInstructionError

from .assembly import run_op

rng = np.random.default_rng(11)
A, B, C = (rng.integers(0, 2**32, 64, dtype=np.uint32) for _ in range(3))
LANE = np.arange(64, dtype=np.uint32)


@pytest.fixture(scope="module")
def group() -> Iterator[DeviceGroup]:
    with DeviceGroup(DeviceConfig.checked()) as one:
        yield one
        assert one.reports() == []


def test_append_and_consume_count_active_lanes(group: DeviceGroup) -> None:
    body = """s_mov_b32 m0, 16
v_mov_b32_e32 v2, 100
v_mov_b32_e32 v3, 0
ds_write_b32 v3, v2 offset:20
s_mov_b64 exec, 0xff0f
ds_append v40 offset:4
s_mov_b64 exec, 0x7
ds_consume v41 offset:4
s_mov_b64 exec, -1
ds_read_b32 v42, v3 offset:20"""
    got = run_op(group, body, [], 3, lds_bytes=64)
    np.testing.assert_array_equal(
        got[0], np.where(0xFF0F >> np.minimum(LANE, 63).astype(np.uint64) & 1, 100, 0)
    )
    np.testing.assert_array_equal(got[1], np.where(LANE < 3, 112, 0))
    assert set(got[2].tolist()) == {109}


def test_lds_by_lane_number(group: DeviceGroup) -> None:
    body = "s_mov_b32 m0, 64\nds_write_addtid_b32 v10 offset:8\ns_waitcnt lgkmcnt(0)\nds_read_addtid_b32 v40 offset:8\nv_lshlrev_b32_e32 v2, 2, v0\nds_read_b32 v41, v2 offset:72"
    got = run_op(group, body, [A], 2, lds_bytes=512)
    np.testing.assert_array_equal(got, [A, A])


@pytest.mark.parametrize("stride", ["", "st64"])
def test_two_exchanges(group: DeviceGroup, stride: str) -> None:
    unit = 64 if stride else 1
    body = f"""v_lshlrev_b32_e32 v2, {2 if stride else 3}, v0
ds_write{"2" + stride}_b32 v2, v10, v11 offset1:1
s_waitcnt lgkmcnt(0)
ds_wrxchg2{stride}_rtn_b32 v[40:41], v2, v12, v10 offset1:1
s_waitcnt lgkmcnt(0)
ds_read2{stride}_b32 v[42:43], v2 offset1:1"""
    got = run_op(group, body, [A, B, C], 4, lds_bytes=8 * 64 * unit)
    np.testing.assert_array_equal(got, [A, B, C, A])


def test_wrapping_add(group: DeviceGroup) -> None:
    body = "v_lshlrev_b32_e32 v2, 2, v0\nds_write_b32 v2, v10\ns_waitcnt lgkmcnt(0)\nds_wrap_rtn_b32 v40, v2, v11, v12\ns_waitcnt lgkmcnt(0)\nds_read_b32 v41, v2"
    got = run_op(group, body, [A, B, C], 2, lds_bytes=256)
    np.testing.assert_array_equal(got, [A, np.where(A >= B, A - B, A + C)])


@pytest.mark.parametrize("space", ["shared", "private"])
def test_flat_atomics_reach_lds_and_scratch(group: DeviceGroup, space: str) -> None:
    """Every lane has a word of its own, reached through the aperture."""
    setup = (
        "v_lshlrev_b32_e32 v2, 2, v0\nds_write_b32 v2, v10"
        if space == "shared"
        else "v_mov_b32_e32 v2, 8\nscratch_store_dword off, v10, off offset:8"
    )
    body = f"""{setup}
s_mov_b64 s[8:9], src_{space}_base
v_mov_b32_e32 v3, s9
s_waitcnt vmcnt(0) lgkmcnt(0)
flat_atomic_add v40, v[2:3], v11 sc0
s_waitcnt vmcnt(0) lgkmcnt(0)
flat_atomic_xor v41, v[2:3], v12 sc0
s_waitcnt vmcnt(0) lgkmcnt(0)
flat_load_dword v42, v[2:3]"""
    got = run_op(group, body, [A, B, C], 3, lds_bytes=256, scratch_bytes=16)
    np.testing.assert_array_equal(got, [A, A + B, A + B ^ C])


def test_scratch_into_lds(group: DeviceGroup) -> None:
    body = "scratch_store_dword off, v10, off offset:4\ns_mov_b32 m0, 32\ns_waitcnt vmcnt(0)\nscratch_load_lds_dword off, off offset:4\ns_waitcnt vmcnt(0)\nv_lshlrev_b32_e32 v2, 2, v0\nds_read_b32 v40, v2 offset:36"
    np.testing.assert_array_equal(run_op(group, body, [A], 1, lds_bytes=512, scratch_bytes=8)[0], A)


# Buffer formats. The descriptor covers the output; word 3: selects X Y Z W, number format, data format.
NUMBER = {"unorm": 0, "snorm": 1, "uscaled": 2, "sscaled": 3, "uint": 4, "sint": 5, "float": 7}
DATA = {
    (8, 1): 1,
    (16, 1): 2,
    (8, 2): 3,
    (32, 1): 4,
    (16, 2): 5,
    (8, 4): 10,
    (32, 2): 11,
    (16, 4): 12,
    (32, 4): 14,
}


def resource(bits: int, count: int, number: str) -> str:
    word = 4 | 5 << 3 | 6 << 6 | 7 << 9 | NUMBER[number] << 12 | DATA[bits, count] << 15
    return f"s_mov_b32 s8, s4\ns_mov_b32 s9, s5\ns_movk_i32 s10, 0x1000\ns_mov_b32 s11, {word:#x}\n"


def expected(raw: np.ndarray, bits: int, number: str) -> np.ndarray:
    """Register words [64, count] of the components in memory, stated in double precision."""
    signed = raw.view({8: np.int8, 16: np.int16, 32: np.int32}[bits])
    if number == "float":
        return (
            (raw.view(np.float16) if bits == 16 else raw.view(np.float32)).astype(np.float32).view(np.uint32)
        )
    if number in ("uint", "sint"):
        return raw.astype(np.uint32) if number == "uint" else signed.astype(np.int32).view(np.uint32)
    value = {
        "unorm": raw.astype(np.float64) / (2**bits - 1), "snorm": np.maximum(signed.astype(np.float64) / (2 ** (bits - 1) - 1), -1),
        "uscaled": raw.astype(np.float64), "sscaled": signed.astype(np.float64),
    }[number]  # fmt: skip
    return value.astype(np.float32).view(np.uint32)


CASES = [
    (8, 4, "unorm"),
    (8, 2, "snorm"),
    (8, 1, "uint"),
    (16, 2, "snorm"),
    (16, 4, "float"),
    (16, 2, "sint"),
    (16, 1, "uscaled"),
    (8, 4, "sscaled"),
    (32, 2, "float"),
    (32, 4, "uint"),
]


@pytest.mark.parametrize(("bits", "count", "number"), CASES)
@pytest.mark.parametrize("typed", [False, True])
def test_formats(group: DeviceGroup, bits: int, count: int, number: str, typed: bool) -> None:
    """Loads give what the format says, absent components 0 0 0 1; storing it again gives the same bytes."""
    each = bits * count // 8
    dtype = {8: np.uint8, 16: np.uint16, 32: np.uint32}[bits]
    memory = rng.integers(0, 2**bits, (64, count), dtype=dtype)
    if number == "float":
        memory = rng.standard_normal((64, count)).astype(np.float16 if bits == 16 else np.float32).view(dtype)
    if number == "snorm":
        memory[memory == 1 << bits - 1] = 0  # the most negative code reads as -1 and is not written
    flat = np.zeros(64 * 4, np.uint32)
    flat.view(np.uint8)[: memory.nbytes] = memory.reshape(-1).view(np.uint8)
    name, letters = ("tbuffer" if typed else "buffer"), "xyzw"[:count]
    form = f"format:{DATA[bits, count] | NUMBER[number] << 4} " if typed else ""
    body = (
        resource(bits, count, number)
        + f"""v_mul_u32_u24_e32 v2, {each}, v0
{name}_load_format_{"xyzw" if not typed else letters} v[40:{39 + (4 if not typed else count)}], v2, s[8:11], 0 {form}offen
s_mov_b32 s8, s6
s_mov_b32 s9, s7
s_waitcnt vmcnt(0)
{name}_store_format_{letters} v[40:{39 + count}], v2, s[8:11], 0 {form}offen offset:2048
s_waitcnt vmcnt(0)
{chr(10).join(f"global_load_dword v{44 + k}, v1, s[6:7] offset:{2048 + 256 * k}" for k in range(each * 64 // 256 or 1))}"""
    )
    body = body.replace(f"v[40:{39 + 1}]", "v40")
    got = run_op(group, body, list(flat.reshape(4, 64)), 16)
    np.testing.assert_array_equal(got[:count].T, expected(memory, bits, number))
    if not typed:
        one = 1 if number in ("uint", "sint") else 0x3F800000
        for k in range(count, 4):
            assert set(got[k].tolist()) == {one if k == 3 else 0}
    written = got[4 : 4 + (each * 64 // 256 or 1)].reshape(-1).view(np.uint8)[: memory.nbytes]
    np.testing.assert_array_equal(written, memory.reshape(-1).view(np.uint8))


def test_half_formats_pack_two_components_a_register(group: DeviceGroup) -> None:
    memory = rng.integers(0, 256, (64, 4), dtype=np.uint8)
    body = (
        resource(8, 4, "unorm")
        + "v_lshlrev_b32_e32 v2, 2, v0\nbuffer_load_format_d16_xyzw v[40:41], v2, s[8:11], 0 offen\ns_mov_b32 s8, s6\ns_mov_b32 s9, s7\ns_waitcnt vmcnt(0)\nbuffer_store_format_d16_xyzw v[40:41], v2, s[8:11], 0 offen offset:1024\ns_waitcnt vmcnt(0)\nglobal_load_dword v42, v1, s[6:7] offset:1024\ns_mov_b32 s8, s4\ns_mov_b32 s9, s5\nbuffer_load_format_d16_hi_x v43, v2, s[8:11], 0 offen"
    )
    got = run_op(group, body, [memory.view(np.uint32)[:, 0]], 5)
    halves = (memory / 255.0).astype(np.float32).astype(np.float16).view(np.uint16).astype(np.uint32)
    np.testing.assert_array_equal(got[0], halves[:, 0] | halves[:, 1] << 16)
    np.testing.assert_array_equal(got[1], halves[:, 2] | halves[:, 3] << 16)
    np.testing.assert_array_equal(got[2], memory.view(np.uint32)[:, 0])
    np.testing.assert_array_equal(got[3], halves[:, 0] << 16)


def test_packed_formats_of_uneven_components_are_named_errors() -> None:
    body = "s_mov_b32 s8, s4\ns_mov_b32 s9, s5\ns_movk_i32 s10, 0x100\ns_mov_b32 s11, 0x40fac\nbuffer_load_format_x v40, v1, s[8:11], 0 offen"
    with (
        DeviceGroup(DeviceConfig()) as group,
        pytest.raises(UnimplementedInstructionError, match="buffer data format 8 with number format 0"),
    ):
        run_op(group, body, [A], 1)


def test_register_indexing(group: DeviceGroup) -> None:
    body = """s_mov_b32 s8, 2
s_set_gpr_idx_on s8, gpr_idx(SRC0)
v_mov_b32_e32 v40, v10
s_set_gpr_idx_idx 1
v_mov_b32_e32 v41, v10
s_set_gpr_idx_mode gpr_idx(SRC1,DST)
v_sub_u32_e32 v42, v10, v11
s_set_gpr_idx_off
v_mov_b32_e32 v42, v10
s_mov_b32 s12, 77
s_mov_b32 m0, 3
s_movrels_b32 s13, s9
s_movreld_b32 s14, s13
v_mov_b32_e32 v44, s17"""
    got = run_op(group, body, [A, B, C], 5)
    np.testing.assert_array_equal(got[:4], [C, B, A, A - C])
    assert set(got[4].tolist()) == {77}


def test_an_indexed_register_outside_of_the_file_is_an_error() -> None:
    with (
        DeviceGroup(DeviceConfig()) as group,
        pytest.raises(Exception, match="indexed vector register v290 is outside of the wave's 192"),
    ):
        run_op(group, "s_movk_i32 s8, 250\ns_set_gpr_idx_on s8, gpr_idx(DST)\nv_mov_b32_e32 v40, 1", [], 1)


def test_sums_of_absolute_differences(group: DeviceGroup) -> None:
    a, b, c, d = (rng.integers(0, 2**32, 64, dtype=np.uint32) for _ in range(4))
    b[:8] &= 0xFF00FF00
    window = np.stack([a, d], 1).view(np.uint8)
    reference = b.view(np.uint8).reshape(64, 4).astype(int)
    sums = np.stack([np.abs(window[:, k : k + 4] - reference).sum(1) for k in range(4)], 1)
    masked = np.stack(
        [(np.abs(window[:, k : k + 4] - reference) * (reference != 0)).sum(1) for k in range(4)], 1
    )
    acc = np.stack([c, a], 1)
    body = "v_msad_u8 v40, v10, v11, v12\nv_mov_b32_e32 v14, v10\nv_mov_b32_e32 v15, v13\nv_mov_b32_e32 v16, v12\nv_mov_b32_e32 v17, v10\nv_qsad_pk_u16_u8 v[42:43], v[14:15], v11, v[16:17]\nv_mqsad_pk_u16_u8 v[44:45], v[14:15], v11, v[16:17]"
    got = run_op(group, body, [a, b, c, d], 6)
    np.testing.assert_array_equal(got[0], (masked[:, 0] + c).astype(np.uint32))
    halves = acc.view(np.uint16)
    for row, want in ((2, sums), (4, masked)):
        np.testing.assert_array_equal(
            np.ascontiguousarray(got[row : row + 2].T).view(np.uint16), (halves + want).astype(np.uint16)
        )


def test_segments_of_two_over_pi(group: DeviceGroup) -> None:
    """The first three segments add up to 2/pi far beyond double precision."""
    pi = Decimal(
        "3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706798214808651"
    )
    body = "v_mov_b32_e32 v2, 0\nv_mov_b32_e32 v3, 0x3ff00000\n" + "\n".join(
        f"v_trig_preop_f64 v[{40 + 2 * k}:{41 + 2 * k}], v[2:3], {k}" for k in range(3)
    )
    got = np.ascontiguousarray(run_op(group, body, [], 6)[:, 0]).view(np.float64)
    with localcontext() as context:
        context.prec = 80
        assert abs(sum(Decimal(float(x)) for x in got) - 2 / pi) < Decimal(2) ** -158


def test_half_odds(group: DeviceGroup) -> None:
    a, b, c = (rng.standard_normal((64, 2)).astype(np.float16) for _ in range(3))
    rows = [x.view(np.uint32)[:, 0].copy() for x in (a, b, c)]
    body = "v_mov_b32_e32 v40, v12\nv_pk_fmac_f16 v40, v10, v11\nv_cvt_pknorm_i16_f16 v41, v10, v11 op_sel:[0,1,0]\nv_cvt_pknorm_u16_f16 v42, v10, v11\nv_madak_f16 v43, v10, v11, 0x3c00\nv_mad_legacy_u16 v44, v10, v11, v12"
    got = run_op(group, body, rows, 5)
    np.testing.assert_array_equal(
        got[0].view(np.float16).reshape(64, 2), (a.astype(np.float64) * b + c).astype(np.float16)
    )
    signed = np.rint(np.clip(np.stack([a[:, 0], b[:, 1]], 1).astype(np.float64), -1, 1) * 32767).astype(
        np.int16
    )
    np.testing.assert_array_equal(got[1].view(np.int16).reshape(64, 2), signed)
    unsigned = np.rint(np.clip(np.stack([a[:, 0], b[:, 0]], 1).astype(np.float64), 0, 1) * 65535).astype(
        np.uint16
    )
    np.testing.assert_array_equal(got[2].view(np.uint16).reshape(64, 2), unsigned)
    np.testing.assert_array_equal(
        got[3].astype(np.uint16).view(np.float16), a[:, 0] * b[:, 0] + np.float16(1)
    )
    low = [x & 0xFFFF for x in rows]
    np.testing.assert_array_equal(got[4], low[0] * low[1] + low[2] & 0xFFFF)
