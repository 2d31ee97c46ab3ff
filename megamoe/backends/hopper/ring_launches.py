"""Launches of the ring GEMM, which serves all rows of a step whose experts have 7 to 100 rows each."""

from __future__ import annotations

from typing import Any

import torch

from megamoe.backends.hopper.launches import Launches, descriptor
from megamoe.backends.hopper.packing import CHUNK, UNIT_BYTES, PackedMatrix
from megamoe.backends.hopper.plan import RING_BOX_ROWS, RingPlan


class RingLaunches(Launches):
    """Of one rank, on the current stream."""

    def _gemm1_ring(self, w13: PackedMatrix, ring: RingPlan, chunks: dict[str, int]) -> None:
        from megamoe.backends.hopper.device import gemm1_ring

        b = self.buffers
        gemm1_ring.gemm1_ring_kernel[(self.device.share,)](
            b.middle,
            *weight_descriptors(w13),
            w13.out_factor,
            *self._ring_boxes(b.image, ring),
            *b.tiled_entries,
            self._limit,
            self.device.share,
            **chunks,
            **_options(ring, b.sizes.gemm1_groups),
            **self._chain,
        )

    def _gemm2_ring(self, w2: PackedMatrix, ring: RingPlan, common: dict[str, Any]) -> None:
        from megamoe.backends.hopper.device import gemm2_ring

        b = self.buffers
        gemm2_ring.gemm2_ring_kernel[(self.device.share,)](
            b.row_address,
            b.row_weight,
            *weight_descriptors(w2),
            w2.out_factor,
            *self._ring_boxes(b.middle, ring),
            *b.tiled_entries,
            self.device.share,
            **common,
            **_options(ring, b.sizes.gemm2_groups),
            **self._chain,
        )

    def _ring_boxes(self, image: torch.Tensor, ring: RingPlan) -> list[Any]:
        """TMA descriptors with boxes of 64, 32 and 16 rows, None where no width is made of such."""
        wanted = 0
        for width in ring.widths:
            wanted |= width
        return [self._box_of(image, rows, CHUNK) if wanted & rows else None for rows in RING_BOX_ROWS]


def weight_descriptors(matrix: PackedMatrix) -> tuple[Any, Any]:
    """TMA descriptors of a matrix: words and scales of the two units of 128 rows and one chunk."""
    units = matrix.units.view(torch.int32).view(-1, UNIT_BYTES // 256, 64)
    return descriptor(units, [2, 16, 64], swizzle=0), descriptor(units, [2, 1, 64], swizzle=0)


def _options(ring: RingPlan, groups: int) -> dict[str, Any]:
    """Constants of a ring kernel; groups: row groups of an expert's matrix."""
    return {
        "GROUPS": groups,
        "WIDTHS": ring.widths,
        "STAGES": ring.stages,
        "num_warps": 4,
    }
