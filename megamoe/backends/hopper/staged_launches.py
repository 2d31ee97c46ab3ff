"""Launches of the stages that move rows, one method a stage."""

from __future__ import annotations

import torch

from megamoe.backends.hopper.device import combine, dispatch, expand, identity, index, prepare
from megamoe.backends.hopper.fp8_launches import Fp8Launches
from megamoe.backends.hopper.plan import INDEX_PART, GemmPlan, index_block_tokens, next_power_of_2
from megamoe.backends.hopper.widths import cut_table
from megamoe.layout import FlagKind

_PREPARE_TOKENS = 512
INDEX_WARPS, INDEX_SPLITS = 8, 4
MANY_ROWS, WIDE_BLOCK = 1024, 8192
"""From so many rows on thread blocks of dispatch take more columns at a time."""
EXPAND_WARPS, EXPAND_BLOCKS = 8, 6
"""Warps of a thread block and thread blocks a multiprocessor."""


class StagedLaunches(Fp8Launches):
    """Of one rank, on the current stream."""

    def prepare(self) -> None:
        b = self.buffers
        tokens = min(_PREPARE_TOKENS, max(next_power_of_2(b.layout.capacity), 16))
        prepare.prepare_kernel[(-(-b.layout.capacity // tokens),)](
            b.control,
            b.bases,
            b.token_index,
            **self._ranks,
            **self._routing,
            COUNTS_WORDS=b.layout.counts_words,
            BLOCK_TOKENS=tokens,
            num_warps=8,
            **self._chain,
        )

    def dispatch(self, max_rows: int, *, compact: bool, quantized: bool) -> None:
        """max_rows: agreed maximum of rows a rank."""
        b = self.buffers
        if compact:
            self._await_flags(FlagKind.COUNTS)
        block = self._block if max_rows < MANY_ROWS else min(WIDE_BLOCK, next_power_of_2(b.shape.hidden))
        dispatch.dispatch_kernel[self._grid(max_rows, block)](
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
            BLOCK=block,
            COMPACT=compact,
            QUANTIZED=quantized,
            num_warps=4,
            **self._chain,
        )

    def index(self, gemms: GemmPlan, capacity: int, *, compact: bool) -> None:
        """capacity: of the runtime that serves the step."""
        b, shape = self.buffers, self.buffers.shape
        self._await_flags(FlagKind.PAYLOAD, only_with_rows=not compact)
        splits = INDEX_SPLITS if capacity >= MANY_ROWS else 1
        tokens = INDEX_PART if splits > 1 else index_block_tokens(shape, capacity)
        common = {
            **self._ranks,
            **self._routing,
            "META_WORDS": b.layout.meta_words,
            "COUNTS_WORDS": b.layout.counts_words,
            "COMPACT": compact,
            "BLOCK_TOKENS": tokens,
            "SLOTS": next_power_of_2(shape.num_topk),
            "BINS": next_power_of_2(shape.num_experts_per_rank + 1),
            "num_warps": INDEX_WARPS,
            **self._chain,
        }
        if splits > 1:
            index.count_parts_kernel[(self.device.share,)](b.control, b.bases, b.part_counts, **common)
        index.index_kernel[(splits * shape.num_experts_per_rank,)](
            b.control,
            b.bases,
            b.row_slot,
            b.row_address,
            b.row_weight,
            b.block_info,
            b.work,
            b.part_counts,
            b.sizes.stream_offset,
            b.sizes.tiled_offset,
            gemms.stream_max_rows,
            **common,
            RESULT_STRIDE=b.layout.result_bytes,
            RESULT_BYTES=self.result_bytes,
            WIDTHS=gemms.widths,
            CUTS=cut_table(gemms.widths),
            SPLITS=splits,
        )

    def expand(self, gemms: GemmPlan) -> None:
        b = self.buffers
        if gemms.is_fp8:
            self._expand_fp8()
            return
        expand.expand_kernel[(EXPAND_BLOCKS * self.device.share,)](
            b.control,
            b.bases,
            b.image.view(torch.int32),
            b.row_slot,
            b.block_info,
            b.work,
            **self._payload,
            COLUMNS=b.sizes.image_columns,
            PIECE=expand.EXPAND_COLUMNS,
            num_warps=EXPAND_WARPS,
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
            **self._payload,
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
