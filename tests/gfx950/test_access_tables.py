"""Loads, stores and atomics of every width in every space: LDS, global, flat, scratch, buffers."""

# ruff: noqa: E501  (tables of cases read best with one case a line)

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from megamoe.backends.gfx950.emulator.device import DeviceConfig, DeviceGroup

from .assembly import run_op

rng = np.random.default_rng(31)
A, B, C, D = (rng.integers(0, 2**32, 64, dtype=np.uint32) for _ in range(4))
u32, u64, i32, i64 = np.uint32, np.uint64, np.int32, np.int64
KEPT = u32(0xDEADBEEF)


@pytest.fixture(scope="module")
def group() -> Iterator[DeviceGroup]:
    with DeviceGroup(DeviceConfig.checked()) as one:
        yield one
        assert one.reports() == []


# How a space is addressed: setup, then the operand texts of a load and of a store; every lane has 32 bytes of its own.
RESOURCE = "s_mov_b32 s8, s6\ns_mov_b32 s9, s7\ns_movk_i32 s10, 0x4000\ns_mov_b32 s11, 0x27000\n"
SPACES: dict[str, tuple[str, str, str, str]] = {
    "global": ("v_lshlrev_b32_e32 v2, 5, v0", "{d}, v2, s[6:7] offset:4080", "v2, {s}, s[6:7] offset:4080", "global"),
    "flat": ("v_lshlrev_b32_e32 v2, 5, v0\nv_mov_b32_e32 v3, s7\nv_add_co_u32_e32 v2, vcc, s6, v2\nv_addc_co_u32_e32 v3, vcc, 0, v3, vcc", "{d}, v[2:3] offset:4080", "v[2:3], {s} offset:4080", "flat"),
    "scratch": ("v_mov_b32_e32 v2, 16", "{d}, v2, off offset:8", "v2, {s}, off offset:8", "scratch"),
    "buffer": (RESOURCE + "v_lshlrev_b32_e32 v2, 5, v0", "{d}, v2, s[8:11], 0 offen offset:4080", "{s}, v2, s[8:11], 0 offen offset:4080", "buffer"),
    "shared": ("v_lshlrev_b32_e32 v2, 5, v0\ns_mov_b64 s[8:9], src_shared_base\nv_mov_b32_e32 v3, s9", "{d}, v[2:3] offset:16", "v[2:3], {s} offset:16", "flat"),
}  # fmt: skip
LOADS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "ubyte": lambda x: x & 255, "sbyte": lambda x: x.astype(np.int8).astype(i32).view(u32), "ushort": lambda x: x & 0xFFFF, "sshort": lambda x: x.astype(np.int16).astype(i32).view(u32),
    "ubyte_d16": lambda x: KEPT & 0xFFFF0000 | x & 255, "ubyte_d16_hi": lambda x: KEPT & 0xFFFF | (x & 255) << 16,
    "sbyte_d16": lambda x: KEPT & 0xFFFF0000 | x.astype(np.int8).astype(np.int16).view(np.uint16), "sbyte_d16_hi": lambda x: KEPT & 0xFFFF | x.astype(np.int8).astype(np.int16).view(np.uint16).astype(u32) << 16,
    "short_d16": lambda x: KEPT & 0xFFFF0000 | x & 0xFFFF, "short_d16_hi": lambda x: KEPT & 0xFFFF | (x & 0xFFFF) << 16,
}  # fmt: skip


