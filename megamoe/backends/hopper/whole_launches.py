"""Launches that are a whole sub-step: small_m, and large_m after its quantize."""

from __future__ import annotations

from dataclasses import replace

import torch

from megamoe.backends.hopper.board import NARROW_ROWS
from megamoe.backends.hopper.buffers import BoundLayer
from megamoe.backends.hopper.device import count
from megamoe.backends.hopper.packing import PackedMatrix
from megamoe.backends.hopper.plan import SMALL_M, GemmPlan, RingPlan, check_resident, next_power_of_2
from megamoe.backends.hopper.ring_launches import RingLaunches, weight_descriptors
from megamoe.backends.hopper.widths import cut_table
from megamoe.errors import InternalError

_COUNT_PAIRS = 2048
"""(token, slot) pairs that a thread block of the counting launch looks at together."""


class WholeLaunches(RingLaunches):
    """Of one rank, on the current stream."""

    def small_m(self, layer: BoundLayer, gemms: GemmPlan) -> None:
        """The whole sub-step. gemms: of plan_small_m."""
        from megamoe.backends.hopper.device import small_m

        if gemms.ring is not None and layer.w13 and layer.w2:
            self._small_m_ring(layer.w13, layer.w2, gemms.ring)
            return

        b, shape = self.buffers, self.buffers.shape
        first, second = gemms.tiled(shape.hidden), gemms.tiled(shape.intermediate)
        # Identity experts have no weights; the kernel then has no code that would read them.
        w13, w2 = (layer.w13, layer.w2) if layer.w13 and layer.w2 else (self._no_weights,) * 2
        compiled = small_m.small_m_kernel[(SMALL_M.occupancy * self.device.resident_share,)](
            b.control,
            b.bases,
            b.image,
            b.middle,
            self._tokens(b.image, first),
            self._tokens(b.middle, second),
            b.row_slot,
            b.row_address,
            b.row_weight,
            b.block_info,
            b.work,
            b.sizes.stream_offset,
            b.sizes.tiled_offset,
            gemms.stream_max_rows,
            w13.units,
            w13.out_factor,
            w2.units,
            w2.out_factor,
            self._limit,
            self.device.resident_share,
            CHUNKS1=b.image.shape[1] // 128,
            CHUNKS2=b.middle.shape[1] // 128,
            GROUPS1=b.sizes.gemm1_groups,
            GROUPS2=b.sizes.gemm2_groups,
            TILES=((first.block_n, first.stages, first.ahead),),
            **self._ranks,
            **self._routing,
            HIDDEN=shape.hidden,
            ROW_BYTES=b.layout.row_bytes,
            META_WORDS=b.layout.meta_words,
            META_BLOCK=next_power_of_2(b.layout.meta_words),
            RESULT_STRIDE=b.layout.result_bytes,
            RESULT_BYTES=self.result_bytes,
            SLOTS=next_power_of_2(shape.num_topk),
            BINS=next_power_of_2(shape.num_experts_per_rank + 1),
            WIDTHS=gemms.widths,
            CUTS=cut_table(gemms.widths),
            FP8=self.fp8,
            IDENTITY=layer.w13 is None,
            num_warps=SMALL_M.warps,
            maxnreg=128,
            **self._chain,
        )
        # Thread blocks wait for each other: a rank's must all be on the device at once.
        check_resident(compiled.metadata.shared, SMALL_M.occupancy)

    def _small_m_ring(self, w13: PackedMatrix, w2: PackedMatrix, ring: RingPlan) -> None:
        from megamoe.backends.hopper.device import small_m_ring

        b, shape = self.buffers, self.buffers.shape
        compiled = small_m_ring.small_m_ring_kernel[(self.device.resident_share,)](
            b.control,
            b.bases,
            b.image,
            b.middle,
            *self._ring_boxes(b.image, ring),
            *self._ring_boxes(b.middle, ring),
            b.row_slot,
            b.row_address,
            b.row_weight,
            b.block_info,
            b.work,
            b.sizes.tiled_offset,
            *weight_descriptors(w13),
            w13.out_factor,
            *weight_descriptors(w2),
            w2.out_factor,
            self._limit,
            self.device.resident_share,
            **self._ranks,
            **self._routing,
            HIDDEN=shape.hidden,
            ROW_BYTES=b.layout.row_bytes,
            META_WORDS=b.layout.meta_words,
            META_BLOCK=next_power_of_2(b.layout.meta_words),
            RESULT_STRIDE=b.layout.result_bytes,
            RESULT_BYTES=self.result_bytes,
            SLOTS=next_power_of_2(shape.num_topk),
            BINS=next_power_of_2(shape.num_experts_per_rank + 1),
            CHUNKS1=b.image.shape[1] // 128,
            CHUNKS2=b.middle.shape[1] // 128,
            GROUPS1=b.sizes.gemm1_groups,
            GROUPS2=b.sizes.gemm2_groups,
            WIDTHS=ring.widths,
            CUTS=cut_table(ring.widths),
            STAGES=ring.stages,
            num_warps=4,
            **self._chain,
        )
        check_resident(compiled.metadata.shared, 1)

    def quantize(self, max_rows: int) -> None:
        """large_m's first launch. max_rows: agreed maximum of rows a rank."""
        b, shape = self.buffers, self.buffers.shape
        count.quantize_kernel[(shape.num_experts + self._grid(max_rows, self._block)[0],)](
            b.control,
            b.bases,
            b.places,
            b.quantized,
            b.board,
            b.ticket,
            b.board_layout.tables,
            **self._ranks,
            **self._routing,
            HIDDEN=shape.hidden,
            ROW_BYTES=b.layout.row_bytes,
            COUNTS_WORDS=b.layout.counts_words,
            BLOCK=self._block,
            BLOCK_PAIRS=_COUNT_PAIRS,
            num_warps=8,
            **self._chain,
        )

    def large_m(self, layer: BoundLayer, gemms: GemmPlan) -> None:
        """The rest of the sub-step. gemms: of plan_large_m."""
        from megamoe.backends.hopper.device import large_m

        b, shape, lists = self.buffers, self.buffers.shape, self.buffers.board_layout
        first, second = gemms.tiled(shape.hidden), gemms.tiled(shape.intermediate)
        narrow = replace(gemms, block_n=NARROW_ROWS).tiled(shape.hidden)
        if (first.stages, first.chunks_per_stage) != (second.stages, second.chunks_per_stage):
            raise InternalError("both GEMMs of large_m share a ring of tokens: their stages must be alike")
        w13, w2 = (layer.w13, layer.w2) if layer.w13 and layer.w2 else (self._no_weights,) * 2
        large_m.large_m_kernel[(self.device.share,)](
            b.control,
            b.bases,
            b.board,
            b.places,
            b.quantized.view(torch.int32),
            b.image,
            b.middle,
            self._tokens(b.image, first),
            self._tokens(b.middle, second),
            self._tokens(b.image, narrow),
            self._tokens(b.middle, narrow),
            b.row_slot,
            b.row_address,
            b.row_weight,
            b.block_info,
            b.work[b.sizes.tiled_offset :],
            w13.units,
            w13.out_factor,
            w2.units,
            w2.out_factor,
            self._limit,
            ARRIVED=lists.arrived,
            DONE=lists.done,
            QUEUE1=lists.queue1,
            QUEUE2=lists.queue2,
            TABLES=lists.tables,
            **self._ranks,
            **self._routing,
            BINS=next_power_of_2(shape.num_experts_per_rank + 1),
            HIDDEN=shape.hidden,
            ROW_BYTES=b.layout.row_bytes,
            META_WORDS=b.layout.meta_words,
            COUNTS_WORDS=b.layout.counts_words,
            RESULT_STRIDE=b.layout.result_bytes,
            RESULT_BYTES=self.result_bytes,
            SEND_WIDE=next_power_of_2(b.layout.row_bytes // 16),
            IMAGE_WIDE=next_power_of_2(b.sizes.image_columns // 8),
            SUM_BLOCKS=next_power_of_2(shape.hidden // 32),
            CHUNKS1=b.image.shape[1] // 128,
            CHUNKS2=b.middle.shape[1] // 128,
            GROUPS1=b.sizes.gemm1_groups,
            GROUPS2=b.sizes.gemm2_groups,
            AHEAD=first.ahead,
            STAGES=first.stages,
            BLOCK_N=first.block_n,
            NARROW_AHEAD=narrow.ahead,
            NARROW_STAGES=narrow.stages,
            FP8=self.fp8,
            IDENTITY=layer.w13 is None,
            num_warps=8,
        )
