"""One rank's device memory: its symmetric heap, private tables and images, and the control block.

All ranks derive the same heap map from the bundle (megamoe.layout); tables follow from tables.TableSizes. Works on any
torch device, so that layouts and stages can be tested without a GPU.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

import torch

from megamoe.backends import Launch
from megamoe.backends.hopper import record
from megamoe.backends.hopper.board import board_layout
from megamoe.backends.hopper.fp8_operands import Fp8Operands
from megamoe.backends.hopper.packing import PackedMatrix, pack_w2, pack_w13
from megamoe.backends.hopper.plan import Counter, GemmPlan
from megamoe.backends.hopper.record import Word
from megamoe.backends.hopper.shortage import allocating
from megamoe.backends.hopper.tables import TableSizes
from megamoe.batch import MoeBatch
from megamoe.bundle import Path, RowFormat
from megamoe.layout import FlagKind, HeapLayout
from megamoe.path import SubStep
from megamoe.shape import MoeShape
from megamoe.weights import LayerWeights

FLAG_KINDS = tuple(FlagKind)
_NO_RANKS = (0,) * record.MAX_RANKS
_REQUEST = Struct(f"{record.NUM_REQUEST_WORDS}q")
_EPOCH, _TIMEOUT_NS = int(Word.EPOCH), int(Word.TIMEOUT_NS)
_OFFSETS = slice(Word.FLAGS_OFFSET, Word.ABORTS_OFFSET + 1)


@dataclass(frozen=True)
class BoundLayer:
    """Packed experts of one protocol slot; None: identity experts. version: of the binding, part of graph keys."""

    w13: PackedMatrix | None
    w2: PackedMatrix | None
    version: int = 0

    @classmethod
    def packed(cls, weights: LayerWeights, device: torch.device) -> BoundLayer:
        """One rank's experts in kernel order on the device, queued on its current stream."""
        views = weights.as_bytes()
        return cls(
            pack_w13(views.w13_codes.to(device), views.w13_scales.to(device)),
            pack_w2(views.w2_codes.to(device), views.w2_scales.to(device)),
        )

    def gemms(self, plan: GemmPlan) -> GemmPlan:
        """What a plan means for these weights: those that do not fit the FP8 kernel are multiplied as bf16."""
        fits = self.w13 is None or self.w2 is None or (self.w13.fp8 is not None and self.w2.fp8 is not None)
        return plan if fits else plan.bf16


def allocate_heap(layout: HeapLayout, device: torch.device) -> torch.Tensor:
    """Zeroed uint8 [num_bytes] on the device. Raises HeapError with wanted and free bytes when memory is short."""
    with allocating("the symmetric heap", layout.num_bytes, device):
        return torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)