@pytest.mark.parametrize("space", SPACES)
def test_loads_and_stores(group: DeviceGroup, space: str) -> None:
    setup, load, store, prefix = SPACES[space]
    body, want = [setup], []
    names = ["dword", "dwordx2", "dwordx3", "dwordx4"]
    for n, name in enumerate(names):  # write 4n bytes, read them back
        value = "v10" if not n else f"v[10:{10 + n}]"
        target = f"v{40 + 4 * n}" if not n else f"v[{40 + 4 * n}:{40 + 5 * n}]"
        body += [
            f"{prefix}_store_{name} {store.format(s=value)}",
            "s_waitcnt vmcnt(0) lgkmcnt(0)",
            f"{prefix}_load_{name} {load.format(d=target)}",
            "s_waitcnt vmcnt(0) lgkmcnt(0)",
        ]
        want += [(4 * n + k, (A, B, C, D)[k]) for k in range(n + 1)]
    for k, (name, function) in enumerate(LOADS.items()):
        body += [
            f"v_mov_b32_e32 v{56 + k}, 0xdeadbeef",
            f"{prefix}_load_{name} {load.format(d=f'v{56 + k}')}",
        ]
        want.append((16 + k, function(A)))
    body.append("s_waitcnt vmcnt(0) lgkmcnt(0)")
    word = A.copy()
    for k, (name, mask, at) in enumerate(
        (("byte", 0xFF, 0), ("short", 0xFFFF, 0), ("byte_d16_hi", 0xFF, 16), ("short_d16_hi", 0xFFFF, 16))
    ):
        body += [
            f"{prefix}_store_{name} {store.format(s='v11')}",
            "s_waitcnt vmcnt(0) lgkmcnt(0)",
            f"{prefix}_load_dword {load.format(d=f'v{70 + k}')}",
            "s_waitcnt vmcnt(0) lgkmcnt(0)",
        ]
        word = word & u32(0xFFFFFFFF - mask) | B >> u32(at) & u32(mask)
        want.append((30 + k, word))
    got = run_op(group, "\n".join(body), [A, B, C, D, *[A] * 60][:5], 64, lds_bytes=4096, scratch_bytes=64)
    for row, expected in want:
        np.testing.assert_array_equal(got[row], expected, err_msg=str(row))


Step = Callable[[Any, Any], Any]
FLOATS = rng.standard_normal((2, 64)).astype(np.float32)
DOUBLES = rng.standard_normal((2, 64))
HALVES = rng.standard_normal((2, 64, 2)).astype(np.float16)
BFLOATS = rng.standard_normal((2, 64, 2)).astype(ml_dtypes.bfloat16)
WORDS, LONGS = (A, B), (A.astype(u64) << u64(32) | C, B.astype(u64) << u64(32) | D)


def signed(step: Step) -> Step:
    return lambda o, d: step(o.view(f"i{o.itemsize}"), d.view(f"i{d.itemsize}")).view(o.dtype)


INTEGER: dict[str, Step] = {
    "swap": lambda o, d: d, "add": lambda o, d: o + d, "sub": lambda o, d: o - d, "smin": signed(np.minimum), "umin": np.minimum, "smax": signed(np.maximum),
    "umax": np.maximum, "and": lambda o, d: o & d, "or": lambda o, d: o | d, "xor": lambda o, d: o ^ d, "inc": lambda o, d: np.where(o >= d, 0, o + 1).astype(o.dtype),
    "dec": lambda o, d: np.where((o == 0) | (o > d), d, o - 1).astype(o.dtype),
}  # fmt: skip
ATOMICS: dict[str, tuple[Any, Step]] = {
    **{name: (WORDS, step) for name, step in INTEGER.items()}, **{f"{name}_x2": (LONGS, step) for name, step in INTEGER.items()},
    "add_f32": (FLOATS, lambda o, d: o + d), "add_f64": (DOUBLES, lambda o, d: o + d), "min_f64": (DOUBLES, np.minimum), "max_f64": (DOUBLES, np.maximum),
    "pk_add_f16": (HALVES, lambda o, d: o + d), "pk_add_bf16": (BFLOATS, lambda o, d: (o.astype(np.float32) + d.astype(np.float32)).astype(o.dtype)),
}  # fmt: skip


def registers(x: np.ndarray) -> list[np.ndarray]:
    return list(np.ascontiguousarray(np.ascontiguousarray(x).view(u32).reshape(64, -1).T))


@pytest.mark.parametrize("space", ["global", "flat", "buffer", "shared"])
@pytest.mark.parametrize("name", ATOMICS)
def test_atomics(group: DeviceGroup, space: str, name: str) -> None:
    """Returns the old value, leaves the new one; without sc0 nothing is returned."""
    (old, data), step = ATOMICS[name]
    setup, load, store, prefix = SPACES[space]
    rows = registers(old)
    n = len(rows)
    span = (lambda k: f"v[{k}:{k + 1}]") if n == 2 else (lambda k: f"v{k}")
    wide = "dwordx2" if n == 2 else "dword"
    result = load.format(d=span(40)).replace("{d}", "")
    operands = f"{span(40)}, {store.format(s=span(12))}" if prefix != "buffer" else store.format(s=span(40))
    copy = (
        ""
        if prefix != "buffer"
        else "\n".join(f"v_mov_b32_e32 v{40 + k}, v{12 + k}" for k in range(n)) + "\n"
    )
    wait = "s_waitcnt vmcnt(0) lgkmcnt(0)"
    body = f"""{setup}
{prefix}_store_{wide} {store.format(s=span(10))}
{wait}
{copy}{prefix}_atomic_{name} {operands} sc0
{wait}
{prefix}_load_{wide} {load.format(d=span(42))}
{wait}
{prefix}_store_{wide} {store.format(s=span(10))}
{wait}
{prefix}_atomic_{name} {store.format(s=span(12))}
{wait}
{prefix}_load_{wide} {load.format(d=span(44))}"""
    assert result
    inputs = [*rows, *([A] if n == 1 else []), *registers(data)]
    got = run_op(group, body, inputs, 48, lds_bytes=4096)
    want = registers(step(old, data))
    for k in range(n):
        np.testing.assert_array_equal(got[k], rows[k])
        np.testing.assert_array_equal(got[2 + k], want[k])
        np.testing.assert_array_equal(got[4 + k], want[k])


