"""One rank's kernels, the private memory that they share, and the control block. A sub-step is a row of launches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path as FilePath

import torch

from megamoe.backends import Launch
from megamoe.backends.gfx950.build import Code, KernelSpec, load_or_compile, shipped
from megamoe.backends.gfx950.device import Device, Memory
from megamoe.backends.gfx950.plan import LaunchPlan, inner_bytes, plan_launch
from megamoe.backends.gfx950.record import (
    AUTO,
    BOARD_BYTES,
    FIRST_STATUS,
    INFO_ERROR,
    LAST_STATUS,
    NUM_WORDS,
    SEGMENT_BYTES,
    Word,
)
from megamoe.backends.gfx950.shuffle import Packed
from megamoe.batch import MoeBatch
from megamoe.bundle import Path, RowFormat
from megamoe.layout import FlagKind, HeapLayout
from megamoe.shape import MoeShape

_FORMATS = {RowFormat.BF16: 0, RowFormat.FP8: 1, RowFormat.AUTO: AUTO}


@dataclass(frozen=True)
class PackedMemory:
    """A packed matrix on the device."""

    codes: Memory
    scales: Memory

    @classmethod
    def upload(cls, device: Device, packed: Packed, name: str) -> PackedMemory:
        codes = device.allocate(packed.codes.numel(), f"{name} codes", weights=True)
        scales = device.allocate(packed.scales.numel(), f"{name} scales", weights=True)
        codes.write(packed.codes)
        scales.write(packed.scales)
        return cls(codes, scales)

    def free(self) -> None:
        self.codes.free()
        self.scales.free()


@dataclass(frozen=True)
class BoundLayer:
    """Packed experts of one protocol slot; None: identity experts. version: of the binding, part of graph keys."""

    w13: PackedMemory | None
    w2: PackedMemory | None
    version: int = 0


def kernel_specs(
    layout: HeapLayout, *, path: Path, block_m: int, quantized: bool, fp8: bool, identity: bool = False
) -> dict[str, KernelSpec]:
    """The kernels of a sub-step by stage, and those that end one otherwise (close, abort)."""
    shape = layout.bundle.shape
    routing = {"TOPK": shape.num_topk, "META_WORDS": layout.meta_words}
    owners = {"NUM_EXPERTS": shape.num_experts_per_rank, "NUM_RANKS": shape.num_ranks}
    row = {"HIDDEN": shape.hidden, "ROW_BYTES": layout.row_bytes}
    specs = {
        "quantize": KernelSpec.of(
            "quantize", NUM_EXPERTS=shape.num_experts, QUANTIZED=int(quantized), **row, **routing
        ),
        "close": KernelSpec.of("close", ABORT=0, NUM_RANKS=shape.num_ranks),
        "abort": abort_spec(shape),
    }
    if path is Path.COMPACT:
        specs["prepare"] = KernelSpec.of("prepare", COUNTS_WORDS=layout.counts_words, **routing, **owners)
    compact = path is Path.COMPACT
    if path is not Path.LARGE_M:
        specs["combine"] = KernelSpec.of("combine", HIDDEN=shape.hidden, **routing, **owners)
    if path is Path.LARGE_M:
        alone = alone_specs(layout, block_m=block_m, fp8=fp8)
        constants = dict(alone["gemm1"].constants) | dict(alone["gemm2"].constants) | routing
        specs["large_m"] = KernelSpec.of(
            "large_m", COUNTS_WORDS=layout.counts_words, IDENTITY=int(identity), **constants
        )
    elif identity:
        moved = {"ROW_BYTES": layout.row_bytes, **routing, **owners}
        specs["dispatch"] = KernelSpec.of("dispatch", COMPACT=int(compact), **moved)
        specs["identity"] = KernelSpec.of("identity", FP8=int(fp8), **row, **owners)
    else:
        alone = alone_specs(layout, block_m=block_m, fp8=fp8)
        constants = dict(alone["gemm1"].constants) | routing | owners
        specs["dispatch_gemm1"] = KernelSpec.of("dispatch_gemm1", COMPACT=int(compact), **constants)
        specs["gemm2"] = alone["gemm2"]
    return specs


def small_m_specs(
    layout: HeapLayout, *, block_m: int, row_format: RowFormat, identity: bool = False
) -> dict[str, KernelSpec]:
    """The one kernel of small_m, and those that end a sub-step otherwise."""
    shape = layout.bundle.shape
    constants = dict(alone_specs(layout, block_m=block_m, fp8=False)["gemm1"].constants)
    return {
        "small_m": KernelSpec.of(
            "small_m", TOPK=shape.num_topk, META_WORDS=layout.meta_words, NUM_RANKS=shape.num_ranks,
            FORMAT=_FORMATS[row_format], IDENTITY=int(identity), **constants,
        ),
        "close": KernelSpec.of("close", ABORT=0, NUM_RANKS=shape.num_ranks),
        "abort": abort_spec(shape),
    }  # fmt: skip


def abort_spec(shape: MoeShape) -> KernelSpec:
    """The kernel that tells all ranks that this one gives its launch up."""
    return KernelSpec.of("close", ABORT=1, NUM_RANKS=shape.num_ranks)


def alone_specs(layout: HeapLayout, *, block_m: int, fp8: bool) -> dict[str, KernelSpec]:
    """The two GEMMs on rows that are there already: what a binding is checked with."""
    shape = layout.bundle.shape
    gemm = {
        "BLOCK_M": block_m, "HIDDEN": shape.hidden, "INTERMEDIATE": shape.intermediate,
        "INNER_BYTES": inner_bytes(shape.intermediate), "NUM_EXPERTS": shape.num_experts_per_rank,
    }  # fmt: skip
    limit = round(shape.swiglu_limit * 1000)
    return {
        "gemm1": KernelSpec.of("gemm1", ROW_BYTES=layout.row_bytes, LIMIT_MILLI=limit, **gemm),
        "gemm2": KernelSpec.of("gemm2", NUM_RANKS=shape.num_ranks, FP8=int(fp8), **gemm),
    }


def _addresses(packed: PackedMemory | None) -> tuple[int, int]:
    """Where kernels find a matrix; None: identity experts, whose kernels do not look."""
    return (0, 0) if packed is None else (packed.codes.address, packed.scales.address)


class RankLaunches:
    """Launches on one device's stream. Owns the private memory; all sizes are for the layout's largest runtime."""

    def __init__(self, device: Device, layout: HeapLayout, *, fp8: bool) -> None:
        self.device, self.layout, self.fp8 = device, layout, fp8
        self.shape: MoeShape = layout.bundle.shape
        shape, rows = self.shape, layout.capacity
        self.heap = device.heap()
        self._last_buffer_idx = -1

        def private(name: str, num_bytes: int) -> Memory:
            return device.allocate(num_bytes, name)

        self.control = private("control", 8 * NUM_WORDS)
        self.bases = private("heap addresses", 8 * shape.num_ranks)
        self.bases.write(torch.tensor(device.heap_addresses(), dtype=torch.int64))
        self.hidden = private("hidden states", rows * shape.hidden * 2)
        self.hidden_sf = private("hidden scales", rows * layout.sf_bytes)
        self.ids = private("ids", rows * shape.num_topk * 4)
        self.weights = private("routing weights", rows * shape.num_topk * 4)
        self.out = private("out", rows * shape.hidden * 2)
        self.rows = private("staged rows", rows * layout.row_bytes)
        self.meta = private("staged words", rows * layout.meta_words * 4)
        self.token_slots = private("token slots", rows * shape.num_ranks * 4)
        self.sent_counts = private("sent counts", 2 * shape.num_ranks * 4)
        self.experts = private("experts", shape.num_experts_per_rank * 16)
        self.row_table = private("row table", layout.max_routed_rows * 16)
        self.inner = private("intermediate rows", layout.max_routed_rows * inner_bytes(shape.intermediate))
        self.segments = private("segments", shape.num_experts_per_rank * SEGMENT_BYTES)
        max_tiles = max(
            plan_launch(shape, 1 << power, device.num_compute_units).max_tiles
            for power in range(rows.bit_length())
        )
        self.board = private("board", max_tiles * BOARD_BYTES)
        self.listed = private("listed", 8 * shape.num_experts_per_rank)
        self.ready_tiles = private("ready tiles", 8 * self._max_small_m_units())

    def _max_small_m_units(self) -> int:
        capacity = max(self.layout.bundle.capacities(Path.SMALL_M), default=0)
        buckets = (1 << power for power in range(capacity.bit_length()))
        units = [
            plan_launch(self.shape, rows, self.device.num_compute_units).small_m_units for rows in buckets
        ]
        return max(units, default=0)

    # ------------------------------------------------------------------------------------------- control

    def begin(self, launch: Launch, batch: MoeBatch, timeout_ticks: int) -> None:
        """Copy a batch to the device and say in the control block what this launch is."""
        layout = self.layout
        words = [0] * NUM_WORDS
        self.hidden.write(batch.hidden_states)
        if batch.hidden_states_sf is not None:
            self.hidden_sf.write(batch.hidden_states_sf)
            words[Word.SF_PTR] = self.hidden_sf.address
        self.ids.write(batch.topk_ids)
        self.weights.write(batch.topk_weights)
        num_rows = batch.num_rows
        if launch.sub_step.path is Path.SMALL_M and num_rows == 0:
            num_rows = 1
            self._write_stand_in()
        buffer_idx = launch.buffer_idx
        words[Word.EPOCH] = launch.epoch
        words[Word.NUM_ROWS] = num_rows
        words[Word.INFO] = INFO_ERROR if launch.refused else 0
        words[Word.TIMEOUT_TICKS] = timeout_ticks
        words[Word.CAPACITY] = launch.sub_step.runtime_capacity
        words[Word.HIDDEN_PTR] = self.hidden.address
        words[Word.IDS_PTR] = self.ids.address
        words[Word.WEIGHTS_PTR] = self.weights.address
        words[Word.OUT_PTR] = self.out.address
        words[Word.FLAGS_OFFSET] = layout.flag_offset(launch.slot_idx, buffer_idx, FlagKind.COUNTS, 0)
        words[Word.COUNTS_OFFSET] = layout.region(f"counts{buffer_idx}").offset
        words[Word.META_OFFSET] = layout.region(f"payload_meta{buffer_idx}").offset
        words[Word.ROWS_OFFSET] = layout.region(f"payload_rows{buffer_idx}").offset
        words[Word.COMBINE_OFFSET] = layout.region(f"combine_rows{buffer_idx}").offset
        words[Word.ABORTS_OFFSET] = layout.region("aborts").offset
        deployment = layout.bundle.deployment
        words[Word.HEAVY_ROWS] = deployment.auto_fp8_min_rows
        words[Word.HEAVY_EXPERT_ROWS] = deployment.auto_fp8_min_rows_of_expert
        busy = sum(1 << rank for rank, rows in enumerate(launch.sub_step.num_rows_per_rank) if rows)
        everyone = (1 << self.shape.num_ranks) - 1
        words[Word.SOURCES] = everyone if self._last_buffer_idx == buffer_idx else busy
        self._last_buffer_idx = buffer_idx
        self.control.write(torch.tensor(words, dtype=torch.int64))

    def _write_stand_in(self) -> None:
        """A row of zeros without experts, for a rank that brings none: small_m then has a row on every rank."""
        hidden, topk = self.shape.hidden, self.shape.num_topk
        self.hidden.write(torch.zeros(hidden, dtype=torch.bfloat16))
        self.ids.write(torch.full((topk,), -1, dtype=torch.int32))
        self.weights.write(torch.zeros(topk))

    def status(self) -> dict[Word, int]:
        """What the kernels wrote back."""
        count = LAST_STATUS - FIRST_STATUS + 1
        values = self.control.read(torch.int64, (count,), 8 * FIRST_STATUS).tolist()
        return {Word(FIRST_STATUS + i): value for i, value in enumerate(values)}

    def rows_per_expert(self) -> list[int]:
        """Routed rows of each local expert in the last launch."""
        records = self.experts.read(torch.int32, (self.shape.num_experts_per_rank, 4))
        counts: list[int] = records[:, 0].tolist()
        return counts

    # ------------------------------------------------------------------------------------------- launches

    def load(self, spec: KernelSpec) -> Code:
        """A kernel: from the deployment's folder of shipped ones, else from the cache, compiled if it is not there."""
        folder = self.layout.bundle.deployment.gfx950_kernels
        return shipped(spec, FilePath(folder)) if folder else load_or_compile(spec)

    def codes(self, plan: LaunchPlan, path: Path, *, quantized: bool, identity: bool) -> dict[str, Code]:
        """The compiled kernels of a sub-step."""
        if path is Path.SMALL_M:
            row_format = self.layout.bundle.deployment.combine_row_format
            specs = small_m_specs(self.layout, block_m=plan.block_m, row_format=row_format, identity=identity)
            return {stage: self.load(spec) for stage, spec in specs.items()}
        specs = kernel_specs(
            self.layout, path=path, block_m=plan.block_m, quantized=quantized, fp8=self.fp8, identity=identity
        )  # fmt: skip
        return {stage: self.load(spec) for stage, spec in specs.items()}

    def quantize(self, code: Code, plan: LaunchPlan) -> None:
        groups = plan.quantize_groups
        args = [self.control.address, self.rows.address, self.meta.address, groups]
        self.device.stream.launch(code, groups, 64, args)

    def prepare(self, code: Code) -> None:
        args = [
            self.control.address, self.bases.address, self.heap.address, self.meta.address, self.token_slots.address,
            self.sent_counts.address, self.device.rank,
        ]  # fmt: skip
        self.device.stream.launch(code, self.shape.num_ranks, 256, args)

    def dispatch(self, code: Code, plan: LaunchPlan) -> None:
        groups = plan.dispatch_groups
        args = [
            self.control.address, self.bases.address, self.heap.address, self.rows.address, self.meta.address,
            self.token_slots.address, self.sent_counts.address, self.experts.address, self.row_table.address,
            self.device.rank, plan.tile_shift, groups,
        ]  # fmt: skip
        self.device.stream.launch(code, groups, 256, args)

    def dispatch_gemm1(self, code: Code, plan: LaunchPlan, w13: PackedMemory) -> None:
        groups = plan.gemm1_groups
        args = [
            self.control.address, self.bases.address, self.heap.address, self.rows.address, self.meta.address,
            self.token_slots.address, self.sent_counts.address, self.experts.address, self.row_table.address,
            w13.codes.address, w13.scales.address, self.inner.address, self.device.rank, groups,
        ]  # fmt: skip
        self.device.stream.launch(code, groups, plan.gemm_threads, args)

    def gemm1(self, code: Code, plan: LaunchPlan, w13: PackedMemory) -> None:
        groups = plan.gemm1_groups
        args = [
            self.control.address, self.heap.address, self.experts.address, self.row_table.address, w13.codes.address,
            w13.scales.address, self.inner.address, groups,
        ]  # fmt: skip
        self.device.stream.launch(code, groups, plan.gemm_threads, args)

    def gemm2(self, code: Code, plan: LaunchPlan, w2: PackedMemory) -> None:
        groups = plan.gemm2_groups
        args = [
            self.control.address, self.bases.address, self.experts.address, self.row_table.address, w2.codes.address,
            w2.scales.address, self.inner.address, self.device.rank, groups,
        ]  # fmt: skip
        self.device.stream.launch(code, groups, plan.gemm_threads, args)

    def small_m(
        self, code: Code, plan: LaunchPlan, w13: PackedMemory | None, w2: PackedMemory | None
    ) -> None:
        weights = [*_addresses(w13), *_addresses(w2)]
        groups = plan.small_m_groups
        args = [
            self.control.address, self.bases.address, self.heap.address, self.meta.address, self.experts.address,
            self.row_table.address, self.listed.address, self.ready_tiles.address, *weights, self.inner.address,
            self.device.rank, groups,
        ]  # fmt: skip
        self.device.stream.launch(code, groups, plan.gemm_threads, args)

    def identity(self, code: Code, plan: LaunchPlan) -> None:
        groups = plan.dispatch_groups
        args = [
            self.control.address, self.bases.address, self.heap.address, self.experts.address, self.row_table.address,
            self.device.rank, groups,
        ]  # fmt: skip
        self.device.stream.launch(code, groups, 256, args)

    def large_m(
        self, code: Code, plan: LaunchPlan, w13: PackedMemory | None, w2: PackedMemory | None
    ) -> None:
        weights = [*_addresses(w13), *_addresses(w2)]
        groups = plan.large_m_groups
        args = [
            self.control.address, self.bases.address, self.heap.address, self.rows.address, self.meta.address,
            self.experts.address, self.segments.address, self.board.address, *weights, self.inner.address,
            self.device.rank, plan.max_tiles, plan.large_m_senders, groups,
        ]  # fmt: skip
        self.device.stream.launch(code, groups, plan.gemm_threads, args)

    def combine(self, code: Code, plan: LaunchPlan) -> None:
        groups = plan.combine_groups
        args = [
            self.control.address, self.bases.address, self.heap.address, self.meta.address, self.device.rank, groups,
        ]  # fmt: skip
        self.device.stream.launch(code, groups, 256, args)

    def close(self, code: Code) -> None:
        """Launch either form of the close kernel."""
        args = [self.control.address, self.bases.address, self.heap.address, self.device.rank]
        self.device.stream.launch(code, 1, 64, args)
