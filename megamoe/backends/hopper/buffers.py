"""One rank's device memory: its symmetric heap, private tables and images, and the control block.

All ranks derive the same heap map from the bundle (megamoe.layout); tables follow from plan.TableSizes. Works on any
torch device, so that layouts and stages can be tested without a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megamoe.backends import Launch
from megamoe.backends.hopper import record
from megamoe.backends.hopper.board import board_layout
from megamoe.backends.hopper.packing import PackedMatrix
from megamoe.backends.hopper.plan import TableSizes
from megamoe.backends.hopper.record import Word
from megamoe.batch import MoeBatch
from megamoe.bundle import Path, RowFormat
from megamoe.errors import HeapError, must_be
from megamoe.layout import FlagKind, HeapLayout
from megamoe.shape import MoeShape

FLAG_KINDS = tuple(FlagKind)


@dataclass(frozen=True)
class BoundLayer:
    """Packed experts of one protocol slot; None: identity experts. version: of the binding, part of graph keys."""

    w13: PackedMatrix | None
    w2: PackedMatrix | None
    version: int = 0


def allocate_heap(layout: HeapLayout, device: torch.device) -> torch.Tensor:
    """Zeroed uint8 [num_bytes] on the device. Raises HeapError with wanted and free bytes when memory is short."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if layout.num_bytes > free:
            raise HeapError(must_be("free device memory", f"at least {layout.num_bytes} bytes", free))
    return torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)


class RankBuffers:
    """Everything that the kernels of one rank touch. heaps: of all ranks in rank order, this rank's among them."""

    def __init__(
        self, layout: HeapLayout, *, rank: int, heap_addresses: Sequence[int], device: torch.device
    ) -> None:
        self.layout = layout
        self.shape: MoeShape = layout.bundle.shape
        self.rank = rank
        self.device = device
        self.sizes = TableSizes(shape=self.shape, capacity=layout.capacity)
        rows, sizes = self.sizes.padded_rows, self.sizes

        def table(count: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        self.bases = torch.tensor(list(heap_addresses), dtype=torch.int64).to(device)
        self.control = table(record.NUM_WORDS, torch.int64)
        self.request = host_words(device)
        self.report = host_words(device)
        self.ticket = table(1, torch.int32)
        self.token_index = table(layout.capacity * self.shape.num_ranks, torch.int32)
        self.row_slot = table(rows, torch.int32)
        self.row_address = table(rows, torch.int64)
        self.row_weight = table(rows, torch.float32)
        self.block_info = table(sizes.num_blocks, torch.int32)
        self.work = table(sizes.work_words, torch.int32)
        self.board_layout = board_layout(sizes)
        if layout.bundle.capacities(Path.LARGE_M):
            self.board = table(self.board_layout.num_words, torch.int32)
            self.places = table(layout.capacity * self.shape.num_topk, torch.int32)
            self.quantized = table(layout.capacity * layout.row_bytes, torch.uint8)
        # Zeroed once: rows past an expert's last are multiplied too, and may hold anything but must be finite bytes
        # of an older step rather than whatever the allocator returns.
        self.image = torch.zeros((rows, sizes.image_columns), dtype=torch.bfloat16, device=device)
        self.middle = torch.zeros((rows, sizes.middle_columns), dtype=torch.bfloat16, device=device)

    @property
    def num_bytes(self) -> int:
        """Device memory of the private part."""
        return self.sizes.num_bytes


def host_words(device: torch.device) -> torch.Tensor:
    """Zeroed int64 [NUM_WORDS] on the host, which kernels on `device` reach too."""
    if device.type == "meta":
        return torch.zeros(record.NUM_WORDS, dtype=torch.int64, device=device)
    return torch.zeros(record.NUM_WORDS, dtype=torch.int64, pin_memory=device.type == "cuda")


def host_view(words: torch.Tensor) -> memoryview:
    """int64 words of a host tensor, which must outlive it."""
    raw = (ctypes.c_int64 * words.numel()).from_address(words.data_ptr())
    return memoryview(raw).cast("B").cast("q")


def control_words(
    layout: HeapLayout,
    launch: Launch,
    batch: MoeBatch,
    out: torch.Tensor,
    timeout_ns: int,
    sources: tuple[int, int] = (0, 0),
) -> list[int]:
    """The control block of a sub-step, status words zero.

    batch and out must be where kernels of the rank's device can reach them. sources: addresses of ids and weights on
    the host, 0 where the batch's own are filled.
    """
    buffer_idx, sub_step = launch.buffer_idx, launch.sub_step
    words = [0] * record.NUM_WORDS
    words[Word.EPOCH] = launch.epoch
    words[Word.NUM_ROWS] = batch.num_rows
    words[Word.INFO] = record.INFO_ERROR if launch.refused else 0
    words[Word.TIMEOUT_NS] = timeout_ns
    words[Word.CAPACITY] = sub_step.runtime_capacity
    words[Word.HIDDEN_PTR] = batch.hidden_states.data_ptr()
    words[Word.SF_PTR] = 0 if batch.hidden_states_sf is None else batch.hidden_states_sf.data_ptr()
    words[Word.IDS_PTR] = batch.topk_ids.data_ptr()
    words[Word.WEIGHTS_PTR] = batch.topk_weights.data_ptr()
    words[Word.OUT_PTR] = out.data_ptr()
    words[Word.FLAGS_OFFSET] = layout.flag_offset(launch.slot_idx, buffer_idx, FLAG_KINDS[0], 0)
    words[Word.COUNTS_OFFSET] = layout.region(f"counts{buffer_idx}").offset
    words[Word.META_OFFSET] = layout.region(f"payload_meta{buffer_idx}").offset
    words[Word.ROWS_OFFSET] = layout.region(f"payload_rows{buffer_idx}").offset
    words[Word.COMBINE_OFFSET] = layout.region(f"combine_rows{buffer_idx}").offset
    words[Word.ABORTS_OFFSET] = layout.region("aborts").offset
    for rank, rows in enumerate(sub_step.num_rows_per_rank):
        words[Word.ROWS_PER_RANK + rank] = rows
    words[Word.IDS_SRC], words[Word.WEIGHTS_SRC] = sources
    return words


def result_bytes(shape: MoeShape, row_format: RowFormat) -> int:
    """Bytes that a result row really takes on its way."""
    return shape.hidden + shape.hidden // 32 if row_format is RowFormat.FP8 else 2 * shape.hidden


def packs_densely(path: Path) -> bool:
    """Whether rows may leave only when all ranks' counts are known."""
    return path is Path.COMPACT


def exchanges_counts(path: Path) -> bool:
    return path in (Path.COMPACT, Path.LARGE_M)
