"""Tiles and grids of a sub-step, from numbers that every rank agrees on; never from a rank's own count."""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.shape import MX_BLOCK, MoeShape

ROWS_FOR_TILE_64, ROWS_FOR_TILE_128 = 24, 96
"""Mean rows of an expert from which larger tiles are used, so that with uniform routing most experts fit one tile and
their weights are read once (V4-Pro EP8: from 256 and 1024 tokens a rank). By reasoning, not by measurement."""
COLUMNS_1, COLUMNS_2 = 32, 64
"""Result columns of a wave in GEMM1 (beside as many gate columns) and GEMM2."""
SMALL_WORKGROUP = 256
SENDERS_SHARE = 4
"""One workgroup of large_m in so many sends rows first. By reasoning: 64 workgroups fill the links of an MI355X."""


def rows_bucket(max_rows: int) -> int:
    """The agreed maximum rounded up to a power of two: what plans, and so graphs, depend on."""
    return 1 << (max_rows - 1).bit_length() if max_rows > 0 else 1


def inner_bytes(intermediate: int) -> int:
    """One intermediate row: codes, scales in MFMA order, a multiple of 16 bytes."""
    return intermediate + 16 * -(-intermediate // (16 * MX_BLOCK))


@dataclass(frozen=True)
class LaunchPlan:
    """Tile and grids for steps of up to `max_rows` rows a rank. block_m: rows of a tile. *_groups: workgroups.

    max_tiles: m-tiles of one owner at most. large_m_senders: workgroups of large_m that send rows before they multiply.
    small_m_units: units of GEMM1 that one owner can have in small_m, each with a word that says it is done.
    """

    max_rows: int
    block_m: int
    quantize_groups: int
    dispatch_groups: int
    gemm1_groups: int
    gemm2_groups: int
    combine_groups: int
    large_m_groups: int
    large_m_senders: int
    max_tiles: int
    small_m_groups: int
    small_m_units: int

    @property
    def gemm_threads(self) -> int:
        """Work-items of a GEMM workgroup: eight waves from tiles of 64 rows on."""
        return SMALL_WORKGROUP if self.block_m < 64 else 2 * SMALL_WORKGROUP

    @property
    def tile_shift(self) -> int:
        return self.block_m.bit_length() - 1


def plan_launch(shape: MoeShape, max_rows: int, num_compute_units: int) -> LaunchPlan:
    """The plan for an agreed maximum. All grids fit the device at once: kernels wait for each other's workgroups."""
    mean = rows_bucket(max_rows) * shape.num_ranks * shape.num_topk / shape.num_experts
    block_m = 128 if mean >= ROWS_FOR_TILE_128 else 64 if mean >= ROWS_FOR_TILE_64 else 32
    return plan_tiles(shape, max_rows, num_compute_units, block_m)


def plan_tiles(shape: MoeShape, max_rows: int, num_compute_units: int, block_m: int) -> LaunchPlan:
    """The plan with tiles of block_m rows: what `plan_launch` chooses among."""
    rows = rows_bucket(max_rows)
    routed = rows * shape.num_ranks * shape.num_topk
    # Every tile has a row, and an expert's tiles are full but for one.
    m_tiles = min(routed, shape.num_experts_per_rank + routed // block_m)
    parts = -(-shape.hidden // (16 * MX_BLOCK))

    def grid(num_units: int) -> int:
        return max(min(num_units, num_compute_units), 1)

    def gemm_grid(num_units: int) -> int:
        # Small tiles are bound by memory: two workgroups a unit keep more loads on their way. These kernels never wait
        # for each other's workgroups.
        return max(min(num_units, num_compute_units * (2 if block_m < 64 else 1)), 1)

    waves = 8 if block_m == 64 else 4
    gemm1_units = m_tiles * -(-shape.intermediate // (COLUMNS_1 * waves))
    gemm2_units = m_tiles * -(-shape.hidden // (COLUMNS_2 * waves))
    combine_units = -(-rows * parts // 4)
    # The last workgroup directs, so there are two at least.
    persistent = max(grid(gemm1_units + 1), 2)

    return LaunchPlan(
        max_rows=rows,
        block_m=block_m,
        quantize_groups=max(min(rows * parts, 8 * num_compute_units), 1),
        dispatch_groups=grid(max(shape.num_experts_per_rank, -(-rows * shape.num_ranks // 4))),
        gemm1_groups=gemm_grid(gemm1_units),
        gemm2_groups=gemm_grid(gemm2_units),
        combine_groups=grid(combine_units),
        large_m_groups=persistent,
        large_m_senders=max(persistent // SENDERS_SHARE, 1),
        max_tiles=m_tiles,
        small_m_groups=gemm_grid(max(gemm1_units, gemm2_units, combine_units, shape.num_experts_per_rank)),
        small_m_units=gemm1_units,
    )
