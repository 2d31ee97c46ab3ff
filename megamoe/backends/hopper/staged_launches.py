"""Launches of the stages that move rows, one method a stage."""

from __future__ import annotations

import torch

from megamoe.backends.hopper.device import combine, dispatch, expand, identity, index, prepare
from megamoe.backends.hopper.launches import Launches
from megamoe.backends.hopper.plan import GemmPlan, cut_table, index_block_tokens, next_power_of_2
from megamoe.layout import FlagKind

_PREPARE_TOKENS = 512


class StagedLaunches(Launches):
    """Of one rank, on the current stream."""

    def prepare(self) -> None:
        b = self.buffers
        prepare.prepare_kernel[(1,)](
            b.control,
            b.bases,
            b.token_index,
            **self._ranks,
            **self._routing,
            COUNTS_WORDS=b.layout.counts_words,
            BLOCK_TOKENS=min(_PREPARE_TOKENS, max(next_power_of_2(b.layout.capacity), 16)),
            num_warps=8,
            **self._chain,
        )

    def dispatch(self, max_rows: int, *, compact: bool, quantized: bool) -> None:
        """max_rows: agreed maximum of rows a rank."""
        b = self.buffers
        if compact:
            self._await_flags(FlagKind.COUNTS)
        dispatch.dispatch_kernel[self._grid(max_rows, self._block)](
            b.control,
            b.bases,
            b.token_index,
            b.ticket,
            **self._ranks,
            **self._routing,
            HIDDEN=b.shape.hidden,
            ROW_BYTES=b.layout.row_bytes,
            META_WORDS=b.layout.meta_words,
            META_BLOCK=next_power_of_2(b.layout.meta_words),
            COUNTS_WORDS=b.layout.counts_words,
            BLOCK=self._block,
            COMPACT=compact,
            QUANTIZED=quantized,
            num_warps=4,
            **self._chain,
        )

    def index(self, gemms: GemmPlan, capacity: int, *, compact: bool) -> None:
        """capacity: of the runtime that serves the step."""
        b, shape = self.buffers, self.buffers.shape
        self._await_flags(FlagKind.PAYLOAD, only_with_rows=not compact)
        index.index_kernel[(shape.num_experts_per_rank,)](
            b.control,
            b.bases,
            b.row_slot,
            b.row_address,
            b.row_weight,
            b.block_info,
            b.work,
            b.sizes.stream_offset,
            b.sizes.tiled_offset,
            gemms.stream_max_rows,
            **self._ranks,
            **self._routing,
            META_WORDS=b.layout.meta_words,
            COUNTS_WORDS=b.layout.counts_words,
            RESULT_STRIDE=b.layout.result_bytes,
            RESULT_BYTES=self.result_bytes,
            COMPACT=compact,
            WIDTHS=gemms.widths,
            CUTS=cut_table(gemms.widths),
            BLOCK_TOKENS=index_block_tokens(shape, capacity),
            SLOTS=next_power_of_2(shape.num_topk),
            BINS=next_power_of_2(shape.num_experts_per_rank + 1),
            num_warps=8,
            **self._chain,
        )

    def expand(self) -> None:
        b = self.buffers
        expand.expand_kernel[(8 * self.device.share,)](
            b.control,
            b.bases,
            b.image.view(torch.int32),
            b.row_slot,
            b.block_info,
            b.work,
            own_rank=b.rank,
            HIDDEN=b.shape.hidden,
            ROW_BYTES=b.layout.row_bytes,
            COLUMNS=b.sizes.image_columns,
            PIECE=expand.EXPAND_COLUMNS,
            num_warps=4,
            **self._chain,
        )

    def identity(self) -> None:
        b = self.buffers
        identity.identity_kernel[(4 * self.device.share,)](
            b.control,
            b.bases,
            b.row_slot,
            b.row_address,
            b.row_weight,
            b.block_info,
            b.work,
            own_rank=b.rank,
            HIDDEN=b.shape.hidden,
            ROW_BYTES=b.layout.row_bytes,
            FP8=self.fp8,
            PIECE=expand.EXPAND_COLUMNS,
            num_warps=8,
            **self._chain,
        )

    def post_return(self) -> None:
        b = self.buffers
        combine.post_return_kernel[(1,)](
            b.control, b.bases, **self._ranks, FP8=self.fp8, num_warps=1, **self._chain
        )

    def combine(self, max_rows: int, *, post: bool = True) -> None:
        """post=False: after post_return."""
        b = self.buffers
        if post and self.device.num_virtual_ranks > 1:
            self.post_return()
            post = False
        self._await_flags(FlagKind.RETURN)
        combine.combine_kernel[self._grid(max_rows, self._block)](
            b.control,
            b.bases,
            **self._ranks,
            **self._routing,
            HIDDEN=b.shape.hidden,
            RESULT_STRIDE=b.layout.result_bytes,
            BLOCK=self._block,
            FP8=self.fp8,
            POST=post,
            num_warps=4,
            **self._chain,
        )
