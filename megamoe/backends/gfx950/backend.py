"""Gfx950Backend: one rank on an MI355X, real or emulated. A sub-step is a fixed row of kernels on the rank's stream.

Nothing synchronises with the host between `begin` and `finish`: counts, work lists and failures live on the device.
Decode sub-steps (fixed_slot, small_m) are captured in a graph at first use and replayed. `finish` waits for the stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from megamoe.backends import Launch
from megamoe.backends.gfx950.build import Code
from megamoe.backends.gfx950.device import Device, DeviceStuckError, Graph
from megamoe.backends.gfx950.expert import expert_rows
from megamoe.backends.gfx950.launches import BoundLayer, PackedMemory, RankLaunches, abort_spec
from megamoe.backends.gfx950.plan import LaunchPlan, plan_launch
from megamoe.backends.gfx950.record import POSTED, Word
from megamoe.backends.gfx950.shuffle import pack_layer
from megamoe.batch import Counters, MoeBatch, StageTimes, SubStepReport
from megamoe.bundle import Bundle, Deployment, Path, RowFormat
from megamoe.errors import (
    BindingError,
    ConfigError,
    IneligibleError,
    InternalError,
    PeerRefusedError,
    PeerTimeoutError,
    must_be,
)
from megamoe.layout import FLAG_BYTES, FlagKind, plan_layout, ranks_in
from megamoe.memory import MemoryHandle, MemoryKind, OpenMemory
from megamoe.path import SubStep
from megamoe.weights import LayerWeights, check_slot

STAGES: dict[Path, tuple[str, ...]] = {
    Path.SMALL_M: ("small_m",),
    Path.FIXED_SLOT: ("quantize", "dispatch_gemm1", "gemm2", "combine"),
    Path.COMPACT: ("quantize", "prepare", "dispatch_gemm1", "gemm2", "combine"),
    Path.LARGE_M: ("quantize", "large_m"),
}
_CAPTURED = (Path.FIXED_SLOT, Path.SMALL_M)
"""Paths of decode steps: their launches are captured at first use and replayed."""
MAX_TOPK = 31
"""Token index, ids and weights of a row are written by one wave at once: 1 + 2 x 31 words."""
_PAIR_WORDS = 2
"""large_m tells an owner of a routed row by its place and weight."""
_GRACE_S = 1.0
"""How much longer the host waits than the kernels, which know better who is missing."""


def check_served(deployment: Deployment) -> None:
    """Raises ConfigError for settings that this backend does not serve."""
    shape = deployment.shape
    wanted: tuple[tuple[str, bool, object, object], ...] = (
        ("activation on gfx950", shape.activation == "silu", "silu", shape.activation),
        ("num_topk on gfx950", shape.num_topk <= MAX_TOPK, f"at most {MAX_TOPK}", shape.num_topk),
    )
    for name, served, need, value in wanted:
        if not served:
            raise ConfigError(must_be(name, need, value))


def check_device(deployment: Deployment, device: Device) -> None:
    """Raises ConfigError where paths were planned for another part than this one (see the gate in bundle.py)."""
    if not deployment.gfx950_emulated and device.num_compute_units != deployment.num_compute_units:
        raise ConfigError(
            must_be(
                "num_compute_units",
                f"{device.num_compute_units} as the device has",
                deployment.num_compute_units,
            )
        )


class Gfx950Backend:
    """Implements megamoe.backends.Backend on a device of this backend. One thread owns it.

    use_graphs: capture sub-steps of fixed_slot and small_m; else all kernels are launched each time.
    """

    memory_kinds: tuple[MemoryKind, ...] = ()
    tensor_device: torch.device | None = None

    def __init__(
        self, bundle: Bundle, device: Device, *, num_slots: int | None = None, use_graphs: bool = True
    ) -> None:
        check_served(bundle.deployment)
        check_device(bundle.deployment, device)
        layout = plan_layout(bundle, num_slots=num_slots)
        self.bundle, self.device, self.rank = bundle, device, device.rank
        self.fp8 = bundle.deployment.combine_row_format is RowFormat.FP8
        self.launches = RankLaunches(device, layout, fp8=self.fp8)
        self._use_graphs = use_graphs
        self._layers: list[BoundLayer | None] = [None] * layout.num_slots
        self._graphs: dict[tuple[object, ...], Graph] = {}
        self._entered: Launch | None = None
        self._call: _Call | None = None
        self._closed = False

    # ------------------------------------------------------------------------------------------- binding

    def bind(
        self,
        slot_idx: int,
        weights: LayerWeights,
        check: Callable[[Callable[[int, torch.Tensor], torch.Tensor]], None] | None = None,
    ) -> None:
        """Put this rank's experts in MFMA order on the device, let `check` look at one, and swap them in."""
        self._check_slot(slot_idx)
        packed = pack_layer(weights, self.bundle.shape)
        w13, w2 = (
            PackedMemory.upload(self.device, one, name)
            for one, name in zip(packed, ("W13", "W2"), strict=True)
        )
        try:
            if check is not None:
                check(partial(self._expert_rows, w13, w2))
        except BaseException:
            w13.free()
            w2.free()
            raise
        self._swap(slot_idx, w13, w2)

    def _expert_rows(
        self, w13: PackedMemory, w2: PackedMemory, expert: int, rows: torch.Tensor
    ) -> torch.Tensor:
        return expert_rows(self.launches, w13, w2, expert, rows, timeout_s=600.0)

    def bind_identity(self, slot_idx: int) -> None:
        """Experts that give a row back as it came: both GEMMs are bypassed, transport and combine are not."""
        self._check_slot(slot_idx)
        self._swap(slot_idx, None, None)

    def _swap(self, slot_idx: int, w13: PackedMemory | None, w2: PackedMemory | None) -> None:
        """Graphs of the old weights go first, then the weights: no recording ever outlives what it points to."""
        old = self._layers[slot_idx]
        self._graphs = {key: graph for key, graph in self._graphs.items() if key[0] != slot_idx}
        self._layers[slot_idx] = BoundLayer(w13, w2, 0 if old is None else old.version + 1)
        for memory in (old.w13, old.w2) if old is not None else ():
            if memory is not None:
                memory.free()

    def _check_slot(self, slot_idx: int) -> None:
        check_slot(slot_idx, len(self._layers))
        if self._call is not None:
            raise BindingError("a slot is bound between sub-steps only: one is under way")

    # ------------------------------------------------------------------------------------------- sub-steps

    def stages(self, path: Path) -> tuple[str, ...]:
        return STAGES[path]

    def begin(self, launch: Launch, batch: MoeBatch, out: torch.Tensor) -> None:
        self._entered = launch
        layer = self._layers[launch.slot_idx]
        if layer is None:
            raise BindingError(f"slot {launch.slot_idx} has no weights: bind_layer it before forward")
        missing = self.device.enter(launch.epoch)
        if missing:
            raise self._timeout(launch, missing, "the group gave this launch up before this rank came")
        path = launch.sub_step.path
        self._check_agreed(launch.sub_step)
        plan = plan_launch(self.bundle.shape, launch.sub_step.max_rows, self.device.num_compute_units)
        quantized = batch.hidden_states_sf is not None
        codes = self.launches.codes(plan, path, quantized=quantized, identity=layer.w13 is None)
        left_s = max(launch.deadline_s - time.monotonic(), 1e-3)
        self.launches.begin(launch, batch, int(left_s * self.device.tick_hz))
        self._call = _Call(launch, layer, batch, out, plan, codes)
        if self._use_graphs and path in _CAPTURED:
            key = (launch.slot_idx, layer.version, path, plan, quantized)
            self._call.graph_key = key
            if key not in self._graphs:
                self._graphs[key] = self._capture(self._call)

    def _check_agreed(self, sub_step: SubStep) -> None:
        """Everything that ranks must have in common follows from all ranks' counts and the runtime: no defaults."""
        counts, capacities = sub_step.num_rows_per_rank, self.bundle.capacities(sub_step.path)
        if sub_step.runtime_capacity not in capacities:
            built = " or ".join(map(str, capacities)) or f"built: {self.bundle.reasons.get(sub_step.path)}"
            raise IneligibleError(must_be(f"capacity of {sub_step.path}", built, sub_step.runtime_capacity))
        if len(counts) != self.bundle.shape.num_ranks or max(counts) > sub_step.runtime_capacity:
            wanted = (
                f"{self.bundle.shape.num_ranks} agreed counts of at most {sub_step.runtime_capacity} rows"
            )
            raise IneligibleError(must_be(f"rows of {sub_step.path}", wanted, counts))

    def _capture(self, call: _Call) -> Graph:
        stream = self.device.stream
        stream.begin_capture()
        for stage in STAGES[call.launch.sub_step.path]:
            self._queue(call, stage)
        return stream.end_capture()

    def launch(self, stage: str) -> None:
        call = self._running()
        call.num_launches += 1
        if call.graph_key is None:
            self._queue(call, stage)
        elif call.num_launches == 1:
            self._graphs[call.graph_key].replay()

    def _queue(self, call: _Call, stage: str) -> None:
        launches, codes, plan = self.launches, call.codes, call.plan
        w13, w2 = call.layer.w13, call.layer.w2
        if stage == "quantize":
            launches.quantize(codes[stage], plan)
        elif stage == "prepare":
            launches.prepare(codes[stage])
        elif stage == "dispatch_gemm1" and w13 is not None:
            launches.dispatch_gemm1(codes[stage], plan, w13)
        elif stage == "dispatch_gemm1":
            launches.dispatch(codes["dispatch"], plan)
        elif stage == "gemm2" and w2 is not None:
            launches.gemm2(codes[stage], plan, w2)
        elif stage == "gemm2":
            launches.identity(codes["identity"], plan)
        elif stage == "large_m":
            launches.large_m(codes[stage], plan, w13, w2)
        elif stage == "small_m":
            launches.small_m(codes[stage], plan, w13, w2)
        elif stage == "combine":
            launches.combine(codes[stage], plan)

    def finish(self) -> SubStepReport:
        call = self._running()
        launch = call.launch
        if launch.closing:
            self.launches.close(call.codes["close"])
        try:
            self.device.stream.synchronize(max(launch.deadline_s - time.monotonic(), 0.0) + _GRACE_S)
        except DeviceStuckError as error:
            raise self._timeout(launch, self.device.give_up(launch.epoch), str(error)) from error
        status = self.launches.status()
        self._raise_failures(launch, status)
        self._entered = self._call = None
        self.launches.out.read_into(call.out)
        return self._report(call, status)

    def _raise_failures(self, launch: Launch, status: dict[Word, int]) -> None:
        if status[Word.FAILED]:
            kind = FlagKind(status[Word.FAILED_KIND]).name.lower()
            seen = status[Word.FAILED_SEEN] & 0xFFFFFFFF
            why = f"expected epoch {launch.epoch} in its {kind} flag, seen {seen}"
            raise self._timeout(launch, ranks_in(status[Word.MISSING]), why)
        if status[Word.DONE_EPOCH] & (1 << 64) - 1 != launch.epoch | POSTED << 32:
            why = "a peer gave this launch up"
            raise self._timeout(launch, self.device.give_up(launch.epoch), why)
        refusing = ranks_in(status[Word.REFUSED])
        if refusing:
            where = f"slot {launch.slot_idx}, epoch {launch.epoch}"
            raise PeerRefusedError(f"ranks {refusing} refused the call of {where}", refusing)

    def _timeout(self, launch: Launch, missing: Sequence[int], why: str) -> PeerTimeoutError:
        where = f"rank {self.rank}, slot {launch.slot_idx}, epoch {launch.epoch}"
        return PeerTimeoutError(f"ranks {list(missing)} did not come in time ({where}): {why}", missing)

    def _report(self, call: _Call, status: dict[Word, int]) -> SubStepReport:
        sub_step, layout, shape = call.launch.sub_step, self.launches.layout, self.bundle.shape
        counted = sub_step.path in (Path.COMPACT, Path.LARGE_M)
        fp8 = set(ranks_in(status[Word.FP8]))
        result_bytes = shape.hidden + layout.sf_bytes if self.rank in fp8 else layout.result_bytes
        counts = self.launches.rows_per_expert()
        block_m = call.plan.block_m
        return SubStepReport(
            path=sub_step.path,
            runtime_capacity=sub_step.runtime_capacity,
            num_rows_per_rank=sub_step.num_rows_per_rank,
            row_format_per_rank=tuple(
                RowFormat.FP8 if rank in fp8 else RowFormat.BF16 for rank in range(shape.num_ranks)
            ),
            counters=Counters(
                count_exchanges=int(counted),
                prepare_passes=int(counted),
                launches=call.num_launches,
                group_barriers=int(sub_step.path is Path.COMPACT) + int(call.launch.closing),
                bytes_sent=status[Word.ROWS_SENT] * layout.row_bytes
                + status[Word.ROWS_RETURNED] * result_bytes
                + self._bytes_beside(call, status[Word.ROWS_SENT]),
                padded_rows=sum(-count % block_m for count in counts) if call.layer.w13 is not None else 0,
                dropped_slots=int((call.batch.topk_ids < 0).sum()),
                rows_received=sum(counts),
            ),
            times=StageTimes(total_us=(time.perf_counter() - call.started_s) * 1e6),
        )

    def _bytes_beside(self, call: _Call, rows_sent: int) -> int:
        """Bytes to peers that are no rows: ids and weights, counts, flags."""
        shape, layout, path = self.bundle.shape, self.launches.layout, call.launch.sub_step.path
        peers = shape.num_ranks - 1
        own_rows = call.batch.num_rows or int(path is Path.SMALL_M)  # its stand-in row
        words = layout.meta_words * (rows_sent if path is Path.COMPACT else peers * own_rows)
        counts, num_flags = 0, 2
        if path is Path.SMALL_M:
            words = (1 + 2 * shape.num_topk) * peers * own_rows
        elif path is Path.COMPACT:
            counts, num_flags = shape.num_ranks, 3
        elif path is Path.LARGE_M:
            counts, num_flags = shape.num_experts_per_rank, 4
            owners = call.batch.topk_ids.div(shape.num_experts_per_rank, rounding_mode="floor")
            words = _PAIR_WORDS * int(((owners >= 0) & (owners != self.rank)).sum())
        return 4 * words + peers * (4 * counts + FLAG_BYTES * (num_flags + call.launch.closing))

    def abandon(self, error: BaseException) -> None:
        """Leave a sub-step that raised. An error of this rank's own ends the launch for its peers now."""
        launch, call = self._entered, self._call
        self._entered = self._call = None
        if launch is None or isinstance(error, PeerTimeoutError | PeerRefusedError):
            return
        if call is None:  # it raised before the kernels were told which launch this is
            self.launches.begin(launch, MoeBatch.empty(self.bundle.shape), 1)
        self.launches.close(self.launches.load(abort_spec(self.bundle.shape)))
        self.device.stream.synchronize(_GRACE_S)

    def _running(self) -> _Call:
        if self._call is None:
            raise InternalError("no sub-step is under way: begin comes first; this is a bug")
        return self._call

    def open_memory(self, handle: MemoryHandle) -> OpenMemory:
        raise InternalError(f"asked to open {handle.kind}, which is none of its memory_kinds: this is a bug")

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        """Nothing to do: rows are copied to the device as they come."""
        return lambda: None

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._graphs, self._layers = {}, []
        self.device.close()


class _Call:
    """The sub-step under way."""

    def __init__(
        self,
        launch: Launch,
        layer: BoundLayer,
        batch: MoeBatch,
        out: torch.Tensor,
        plan: LaunchPlan,
        codes: dict[str, Code],
    ) -> None:
        self.launch, self.layer, self.batch, self.out = launch, layer, batch, out
        self.plan, self.codes = plan, codes
        self.graph_key: tuple[object, ...] | None = None
        self.num_launches = 0
        self.started_s = time.perf_counter()
