"""Conversions to and from small formats against ml_dtypes and a statement of stochastic rounding in exact fractions."""

# ruff: noqa: E501  (tables of cases read best with one case a line)

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from megamoe.backends.gfx950.emulator.device import DeviceConfig, DeviceGroup

from .assembly import run_op

rng = np.random.default_rng(4)
# name: type, bits of a code, mantissa bits, smallest normal exponent
FORMATS = {
    "fp8": (ml_dtypes.float8_e4m3fn, 8, 3, -6), "bf8": (ml_dtypes.float8_e5m2, 8, 2, -14), "fp4": (ml_dtypes.float4_e2m1fn, 4, 1, 0),
    "fp6": (ml_dtypes.float6_e2m3fn, 6, 3, 0), "bf6": (ml_dtypes.float6_e3m2fn, 6, 2, -2),
    "f16": (np.float16, 16, 10, -14), "bf16": (ml_dtypes.bfloat16, 16, 7, -126),
}  # fmt: skip
SOURCES = {"f32": (np.float32, 23), "f16": (np.float16, 10), "bf16": (ml_dtypes.bfloat16, 7)}


@pytest.fixture(scope="module")
def group() -> Iterator[DeviceGroup]:
    with DeviceGroup(DeviceConfig(detect_waits=True)) as one:
        yield one


def code_of(value: Fraction, negative: bool, name: str) -> int:
    """The code of a number that the format holds."""
    dtype, bits = FORMATS[name][:2]
    raw = np.array([-float(value) if negative else float(value)], np.float64).astype(dtype)
    if negative and value == 0:
        return 1 << bits - 1
    return int(raw.view(np.uint8 if bits <= 8 else np.uint16)[0]) & (1 << bits) - 1


def largest(name: str) -> Fraction:
    return Fraction(float(ml_dtypes.finfo(FORMATS[name][0]).max))


def stochastic(x: float, source: str, seed: int, scale: int, name: str) -> int:
    """Cut |x| to the source's precision at the target's exponent, add the seed's top bits below the target's, cut again."""
    mantissa, emin = FORMATS[name][2:]
    magnitude = abs(Fraction(float(x))) / Fraction(2) ** scale
    if magnitude == 0:
        return code_of(magnitude, math.copysign(1, x) < 0, name)
    exponent = max(math.floor(math.log2(magnitude)), emin)
    fine = Fraction(2) ** (exponent - SOURCES[source][1])
    dropped = SOURCES[source][1] - mantissa
    number = math.floor(magnitude / fine) + (seed >> (32 - dropped))
    value = Fraction(number >> dropped) * Fraction(2) ** (exponent - mantissa)
    if value > largest(name):
        over = {"fp8": 0x7F, "bf8": 0x7C, "f16": 0x7C00, "bf16": 0x7F80}.get(name)
        return (
            (over | (0x8000 if name[-2:] == "16" else 0x80) * (x < 0))
            if over
            else code_of(largest(name), x < 0, name)
        )
    return code_of(value, x < 0, name)


def numbers(source: str, name: str, scale: int, count: int = 64) -> np.ndarray:
    """Values around the format's range: ordinary, below the smallest normal, and too large."""
    spread = np.exp2(
        rng.uniform(FORMATS[name][3] - 4, math.log2(float(largest(name))) + 1, count)
        if name != "bf16"
        else rng.uniform(-8, 8, count)
    )
    x = rng.choice([-1.0, 1.0], count) * spread * 2.0**scale
    x[:2] = [0.0, -0.0]
    if source == "f16":
        x = x.clip(-65504, 65504)
    return x.astype(SOURCES[source][0])


def words(x: np.ndarray) -> np.ndarray:
    """Values as 32-bit registers, 16-bit ones in the low half."""
    return x.view(np.uint32) if x.dtype == np.float32 else x.view(np.uint16).astype(np.uint32)