class RankBuffers:
    """Everything that the kernels of one rank touch. heap_addresses: of all ranks' heaps as this rank's kernels reach
    them, in rank order, this rank's among them."""

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
        self.part_counts = table(sizes.part_count_words, torch.int32)
        self.board_layout = board_layout(sizes)
        if layout.bundle.capacities(Path.LARGE_M):
            self.board = table(self.board_layout.num_words, torch.int32)
            self.places = table(layout.capacity * self.shape.num_topk, torch.int32)
            self.quantized = table(layout.capacity * layout.row_bytes, torch.uint8)
        # Zeroed once: rows past an expert's last are multiplied too, and may hold anything but must be finite bytes
        # of an older step rather than whatever the allocator returns.
        self.image = torch.zeros((rows, sizes.image_columns), dtype=torch.bfloat16, device=device)
        self.middle = torch.zeros((rows, sizes.middle_columns), dtype=torch.bfloat16, device=device)
        self.fp8 = Fp8Operands.within(self.image, self.middle)

    @property
    def stream_entries(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the streaming kernel, and how many there are: parts of `work`."""
        return self.work[self.sizes.stream_offset :], self.work[Counter.NUM_STREAM_ENTRIES :]

    @property
    def tiled_entries(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of the tiled, ring or FP8 kernel."""
        return self.work[self.sizes.tiled_offset :], self.work[Counter.NUM_TILED_ENTRIES :]

    @property
    def num_bytes(self) -> int:
        """Device memory of tables and images, without what large_m has beside them."""
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


class Addresses(NamedTuple):
    """Where a sub-step's tensors are for kernels. ids_src, weights_src: where they lie on the host, from where the
    first kernel brings them; 0 = they are where they shall be."""

    num_rows: int
    hidden: int
    scales: int
    ids: int
    weights: int
    out: int
    ids_src: int = 0
    weights_src: int = 0

    @classmethod
    def of(cls, batch: MoeBatch, out: torch.Tensor) -> Addresses:
        """Of tensors that kernels reach as they are."""
        scales = 0 if batch.hidden_states_sf is None else batch.hidden_states_sf.data_ptr()
        ids, weights = batch.topk_ids.data_ptr(), batch.topk_weights.data_ptr()
        return cls(batch.num_rows, batch.hidden_states.data_ptr(), scales, ids, weights, out.data_ptr())


def heap_offsets(layout: HeapLayout, slot_idx: int, buffer_idx: int) -> tuple[int, ...]:
    """Of what a launch uses of a heap, in the order of Word from FLAGS_OFFSET to ABORTS_OFFSET."""
    buffered = ("counts", "payload_meta", "payload_rows", "combine_rows")
    regions = [layout.region(f"{name}{buffer_idx}") for name in buffered] + [layout.region("aborts")]
    flags = layout.flag_offset(slot_idx, buffer_idx, FLAG_KINDS[0], 0)
    return (flags, *(region.offset for region in regions))


def request_words(
    launch: Launch, at: Addresses, offsets: tuple[int, ...], timeout_ns: int
) -> tuple[int, ...]:
    """The request of a sub-step in the order of Word. offsets: of heap_offsets."""
    sub_step = launch.sub_step
    rows = sub_step.num_rows_per_rank
    return (
        launch.epoch,
        at.num_rows,
        record.INFO_ERROR if launch.refused else 0,
        timeout_ns,
        sub_step.runtime_capacity,
        *at[1:6],
        *offsets,
        *rows,
        *_NO_RANKS[len(rows) :],
        at.ids_src,
        at.weights_src,
    )


class Request:
    """What the host asks of the next sub-step, in the pinned words that its first kernel takes."""

    def __init__(self, words: torch.Tensor, layout: HeapLayout) -> None:
        """words: of host_words."""
        self._words = host_view(words)
        self._layout = layout
        self._offsets: dict[int, array[int]] = {}
        self._last: tuple[Addresses | None, SubStep | None, bool] = (None, None, False)

    def write(self, launch: Launch, at: Addresses, timeout_ns: int) -> None:
        """Nothing may be under way. Where tensors and sub-step are those of the last request, only what is new."""
        key = launch.slot_idx << 1 | launch.buffer_idx
        offsets = self._offsets.get(key)
        if offsets is None:
            offsets = self._offsets[key] = array(
                "q", heap_offsets(self._layout, launch.slot_idx, launch.buffer_idx)
            )
        words, (last_at, last_sub_step, was_refused) = self._words, self._last
        if at is last_at and launch.sub_step is last_sub_step and launch.refused == was_refused:
            words[_EPOCH], words[_TIMEOUT_NS], words[_OFFSETS] = launch.epoch, timeout_ns, offsets
            return
        _REQUEST.pack_into(words, 0, *request_words(launch, at, tuple(offsets), timeout_ns))
        self._last = at, launch.sub_step, launch.refused


def control_words(
    layout: HeapLayout, launch: Launch, batch: MoeBatch, out: torch.Tensor, timeout_ns: int
) -> list[int]:
    """A whole control block, status words zero, for tensors that kernels reach as they are."""
    offsets = heap_offsets(layout, launch.slot_idx, launch.buffer_idx)
    words = request_words(launch, Addresses.of(batch, out), offsets, timeout_ns)
    return [*words, *(0,) * (record.NUM_WORDS - len(words))]


def result_bytes(shape: MoeShape, row_format: RowFormat) -> int:
    """Bytes that a result row really takes on its way."""
    return shape.hidden + shape.hidden // 32 if row_format is RowFormat.FP8 else 2 * shape.hidden


def packs_densely(path: Path) -> bool:
    """Whether rows may leave only when all ranks' counts are known."""
    return path is Path.COMPACT


def exchanges_counts(path: Path) -> bool:
    return path in (Path.COMPACT, Path.LARGE_M)
