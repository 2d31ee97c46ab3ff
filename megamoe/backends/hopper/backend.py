"""HopperBackend: one rank on an NVIDIA H100/H200.

A sub-step is a fixed sequence of kernels on the rank's own stream. Nothing synchronises with the host between `begin`
and `finish`: row counts, work lists and failures live on the device. `finish` waits for the stream and reads the
control block back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import torch

from megamoe.backends import Launch
from megamoe.backends.hopper import group as groups
from megamoe.backends.hopper import record
from megamoe.backends.hopper.board import SECTIONS
from megamoe.backends.hopper.buffers import (
    BoundLayer,
    RankBuffers,
    allocate_heap,
    control_words,
    exchanges_counts,
)
from megamoe.backends.hopper.call import LAUNCH, STAGES, Call
from megamoe.backends.hopper.expert import expert_rows
from megamoe.backends.hopper.graphs import StepGraphs
from megamoe.backends.hopper.kernels import Device, Kernels
from megamoe.backends.hopper.packing import pack_w2, pack_w13
from megamoe.backends.hopper.plan import devices_of_ranks
from megamoe.backends.hopper.record import Word
from megamoe.backends.hopper.served import check_served, gemm_plan, gemm_plans, reach_peers
from megamoe.backends.hopper.staging import Staging
from megamoe.batch import Counters, MoeBatch, SubStepReport
from megamoe.bundle import Bundle, Path, RowFormat
from megamoe.errors import (
    BindingError,
    ConfigError,
    IneligibleError,
    InternalError,
    PeerRefusedError,
    PeerTimeoutError,
    must_be,
)
from megamoe.layout import FlagKind, plan_layout
from megamoe.memory import MemoryHandle, MemoryKind, OpenMemory
from megamoe.weights import LayerWeights

_FLAG_BYTES = 8


_warming = threading.Lock()
"""Ranks of one process compile in turn: the first one does the work, the others find it done."""


class HopperBackend:
    """Implements megamoe.backends.Backend. One thread owns it."""

    memory_kinds: tuple[MemoryKind, ...] = ()

    def __init__(
        self, bundle: Bundle, *, rank: int, group_name: str, num_slots: int | None, timeout_s: float
    ) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("backend hopper needs a CUDA build of torch and a GPU (got: no CUDA device)")
        devices = devices_of_ranks(bundle.shape.num_ranks, torch.cuda.device_count())
        self.device = torch.device("cuda", devices[rank])
        properties = torch.cuda.get_device_properties(self.device)
        if properties.major != 9:
            raise ConfigError(
                must_be("compute capability", "9.0 (H100, H200)", f"{properties.major}.{properties.minor}")
            )
        check_served(bundle)
        layout = plan_layout(bundle, num_slots=num_slots)
        self.rank = rank
        self.bundle = bundle
        self._heap = allocate_heap(layout, self.device)
        self.buffers = RankBuffers(
            layout, rank=rank, heap_addresses=[self._heap.data_ptr()] * layout.num_ranks, device=self.device
        )
        self._staging = Staging(bundle.shape, layout.capacity, self.device)
        device = Device(properties.multi_processor_count, devices.count(devices[rank]))
        self.kernels = Kernels(self.buffers, device, bundle.deployment.combine_row_format)
        with _warming, torch.cuda.device(self.device):
            small_m, large_m = gemm_plans(bundle, Path.SMALL_M), gemm_plans(bundle, Path.LARGE_M)
            staged = {path: bundle.capacities(path) for path in (Path.FIXED_SLOT, Path.COMPACT)}
            self.kernels.warm_up(gemm_plans(bundle, Path.COMPACT), staged, small_m, large_m)
        self._group = groups.join(
            group_name,
            rank=rank,
            num_ranks=layout.num_ranks,
            fingerprint=bundle.deployment.fingerprint(),
            heap=self._heap,
            timeout_s=timeout_s,
        )
        reach_peers(self._group.heaps.values(), self.device)
        self.buffers.bases.copy_(torch.tensor(self._group.addresses(), dtype=torch.int64))
        self.stream = torch.cuda.Stream(self.device)
        # Instantiating a graph may wait for the device, and so for a kernel of a peer that waits for this rank.
        alone = device.num_virtual_ranks == 1
        self.graphs = StepGraphs(self.stream) if alone else None
        self._layers: list[BoundLayer | None] = [None] * layout.num_slots
        self._control_host = torch.zeros(record.NUM_WORDS, dtype=torch.int64, pin_memory=True)
        self._status_host = torch.zeros(record.NUM_WORDS, dtype=torch.int64, pin_memory=True)
        self._call: Call | None = None
        self._closed = False

    # ------------------------------------------------------------------------------------------- binding

    def bind(
        self,
        slot_idx: int,
        weights: LayerWeights,
        check: Callable[[Callable[[int, torch.Tensor], torch.Tensor]], None] | None = None,
    ) -> None:
        """Pack this rank's experts on the device, let `check` look at one, and swap them in."""
        self._check_slot(slot_idx)
        views = weights.as_bytes()
        with torch.cuda.stream(self.stream):
            w13 = pack_w13(views.w13_codes.to(self.device), views.w13_scales.to(self.device))
            w2 = pack_w2(views.w2_codes.to(self.device), views.w2_scales.to(self.device))
            layer = BoundLayer(w13, w2)
            if check is not None:
                check(partial(expert_rows, self.kernels, layer, gemm_plan(self.bundle, Path.COMPACT, 1)))
        self._swap(slot_idx, layer)

    def bind_identity(self, slot_idx: int) -> None:
        """Experts that give a row back as it came: both GEMMs are bypassed, transport and combine are not."""
        self._check_slot(slot_idx)
        self._swap(slot_idx, BoundLayer(None, None))

    def _swap(self, slot_idx: int, layer: BoundLayer) -> None:
        old = self._layers[slot_idx]
        version = 0 if old is None else old.version + 1
        if self.graphs is not None:
            # Of launches that have finished: one thread owns this backend, and finish waits for the stream.
            self.graphs.forget(slot_idx)
        self._layers[slot_idx] = BoundLayer(layer.w13, layer.w2, version)

    def _check_slot(self, slot_idx: int) -> None:
        if not 0 <= slot_idx < len(self._layers):
            raise BindingError(must_be("slot_idx", f"from 0 to {len(self._layers) - 1}", slot_idx))

    # ------------------------------------------------------------------------------------------- sub-steps

    def stages(self, path: Path) -> tuple[str, ...]:
        if path not in STAGES:
            built = ", ".join(STAGES)
            raise IneligibleError(must_be("path on hopper", f"one of {built}", path))
        return STAGES[path]

    def begin(self, launch: Launch, batch: MoeBatch, out: torch.Tensor) -> None:
        """batch and out may be on the host (pinned or not) or on the device; host rows are copied on the stream."""
        layer = self._layers[launch.slot_idx]
        if layer is None:
            raise BindingError(f"slot {launch.slot_idx} has no weights: bind_layer it before forward")
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            on_device = self._staging.to_device(batch)
            out_dev = self._staging.out_dev(out)
            left_ns = max(int((launch.deadline_s - time.monotonic()) * 1e9), 1_000_000)
            words = control_words(self.buffers.layout, launch, on_device, out_dev, left_ns)
            self._control_host.copy_(torch.tensor(words, dtype=torch.int64))
        gemms = gemm_plan(self.bundle, launch.sub_step.path, launch.sub_step.max_rows)
        call = self._call = Call(launch, layer, on_device, out, out_dev, gemms)
        call.mark(self.stream, "begin")
        if self.graphs is not None and call.graph_key is not None:
            self.graphs.replay(call.graph_key, partial(self._launch_all, call))
            call.in_graph = True
        else:
            with torch.cuda.stream(self.stream):
                self._send_control()

    def _send_control(self) -> None:
        self.buffers.control.copy_(self._control_host, non_blocking=True)

    def _launch_all(self, call: Call) -> None:
        self._send_control()
        for stage in STAGES[call.launch.sub_step.path]:
            LAUNCH[stage](self.kernels, call)

    def launch(self, stage: str) -> None:
        """One stage; of a sub-step that is a captured graph, nothing is left to do."""
        call = self._running()
        call.num_launches += 1
        if call.in_graph:
            return
        with torch.cuda.stream(self.stream):
            LAUNCH[stage](self.kernels, call)
        call.mark(self.stream, stage)

    def finish(self) -> SubStepReport:
        call = self._running()
        with torch.cuda.stream(self.stream):
            if call.launch.closing:
                self.kernels.close()
            self._status_host.copy_(self.buffers.control, non_blocking=True)
            self._staging.queue_out(call.out)
        call.mark(self.stream, "end")
        # Every device-side wait is bounded by the launch's deadline, so this one ends too.
        call.marks[-1][1].synchronize()
        self._call = None
        status = self._status_host.tolist()
        self._raise_failures(call.launch, status)
        self._staging.take_out(call.out)
        return self._report(call, status)

    def _raise_failures(self, launch: Launch, status: list[int]) -> None:
        where = f"rank {self.rank}, slot {launch.slot_idx}, epoch {launch.epoch}"
        if status[Word.FAILED]:
            missing = _ranks(status[Word.MISSING])
            kind = FlagKind(status[Word.FAILED_KIND]).name.lower()
            src_rank, seen = status[Word.FAILED_SRC], status[Word.FAILED_SEEN] & 0xFFFFFFFF
            why = (
                f"expected epoch {launch.epoch} in the {kind} flag of rank {src_rank}, seen {seen}"
                if src_rank >= 0
                else f"a peer gave up while this rank waited for {kind} flags"
            )
            raise PeerTimeoutError(f"ranks {missing} did not come ({where}): {why}", missing)
        refusing = _ranks(status[Word.REFUSED])
        if refusing:
            raise PeerRefusedError(
                f"ranks {refusing} refused the call of slot {launch.slot_idx}, epoch {launch.epoch}", refusing
            )

    def _report(self, call: Call, status: list[int]) -> SubStepReport:
        sub_step = call.launch.sub_step
        counted = exchanges_counts(sub_step.path)
        shape = self.bundle.shape
        peers = shape.num_ranks - 1
        num_flags = (3 if counted else 2) + call.launch.closing
        if sub_step.path is Path.LARGE_M:
            num_flags += SECTIONS - 1
        counts = shape.num_experts_per_rank if sub_step.path is Path.LARGE_M else shape.num_ranks
        counts_bytes = 4 * counts * counted
        fp8 = set(_ranks(status[Word.FP8]))
        return SubStepReport(
            path=sub_step.path,
            runtime_capacity=sub_step.runtime_capacity,
            num_rows_per_rank=sub_step.num_rows_per_rank,
            row_format_per_rank=tuple(
                RowFormat.FP8 if rank in fp8 else RowFormat.BF16
                for rank in range(self.bundle.shape.num_ranks)
            ),
            counters=Counters(
                count_exchanges=int(counted),
                prepare_passes=int(counted),
                launches=call.num_launches,
                group_barriers=int(call.compact) + int(call.launch.closing),
                bytes_sent=status[Word.BYTES_SENT] + peers * (num_flags * _FLAG_BYTES + counts_bytes),
                padded_rows=status[Word.PADDED_ROWS],
                dropped_slots=status[Word.DROPPED_SLOTS],
                rows_received=status[Word.ROWS_RECEIVED],
            ),
            times=call.times(),
        )

    def abandon(self, error: BaseException) -> None:
        """Leave a sub-step that raised. An error of this rank's own ends the launch for its peers now."""
        call, self._call = self._call, None
        if call is None or isinstance(error, PeerTimeoutError | PeerRefusedError):
            return
        with torch.cuda.stream(self.stream):
            self.kernels.abort()
        self.stream.synchronize()

    def _running(self) -> Call:
        if self._call is None:
            raise InternalError("no sub-step is under way: begin comes first; this is a bug")
        return self._call

    def open_memory(self, handle: MemoryHandle) -> OpenMemory:
        raise InternalError(f"asked to open {handle.kind}, which is none of its memory_kinds: this is a bug")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.stream.synchronize()
        groups.leave(self._group, self.rank)
        self._layers = []
        self.graphs = None
        self.graphs = None


def _ranks(mask: int) -> list[int]:
    return [rank for rank in range(record.MAX_RANKS) if mask >> rank & 1]
