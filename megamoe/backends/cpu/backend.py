"""CpuBackend: one rank of the group on this host, and the order in which a sub-step goes through it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from megamoe.backends import Launch
from megamoe.backends.cpu import stages
from megamoe.backends.cpu.call import Call, Hook, PathRun, RankContext, Staging
from megamoe.backends.cpu.compact import CompactPath
from megamoe.backends.cpu.experts import BoundLayer, ExpertGemms, Scratch, dequantized
from megamoe.backends.cpu.fixed_slot import FixedSlotPath
from megamoe.backends.cpu.heap import Heap
from megamoe.backends.cpu.large_m import LargeMPath
from megamoe.backends.cpu.signals import Phase, Signals
from megamoe.backends.cpu.small_m import SmallMPath
from megamoe.batch import MoeBatch, SubStepReport
from megamoe.bundle import Bundle, Path
from megamoe.errors import BindingError, InternalError, PeerRefusedError, PeerTimeoutError
from megamoe.layout import INFO_ERROR, FlagKind, plan_layout
from megamoe.memory import HostMemory, MemoryHandle, MemoryKind
from megamoe.weights import LayerWeights, check_slot

_PATHS: dict[Path, type[PathRun]] = {
    Path.COMPACT: CompactPath,
    Path.FIXED_SLOT: FixedSlotPath,
    Path.SMALL_M: SmallMPath,
    Path.LARGE_M: LargeMPath,
}


class CpuBackend:
    """Implements megamoe.backends.Backend over shared memory. One thread owns it.

    Sets torch to one thread in this process: the ranks are the parallelism, and the bits of a matmul may depend on
    its thread count.
    """

    memory_kinds = (MemoryKind.POSIX_SHM,)
    tensor_device = torch.device("cpu")

    def __init__(
        self, bundle: Bundle, *, rank: int, group_name: str, num_slots: int | None, timeout_s: float
    ) -> None:
        torch.set_num_threads(1)
        layout = plan_layout(bundle, num_slots=num_slots)
        self.heap = Heap(layout, rank=rank, group_name=group_name, timeout_s=timeout_s)
        self.context = RankContext(
            deployment=bundle.deployment,
            shape=bundle.shape,
            layout=layout,
            heap=self.heap,
            signals=Signals(self.heap),
            gemms=ExpertGemms(bundle.shape, batch_invariant=bundle.deployment.batch_invariant),
            scratch=Scratch(),
            staging=Staging(layout),
        )
        self.hook: Hook | None = None
        self._layers: list[BoundLayer | None] = [None] * layout.num_slots
        self._launch: Launch | None = None
        self._call: Call | None = None
        self._path: PathRun | None = None

    # ------------------------------------------------------------------------------------------- binding

    def bind(
        self,
        slot_idx: int,
        weights: LayerWeights,
        check: Callable[[Callable[[int, torch.Tensor], torch.Tensor]], None] | None = None,
    ) -> None:
        """Dequantize this rank's experts to fp32, let `check` look at one, and swap them in."""
        check_slot(slot_idx, len(self._layers))
        layer = dequantized(weights)
        if check is not None:
            check(partial(self.context.gemms.expert_rows, layer))
        self._layers[slot_idx] = layer

    def bind_identity(self, slot_idx: int) -> None:
        """Experts that give a row back as it came: both GEMMs are bypassed, transport and combine are not."""
        check_slot(slot_idx, len(self._layers))
        self._layers[slot_idx] = BoundLayer(None, None)

    # ------------------------------------------------------------------------------------------- sub-steps

    def stages(self, path: Path) -> tuple[str, ...]:
        return _PATHS[path].STAGES

    def begin(self, launch: Launch, batch: MoeBatch, out: torch.Tensor) -> None:
        signals = self.context.signals
        self._launch = launch
        signals.enter(launch.slot_idx, launch.epoch, launch.buffer_idx, launch.deadline_s)
        layer = self._layers[launch.slot_idx]
        if layer is None:
            raise BindingError(f"slot {launch.slot_idx} has no weights: bind_layer it before forward")
        self.context.gemms.padded_rows = 0
        self._call = Call(self.context, launch, layer, batch, out, self.hook)
        self._path = _PATHS[launch.sub_step.path](self._call)
        self._call.at("enter")
        signals.await_buffer_free()

    def launch(self, stage: str) -> None:
        self._running()[1].launch(stage)

    def finish(self) -> SubStepReport:
        call, _ = self._running()
        signals = call.signals
        if call.launch.closing:
            # After a cut step the next sequence may use this buffer again: nobody leaves before all are done.
            call.count("group_barriers")
            for dst_rank in call.peers_in_turn:
                call.post(dst_rank, FlagKind.CLOSE)
            signals.wait(FlagKind.CLOSE, range(call.num_ranks))
        signals.check_alive()
        infos = stages.infos(call, FlagKind.RETURN)
        signals.advance(Phase.DONE)
        self._launch = self._call = self._path = None
        refusing = [rank for rank, info in enumerate(infos) if info & INFO_ERROR]
        if refusing:
            raise PeerRefusedError(
                f"ranks {refusing} refused the call of slot {call.launch.slot_idx}, epoch {call.launch.epoch}",
                refusing,
            )
        call.count("padded_rows", self.context.gemms.padded_rows)
        return SubStepReport(
            path=call.launch.sub_step.path,
            runtime_capacity=call.capacity,
            num_rows_per_rank=call.launch.sub_step.num_rows_per_rank,
            row_format_per_rank=stages.formats_of(infos),
            counters=call.counters(),
            times=call.stage_times(),
        )

    def abandon(self, error: BaseException) -> None:
        """Leave a sub-step that raised: peers that look at this rank's progress must not wait for it.

        An error of this rank's own (not one that all ranks raise) ends the launch for its peers now, not at their
        deadline.
        """
        if self._launch is None:
            return
        self._launch = self._call = self._path = None
        if not isinstance(error, PeerTimeoutError | PeerRefusedError):
            self.context.signals.abort()
        self.context.signals.advance(Phase.DONE)

    def _running(self) -> tuple[Call, PathRun]:
        if self._call is None or self._path is None:
            raise InternalError("no sub-step is under way: begin comes first; this is a bug")
        return self._call, self._path

    def open_memory(self, handle: MemoryHandle) -> HostMemory:
        return HostMemory.open(handle)

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        """Nothing to do: host memory is what stages read and write."""
        return lambda: None

    def close(self) -> None:
        self._call = self._path = None
        self.heap.close()