@pytest.mark.parametrize("name", ["fp8", "bf8", "f16", "bf16"])
def test_stochastic_rounding(group: DeviceGroup, name: str) -> None:
    x, seed = numbers("f32", name, 0), rng.integers(0, 2**32, 64, dtype=np.uint32)
    bits = FORMATS[name][1]
    places = (0, 1) if bits == 16 else (0, 1, 2, 3)
    select = {
        16: ["", " op_sel:[0,0,1]"],
        8: ["", " op_sel:[0,0,1,0]", " op_sel:[0,0,0,1]", " op_sel:[0,0,1,1]"],
    }[bits]
    for place in places:
        got = run_op(
            group,
            f"v_mov_b32_e32 v40, -1\nv_cvt_sr_{name}_f32 v40, v10, v11{select[place]}",
            [words(x), seed],
            1,
        )[0]
        want = np.array(
            [stochastic(v, "f32", int(s), 0, name) for v, s in zip(x, seed, strict=True)], np.uint32
        )
        mask = np.uint32((1 << bits) - 1)
        np.testing.assert_array_equal(got >> bits * place & mask, want)
        rest = ~(mask << np.uint32(bits * place))
        np.testing.assert_array_equal(got & rest, np.full(64, rest))  # what is beside the written part stays


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", ["fp8", "bf8"])
@pytest.mark.parametrize("scale", [-5, 0, 3])
def test_scaled_stochastic_rounding(group: DeviceGroup, source: str, name: str, scale: int) -> None:
    x, seed = numbers(source, name, scale), rng.integers(0, 2**32, 64, dtype=np.uint32)
    factor = np.full(64, 2.0**scale * 1.5, np.float32)  # only the exponent counts
    got = run_op(
        group,
        f"v_cvt_scalef32_sr_{name}_{source} v40, v10, v11, v12 op_sel:[0,0,1,0]",
        [words(x), seed, words(factor)],
        1,
    )[0]
    want = [stochastic(v, source, int(s), scale, name) << 8 for v, s in zip(x, seed, strict=True)]
    np.testing.assert_array_equal(got, np.array(want, np.uint32))


@pytest.mark.parametrize("source", SOURCES)
def test_stochastic_pairs_of_four_bits(group: DeviceGroup, source: str) -> None:
    x, y = numbers(source, "fp4", 2), numbers(source, "fp4", 2)
    seed, factor = rng.integers(0, 2**32, 64, dtype=np.uint32), np.full(64, 4.0, np.float32)
    inputs = [words(x), words(y)] if source == "f32" else [words(x) | words(y) << 16]
    pair, at = ("v[10:11]", 12) if source == "f32" else ("v10", 11)
    got = run_op(
        group,
        f"v_cvt_scalef32_sr_pk_fp4_{source} v40, {pair}, v{at}, v{at + 1} op_sel:[0,0,0,1]",
        [*inputs, seed, words(factor)],
        1,
    )[0]
    codes = [[stochastic(v, source, int(s), 2, "fp4") for v, s in zip(z, seed, strict=True)] for z in (x, y)]
    np.testing.assert_array_equal(got, (np.array(codes[0]) | np.array(codes[1]) << 4) << 16)


def test_stochastic_rounding_has_no_bias(group: DeviceGroup) -> None:
    """Evenly spaced seeds round up as often as the value lies above the lower neighbour."""
    seeds = (np.arange(64, dtype=np.uint64) << 26).astype(np.uint32)
    for value in (1.03, 5.3, 300.0, 0.0031):
        got = run_op(group, "v_cvt_sr_fp8_f32 v40, v10, v11", [np.full(64, value, np.float32), seeds], 1)[0]
        decoded = got.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        spacing = np.ptp(decoded)
        assert abs(decoded.mean() - value) <= spacing / 64


def test_nan_and_infinity_stay_what_they_are(group: DeviceGroup) -> None:
    x = np.array([np.nan, -np.nan, np.inf, -np.inf] * 16, np.float32)
    x.view(np.uint32)[1::4] |= 0x80000000
    zero = np.zeros(64, np.uint32)
    got = run_op(
        group,
        "v_cvt_sr_fp8_f32 v40, v10, v11\nv_cvt_sr_bf8_f32 v41, v10, v11\nv_cvt_pk_bf8_f32 v42, v10, v10",
        [words(x), zero],
        3,
    )
    assert got[0, :4].tolist() == [0x7F, 0xFF, 0x7F, 0xFF]
    assert got[1, :4].tolist() == [0x7E, 0xFE, 0x7C, 0xFC]
    assert (got[2, :4] & 255).tolist() == [0x7E, 0xFE, 0x7C, 0xFC]


def unpack_six(rows: np.ndarray) -> np.ndarray:
    """Codes [64, 32] of six registers [6, 64]."""
    bits = np.unpackbits(
        np.ascontiguousarray(rows.T).view(np.uint8).reshape(64, 24), axis=1, bitorder="little"
    )
    return (bits.reshape(64, 32, 6) << np.arange(6, dtype=np.uint8)).sum(2)


