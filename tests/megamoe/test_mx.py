"""MX formats against ml_dtypes: every code, every scale, and the block rules by properties."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megamoe import mx
from megamoe.errors import InvalidArgumentError

E8M0 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
FORMATS = {
    "mxfp8": (mx.quantize_mxfp8, mx.dequantize_mxfp8, 448.0, 8),
    "mxfp4": (mx.quantize_mxfp4, mx.dequantize_mxfp4, 6.0, 2),
}


def test_every_e4m3_code_under_every_scale() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 8).contiguous()
    with np.errstate(over="ignore", invalid="ignore"):
        want = (E4M3[None, :] * E8M0[:, None]).astype(np.float32)
    np.testing.assert_array_equal(mx.dequantize_mxfp8(codes, scales).numpy(), want)


def test_every_e2m1_pair_under_every_scale() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 16).contiguous()
    byte = np.arange(256)
    pairs = np.stack([E2M1[byte & 15], E2M1[byte >> 4]], axis=-1).reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        want = (pairs[None, :] * E8M0[:, None]).astype(np.float32)
    np.testing.assert_array_equal(mx.dequantize_mxfp4(codes, scales).numpy(), want)


@pytest.mark.parametrize("name", FORMATS)
def test_every_short_float_rounds_as_ml_dtypes_does(name: str) -> None:
    """All fp16 and bf16 numbers that fit under scale 1 meet every boundary, tie and subnormal; their fp32 neighbours
    lie just beside the ties."""
    quantize, dequantize, top, _ = FORMATS[name]
    element = ml_dtypes.float8_e4m3fn if name == "mxfp8" else ml_dtypes.float4_e2m1fn
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    short = torch.cat([bits.view(torch.float16).float(), bits.view(torch.bfloat16).float()])
    values = torch.cat(
        [short, short.nextafter(torch.tensor(math.inf)), short.nextafter(-torch.tensor(math.inf))]
    )
    values = values[values.abs() <= top]
    values = torch.cat([values, torch.zeros(-len(values) % 31)]).view(-1, 31)
    x = torch.cat([torch.full((len(values), 1), top), values], dim=1)
    codes, scales = quantize(x)
    assert scales.unique().tolist() == [127]
    want = x.numpy().astype(element)
    np.testing.assert_array_equal(dequantize(codes, scales).numpy(), want.astype(np.float32))
    want_codes = want.view(np.uint8)
    if name == "mxfp4":
        want_codes = want_codes[:, 0::2] & 15 | want_codes[:, 1::2] << 4
    np.testing.assert_array_equal(codes.numpy(), want_codes)  # -0 included


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_nan_code_is_one_nan(code: int) -> None:
    codes = torch.arange(0, 64, dtype=torch.uint8).view(1, 64)
    codes[0, 40] = code
    decoded = mx.dequantize_mxfp8(codes, torch.full((1, 2), 127, dtype=torch.uint8))
    assert decoded.isnan().nonzero().tolist() == [[0, 40]]


@pytest.mark.parametrize("name", FORMATS)
def test_scale_steps_exactly_above_the_largest_value(name: str) -> None:
    quantize, _, top, emax = FORMATS[name]
    for exponent in (-100, -1, 0, 1, 100):
        edge = torch.tensor(top * 2.0**exponent)
        above, below = edge.nextafter(torch.tensor(math.inf)), edge.nextafter(torch.tensor(0.0))
        for value, up in ((below, 0), (edge, 0), (above, 1)):
            block = torch.zeros(32)
            block[17] = -value
            assert int(quantize(block, "up")[1]) == 127 + exponent + up
            assert int(quantize(block, "floor")[1]) == 127 + exponent
        power = torch.tensor(2.0 ** (exponent + emax))
        for value, down in ((power, 0), (power.nextafter(torch.tensor(0.0)), 1)):
            assert int(quantize(value.expand(32), "floor")[1]) == 127 + exponent - down


def oracle(block: np.ndarray, name: str, rule: str) -> tuple[int, np.ndarray]:
    """One block by the definition, in float64 and ml_dtypes: (scale byte, decoded values)."""
    _, _, top, emax = FORMATS[name]
    if not np.isfinite(block).all():
        return 255, np.full(32, np.nan)
    largest = float(np.abs(block).max())
    if largest == 0:
        return 0, np.zeros(32)
    if rule == "floor":
        exponent = math.frexp(largest)[1] - 1 - emax
    else:
        exponent = next(e for e in range(-300, 300) if largest <= math.ldexp(top, e))
    exponent = min(max(exponent, -127), 127)
    scaled = np.clip(block.astype(np.float64) / 2.0**exponent, -top, top)
    element = ml_dtypes.float8_e4m3fn if name == "mxfp8" else ml_dtypes.float4_e2m1fn
    return exponent + 127, scaled.astype(np.float32).astype(element).astype(np.float64) * 2.0**exponent


floats = st.one_of(
    st.floats(width=32),
    st.floats(width=32, min_value=-8.0, max_value=8.0),
    st.floats(width=32, min_value=-(2.0**-126), max_value=2.0**-126),
    st.sampled_from(
        [0.0, -0.0, 448.0, 449.0, 464.0, 6.0, 6.5, 5.0, 2.5, 3.5, 0.25, 0.75, 2.0**-130, 2.0**-149]
    ),
)
blocks = st.lists(floats, min_size=32, max_size=32)


@pytest.mark.parametrize("rule", ["up", "floor"])
@pytest.mark.parametrize("name", FORMATS)
@given(block=blocks)
def test_any_block_equals_the_definition(name: str, rule: mx.ScaleRule, block: list[float]) -> None:
    quantize, dequantize, *_ = FORMATS[name]
    x = torch.tensor(block, dtype=torch.float32)
    codes, scales = quantize(x, rule)
    byte, want = oracle(x.numpy(), name, rule)
    assert int(scales[0]) == byte
    with np.errstate(over="ignore"):  # next to fp32's maximum a code rounds up to 2^128, which fp32 calls inf
        np.testing.assert_array_equal(dequantize(codes, scales).numpy(), want.astype(np.float32))


@pytest.mark.parametrize("name", FORMATS)
@given(block=st.lists(st.floats(width=32, min_value=-(2.0**99), max_value=2.0**99), min_size=32, max_size=32))
def test_quantizing_twice_changes_nothing(name: str, block: list[float]) -> None:
    quantize, dequantize, *_ = FORMATS[name]
    once = dequantize(*quantize(torch.tensor(block)))
    torch.testing.assert_close(dequantize(*quantize(once)), once, rtol=0, atol=0)


@pytest.mark.parametrize("rule", ["up", "floor"])
@pytest.mark.parametrize("name", FORMATS)
@given(block=blocks)
def test_larger_values_never_get_smaller_codes(name: str, rule: mx.ScaleRule, block: list[float]) -> None:
    quantize, dequantize, *_ = FORMATS[name]
    x = torch.tensor(block, dtype=torch.float32).nan_to_num(0.0, 1.0, -1.0)
    decoded = dequantize(*quantize(x, rule))
    in_order = decoded[x.argsort()]
    assert bool((in_order[1:] >= in_order[:-1]).all())
    negated = dequantize(*quantize(-x, rule))
    assert torch.equal(negated, -decoded)


@pytest.mark.parametrize("name", FORMATS)
def test_codes_survive_a_round_trip(name: str) -> None:
    """Canonical blocks come back code by code. A block is canonical when its maximum needs its scale; one whose maximum
    was rounded down to half the largest value comes back with half the scale, and is canonical from then on."""
    quantize, dequantize, top, _ = FORMATS[name]
    x = (
        torch.randn(300, 64, generator=torch.Generator().manual_seed(7))
        * torch.logspace(-30, 30, 300)[:, None]
    )
    codes, scales = quantize(x)
    decoded = dequantize(codes, scales)
    largest = decoded.abs().view(300, 2, 32).amax(-1) / torch.pow(2.0, scales.double() - 127)
    canonical = largest > top / 2
    assert 0.5 < float(canonical.double().mean()) < 1.0, "the data must hold both kinds"
    again, again_scales = quantize(decoded)
    assert torch.equal(again_scales, torch.where(canonical, scales, scales - 1))
    codes_of_block = [tensor.view(300, 2, -1)[canonical] for tensor in (again, codes)]
    assert torch.equal(*codes_of_block)
    third = quantize(dequantize(again, again_scales))
    assert torch.equal(third[0], again)
    assert torch.equal(third[1], again_scales)


def test_zeros_have_scale_zero_and_keep_their_sign() -> None:
    for quantize, dequantize, *_ in FORMATS.values():
        codes, scales = quantize(torch.zeros(2, 32))
        assert not codes.any()
        assert not scales.any()
        decoded = dequantize(*quantize(torch.full((32,), -0.0)))
        assert torch.equal(decoded, torch.zeros(32))
        assert bool(decoded.signbit().all())


def ragged_rows() -> torch.Tensor:
    x = torch.randn(37, 96, generator=torch.Generator().manual_seed(11))
    x *= torch.logspace(-37, 37, 37)[:, None]
    x[3, 5], x[20, 70], x[36, 95] = float("nan"), float("inf"), float("-inf")
    return x


@pytest.mark.parametrize("name", FORMATS)
def test_chunks_and_work_space_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quantize, dequantize, *_ = FORMATS[name]
    x = ragged_rows()
    want = [quantize(row) for row in x]
    monkeypatch.setattr(mx, "_SMALL_ELEMENTS", 0)
    for chunk in (1 << 18, 96 * 5, 96, 64):
        monkeypatch.setattr(mx, "_CHUNK_ELEMENTS", chunk)
        codes, scales = quantize(x)
        assert torch.equal(codes, torch.stack([pair[0] for pair in want]))
        assert torch.equal(scales, torch.stack([pair[1] for pair in want]))
        rows = torch.stack([dequantize(*pair) for pair in want])
        torch.testing.assert_close(dequantize(codes, scales), rows, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_longer_than_a_chunk(name: str) -> None:
    quantize, dequantize, *_ = FORMATS[name]
    x = torch.randn(2, (1 << 18) + 64, generator=torch.Generator().manual_seed(6))
    want = torch.cat([dequantize(*quantize(x[:, : 1 << 17])), dequantize(*quantize(x[:, 1 << 17 :]))], dim=1)
    assert torch.equal(dequantize(*quantize(x)), want)


def test_into_strided_memory_touches_nothing_else() -> None:
    x = torch.cat([ragged_rows(), torch.full((37, 32), 7.0)], dim=1)[:, :96]
    heap = torch.full((37, 256), 0xAB, dtype=torch.uint8)
    codes, scales = heap[:, 16:112], heap[:, 120:123]
    mx.quantize_mxfp8_into(codes, scales, x)
    want_codes, want_scales = mx.quantize_mxfp8(x)
    assert torch.equal(codes, want_codes)
    assert torch.equal(scales, want_scales)
    rest = torch.cat([heap[:, :16], heap[:, 112:120], heap[:, 123:]], dim=1)
    assert bool((rest == 0xAB).all())
    wide = torch.full((37, 100), 3.0)
    mx.dequantize_mxfp8_into(wide[:, 2:98], codes, scales, nan_codes=False)
    torch.testing.assert_close(
        wide[:, 2:98], mx.dequantize_mxfp8(codes, scales), rtol=0, atol=0, equal_nan=True
    )
    assert bool((wide[:, [0, 1, 98, 99]] == 3.0).all())


@pytest.mark.parametrize("name", FORMATS)
def test_inputs_of_other_types_and_strides(name: str) -> None:
    quantize, *_ = FORMATS[name]
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(5))
    for other in (x.bfloat16(), x.half(), x.double(), x.T, x[::2], x.view(2, 32, 64)):
        for got, want in zip(quantize(other), quantize(other.float().contiguous()), strict=True):
            assert torch.equal(got, want)
        assert quantize(other)[1].shape == (*other.shape[:-1], 2)


def test_threads_do_not_share_work_space() -> None:
    xs = [torch.randn(200, 512, generator=torch.Generator().manual_seed(seed)) for seed in range(8)]
    want = [mx.dequantize_mxfp8(*mx.quantize_mxfp8(x)) for x in xs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            got = pool.map(lambda x: mx.dequantize_mxfp8(*mx.quantize_mxfp8(x)), xs)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_poison_stays_in_its_block(name: str, poison: float) -> None:
    quantize, dequantize, *_ = FORMATS[name]
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(1))
    clean = dequantize(*quantize(x))
    x[1, 40] = poison
    codes, scales = quantize(x)
    decoded = dequantize(codes, scales)
    assert int(scales[1, 1]) == mx.SCALE_NAN
    assert not codes.view(3, 3, -1)[1, 1].any()
    assert decoded[1, 32:64].isnan().all()
    decoded[1, 32:64] = clean[1, 32:64]
    assert torch.equal(decoded, clean)


def test_round_up_rule_never_saturates_and_is_tight() -> None:
    x = (
        torch.randn(64, 512, generator=torch.Generator().manual_seed(2))
        * torch.logspace(-20, 20, 64)[:, None]
    )
    for quantize, dequantize, top, _ in FORMATS.values():
        codes, scales = quantize(x)
        steps = (x.view(64, 16, 32).abs().amax(-1) / torch.pow(2.0, scales.double() - 127)).double()
        assert bool((steps <= top).all())
        assert bool((steps > top / 2).all())
        error = (dequantize(codes, scales) - x).abs().view(64, 16, 32)
        assert float((error.amax(-1) / x.view(64, 16, 32).abs().amax(-1)).max()) <= (
            1 / 16 if top > 6 else 1 / 4
        )


def test_typed_views_are_the_same_bytes() -> None:
    codes, scales = mx.quantize_mxfp8(torch.randn(4, 64, generator=torch.Generator().manual_seed(3)))
    typed = mx.dequantize_mxfp8(codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu))
    assert torch.equal(typed, mx.dequantize_mxfp8(codes, scales))
    packed, scales = mx.quantize_mxfp4(torch.randn(4, 64, generator=torch.Generator().manual_seed(3)))
    typed = mx.dequantize_mxfp4(packed.view(torch.float4_e2m1fn_x2), scales.view(torch.float8_e8m0fnu))
    assert torch.equal(typed, mx.dequantize_mxfp4(packed, scales))


def test_empty_rows() -> None:
    codes, scales = mx.quantize_mxfp8(torch.zeros(0, 64))
    assert codes.shape == (0, 64)
    assert scales.shape == (0, 2)
    assert mx.dequantize_mxfp8(codes, scales).shape == (0, 64)


def test_refusals_name_field_wanted_and_got() -> None:
    with pytest.raises(InvalidArgumentError, match=r"multiple of 32, got \[2, 40\]"):
        mx.quantize_mxfp8(torch.zeros(2, 40))
    with pytest.raises(InvalidArgumentError, match="floating point"):
        mx.quantize_mxfp4(torch.zeros(2, 64, dtype=torch.int32))
    with pytest.raises(InvalidArgumentError, match=r"scales\.shape must be \[2, 2\], got \[2, 3\]"):
        mx.dequantize_mxfp8(torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.uint8))
    out = torch.zeros(3, 66, dtype=torch.uint8)
    with pytest.raises(InvalidArgumentError, match=r"codes\.shape must be \[2, 64\], got \[3, 64\]"):
        mx.quantize_mxfp8_into(out[:, :64], out[:2, 64:], torch.zeros(2, 64))
    with pytest.raises(InvalidArgumentError, match=r"out\.shape must be \[2, 64\], got \[2, 32\]"):
        mx.dequantize_mxfp8_into(torch.zeros(2, 32), out[:2, :64], out[:2, 64:])
    with pytest.raises(InvalidArgumentError, match=r"codes must be bytes .* got torch\.int32"):
        mx.dequantize_mxfp4(torch.zeros(2, 16, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.uint8))
    with pytest.raises(InvalidArgumentError, match="'up' or 'floor'"):
        mx.quantize_mxfp8(torch.zeros(2, 64), "down")  # type: ignore[arg-type]