@pytest.mark.parametrize(("suffix", "n"), [("", 1), ("_x2", 2)])
@pytest.mark.parametrize("space", ["global", "flat", "shared"])
def test_compare_and_swap(group: DeviceGroup, space: str, suffix: str, n: int) -> None:
    setup, load, store, prefix = SPACES[space]
    old, new = (A, B) if n == 1 else LONGS
    compare = np.where(np.arange(64) % 2 == 0, old, new)

    def span(k, m=n):
        return f"v[{k}:{k + m - 1}]" if m > 1 else f"v{k}"

    wide = "dwordx2" if n == 2 else "dword"
    body = f"""{setup}
{prefix}_store_{wide} {store.format(s=span(10))}
s_waitcnt vmcnt(0) lgkmcnt(0)
{prefix}_atomic_cmpswap{suffix} {span(40)}, {store.format(s=span(12, 2 * n))} sc0
s_waitcnt vmcnt(0) lgkmcnt(0)
{prefix}_load_{wide} {load.format(d=span(42))}"""
    got = run_op(
        group,
        body,
        [*registers(old), *([A] if n == 1 else []), *registers(new), *registers(compare)],
        48,
        lds_bytes=4096,
    )
    np.testing.assert_array_equal(got[:n], registers(old))
    np.testing.assert_array_equal(got[2 : 2 + n], registers(np.where(np.arange(64) % 2 == 0, new, old)))


LDS_STEPS: dict[str, Step] = {
    **{f"{name}_u32": INTEGER[name] for name in ("add", "sub", "inc", "dec")}, **{f"{name}_b32": INTEGER[name] for name in ("and", "or", "xor")},
    "rsub_u32": lambda o, d: d - o, "min_i32": signed(np.minimum), "max_i32": signed(np.maximum), "min_u32": np.minimum, "max_u32": np.maximum,
    "add_f32": lambda o, d: o + d, "min_f32": np.minimum, "max_f32": np.maximum,
    "pk_add_f16": lambda o, d: o + d, "pk_add_bf16": lambda o, d: (o.astype(np.float32) + d.astype(np.float32)).astype(o.dtype),
}  # fmt: skip
LDS_ATOMICS = {
    **LDS_STEPS,
    **{name[:-2] + "64": step for name, step in LDS_STEPS.items() if name[-2:] == "32"},
}


@pytest.mark.parametrize("name", LDS_ATOMICS)
def test_lds_atomics(group: DeviceGroup, name: str) -> None:
    old, data = {"f32": FLOATS, "f64": DOUBLES, "f16": HALVES, "bf16": BFLOATS}.get(
        name.rsplit("_", 1)[1], LONGS if "64" in name else WORDS
    )
    rows = registers(old)
    n = len(rows)
    span = (lambda k: f"v[{k}:{k + 1}]") if n == 2 else (lambda k: f"v{k}")
    operation, kind = name.rsplit("_", 1)
    width = 32 * n
    body = f"""v_lshlrev_b32_e32 v2, 3, v0
ds_write_b{width} v2, {span(10)} offset:8
s_waitcnt lgkmcnt(0)
ds_{operation}_rtn_{kind} {span(40)}, v2, {span(12)} offset:8
s_waitcnt lgkmcnt(0)
ds_read_b{width} {span(42)}, v2 offset:8
s_waitcnt lgkmcnt(0)
ds_write_b{width} v2, {span(10)} offset:8
s_waitcnt lgkmcnt(0)
ds_{name} v2, {span(12)} offset:8
s_waitcnt lgkmcnt(0)
ds_read_b{width} {span(44)}, v2 offset:8"""
    got = run_op(group, body, [*rows, *([A] if n == 1 else []), *registers(data)], 6, lds_bytes=1024)
    want = registers(LDS_ATOMICS[name](old, data))
    for k in range(n):
        np.testing.assert_array_equal(got[k], rows[k])
        np.testing.assert_array_equal(got[2 + k], want[k])
        np.testing.assert_array_equal(got[4 + k], want[k])


