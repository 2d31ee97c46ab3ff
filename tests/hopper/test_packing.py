"""Packing: every code and scale survives it, as the kernels decode them."""

from __future__ import annotations

import pytest
import torch

from megamoe import mx
from megamoe.backends.hopper import packing


def every_code_and_scale(num_experts: int, num_rows: int, num_columns: int, scales: range) -> tuple:
    """Random codes in which each of the 16 meets each scale of `scales`."""
    generator = torch.Generator().manual_seed(num_rows * num_columns + len(scales))
    codes = torch.randint(
        0, 256, (num_experts, num_rows, num_columns // 2), generator=generator, dtype=torch.uint8
    )
    all_scales = torch.arange(scales.start, scales.stop, dtype=torch.int32).to(torch.uint8)
    count = num_experts * num_rows * num_columns // 32
    assert count >= 4 * len(scales), "too small a matrix to meet every scale"
    order = torch.randperm(count, generator=generator)
    return codes, all_scales.repeat(-(-count // len(scales)))[:count][order].view(num_experts, num_rows, -1)


@pytest.mark.parametrize(("num_rows", "num_columns"), [(128, 512), (96, 256), (256, 1024), (160, 544)])
@pytest.mark.parametrize("scales", [range(129), range(72, 200), range(127, 255)])
def test_plain_matrix_keeps_every_value(num_rows: int, num_columns: int, scales: range) -> None:
    codes, sf = every_code_and_scale(2, num_rows, num_columns, scales)
    packed = packing.pack_w2(codes, sf)
    dense = packing.unpack_matrix(packed)
    want = mx.dequantize_mxfp4(codes, sf)
    assert torch.equal(dense[:, :num_rows, :num_columns], want)
    assert not dense[:, num_rows:].any()
    assert not dense[:, :, num_columns:].any()
    excess = max(scales.stop - 1 - packing.MAX_SCALE, 0)
    assert packed.out_factor.tolist() == [2.0**excess] * 2


def test_scales_further_apart_than_bf16_reaches_become_zero() -> None:
    """With 2^126 moved out, bf16 ends at 2^-133 below: weights 2^-133 of the largest scale's are lost, no others."""
    codes = torch.full((1, 128, 256), 0x11, dtype=torch.uint8)
    sf = torch.full((1, 128, 16), 254, dtype=torch.uint8)
    sf[0, 5, 3:6] = torch.tensor([121, 119, 0], dtype=torch.uint8)
    dense = packing.unpack_matrix(packing.pack_w2(codes, sf))[:, :128]
    want = mx.dequantize_mxfp4(codes, sf)
    assert not dense[0, 5, 128:192].any()
    want[0, 5, 128:192] = 0.0
    assert torch.equal(dense, want)


def test_excess_is_per_expert() -> None:
    codes, sf = every_code_and_scale(3, 128, 512, range(100, 129))
    sf[1, 7, 3] = 140
    packed = packing.pack_w2(codes, sf)
    assert packed.out_factor.tolist() == [1.0, 4096.0, 1.0]
    assert torch.equal(packing.unpack_matrix(packed)[:, :128], mx.dequantize_mxfp4(codes, sf))


def test_nan_scale_makes_its_block_nan_and_nothing_else() -> None:
    codes, sf = every_code_and_scale(1, 128, 512, range(100, 120))
    sf[0, 9, 2] = mx.SCALE_NAN
    got = packing.unpack_matrix(packing.pack_w2(codes, sf))[:, :128]
    want = mx.dequantize_mxfp4(codes, sf)
    assert bool(torch.isnan(want[0, 9, 64:96]).all())
    assert torch.equal(torch.isnan(got), torch.isnan(want))
    assert torch.equal(got.nan_to_num(0.0), want.nan_to_num(0.0))


@pytest.mark.parametrize("intermediate", [512, 128, 320])
def test_w13_rows_interleave_gate_and_up(intermediate: int) -> None:
    codes, sf = every_code_and_scale(1, 2 * intermediate, 512, range(110, 129))
    packed = packing.pack_w13(codes, sf)
    features = packing.padded_columns(intermediate)
    dense = packing.unpack_matrix(packed)[0].view(features // 8, 2, 8, 512)
    want = mx.dequantize_mxfp4(codes, sf)[0]
    gate, up = dense[:, 0].reshape(features, 512), dense[:, 1].reshape(features, 512)
    assert torch.equal(gate[:intermediate], want[:intermediate])
    assert torch.equal(up[:intermediate], want[intermediate:])
    assert not gate[intermediate:].any()
    assert not up[intermediate:].any()


def test_bytes_a_weight_are_those_of_the_canonical_packing() -> None:
    codes, sf = every_code_and_scale(1, 256, 1024, range(100, 129))
    packed = packing.pack_w2(codes, sf)
    assert packed.units.numel() == codes.numel() + sf.numel()


def test_word_is_a_bijection_of_its_nibbles() -> None:
    generator = torch.Generator().manual_seed(1)
    nibbles = torch.randint(0, 16, (4096, 4, 2), generator=generator, dtype=torch.int32)
    words = packing._words(nibbles)
    registers = packing.decode_words(words)
    assert not (registers & ~packing._signed(packing.FRAGMENT_MASK)).any()
    low = ((registers >> 12) & 8) | ((registers >> 6) & 7)
    high = ((registers >> 28) & 8) | ((registers >> 22) & 7)
    assert torch.equal(torch.stack([low, high], dim=-1), nibbles)


def test_device_code_and_tables_name_the_same_unit() -> None:
    assert packing.UNIT_BYTES == 4352
    assert packing.UNIT_ROWS * 2 == packing.ROW_GROUP
