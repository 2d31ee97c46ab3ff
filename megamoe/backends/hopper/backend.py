"""HopperBackend: one rank on an NVIDIA H100/H200.

What a rank has: its heap and its peers', weights by slot, memory of callers. sub_steps.py runs on them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch

from megamoe.backends import Launch
from megamoe.backends.hopper import check_gpu, check_triton
from megamoe.backends.hopper import group as groups
from megamoe.backends.hopper.buffers import BoundLayer, RankBuffers, allocate_heap
from megamoe.backends.hopper.call import STAGES
from megamoe.backends.hopper.expert import expert_rows
from megamoe.backends.hopper.graphs import StepGraphs
from megamoe.backends.hopper.kernels import Device, Kernels
from megamoe.backends.hopper.memory import DeviceMemory
from megamoe.backends.hopper.pinned import Pin, PinnedMemory
from megamoe.backends.hopper.plan import devices_of_ranks
from megamoe.backends.hopper.served import check_served, gemm_plan, gemm_plans, reach_peers
from megamoe.backends.hopper.shortage import allocating
from megamoe.backends.hopper.staging import Staging
from megamoe.backends.hopper.stream import RankStream
from megamoe.backends.hopper.sub_steps import SubSteps
from megamoe.backends.hopper.tables import TableSizes
from megamoe.batch import MoeBatch, SubStepReport
from megamoe.bundle import Bundle, Path
from megamoe.errors import BindingError, IneligibleError, must_be
from megamoe.layout import plan_layout
from megamoe.memory import HostMemory, MemoryHandle, MemoryKind, OpenMemory
from megamoe.weights import LayerWeights, check_slot

_warming = threading.Lock()
"""Ranks of one process compile in turn: the first one does the work, the others find it done."""


class HopperBackend:
    """Implements megamoe.backends.Backend. One thread owns it."""

    memory_kinds = (MemoryKind.CUDA_IPC, MemoryKind.POSIX_SHM)

    def __init__(
        self, bundle: Bundle, *, rank: int, group_name: str, num_slots: int | None, timeout_s: float
    ) -> None:
        check_gpu(bundle.shape.num_ranks)
        check_triton()
        check_served(bundle)
        devices = devices_of_ranks(bundle.shape.num_ranks, torch.cuda.device_count())
        self.device = torch.device("cuda", devices[rank])
        self.tensor_device: torch.device | None = self.device
        layout = plan_layout(bundle, num_slots=num_slots)
        self.rank = rank
        self.bundle = bundle
        self._heap = allocate_heap(layout, self.device)
        self.stream = RankStream(self.device)
        tables = TableSizes(shape=bundle.shape, capacity=layout.capacity)
        with allocating("tables and images", tables.num_bytes, self.device):
            self.buffers = RankBuffers(
                layout,
                rank=rank,
                heap_addresses=[self._heap.data_ptr()] * layout.num_ranks,
                device=self.device,
            )
            self.staging = Staging(bundle.shape, layout.capacity, self.device, self.stream)
        num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        device = Device(num_sms, devices.count(devices[rank]))
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
        try:
            reach_peers(self._group.of_this_process(), self.device)
            self.buffers.bases.copy_(torch.tensor(self._group.addresses(), dtype=torch.int64))
        except BaseException:
            groups.leave(self._group, rank)
            raise
        # Instantiating a graph may wait for the device, and so for a kernel of a peer that waits for this rank.
        self.graphs = StepGraphs(self.stream) if device.num_virtual_ranks == 1 else None
        self._sub_steps = SubSteps(self.kernels, self.staging, self.stream, self.graphs)
        self._layers: list[BoundLayer | None] = [None] * layout.num_slots
        self._pins: set[Pin] = set()
        self._closed = False

    # ------------------------------------------------------------------------------------------- binding

    def bind(
        self,
        slot_idx: int,
        weights: LayerWeights,
        check: Callable[[Callable[[int, torch.Tensor], torch.Tensor]], None] | None = None,
    ) -> None:
        """Pack this rank's experts on the device, let `check` look at one, and swap them in.

        The old binding stays where it is until then. Raises BindingError: no such slot, a sub-step under way, or too
        little free memory on the device for both.
        """
        self._check_slot(slot_idx)
        num_bytes = sum(tensor.nbytes for tensor in weights.tensors().values())
        with (
            self.stream.current(),
            allocating(f"weights of slot {slot_idx}", num_bytes, self.device, BindingError),
        ):
            layer = BoundLayer.packed(weights, self.device)
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
            # Of launches that have finished: nothing is bound while a sub-step is under way.
            self.graphs.forget(slot_idx)
        self._layers[slot_idx] = BoundLayer(layer.w13, layer.w2, version)

    def _check_slot(self, slot_idx: int) -> None:
        check_slot(slot_idx, len(self._layers))
        if self._sub_steps.under_way:
            raise BindingError("a slot is bound between sub-steps only: one is under way")

    # ------------------------------------------------------------------------------------------- sub-steps

    def stages(self, path: Path) -> tuple[str, ...]:
        if path not in STAGES:
            built = ", ".join(STAGES)
            raise IneligibleError(must_be("path on hopper", f"one of {built}", path))
        return STAGES[path]

    def begin(self, launch: Launch, batch: MoeBatch, out: torch.Tensor) -> None:
        """See SubSteps.begin."""
        self._sub_steps.begin(launch, self._layers[launch.slot_idx], batch, out)

    def launch(self, stage: str) -> None:
        self._sub_steps.launch(stage)

    def finish(self) -> SubStepReport:
        return self._sub_steps.finish()

    def abandon(self, error: BaseException) -> None:
        self._sub_steps.abandon(error)

    # ------------------------------------------------------------------------------------------- memory

    def open_memory(self, handle: MemoryHandle) -> OpenMemory:
        """Device memory of this rank's GPU, or shared memory of the host, which is pinned.

        Raises also HeapError where the driver cannot pin it.
        """
        if handle.kind == MemoryKind.CUDA_IPC:
            opened = DeviceMemory.open(handle, self.device)
            lent = [memory for memory in self._sub_steps.lent if not memory.is_closed]
            self._sub_steps.lent = [*lent, opened]
            return opened
        return PinnedMemory(HostMemory.open(handle), self.device, self.staging.pins)

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        pin = Pin(memory, self.device, self.staging.pins)
        self._pins.add(pin)

        def undo() -> None:
            self._pins.discard(pin)
            pin.close()

        return undo

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # Also after a device error, which every call of CUDA from then on repeats.
        with ExitStack() as rest:
            rest.callback(groups.leave, self._group, self.rank)
            for pin in self._pins:
                rest.callback(pin.close)
            self.stream.synchronize()
            self._layers = []
            if self.graphs is not None:
                self.graphs.clear()