def six_bits(x: np.ndarray, name: str) -> np.ndarray:
    limit = float(largest(name))
    return np.clip(x.astype(np.float64), -limit, limit).astype(FORMATS[name][0]).view(np.uint8) & 63


@pytest.mark.parametrize("name", ["fp6", "bf6"])
def test_thirty_two_six_bit_codes_of_two_halves(group: DeviceGroup, name: str) -> None:
    x = np.stack([numbers("f32", name, 3, 64) for _ in range(32)])
    factor = np.full(64, 8.0, np.float32)
    rows = [words(v) for v in (*x[0::2], *x[1::2], factor)]
    got = run_op(
        group, f"v_cvt_scalef32_2xpk16_{name}_f32 v[100:105], v[10:25], v[26:41], v42", rows, 6, out_row=100
    )
    np.testing.assert_array_equal(unpack_six(got), six_bits(x / 8, name).T)


@pytest.mark.parametrize("source", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["fp6", "bf6"])
def test_thirty_two_six_bit_codes(group: DeviceGroup, name: str, source: str) -> None:
    x = np.stack([numbers(source, name, -2, 64) for _ in range(32)])
    rows = [words(x[k]) | words(x[k + 1]) << 16 for k in range(0, 32, 2)]
    factor, seed = np.full(64, 0.25, np.float32), rng.integers(0, 2**32, 64, dtype=np.uint32)
    got = run_op(
        group,
        f"v_cvt_scalef32_pk32_{name}_{source} v[60:65], v[10:25], v26",
        [*rows, words(factor)],
        6,
        out_row=60,
    )
    np.testing.assert_array_equal(unpack_six(got), six_bits(x.astype(np.float64) * 4, name).T)
    got = run_op(
        group,
        f"v_cvt_scalef32_sr_pk32_{name}_{source} v[60:65], v[10:25], v26, v27",
        [*rows, seed, words(factor)],
        6,
        out_row=60,
    )
    want = [
        [stochastic(x[k, lane], source, int(seed[lane]), -2, name) for k in range(32)] for lane in range(64)
    ]
    np.testing.assert_array_equal(unpack_six(got), np.array(want))


@pytest.mark.parametrize("name", ["fp6", "bf6"])
def test_thirty_two_stochastic_codes_of_floats(group: DeviceGroup, name: str) -> None:
    x = np.stack([numbers("f32", name, 1, 64) for _ in range(32)])
    seed, factor = rng.integers(0, 2**32, 64, dtype=np.uint32), np.full(64, 2.0, np.float32)
    rows = [*(words(v) for v in x), seed, words(factor)]
    got = run_op(
        group, f"v_cvt_scalef32_sr_pk32_{name}_f32 v[60:65], v[10:41], v42, v43", rows, 6, out_row=60
    )
    want = [
        [stochastic(x[k, lane], "f32", int(seed[lane]), 1, name) for k in range(32)] for lane in range(64)
    ]
    np.testing.assert_array_equal(unpack_six(got), np.array(want))


@pytest.mark.parametrize("target", SOURCES)
@pytest.mark.parametrize("name", ["fp6", "bf6"])
def test_values_of_six_bit_codes(group: DeviceGroup, name: str, target: str) -> None:
    codes = rng.integers(0, 64, (64, 32), dtype=np.uint8)
    bits = np.unpackbits(codes[:, :, None], axis=2, count=6, bitorder="little").reshape(64, 192)
    rows = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
    factor = np.full(64, 4.0, np.float32)
    count = 32 if target == "f32" else 16
    body = f"v_cvt_scalef32_pk32_{target}_{name} v[60:{59 + count}], v[10:15], v16"
    got = run_op(group, body, [*rows.T.copy(), words(factor)], count, out_row=60)
    want = (codes.view(FORMATS[name][0]).astype(np.float64) * 4).astype(SOURCES[target][0])
    np.testing.assert_array_equal(
        np.ascontiguousarray(got.T).view(SOURCES[target][0]).astype(np.float64), want.astype(np.float64)
    )


