"""Twenty-odd kernels that nobody here wrote machine code for run right, with every detector on and without a report."""

# ruff: noqa: E501  (tables of cases read best with one case a line)

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from megamoe.backends.gfx950.emulator.device import DeviceConfig, DeviceGroup
from megamoe.backends.gfx950.emulator.lowering import missing

from . import triton_kernels as tk
from .toolchain import triton_kernel

N, BLOCK = 1000, 256
rng = np.random.default_rng(7)
F, G = rng.standard_normal(N).astype(np.float32), rng.standard_normal(N).astype(np.float32)
I32, J32 = rng.integers(-(2**30), 2**30, N, dtype=np.int32), rng.integers(1, 2**12, N, dtype=np.int32)
L, P = rng.integers(-(2**40), 2**40, N, dtype=np.int64), rng.integers(1, 2**20, N, dtype=np.int64)
ROWS, WIDTH = 6, 333
M2 = rng.standard_normal((ROWS, WIDTH)).astype(np.float32)


@pytest.fixture
def group() -> Iterator[DeviceGroup]:
    """One rank, all detectors on, waves in drawn order."""
    with DeviceGroup(DeviceConfig.checked(seed=3)) as one:
        yield one


def run(
    group: DeviceGroup,
    function: Any,
    types: str,
    arrays: list[Any],
    constants: dict[str, Any],
    grid: tuple[int, ...],
    **options: Any,
) -> list[np.ndarray]:
    """Compile, launch with the arrays as device copies, return their contents afterwards."""
    names = function.__code__.co_varnames[: len(arrays)]
    kernel, items, shared = triton_kernel(
        function, dict(zip(names, types.split(), strict=True)), constants, **options
    )
    assert not missing(kernel)
    device = group.devices[0]
    buffers = [device.upload(a) if isinstance(a, np.ndarray) else None for a in arrays]
    args = [b.address if b else a for a, b in zip(arrays, buffers, strict=True)]
    args += [0] * (len(kernel.explicit_args) - len(args))
    device.default_stream.launch(kernel, grid, (items,), args, lds_bytes=shared)
    group.synchronize()
    assert [r.text for r in group.reports()] == []
    return [
        b.memory[: a.nbytes].view(a.dtype).reshape(a.shape)
        for a, b in zip(arrays, buffers, strict=True)
        if b is not None
    ]