@pytest.mark.parametrize(("kind", "n"), [("b32", 1), ("b64", 2), ("f32", 1), ("f64", 2)])
def test_lds_compare_exchange_and_masked_or(group: DeviceGroup, kind: str, n: int) -> None:
    old, new = {"b32": WORDS, "b64": LONGS, "f32": FLOATS, "f64": DOUBLES}[kind]
    compare = np.where(np.arange(64) % 3 == 0, old, new)
    span = (lambda k: f"v[{k}:{k + 1}]") if n == 2 else (lambda k: f"v{k}")
    body = f"""v_lshlrev_b32_e32 v2, 3, v0
ds_write_b{32 * n} v2, {span(10)}
s_waitcnt lgkmcnt(0)
ds_cmpst_rtn_{kind} {span(40)}, v2, {span(12)}, {span(14)}
s_waitcnt lgkmcnt(0)
ds_read_b{32 * n} {span(42)}, v2
s_waitcnt lgkmcnt(0)
ds_cmpst_{kind} v2, {span(10)}, {span(12)}
s_waitcnt lgkmcnt(0)
ds_wrxchg_rtn_b{32 * n} {span(44)}, v2, {span(10)}
s_waitcnt lgkmcnt(0)
ds_mskor_b{32 * n} v2, {span(12)}, {span(14)}
s_waitcnt lgkmcnt(0)
ds_read_b{32 * n} {span(46)}, v2"""
    pad = [A] if n == 1 else []
    got = run_op(
        group, body, [*registers(old), *pad, *registers(compare), *pad, *registers(new)], 8, lds_bytes=512
    )
    swapped = np.where(np.arange(64) % 3 == 0, new, old)
    again = np.where(swapped == old, compare, swapped)
    masked = [o & ~c | d for o, c, d in zip(registers(old), registers(compare), registers(new), strict=True)]
    for row, want in ((0, registers(old)), (2, registers(swapped)), (4, registers(again)), (6, masked)):
        np.testing.assert_array_equal(got[row : row + n], want, err_msg=str(row))


def test_lds_of_every_width(group: DeviceGroup) -> None:
    words = {
        "u8": A & 255, "i8": A.astype(np.int8).astype(i32).view(u32), "u16": A & 0xFFFF, "i16": A.astype(np.int16).astype(i32).view(u32),
        "u8_d16": LOADS["ubyte_d16"](A), "u8_d16_hi": LOADS["ubyte_d16_hi"](A), "i8_d16": LOADS["sbyte_d16"](A), "i8_d16_hi": LOADS["sbyte_d16_hi"](A),
        "u16_d16": LOADS["short_d16"](A), "u16_d16_hi": LOADS["short_d16_hi"](A),
    }  # fmt: skip
    body = ["v_lshlrev_b32_e32 v2, 5, v0", "ds_write_b128 v2, v[10:13]", "s_waitcnt lgkmcnt(0)"]
    for k, name in enumerate(words):
        body += [f"v_mov_b32_e32 v{40 + k}, 0xdeadbeef", f"ds_read_{name} v{40 + k}, v2"]
    body += [
        "ds_read_b128 v[50:53], v2",
        "ds_write_b96 v2, v[10:12] offset:16",
        "s_waitcnt lgkmcnt(0)",
        "ds_read_b96 v[54:56], v2 offset:16",
    ]
    body += [
        "ds_write2_b64 v2, v[12:13], v[10:11] offset1:3",
        "s_waitcnt lgkmcnt(0)",
        "ds_read2_b64 v[58:61], v2 offset1:3",
        "s_waitcnt lgkmcnt(0)",
    ]
    for name in ("b8", "b8_d16_hi", "b16", "b16_d16_hi"):
        body.append(f"ds_write_{name} v2, v11 offset:{8 + 4 * (len(name) > 3)}")
    body += ["s_waitcnt lgkmcnt(0)", "ds_read_b64 v[62:63], v2 offset:8"]
    got = run_op(group, "\n".join(body), [A, B, C, D], 24, lds_bytes=2048)
    for k, want in enumerate(words.values()):
        np.testing.assert_array_equal(got[k], want, err_msg=list(words)[k])
    np.testing.assert_array_equal(got[10:14], [A, B, C, D])
    np.testing.assert_array_equal(got[14:17], [A, B, C])
    np.testing.assert_array_equal(got[18:22], [C, D, A, B])
    np.testing.assert_array_equal(got[22:24], [C & 0xFFFF0000 | B & 0xFFFF, D & 0xFFFF0000 | B >> 16])


