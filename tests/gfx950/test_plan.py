"""Tiles and grids follow from agreed numbers alone, and grids fit the device."""

from __future__ import annotations

import inspect

import pytest

from megamoe.backends.gfx950.plan import inner_bytes, plan_launch, rows_bucket
from megamoe.shape import preset

V4_PRO = preset("deepseek-v4-pro")


def test_a_bucket_has_one_plan() -> None:
    assert list(inspect.signature(plan_launch).parameters) == ["shape", "max_rows", "num_compute_units"]
    for low, high in ((65, 128), (129, 256), (4097, 8192)):
        assert plan_launch(V4_PRO, low, 256) == plan_launch(V4_PRO, high, 256)
    assert [rows_bucket(rows) for rows in (0, 1, 2, 3, 128, 129)] == [1, 1, 2, 4, 128, 256]


@pytest.mark.parametrize(
    ("rows", "block_m"), [(1, 32), (128, 32), (256, 64), (512, 64), (1024, 128), (8192, 128)]
)
def test_tiles_of_the_tuned_shape(rows: int, block_m: int) -> None:
    plan = plan_launch(V4_PRO, rows, 256)
    assert plan.block_m == block_m == 1 << plan.tile_shift
    assert plan.gemm_threads == (256 if block_m == 32 else 512)


@pytest.mark.parametrize("rows", [0, 1, 7, 128, 8192])
def test_kernels_that_wait_are_co_resident(rows: int) -> None:
    plan = plan_launch(V4_PRO, rows, 256)
    assert 1 <= plan.dispatch_groups <= 256
    assert 1 <= plan.combine_groups <= 256
    # Of large_m one directs, and the senders are others.
    assert 2 <= plan.large_m_groups <= 256
    assert 1 <= plan.large_m_senders < plan.large_m_groups
    # Two workgroups of four waves and 17 KiB of LDS a compute unit, or one of eight waves.
    assert 1 <= plan.gemm1_groups <= 256 * (2 if plan.block_m == 32 else 1)
    assert 1 <= plan.small_m_groups <= 256 * (2 if plan.block_m == 32 else 1)


def test_rows_on_their_way_inside() -> None:
    assert inner_bytes(3072) == 3072 + 96
    assert inner_bytes(96) == 96 + 16
