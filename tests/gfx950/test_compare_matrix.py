"""All comparisons, and all matrix instructions, against numpy."""

# ruff: noqa: E501  (tables of cases read best with one case a line)

from __future__ import annotations

import re
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from megamoe.backends.gfx950.emulator.device import DeviceConfig, DeviceGroup
from megamoe.backends.gfx950.emulator.isa.matrix import VOP3P

from .assembly import run_op

rng = np.random.default_rng(8)
f64, u32 = np.float64, np.uint32


@pytest.fixture(scope="module")
def group() -> Iterator[DeviceGroup]:
    with DeviceGroup(DeviceConfig(detect_waits=True)) as one:
        yield one


ORDERS = {
    "f": lambda a, b: np.zeros(64, bool), "lt": lambda a, b: a < b, "eq": lambda a, b: a == b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}  # fmt: skip
INTEGERS = {**ORDERS, "ne": lambda a, b: a != b, "t": lambda a, b: np.ones(64, bool)}
FLOATS = {
    **ORDERS, "lg": lambda a, b: (a < b) | (a > b), "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)), "u": lambda a, b: np.isnan(a) | np.isnan(b),
    "nge": lambda a, b: ~(a >= b), "nlg": lambda a, b: ~((a < b) | (a > b)), "ngt": lambda a, b: ~(a > b), "nle": lambda a, b: ~(a <= b),
    "neq": lambda a, b: ~(a == b), "nlt": lambda a, b: ~(a < b), "tru": lambda a, b: np.ones(64, bool),
}  # fmt: skip
TYPES = {
    "i16": np.int16, "u16": np.uint16, "i32": np.int32, "u32": np.uint32, "i64": np.int64, "u64": np.uint64, "f16": np.float16, "f32": np.float32, "f64": np.float64,
}  # fmt: skip


