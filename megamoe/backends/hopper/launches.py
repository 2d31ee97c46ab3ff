"""What every launch of a rank needs: its buffers, its share of the device, constants of its deployment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megamoe.backends.hopper.buffers import RankBuffers, result_bytes
from megamoe.backends.hopper.device import flags
from megamoe.backends.hopper.fp8 import RowScales
from megamoe.backends.hopper.keys import settle_keys
from megamoe.backends.hopper.packing import ROW_GROUP, UNIT_BYTES, PackedMatrix
from megamoe.backends.hopper.plan import BOX_ROWS, TiledPlan, grid_share, next_power_of_2
from megamoe.bundle import RowFormat
from megamoe.layout import FlagKind

_BLOCK = 1024
"""Columns that a thread block of dispatch or combine handles at a time."""


@dataclass(frozen=True)
class Device:
    """What grids follow from. num_virtual_ranks: ranks of the group that share this GPU."""

    num_sms: int
    num_virtual_ranks: int = 1

    @property
    def share(self) -> int:
        """Multiprocessors of one rank."""
        return grid_share(self.num_sms, self.num_virtual_ranks)

    @property
    def resident_share(self) -> int:
        """Of it, for launches of which a multiprocessor holds two thread blocks and that wait for peers.

        Where ranks share a GPU half of them: multiprocessors without any waiting block must be left. A kernel that
        divides shared memory and L1 otherwise, such as the one that begins a peer's sub-step, starts on no other.
        """
        return self.share if self.num_virtual_ranks == 1 else max(self.share // 2, 1)


class Launches:
    """Base of the rooms that launch kernels."""

    def __init__(self, buffers: RankBuffers, device: Device, row_format: RowFormat) -> None:
        settle_keys()
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
        self._payload = {
            "own_rank": buffers.rank,
            "HIDDEN": shape.hidden,
            "ROW_BYTES": buffers.layout.row_bytes,
        }
        self._routing = {"NUM_TOPK": shape.num_topk, "EXPERTS_PER_RANK": shape.num_experts_per_rank}
        experts = shape.num_experts_per_rank
        none = torch.zeros((experts, 1, 1, 2, UNIT_BYTES), dtype=torch.uint8, device=buffers.device)
        ones = torch.ones(experts, device=buffers.device)
        row_scales = RowScales(none[:, 0, 0, 0, :ROW_GROUP], ones.unsqueeze(1).expand(-1, ROW_GROUP))
        self._no_weights = PackedMatrix(none, ones, 0, 0, row_scales)
        self._descriptors: dict[tuple[int, int, int], Any] = {}
        self._fp8_descriptors: dict[tuple[int, int], tuple[Any, Any]] = {}

    def _await_flags(self, kind: FlagKind, *, only_with_rows: bool = False) -> None:
        """Where ranks share a GPU, let one thread block a rank wait, not a whole grid of them: a kernel that a peer
        waits for must always find multiprocessors that are free of waiting ones."""
        if self.device.num_virtual_ranks == 1:
            return
        b = self.buffers
        flags.await_kernel[(1,)](
            b.control, b.bases, **self._ranks, KIND=int(kind), ONLY_WITH_ROWS=only_with_rows, num_warps=1
        )

    def _grid(self, max_rows: int, width: int) -> tuple[int]:
        """Thread blocks for rows in pieces of `width` columns: one a piece, up to 8 a multiprocessor."""
        pieces = max_rows * -(-self.buffers.shape.hidden // width)
        return (min(8 * self.device.share, max(pieces, 1)),)

    def _tokens(self, image: torch.Tensor, tiled: TiledPlan) -> Any:
        """TMA descriptor of an image: boxes of block_n rows by a stage's columns."""
        return self._box(image, tiled.block_n, tiled)

    def _boxes(self, image: torch.Tensor, tiles: tuple[TiledPlan, ...]) -> list[Any]:
        """Descriptors with boxes of 256, 128, 64 and 32 rows, None where no tile is made of such."""
        wanted = 0
        for tile in tiles:
            wanted |= tile.block_n
        return [self._box(image, rows, tiles[0]) if wanted & rows else None for rows in BOX_ROWS]

    def _box(self, image: torch.Tensor, rows: int, tiled: TiledPlan) -> Any:
        return self._box_of(image, rows, 128 * tiled.chunks_per_stage)

    def _box_of(self, image: torch.Tensor, rows: int, columns: int) -> Any:
        key = (image.data_ptr(), rows, columns)
        if key not in self._descriptors:
            self._descriptors[key] = descriptor(image, [rows, columns], swizzle=128)
        return self._descriptors[key]


def descriptor(tensor: torch.Tensor, box: list[int], *, swizzle: int) -> Any:
    """TMA descriptor; swizzle: bytes of its pattern in shared memory."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(swizzle, 8 * tensor.element_size(), rank=len(box))
    return TensorDescriptor.from_tensor(tensor, box, layout)