@pytest.mark.parametrize(
    ("name", "bits", "registers_"), [("b64_tr_b8", 8, 2), ("b64_tr_b4", 4, 2), ("b96_tr_b6", 6, 3)]
)
def test_transposing_reads(group: DeviceGroup, name: str, bits: int, registers_: int) -> None:
    """Sixteen lanes hold a matrix of `depth` rows of sixteen columns, row by row; lane n leaves with column n."""
    depth = 32 * registers_ // bits
    tile = rng.integers(0, 1 << bits, (4, depth, 16), dtype=np.uint8)
    stream = np.unpackbits(tile.reshape(64, -1)[:, :, None], axis=2, count=bits, bitorder="little").reshape(
        64, -1
    )
    rows = np.packbits(stream, axis=1, bitorder="little").view(u32)
    stride = 8 if registers_ == 2 else 12
    data = f"v[10:{9 + registers_}]"
    body = f"v_mul_u32_u24_e32 v2, {stride}, v0\nds_write_b{32 * registers_} v2, {data}\ns_waitcnt lgkmcnt(0)\nds_read_{name} v[40:{39 + registers_}], v2"
    got = run_op(group, body, list(rows.T.copy()), registers_, lds_bytes=64 * stride)
    have = np.unpackbits(
        np.ascontiguousarray(got.T).view(np.uint8).reshape(64, -1), axis=1, bitorder="little"
    ).reshape(4, 16, depth, bits)
    np.testing.assert_array_equal((have << np.arange(bits, dtype=np.uint8)).sum(-1), tile.transpose(0, 2, 1))


def test_loads_into_lds_of_every_width(group: DeviceGroup) -> None:
    """Lane k's value lands at M0 + offset + k * width, narrow ones extended to a word."""
    cases = {
        "ubyte": A & 255,
        "sbyte": LOADS["sbyte"](A),
        "ushort": A & 0xFFFF,
        "sshort": LOADS["sshort"](A),
        "dword": A,
    }
    body = ["s_mov_b32 m0, 0"]
    for k, name in enumerate(cases):
        body += [f"s_movk_i32 m0, {256 * k}", f"global_load_lds_{name} v1, s[4:5]"]
    body += ["s_movk_i32 m0, 0x600", "v_lshlrev_b32_e32 v3, 4, v0", "global_load_lds_dwordx4 v3, s[4:5]"]
    body += [
        "s_mov_b32 s8, s4",
        "s_mov_b32 s9, s5",
        "s_movk_i32 s10, 0x1000",
        "s_mov_b32 s11, 0x27000",
        "s_movk_i32 m0, 0xa00",
        "buffer_load_dword v1, s[8:11], 0 offen offset:256 lds",
    ]
    body += [
        "s_movk_i32 m0, 0xc00",
        "v_mul_u32_u24_e32 v4, 12, v0",
        "global_load_lds_dwordx3 v4, s[4:5]",
        "s_waitcnt vmcnt(0)",
    ]
    body += [f"ds_read_b32 v{40 + k}, v1 offset:{256 * k}" for k in range(6)]
    body += [f"ds_read_b32 v{46 + k}, v1 offset:{0x600 + 256 * k}" for k in range(4)] + [
        "ds_read_b32 v50, v1 offset:2816"
    ]
    body += [f"ds_read_b32 v{51 + k}, v1 offset:{0xC00 + 256 * k}" for k in range(3)]
    body[body.index("ds_read_b32 v45, v1 offset:1280")] = "v_mov_b32_e32 v45, 0"
    got = run_op(group, "\n".join(body), [A, B, C, D], 14, lds_bytes=4096)
    np.testing.assert_array_equal(got[:5], list(cases.values()))
    np.testing.assert_array_equal(got[6:10], [A, B, C, D])
    np.testing.assert_array_equal(got[10], B)  # the offset counts on both sides
    np.testing.assert_array_equal(got[11:14], [A, B, C])