def rows_of(x: np.ndarray) -> list[np.ndarray]:
    if x.itemsize == 2:
        return [x.view(np.uint16).astype(u32)]
    return [np.ascontiguousarray(x.view(u32).reshape(64, -1)[:, k]) for k in range(x.itemsize // 4)]


@pytest.mark.parametrize("kind", TYPES)
def test_comparisons(group: DeviceGroup, kind: str) -> None:
    """Equal, neighbouring, opposite and, for floats, special values; as a mask, and as EXEC by the cmpx form."""
    dtype = TYPES[kind]
    if kind[0] == "f":
        pool = np.array([0.0, -0.0, 1, -1, 1.5, np.inf, -np.inf, np.nan], dtype)
    else:
        info = np.iinfo(dtype)
        pool = np.array([0, 1, 2, info.max, info.min, info.max - 1, info.min + 1, info.max // 2], dtype)
    a, b = np.repeat(pool, 8), np.tile(pool, 8)
    wide = dtype().itemsize == 8
    x, y = ("v[10:11]", "v[12:13]") if wide else ("v10", "v11")
    orders = FLOATS if kind[0] == "f" else INTEGERS
    body, names = [], list(orders)
    for k, name in enumerate(names):
        body += [f"v_cmp_{name}_{kind}_e32 vcc, {x}, {y}", f"v_cndmask_b32_e64 v{40 + 2 * k}, 0, 1, vcc"]
        body += [
            "s_mov_b64 s[8:9], exec",
            f"v_cmpx_{name}_{kind}_e32 vcc, {x}, {y}",
            f"v_mov_b32_e32 v{41 + 2 * k}, 1",
            "s_mov_b64 exec, s[8:9]",
        ]
    got = run_op(group, "\n".join(body), [*rows_of(a), *rows_of(b)], 2 * len(names))
    with np.errstate(invalid="ignore"):
        for k, name in enumerate(names):
            want = orders[name](a, b)
            np.testing.assert_array_equal(got[2 * k].astype(bool), want, err_msg=name)
            np.testing.assert_array_equal(got[2 * k + 1].astype(bool), want, err_msg=f"cmpx {name}")


@pytest.mark.parametrize("kind", ["f16", "f32", "f64"])
def test_classes(group: DeviceGroup, kind: str) -> None:
    """Each of the ten classes alone: NaNs, infinities, normals, subnormals, zeros."""
    dtype = TYPES[kind]
    info = np.finfo(dtype)
    bits = {2: np.uint16, 4: np.uint32, 8: np.uint64}[dtype().itemsize]
    quiet = np.array([np.nan], dtype).view(bits)[0] & ~(bits(1) << bits(8 * dtype().itemsize - 1))
    signalling = np.array([np.inf], dtype).view(bits)[0] | bits(1)
    small = info.smallest_subnormal
    values = np.array([-np.inf, -2, -small, -0.0, 0.0, small, 2, np.inf], dtype).view(bits)
    x = np.resize(np.concatenate([np.array([signalling, quiet], bits), values]), 64).view(dtype)
    wide = dtype().itemsize == 8
    source, mask = ("v[10:11]", "v12") if wide else ("v10", "v11")
    body = []
    for k in range(10):
        body += [
            f"v_mov_b32_e32 {mask}, {1 << k}",
            f"v_cmp_class_{kind}_e32 vcc, {source}, {mask}",
            f"v_cndmask_b32_e64 v{40 + k}, 0, 1, vcc",
        ]
    got = run_op(group, "\n".join(body), [*rows_of(x), np.zeros(64, u32)], 10)
    np.testing.assert_array_equal(got, [np.arange(64) % 10 == k for k in range(10)])


# Matrix instructions. name -> (numpy type, elements of a 32-bit register)
ELEMENTS = {
    "f32": (np.float32, 1), "f16": (np.float16, 2), "bf16": (ml_dtypes.bfloat16, 2), "i8": (np.int8, 4), "fp8": (ml_dtypes.float8_e4m3fn, 4), "bf8": (ml_dtypes.float8_e5m2, 4),
}  # fmt: skip
NAME = re.compile(r"v_mfma_(f32|i32)_(\d+)x\d+x(\d+)(?:_(\d+)b)?_(\w+?)(?:_(\w+))?$")
PLAIN = sorted(
    row.mnemonic for row in VOP3P.values() if NAME.fullmatch(row.mnemonic) and "f8f6f4" not in row.mnemonic
)


def values(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    dtype = ELEMENTS[kind][0]
    return (
        rng.integers(-100, 100, shape).astype(dtype)
        if kind == "i8"
        else rng.standard_normal(shape).astype(dtype)
    )


def lanes_of(x: np.ndarray, size: int) -> list[np.ndarray]:
    """Registers of an operand [blocks, size, depth]: a lane holds one row's run of depths of one lane group."""
    blocks, _, depth = x.shape
    groups = 64 // size // blocks
    each = depth // groups
    lanes = x.reshape(blocks, size, groups, each).transpose(0, 2, 1, 3).reshape(64, each)
    raw = np.ascontiguousarray(lanes).view(np.uint8).reshape(64, -1)
    raw = np.pad(raw, ((0, 0), (0, -raw.shape[1] % 4)))
    return list(np.ascontiguousarray(raw).view(u32).T.copy())


def places(size: int, blocks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Block, row and column of result register r of each lane: [registers, 64]."""
    r, lane = np.meshgrid(np.arange(max(size * size * blocks // 64, 1)), np.arange(64), indexing="ij")
    if size == 4:
        return lane // 4, r, lane % 4
    per = size * size // 64
    row = 8 * (r % per // 4) + 4 * (lane // size) + r % 4 if size == 32 else 4 * (lane // size) + r % per
    return r // per, row, lane % size


@pytest.mark.parametrize("name", PLAIN)
def test_matrix_products(group: DeviceGroup, name: str) -> None:
    match = NAME.fullmatch(name)
    assert match
    result, size, depth, blocks, ka, kb = (
        match[1],
        int(match[2]),
        int(match[3]),
        int(match[4] or 1),
        match[5],
        match[6] or match[5],
    )
    a, b = values(ka, (blocks, size, depth)), values(kb, (blocks, size, depth))
    block, row, column = places(size, blocks)
    count = len(row)
    c = rng.integers(-99, 99, (count, 64)).astype(np.int32 if result == "i32" else np.float32)
    inputs = [*lanes_of(a, size), *lanes_of(b, size)]
    na, nb = len(lanes_of(a, size)), len(lanes_of(b, size))

    def span(first: int, n: int) -> str:
        return f"v{first}" if n == 1 else f"v[{first}:{first + n - 1}]"

    scale = "\n".join(
        f"v_mov_b32_e32 v{60 + k}, {int(c[k, 0]) if result == 'i32' else int(c[k, 0].view(u32)):#x}"
        for k in range(count)
    )
    c = np.repeat(c[:, :1], 64, 1)
    body = (
        f"{scale}\n{name} {span(60, count)}, {span(10, na)}, {span(10 + na, nb)}, {span(60, count)}\ns_nop 15"
    )
    got = run_op(group, body, inputs, count, out_row=60)
    product = np.einsum("zmk,znk->zmn", a.astype(f64), b.astype(f64))[block, row, column] + c
    if result == "i32":
        np.testing.assert_array_equal(got.view(np.int32), product.astype(np.int32))
    else:
        np.testing.assert_allclose(got.view(np.float32), product, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize(
    ("control", "source"),
    [
        ("cbsz:2 abid:1", "a"),
        ("cbsz:1", "a"),
        ("blgp:1", "b"),
        ("blgp:2", "b"),
        ("blgp:3", "b"),
        ("blgp:6", "b"),
    ],
)
def test_broadcasts_of_small_blocks(group: DeviceGroup, control: str, source: str) -> None:
    """cbsz and abid take one block of A for several; blgp broadcasts or rotates lane groups of B."""
    a, b = values("f32", (16, 4, 1)), values("f32", (16, 4, 1))
    got = run_op(
        group,
        f"v_mfma_f32_4x4x1_16b_f32 v[60:63], v10, v11, 0 {control}\ns_nop 15",
        [*lanes_of(a, 4), *lanes_of(b, 4)],
        4,
        out_row=60,
    ).view(np.float32)
    block, row, column = places(4, 16)
    if source == "a":
        size = 4 if "cbsz:2" in control else 2
        a = a[np.arange(16) // size * size + (1 if "abid" in control else 0)]
    lane = np.arange(64)
    taken = {
        "blgp:1": lane % 32,
        "blgp:2": lane % 32 + 32,
        "blgp:3": (lane + 16) % 64,
        "blgp:6": lane % 16 + 32,
    }.get(control, lane)
    b = b.reshape(64)[taken].reshape(16, 4, 1)
    np.testing.assert_allclose(got, np.einsum("zmk,znk->zmn", a, b)[block, row, column], rtol=1e-6)


SMALL = [
    (ml_dtypes.float8_e4m3fn, 8),
    (ml_dtypes.float8_e5m2, 8),
    (ml_dtypes.float6_e2m3fn, 6),
    (ml_dtypes.float6_e3m2fn, 6),
    (ml_dtypes.float4_e2m1fn, 4),
]


def mixed_operand(form: int, size: int, depth: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Values [size, depth] and eight registers. Eight-bit codes: 16 depths of the lane group, then 16 half a depth on."""
    dtype, bits = SMALL[form]
    codes = rng.integers(0, 1 << bits, (size, depth), dtype=np.uint8)
    if bits == 8:
        codes = rng.standard_normal((size, depth)).astype(dtype).view(np.uint8)
    groups = 64 // size
    if bits == 8:
        runs = codes.reshape(size, 2, groups, 16).transpose(2, 0, 1, 3)
    else:
        runs = codes.reshape(size, groups, 32).transpose(1, 0, 2)
    stream = np.unpackbits(
        np.ascontiguousarray(runs).reshape(64, 32)[:, :, None], axis=2, count=bits, bitorder="little"
    ).reshape(64, -1)
    raw = np.packbits(stream, axis=1, bitorder="little")
    return codes.view(dtype).astype(f64), list(np.ascontiguousarray(raw).view(u32).T.copy())


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("form", range(5))
@pytest.mark.parametrize("scaled", [False, True])
def test_mixed_matrix_products(group: DeviceGroup, size: int, form: int, scaled: bool) -> None:
    """A in format `form`, B in the next one; scales of 32 depths from the lane group of that number."""
    depth, other = 2048 // size, (form + 1) % 5
    (a, ra), (b, rb) = mixed_operand(form, size, depth), mixed_operand(other, size, depth)
    sa, sb = (rng.integers(120, 134, 64).astype(u32) for _ in range(2))
    count = size * size // 64
    shape = f"{size}x{size}x{depth}_f8f6f4 v[60:{59 + count}], v[10:{9 + len(ra)}], v[20:{19 + len(rb)}], 0"
    zero = np.zeros(64, u32)
    inputs = [*ra, *[zero] * (10 - len(ra)), *rb, *[zero] * (10 - len(rb)), sa << 8, sb << 16]
    suffix = (
        f", v30, v31 op_sel:[1,0] op_sel_hi:[0,1] cbsz:{form} blgp:{other}"
        if scaled
        else f" cbsz:{form} blgp:{other}"
    )
    got = run_op(
        group, f"v_mfma_{'scale_' if scaled else ''}f32_{shape}{suffix}\ns_nop 15", inputs, count, out_row=60
    ).view(np.float32)
    if scaled:
        for x, scale in ((a, sa), (b, sb)):
            x *= np.exp2(np.repeat(scale.reshape(-1, size).T.astype(f64) - 127, 32, 1))
    _, row, column = places(size, 1)
    want = (a @ b.T)[row, column]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


def test_double_precision_products(group: DeviceGroup) -> None:
    def rows(x: np.ndarray) -> list[np.ndarray]:
        return list(np.ascontiguousarray(x.reshape(64).view(u32).reshape(64, 2).T))

    a, b = rng.standard_normal((2, 16, 4))
    got = run_op(
        group,
        "v_mfma_f64_16x16x4_f64 v[60:67], v[10:11], v[12:13], 0\ns_nop 15",
        [*rows(a.T), *rows(b.T)],
        8,
        out_row=60,
    )
    have = np.ascontiguousarray(got.T).view(f64)  # [lane, 4]
    lane, r = np.meshgrid(np.arange(64), np.arange(4), indexing="ij")
    np.testing.assert_allclose(have, (a @ b.T)[4 * r + lane // 16, lane % 16], rtol=1e-12)
    a, b = rng.standard_normal((2, 4, 4, 4))  # [block, row or column, depth]
    got = run_op(
        group,
        "v_mfma_f64_4x4x4_4b_f64 v[60:61], v[10:11], v[12:13], 0\ns_nop 15",
        [*rows(a.transpose(2, 0, 1)), *rows(b.transpose(2, 0, 1))],
        2,
        out_row=60,
    )
    have = np.ascontiguousarray(got.T).view(f64)[:, 0]
    lane = np.arange(64)
    np.testing.assert_allclose(
        have, np.einsum("zmk,znk->zmn", a, b)[lane // 4 % 4, lane // 16, lane % 4], rtol=1e-12
    )
