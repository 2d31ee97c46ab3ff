"""MX formats against ml_dtypes: every code, every scale, and the block rules by properties."""

from __future__ import annotations

import math

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
    with pytest.raises(InvalidArgumentError, match="'up' or 'floor'"):
        mx.quantize_mxfp8(torch.zeros(2, 64), "down")  # type: ignore[arg-type]