ELEMENTWISE: dict[str, tuple[Any, str, list[np.ndarray], Any, Any, float]] = {
    "add": (tk.add, "*fp32", [F, G], np.float32, lambda a, b: a + b, 0),
    "half": (tk.fused_half, "*fp16", [F.astype(np.float16), G.astype(np.float16)], np.float16, lambda a, b: a * b + a - b * np.float16(0.5), 4e-3),
    "silu": (tk.silu, "*fp32", [F], np.float32, lambda a: a / (1 + np.exp(-a)), 1e-6),
    "functions": (tk.trigonometry, "*fp32", [F], np.float32, lambda a: np.sqrt(np.abs(a)) + np.log(np.abs(a) + 1) + np.floor(a), 1e-6),
    "integers": (tk.integers, "*i32", [I32, J32], np.int32, lambda a, b: np.trunc(a / b).astype(np.int32) ^ (np.fmod(a, b) + (a << 3) - (b >> 2) * a), 0),
    "longs": (tk.longs, "*i64", [L, P], np.int64, lambda a, b: np.where(a > b, a * b, (a - b) >> 5) & 0x7FFFFFFFFFFF, 0),
    "doubles": (tk.doubles, "*fp64", [F.astype(np.float64), G.astype(np.float64)], np.float64, lambda a, b: a * b + a / b, 1e-15),
    "bytes": (tk.bytes_mix, "*u8", [(I32 & 255).astype(np.uint8), (J32 & 255).astype(np.uint8)], np.uint8, lambda a, b: (a ^ b) + np.maximum(a, b), 0),
    "bfloat": (tk.to_bfloat, "*fp32 *bf16", [F], ml_dtypes.bfloat16, lambda a: a.astype(ml_dtypes.bfloat16), 0),
    "float8": (tk.to_float8, "*fp32 *fp8e4nv", [F * 20], ml_dtypes.float8_e4m3fn, lambda a: a.astype(ml_dtypes.float8_e4m3fn), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(group: DeviceGroup, name: str) -> None:
    function, types, inputs, dtype, want, tolerance = ELEMENTWISE[name]
    kinds = types.split() if " " in types else [types] * (len(inputs) + 1)
    out = run(
        group,
        function,
        " ".join([*kinds, "i32"]),
        [*inputs, np.zeros(N, dtype), N],
        {"BLOCK": BLOCK},
        (-(-N // BLOCK),),
    )[-1]
    with np.errstate(over="ignore"):
        expected = want(*inputs)
    if tolerance:
        np.testing.assert_allclose(
            out.astype(np.float64), expected.astype(np.float64), rtol=tolerance, atol=tolerance
        )
    else:
        np.testing.assert_array_equal(out.view(np.uint8), expected.view(np.uint8))


def test_random_numbers_are_philox(group: DeviceGroup) -> None:
    (out,) = run(
        group, tk.random_numbers, "*i32 i32 i32", [np.zeros(N, np.int32), 5, N], {"BLOCK": BLOCK}, (4,)
    )
    counter, key = np.zeros((4, N), np.uint64), [5, 0]
    counter[0] = np.arange(N)
    for _ in range(10):
        a, b = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        low = np.uint64(0xFFFFFFFF)
        counter = np.stack(
            [
                (b >> np.uint64(32)) ^ counter[1] ^ np.uint64(key[0]),
                b & low,
                (a >> np.uint64(32)) ^ counter[3] ^ np.uint64(key[1]),
                a & low,
            ]
        )
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    np.testing.assert_array_equal(out.view(np.uint32), counter[0].astype(np.uint32))


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(1, keepdims=True))
    return np.asarray(e / e.sum(1, keepdims=True))


def _normalized(x: np.ndarray) -> np.ndarray:
    d = x - x.mean(1, keepdims=True)
    return np.asarray(d / np.sqrt((d * d).mean(1, keepdims=True) + 1e-5))


@pytest.mark.parametrize(
    ("function", "out", "want"),
    [
        (tk.row_sum, np.zeros(ROWS, np.float32), lambda x: x.sum(1)),
        (tk.softmax, np.zeros_like(M2), _softmax),
        (tk.layer_norm, np.zeros_like(M2), _normalized),
    ],
)
def test_row_reductions(group: DeviceGroup, function: Any, out: np.ndarray, want: Any) -> None:
    got = run(group, function, "*fp32 *fp32 i32", [M2, out, WIDTH], {"BLOCK": 512}, (ROWS,))[-1]
    np.testing.assert_allclose(got, want(M2.astype(np.float64)), rtol=2e-5, atol=2e-5)


def test_row_argmax(group: DeviceGroup) -> None:
    got = run(
        group, tk.row_argmax, "*fp32 *i32 i32", [M2, np.zeros(ROWS, np.int32), WIDTH], {"BLOCK": 512}, (ROWS,)
    )[-1]
    np.testing.assert_array_equal(got, M2.argmax(1))


def test_prefix_sum(group: DeviceGroup) -> None:
    x = rng.integers(-50, 50, (ROWS, WIDTH), dtype=np.int32)
    got = run(group, tk.prefix_sum, "*i32 *i32 i32", [x, np.zeros_like(x), WIDTH], {"BLOCK": 512}, (ROWS,))[
        -1
    ]
    np.testing.assert_array_equal(got, np.cumsum(x, axis=1))


def test_histogram(group: DeviceGroup) -> None:
    x = rng.integers(0, 17, N, dtype=np.int32)
    got = run(group, tk.histogram, "*i32 *i32 i32", [x, np.zeros(17, np.int32), N], {"BLOCK": BLOCK}, (4,))[
        -1
    ]
    np.testing.assert_array_equal(got, np.bincount(x, minlength=17))


def test_float_atomics(group: DeviceGroup) -> None:
    got = run(
        group,
        tk.float_atomics,
        "*fp32 *fp32 *fp32 i32",
        [F, np.zeros(1, np.float32), np.zeros(1, np.float32), N],
        {"BLOCK": BLOCK},
        (4,),
    )
    np.testing.assert_allclose(got[1], F.sum(dtype=np.float64), rtol=1e-4, atol=1e-4)
    assert got[2][0] == F.max()


def test_transpose(group: DeviceGroup) -> None:
    x = rng.standard_normal((128, 64)).astype(np.float32)
    got = run(
        group,
        tk.transpose,
        "*fp32 *fp32 i32 i32",
        [x, np.zeros((64, 128), np.float32), 128, 64],
        {"BLOCK": 64},
        (2, 1),
    )[-1]
    np.testing.assert_array_equal(got, x.T)


@pytest.mark.parametrize(
    ("kind", "dtype", "tile", "tolerance"),
    [
        ("bf16", ml_dtypes.bfloat16, (64, 64, 64), 1e-6), ("fp16", np.float16, (32, 32, 32), 1e-6), ("fp32", np.float32, (32, 32, 32), 1e-5),
        ("fp8e4nv", ml_dtypes.float8_e4m3fn, (64, 64, 128), 1e-6),
    ],
)  # fmt: skip
def test_matmul(
    group: DeviceGroup, kind: str, dtype: Any, tile: tuple[int, int, int], tolerance: float
) -> None:
    m, n, k = 64, 128, 256
    a, b = rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((k, n)).astype(dtype)
    constants = dict(zip(("BM", "BN", "BK"), tile, strict=True))
    got = run(
        group, tk.matmul, f"*{kind} *{kind} *fp32 i32 i32", [a, b, np.zeros((m, n), np.float32), n, k], constants,
        (m // tile[0], n // tile[1]),
    )[-1]  # fmt: skip
    want = a.astype(np.float64) @ b.astype(np.float64)
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < max(tolerance, 1e-6)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.mark.parametrize("instruction", [16, 32])
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_scaled_matmul(group: DeviceGroup, fmt: str, instruction: int) -> None:
    m, n, k = 64, 64, 512
    a = rng.standard_normal((m, k)).astype(ml_dtypes.float8_e4m3fn)
    sa, sb = (rng.integers(124, 130, (rows, k // 32), dtype=np.uint8) for rows in (m, n))
    if fmt == "e4m3":
        b = rng.standard_normal((n, k)).astype(ml_dtypes.float8_e4m3fn)
        values, pack, kind = b.astype(np.float64), 1, "*fp8e4nv"
    else:
        b = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
        values, pack, kind = np.stack([E2M1[b & 15], E2M1[b >> 4]], -1).reshape(n, k), 2, "*u8"
    got = run(
        group, tk.scaled_matmul, f"*fp8e4nv *u8 {kind} *u8 *fp32 i32 i32", [a, sa, b, sb, np.zeros((m, n), np.float32), n, k],
        {"BM": 64, "BN": 64, "BK": 256, "FB": fmt, "PB": pack}, (1, 1), matrix_instr_nonkdim=instruction,
    )[-1]  # fmt: skip
    x = a.astype(np.float64) * np.repeat(2.0 ** (sa.astype(float) - 127), 32, 1)
    y = values * np.repeat(2.0 ** (sb.astype(float) - 127), 32, 1)
    want = x @ y.T
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 1e-6
