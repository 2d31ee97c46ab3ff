"""Weights in MFMA order: the order is what the instruction takes, and packing loses nothing."""

from __future__ import annotations

import pytest
import torch

from megamoe.backends.gfx950 import shuffle


@pytest.mark.parametrize("k", [32, 96, 128, 544, 1024])
@pytest.mark.parametrize("hidden", [32, 96, 256])
def test_round_trip(hidden: int, k: int) -> None:
    generator = torch.Generator().manual_seed(hidden + k)
    for columns in (shuffle.w2_columns(hidden), shuffle.w13_columns(hidden)):
        num_rows = int(columns.max()) + 1
        assert sorted(columns[columns >= 0].tolist()) == list(range(num_rows))
        codes = torch.randint(0, 256, (3, num_rows, k // 2), generator=generator, dtype=torch.uint8)
        scales = torch.randint(0, 256, (3, num_rows, k // 32), generator=generator, dtype=torch.uint8)
        packed = shuffle.pack(codes, scales, columns)
        got_codes, got_scales = shuffle.unpack(packed, columns, k)
        assert torch.equal(got_codes, codes)
        assert torch.equal(got_scales, scales)


def test_a_lane_holds_what_its_instruction_takes() -> None:
    """Lane 16 g + r of block n holds row r's codes at k = 32 g, and of its four scale words byte j for K block j."""
    k = 1024
    codes = torch.randint(0, 256, (1, 256, k // 2), dtype=torch.uint8)
    scales = torch.randint(0, 256, (1, 256, k // 32), dtype=torch.uint8)
    columns = shuffle.w2_columns(256)
    packed = shuffle.pack(codes, scales, columns)
    for group, block, k_block, g, r in [(0, 0, 0, 0, 0), (1, 3, 5, 2, 7), (3, 1, 7, 3, 15), (2, 2, 4, 1, 9)]:
        column = 64 * group + 16 * (r // 4) + 4 * block + r % 4
        lane = 16 * g + r
        start = 64 * k_block + 16 * g
        assert torch.equal(packed.codes[0, group, k_block, block, lane], codes[0, column, start : start + 16])
        byte = packed.scales[0, group, k_block // 4, lane, 4 * block + k_block % 4]
        assert byte == scales[0, column, 4 * k_block + g]


def test_gate_and_up_columns_meet_in_one_wave() -> None:
    columns = shuffle.w13_columns(128)
    for group in range(4):
        gate, up = columns[group, :2].flatten(), columns[group, 2:].flatten()
        assert torch.equal(up, gate + 128)
        assert sorted(gate.tolist()) == list(range(32 * group, 32 * group + 32))


@pytest.mark.parametrize("count", [1, 3, 16, 17, 96])
def test_row_scales_round_trip(count: int) -> None:
    scales = torch.randint(0, 256, (5, count), dtype=torch.uint8)
    assert torch.equal(shuffle.plain_scales(shuffle.row_scales(scales), count), scales)
