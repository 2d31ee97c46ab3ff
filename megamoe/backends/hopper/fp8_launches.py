"""Launches of the FP8 kernel, which serves all rows of a step whose experts have many, and of what lays them out."""

from __future__ import annotations

from typing import Any

import torch

from megamoe.backends.hopper.buffers import BoundLayer
from megamoe.backends.hopper.device import expand_fp8
from megamoe.backends.hopper.fp8 import CHUNK
from megamoe.backends.hopper.launches import Launches, descriptor
from megamoe.backends.hopper.packing import PackedMatrix
from megamoe.backends.hopper.plan import BLOCK_ROWS, FP8_STAGES, FP8_WIDTHS
from megamoe.backends.hopper.ring_launches import weight_descriptors

EXPAND_WARPS, EXPAND_BLOCKS = 2, 14
"""Warps of a thread block and thread blocks a multiprocessor: as many as fit at once."""
_PIECE = 64
"""Tokens that are copied and multiplied at a time."""


class Fp8Launches(Launches):
    """Of one rank, on the current stream."""

    def _expand_fp8(self) -> None:
        b = self.buffers
        expand_fp8.expand_fp8_kernel[(EXPAND_BLOCKS * self.device.share,)](
            b.control,
            b.bases,
            b.fp8.rows.view(torch.int32),
            b.fp8.row_scales,
            b.sizes.padded_rows,
            b.row_slot,
            b.block_info,
            b.work,
            **self._payload,
            COLUMNS=b.sizes.image_columns,
            PIECE=expand_fp8.PIECE_CHUNKS,
            num_warps=EXPAND_WARPS,
            **self._chain,
        )

    def _gemm1_fp8(self, layer: BoundLayer) -> None:
        from megamoe.backends.hopper.device import gemm1_fp8

        assert layer.w13 is not None
        b = self.buffers
        gemm1_fp8.gemm1_fp8_kernel[(self.device.share,)](
            b.fp8.middle,
            b.fp8.exponents,
            b.sizes.padded_rows,
            *self._fp8_weights(layer.w13),
            *self._fp8_tokens(b.fp8.rows, b.fp8.row_scales),
            *b.tiled_entries,
            self._limit,
            self.device.share,
            CHUNKS=b.sizes.image_columns // CHUNK,
            CHUNKS_OUT=b.sizes.middle_columns // CHUNK,
            GROUPS=b.sizes.gemm1_groups,
            **_OPTIONS,
            **self._chain,
        )
        self.regroup()

    def regroup(self) -> None:
        """What GEMM1 has left, as GEMM2's operand."""
        b = self.buffers
        expand_fp8.regroup_kernel[(EXPAND_BLOCKS * self.device.share,)](
            b.fp8.features.view(torch.int32),
            b.fp8.feature_scales,
            b.fp8.middle.view(torch.int32),
            b.fp8.exponents,
            b.sizes.padded_rows,
            b.work,
            COLUMNS=b.sizes.middle_columns,
            PIECE=expand_fp8.PIECE_CHUNKS,
            num_warps=EXPAND_WARPS,
            **self._chain,
        )

    def _gemm2_fp8(self, layer: BoundLayer) -> None:
        from megamoe.backends.hopper.device import gemm2_fp8

        assert layer.w2 is not None
        b = self.buffers
        gemm2_fp8.gemm2_fp8_kernel[(self.device.share,)](
            b.row_address,
            b.row_weight,
            *self._fp8_weights(layer.w2),
            *self._fp8_tokens(b.fp8.features, b.fp8.feature_scales),
            *b.tiled_entries,
            self.device.share,
            HIDDEN=b.shape.hidden,
            CHUNKS=b.sizes.middle_columns // CHUNK,
            GROUPS=b.sizes.gemm2_groups,
            **_OPTIONS,
            **self._chain,
        )

    def _fp8_weights(self, matrix: PackedMatrix) -> tuple[Any, ...]:
        """Descriptors of words and scales, then bases and factors of rows."""
        assert matrix.fp8 is not None, "a layer that does not fit: BoundLayer.gemms chooses the kernel"
        return *weight_descriptors(matrix), matrix.fp8.base, matrix.fp8.factor

    def _fp8_tokens(self, codes: torch.Tensor, scales: torch.Tensor) -> tuple[Any, Any]:
        """Descriptors: a piece of an operand, and the scales of a widest tile."""
        key = (codes.data_ptr(), codes.shape[1])
        if key not in self._fp8_descriptors:
            by_block = scales.view(len(scales), -1, BLOCK_ROWS)
            box = [1, max(FP8_WIDTHS) // BLOCK_ROWS, BLOCK_ROWS]
            self._fp8_descriptors[key] = (
                descriptor(codes, [_PIECE, CHUNK], swizzle=128),
                descriptor(by_block, box, swizzle=0),
            )
        return self._fp8_descriptors[key]


_OPTIONS = {"STAGES": FP8_STAGES, "num_warps": 4}
