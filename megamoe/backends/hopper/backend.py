"""HopperBackend: one rank on an NVIDIA H100/H200.

A sub-step is a fixed sequence of kernels on the rank's own stream. Nothing synchronises with the host between `begin`
and `finish`: row counts, work lists and failures live on the device. `begin` writes the request into pinned memory,
`finish` waits for the stream and reads the status there.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable
from functools import partial

import torch

from megamoe.backends import Launch
from megamoe.backends.hopper import group as groups
from megamoe.backends.hopper.buffers import BoundLayer, RankBuffers, allocate_heap, control_words, host_view
from megamoe.backends.hopper.call import LAUNCH, STAGES, Call, Recipes
from megamoe.backends.hopper.expert import expert_rows
from megamoe.backends.hopper.graphs import StepGraphs
from megamoe.backends.hopper.kernels import Device, Kernels
from megamoe.backends.hopper.memory import DeviceMemory, Pin, PinnedMemory
from megamoe.backends.hopper.packing import pack_w2, pack_w13
from megamoe.backends.hopper.plan import devices_of_ranks
from megamoe.backends.hopper.report import raise_failures, report_of
from megamoe.backends.hopper.served import check_served, gemm_plan, gemm_plans, reach_peers
from megamoe.backends.hopper.staging import Staging
from megamoe.batch import MoeBatch, SubStepReport
from megamoe.bundle import Bundle, Path
from megamoe.errors import (
    BindingError,
    ConfigError,
    IneligibleError,
    InternalError,
    PeerRefusedError,
    PeerTimeoutError,
    must_be,
)
from megamoe.layout import plan_layout
from megamoe.memory import HostMemory, MemoryHandle, MemoryKind, OpenMemory
from megamoe.weights import LayerWeights

_warming = threading.Lock()
"""Ranks of one process compile in turn: the first one does the work, the others find it done."""


class HopperBackend:
    """Implements megamoe.backends.Backend. One thread owns it."""

    memory_kinds = (MemoryKind.CUDA_IPC, MemoryKind.POSIX_SHM)

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
        self.staging = Staging(bundle.shape, layout.capacity, self.device)
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
        reach_peers(self._group.of_this_process(), self.device)
        self.buffers.bases.copy_(torch.tensor(self._group.addresses(), dtype=torch.int64))
        self.stream = torch.cuda.Stream(self.device)
        # Instantiating a graph may wait for the device, and so for a kernel of a peer that waits for this rank.
        alone = device.num_virtual_ranks == 1
        self.graphs = StepGraphs() if alone else None
        self._layers: list[BoundLayer | None] = [None] * layout.num_slots
        self._recipes = Recipes(bundle)
        self._request = host_view(self.buffers.request)
        self._report = host_view(self.buffers.report)
        self._caller = torch.cuda.Event()
        self._marks: list[torch.cuda.Event] = []
        self._pins: list[Pin] = []
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
        """batch and out may be on the host (pinned or not) or on the device.

        What the caller has queued on its current stream for tensors on the device comes first; those on the host must
        be complete.
        """
        layer = self._layers[launch.slot_idx]
        if layer is None:
            raise BindingError(f"slot {launch.slot_idx} has no weights: bind_layer it before forward")
        recipe = self._recipes.of(launch.sub_step)
        if batch.hidden_states.is_cuda or batch.topk_ids.is_cuda or out.is_cuda:
            self._caller.record(torch.cuda.current_stream(self.device.index))
            self.stream.wait_event(self._caller)
        with torch.cuda.stream(self.stream):
            incoming, result = self.staging.bring(batch), self.staging.outgoing(out)
            call = self._call = Call(launch, layer, recipe, incoming.batch, result)
            left_ns = max(int((launch.deadline_s - time.monotonic()) * 1e9), 1_000_000)
            words = control_words(
                self.buffers.layout, launch, incoming.batch, result.written, left_ns, incoming.sources
            )
            self._request[:] = array("q", words)
            if self.graphs is not None and recipe.captured:
                self.graphs.replay(call.graph_key, partial(self._launch_all, call))
                call.in_graph = True
            else:
                self.kernels.take(recipe.grid_rows)
                self._mark("begin")

    def _launch_all(self, call: Call) -> None:
        self.kernels.take(call.recipe.grid_rows)
        for stage in STAGES[call.recipe.path]:
            LAUNCH[stage](self.kernels, call)
        self._launch_end(call)

    def _launch_end(self, call: Call) -> None:
        if call.launch.closing:
            self.kernels.close()
        self.kernels.tell()

    def launch(self, stage: str) -> None:
        """One stage; of a sub-step that is a captured graph, nothing is left to do."""
        call = self._running()
        call.num_launches += 1
        if call.in_graph:
            return
        with torch.cuda.stream(self.stream):
            LAUNCH[stage](self.kernels, call)
        self._mark(stage)

    def _mark(self, name: str) -> None:
        """A point in the stream's time; events are used again by the next call."""
        call = self._running()
        if len(call.marks) == len(self._marks):
            self._marks.append(torch.cuda.Event(enable_timing=True))
        event = self._marks[len(call.marks)]
        event.record(self.stream)
        call.marks.append((name, event))

    def finish(self) -> SubStepReport:
        call = self._running()
        if not call.in_graph or call.result.needs_copy:
            with torch.cuda.stream(self.stream):
                if not call.in_graph:
                    self._launch_end(call)
                call.result.queue()
        # Every device-side wait is bounded by the launch's deadline, so this one ends too.
        self.stream.synchronize()
        self._call = None
        status = self._report.tolist()
        raise_failures(status, call.launch, self.rank)
        call.result.take()
        return report_of(status, call, self.bundle.shape)

    def abandon(self, error: BaseException) -> None:
        """Leave a sub-step that raised. An error of this rank's own ends the launch for its peers now."""
        call, self._call = self._call, None
        if call is None or isinstance(error, PeerTimeoutError | PeerRefusedError):
            return
        with torch.cuda.stream(self.stream):
            # The first kernel may not have been queued: peers look for this launch's epoch.
            self.kernels.take(call.recipe.grid_rows)
            self.kernels.abort()
        self.stream.synchronize()

    def _running(self) -> Call:
        if self._call is None:
            raise InternalError("no sub-step is under way: begin comes first; this is a bug")
        return self._call

    # ------------------------------------------------------------------------------------------- memory

    def open_memory(self, handle: MemoryHandle) -> OpenMemory:
        """Device memory of this rank's GPU, or shared memory of the host, which is pinned.

        Raises also HeapError where the driver cannot pin it.
        """
        if handle.kind == MemoryKind.CUDA_IPC:
            return DeviceMemory.open(handle, self.device)
        return PinnedMemory(HostMemory.open(handle))

    def pin(self, memory: torch.Tensor) -> None:
        """Pin host memory until `close`. Raises HeapError when the driver cannot."""
        with torch.cuda.device(self.device):
            self._pins.append(Pin(memory))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.stream.synchronize()
        groups.leave(self._group, self.rank)
        for pin in self._pins:
            pin.close()
        self._layers = []
        self.graphs = None