def small_codes(x: np.ndarray, name: str) -> np.ndarray:
    """Codes of finite values, rounded to nearest even; four-bit ones saturate."""
    dtype, bits = FORMATS[name][:2]
    limit = float(largest(name))
    return np.clip(x.astype(np.float64), -limit, limit).astype(dtype).view(np.uint8).astype(np.uint32) & (
        (1 << bits) - 1
    )


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", ["fp8", "bf8", "fp4"])
def test_scaled_pairs(group: DeviceGroup, name: str, source: str) -> None:
    limit = float(largest(name))
    x, y = (rng.uniform(-limit, limit, 64).astype(SOURCES[source][0]) for _ in range(2))
    x[:2] = [0.0, -0.0]
    factor = np.full(64, 2.0, np.float32)
    inputs = [words(x), words(y)] if source == "f32" else [words(x) | words(y) << 16]
    operands = "v10, v11, v12" if source == "f32" else "v10, v11"
    bits = FORMATS[name][1]
    select = ",".join("0" for _ in range(len(operands.split(","))))
    select = f" op_sel:[{select},1]" if bits == 8 else " op_sel:[0,0,1,0]"
    got = run_op(
        group,
        f"v_mov_b32_e32 v40, -1\nv_cvt_scalef32_pk_{name}_{source} v40, {operands}{select}",
        [*inputs, words(factor)],
        1,
    )[0]
    pair = small_codes(x.astype(np.float64) / 2, name) | small_codes(y.astype(np.float64) / 2, name) << bits
    at, mask = (16, 0xFFFF) if bits == 8 else (8, 0xFF)
    np.testing.assert_array_equal(got, pair << at | np.uint32(0xFFFFFFFF & ~(mask << at)))


@pytest.mark.parametrize("target", SOURCES)
@pytest.mark.parametrize("name", ["fp8", "bf8", "fp4"])
def test_values_of_scaled_pairs(group: DeviceGroup, name: str, target: str) -> None:
    dtype, bits = FORMATS[name][:2]
    codes = rng.integers(0, 1 << bits, (64, 32 // bits), dtype=np.uint8)
    codes[(codes & 0x7C) == 0x7C] = 1  # finite ones
    stream = np.packbits(
        np.unpackbits(codes[:, :, None], axis=2, count=bits, bitorder="little").reshape(64, 32),
        axis=1,
        bitorder="little",
    )
    factor = np.full(64, 0.5, np.float32)
    first = 2 if bits == 8 else 4
    select = " op_sel:[1,0]" if bits == 8 else " op_sel:[0,1]"
    if target != "f32" or bits == 4:
        select = select.replace("]", ",0]")
    wide = target == "f32"
    body = f"v_cvt_scalef32_pk_{target}_{name} {'v[40:41]' if wide else 'v40'}, v10, v11{select}"
    got = run_op(group, body, [stream.view(np.uint32)[:, 0].copy(), words(factor)], 2)
    want = codes[:, first : first + 2].view(dtype).astype(np.float64) * 0.5
    have = (
        np.ascontiguousarray(got.T).view(np.float32)
        if wide
        else np.ascontiguousarray(got[0]).view(SOURCES[target][0]).reshape(64, 2)
    )
    np.testing.assert_array_equal(have.astype(np.float64), want.astype(SOURCES[target][0]).astype(np.float64))


@pytest.mark.parametrize("name", ["fp8", "bf8"])
def test_single_values_of_eight_bits(group: DeviceGroup, name: str) -> None:
    codes = rng.integers(0, 0x70, (64, 4), dtype=np.uint8)
    packed, factor = codes.view(np.uint32)[:, 0].copy(), np.full(64, 8.0, np.float32)
    body = f"""v_cvt_scalef32_f32_{name} v40, v10, v11 op_sel:[1,1]
v_mov_b32_e32 v41, -1
v_cvt_scalef32_f16_{name} v41, v10, v11 op_sel:[0,1,1]
v_cvt_f32_{name}_sdwa v42, v10 src0_sel:BYTE_1
v_cvt_pk_f32_{name}_sdwa v[44:45], v10 src0_sel:WORD_1"""
    got = run_op(group, body, [packed, words(factor)], 6)
    plain = codes.view(FORMATS[name][0]).astype(np.float32)
    np.testing.assert_array_equal(got[0].view(np.float32), plain[:, 3] * 8)
    half = (plain[:, 2] * 8).astype(np.float16).view(np.uint16).astype(np.uint32)
    np.testing.assert_array_equal(got[1], half << 16 | 0xFFFF)
    np.testing.assert_array_equal(got[2].view(np.float32), plain[:, 1])
    np.testing.assert_array_equal(got[4:6].view(np.float32), plain[:, 2:4].T)
