"""Launches of one rank's stages on the current stream: the host side of the kernel files, one method a stage.

Nothing here reads device memory or waits. Grids follow from the device and from how many ranks share it; what a
kernel does follows from the control block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from megamoe.backends.hopper import record
from megamoe.backends.hopper.board import NARROW_ROWS
from megamoe.backends.hopper.buffers import BoundLayer, RankBuffers, packs_densely, result_bytes
from megamoe.backends.hopper.device import (
    close,
    combine,
    count,
    dispatch,
    expand,
    flags,
    identity,
    index,
    prepare,
)
from megamoe.backends.hopper.packing import PackedMatrix
from megamoe.backends.hopper.plan import (
    GEMM1_STREAM,
    GEMM2_STREAM,
    SMALL_M,
    Counter,
    GemmPlan,
    TiledPlan,
    check_resident,
    grid_share,
    index_block_tokens,
    next_power_of_2,
)
from megamoe.bundle import Path, RowFormat
from megamoe.errors import InternalError
from megamoe.layout import FlagKind

_BLOCK = 1024
"""Columns that a thread block of dispatch or combine handles at a time."""
_PREPARE_TOKENS = 512
_COUNT_PAIRS = 2048
"""(token, slot) pairs that a thread block of the counting launch looks at together."""


@dataclass(frozen=True)
class Device:
    """What grids follow from. num_virtual_ranks: ranks of the group that share this GPU."""

    num_sms: int
    num_virtual_ranks: int = 1

    @property
    def share(self) -> int:
        """Multiprocessors of one rank."""
        return grid_share(self.num_sms, self.num_virtual_ranks)


class Kernels:
    """One rank's launches."""

    def __init__(self, buffers: RankBuffers, device: Device, row_format: RowFormat) -> None:
        self.buffers = buffers
        self.device = device
        self.fp8 = row_format is RowFormat.FP8
        self.result_bytes = result_bytes(buffers.shape, row_format)
        shape = buffers.shape
        self._limit = shape.swiglu_limit or float("inf")
        self._block = min(_BLOCK, next_power_of_2(shape.hidden))
        # Where ranks share a GPU, a kernel that starts early would take multiprocessors that a peer's may need.
        self._chain = {"launch_pdl": device.num_virtual_ranks == 1}
        self._ranks = {"own_rank": buffers.rank, "NUM_RANKS": shape.num_ranks}
        self._routing = {"NUM_TOPK": shape.num_topk, "EXPERTS_PER_RANK": shape.num_experts_per_rank}
        experts = shape.num_experts_per_rank
        none = torch.zeros((experts, 1), dtype=torch.uint8, device=buffers.device)
        self._no_weights = PackedMatrix(none, torch.ones(experts, device=buffers.device), 0, 0)
        self._descriptors: dict[tuple[int, int, int], Any] = {}

    def _await_flags(self, kind: FlagKind, *, only_with_rows: bool = False) -> None:
        """Where ranks share a GPU, let one thread block a rank wait, not a whole grid of them: a kernel that a peer
        waits for must always find multiprocessors that are free of waiting ones."""
        if self.device.num_virtual_ranks == 1:
            return
        b = self.buffers
        flags.await_kernel[(1,)](
            b.control, b.bases, **self._ranks, KIND=int(kind), ONLY_WITH_ROWS=only_with_rows, num_warps=1
        )

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

    def _grid(self, max_rows: int, width: int) -> tuple[int]:
        """Thread blocks for rows in pieces of `width` columns: one a piece, up to 8 a multiprocessor."""
        pieces = max_rows * -(-self.buffers.shape.hidden // width)
        return (min(8 * self.device.share, max(pieces, 1)),)

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
            BLOCK_N=gemms.block_n,
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

    def gemm1(self, layer: BoundLayer, gemms: GemmPlan) -> None:
        from megamoe.backends.hopper.device import gemm1

        assert layer.w13 is not None
        b = self.buffers
        chunks = {"CHUNKS": b.image.shape[1] // 128, "CHUNKS_OUT": b.middle.shape[1] // 128}
        if gemms.stream_max_rows:
            gemm1.gemm1_stream_kernel[(self.device.share * GEMM1_STREAM.occupancy,)](
                b.middle,
                layer.w13.units,
                layer.w13.out_factor,
                b.image,
                b.work[b.sizes.stream_offset :],
                b.work[Counter.NUM_STREAM_ENTRIES :],
                self._limit,
                self.device.share,
                **chunks,
                GROUPS=b.sizes.gemm1_groups,
                OCCUPANCY=GEMM1_STREAM.occupancy,
                WARPS=GEMM1_STREAM.warps,
                num_warps=GEMM1_STREAM.warps,
                **self._chain,
                maxnreg=128,
            )
        tiled = gemms.tiled(b.shape.hidden)
        grid = self.device.share * tiled.occupancy
        gemm1.gemm1_tiled_kernel[(grid,)](
            b.middle,
            layer.w13.units,
            layer.w13.out_factor,
            self._tokens(b.image, tiled),
            b.work[b.sizes.tiled_offset :],
            b.work[Counter.NUM_TILED_ENTRIES :],
            self._limit,
            grid,
            **chunks,
            **_tiled_options(tiled, b.sizes.gemm1_groups),
            **self._chain,
        )

    def gemm2(self, layer: BoundLayer, gemms: GemmPlan, *, plain_rows: bool = False) -> None:
        """plain_rows: bf16 results whatever the deployment's format (for checks of a binding)."""
        from megamoe.backends.hopper.device import gemm2

        assert layer.w2 is not None
        b = self.buffers
        common = {
            "HIDDEN": b.shape.hidden,
            "CHUNKS": b.middle.shape[1] // 128,
            "FP8": self.fp8 and not plain_rows,
        }
        if gemms.stream_max_rows:
            gemm2.gemm2_stream_kernel[(self.device.share * GEMM2_STREAM.occupancy,)](
                b.row_address,
                b.row_weight,
                layer.w2.units,
                layer.w2.out_factor,
                b.middle,
                b.work[b.sizes.stream_offset :],
                b.work[Counter.NUM_STREAM_ENTRIES :],
                self.device.share,
                **common,
                GROUPS=b.sizes.gemm2_groups,
                OCCUPANCY=GEMM2_STREAM.occupancy,
                WARPS=GEMM2_STREAM.warps,
                num_warps=GEMM2_STREAM.warps,
                **self._chain,
                maxnreg=128,
            )
        tiled = gemms.tiled(b.shape.intermediate)
        grid = self.device.share * tiled.occupancy
        gemm2.gemm2_tiled_kernel[(grid,)](
            b.row_address,
            b.row_weight,
            layer.w2.units,
            layer.w2.out_factor,
            self._tokens(b.middle, tiled),
            b.work[b.sizes.tiled_offset :],
            b.work[Counter.NUM_TILED_ENTRIES :],
            grid,
            **common,
            **_tiled_options(tiled, b.sizes.gemm2_groups),
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

    def small_m(self, layer: BoundLayer, gemms: GemmPlan) -> None:
        """The whole sub-step. gemms: of plan_small_m."""
        from megamoe.backends.hopper.device import small_m

        b, shape, identity_layer = self.buffers, self.buffers.shape, layer.w13 is None
        first, second = gemms.tiled(shape.hidden), gemms.tiled(shape.intermediate)
        # Identity experts have no weights; the kernel then has no code that would read them.
        w13, w2 = (layer.w13, layer.w2) if layer.w13 and layer.w2 else (self._no_weights,) * 2
        compiled = small_m.small_m_kernel[(SMALL_M.occupancy * self.device.share,)](
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
            w13.units,
            w13.out_factor,
            w2.units,
            w2.out_factor,
            self._limit,
            b.sizes.stream_offset,
            b.sizes.tiled_offset,
            gemms.stream_max_rows,
            self.device.share,
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
            AHEAD=first.ahead,
            STAGES=first.stages,
            BLOCK_N=first.block_n,
            FP8=self.fp8,
            IDENTITY=identity_layer,
            num_warps=SMALL_M.warps,
            maxnreg=128,
        )
        # Thread blocks wait for each other: a rank's must all be on the device at once.
        check_resident(compiled.metadata.shared, SMALL_M.occupancy)

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

    def close(self) -> None:
        """Closing flags of a cut step, posted and waited for."""
        b = self.buffers
        close.close_kernel[(1,)](b.control, b.bases, **self._ranks, num_warps=1, **self._chain)

    def abort(self) -> None:
        """Tell all peers that this rank gives the launch up."""
        b = self.buffers
        close.abort_kernel[(1,)](b.control, b.bases, **self._ranks, num_warps=1, **self._chain)

    def warm_up(
        self,
        plans: Iterable[GemmPlan],
        capacities: Mapping[Path, Iterable[int]],
        small_m: Iterable[GemmPlan] = (),
        large_m: Iterable[GemmPlan] = (),
    ) -> None:
        """Compile and load every kernel that steps of these plans and runtimes can need. small_m, large_m: plans of
        those paths.

        Must happen before any rank's first launch: loading code may wait for the device, and so for a kernel of a
        peer that itself waits for this rank. Runs everything once on memory of its own, with no rows and no patience.
        """
        b = self.buffers
        scratch = torch.zeros(1 << 16, dtype=torch.uint8, device=b.device)
        real = b.bases.clone()
        b.bases.fill_(scratch.data_ptr())
        words = [0] * record.NUM_WORDS
        words[record.Word.ABORTS_OFFSET] = 4096
        words[record.Word.COUNTS_OFFSET] = 8192
        b.control.copy_(torch.tensor(words, dtype=torch.int64))
        b.work.zero_()
        layer = BoundLayer(self._no_weights, self._no_weights)
        for path, values in capacities.items():
            compact = packs_densely(path)
            if compact:
                self.prepare()
            for quantized in (False, True):
                self.dispatch(1, compact=compact, quantized=quantized)
            for gemms in plans:
                for capacity in values:
                    self.index(gemms, capacity, compact=compact)
        self.expand()
        self.identity()
        for gemms in plans:
            self.gemm1(layer, gemms)
            self.gemm2(layer, gemms)
            self.gemm2(layer, gemms, plain_rows=True)
        for gemms in small_m:
            self.small_m(layer, gemms)
            self.small_m(BoundLayer(None, None), gemms)
        for gemms in large_m:
            self.quantize(1)
            self.large_m(layer, gemms)
            self.large_m(BoundLayer(None, None), gemms)
        self.combine(1)
        self.close()
        self.abort()
        _finish(b.device)
        b.bases.copy_(real)
        b.control.zero_()
        _finish(b.device)

    def _tokens(self, image: torch.Tensor, tiled: TiledPlan) -> Any:
        """TMA descriptor of an image: boxes of block_n rows by a stage's columns."""
        from triton.experimental.gluon.language import NVMMASharedLayout
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        columns = 128 * tiled.chunks_per_stage
        key = (image.data_ptr(), tiled.block_n, columns)
        if key not in self._descriptors:
            layout = NVMMASharedLayout(128, 16, rank=2)
            self._descriptors[key] = TensorDescriptor.from_tensor(image, [tiled.block_n, columns], layout)
        return self._descriptors[key]


def _finish(device: torch.device) -> None:
    """Wait for all that runs on a device; compiling ahead has none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _tiled_options(tiled: TiledPlan, groups: int) -> dict[str, Any]:
    """Constants and options of a tiled kernel; groups: row groups of an expert's matrix."""
    options = {
        "GROUPS": groups,
        "AHEAD": tiled.ahead,
        "STAGES": tiled.stages,
        "BLOCK_N": tiled.block_n,
        "num_warps": 8,
    }
    return options if tiled.num_regs is None else options | {"maxnreg": tiled.num_regs}


def bytes_of(matrix: PackedMatrix) -> int:
    """Device bytes of a packed matrix."""
    return matrix.units.numel() + 4 * matrix.out_factor.numel()
