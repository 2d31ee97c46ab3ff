"""One sub-step after the other on a rank's stream: begin, its stages, finish; or abandon.

Nothing synchronises with the host in between: row counts, work lists and failures live on the device. `begin` writes
the request into pinned memory, `finish` waits for the stream and reads the status there.

A GPU that fails takes its rank along: every call of its driver repeats the error, so nothing is launched any more.
"""

from __future__ import annotations

import time
from functools import partial
from typing import NamedTuple

import torch

from megamoe.backends import Launch
from megamoe.backends.hopper.buffers import Addresses, BoundLayer, Request, host_view
from megamoe.backends.hopper.call import LAUNCH, STAGES, Call, Recipes
from megamoe.backends.hopper.graphs import StepGraphs
from megamoe.backends.hopper.kernels import Kernels
from megamoe.backends.hopper.memory import DeviceMemory
from megamoe.backends.hopper.report import raise_failures, report_of
from megamoe.backends.hopper.staging import Outgoing, Staging
from megamoe.backends.hopper.stream import RankStream
from megamoe.batch import MoeBatch, SubStepReport
from megamoe.errors import (
    BindingError,
    InternalError,
    PeerRefusedError,
    PeerTimeoutError,
    UnavailableError,
    must_be,
)

_MIN_TIMEOUT_NS = 1_000_000
_MAX_PLACED = 64
_NO_ROWS = Addresses(0, 0, 0, 0, 0, 0)


class Placed(NamedTuple):
    """Tensors of a call, whose memory they lie in, and where kernels reach them."""

    batch: MoeBatch
    out: torch.Tensor
    owner: DeviceMemory | None
    result: Outgoing
    at: Addresses


class SubSteps:
    """Those of one rank. graphs: None = every sub-step is launched kernel by kernel."""

    def __init__(
        self, kernels: Kernels, staging: Staging, stream: RankStream, graphs: StepGraphs | None
    ) -> None:
        self._kernels = kernels
        self._buffers = kernels.buffers
        self._staging = staging
        self._stream = stream
        self._graphs = graphs
        self._recipes = Recipes(self._buffers.layout.bundle)
        self._request = Request(self._buffers.request, self._buffers.layout)
        self._report = host_view(self._buffers.report)
        self._placed: dict[int, Placed] = {}
        """By the id of their batch, which they keep."""
        staging.pins.on_discard = self._placed.clear
        self.lent: list[DeviceMemory] = []
        """Memory of other processes, in which rows may still be under way."""
        self._entered: Launch | None = None
        self._asked = False
        """Whether the request is that of the launch entered."""
        self._call: Call | None = None
        self._lost: UnavailableError | None = None
        """Why nothing is launched any more."""

    @property
    def under_way(self) -> bool:
        """Whether a sub-step has begun and neither finished nor been abandoned."""
        return self._entered is not None

    def begin(self, launch: Launch, layer: BoundLayer | None, batch: MoeBatch, out: torch.Tensor) -> None:
        """batch and out may be on the host (pinned or not) or on the device. layer: None = the slot has no weights.

        What the caller has queued on its current stream for tensors on the device comes first; those on the host must
        be complete. Raises BindingError for a slot without weights, and PeerTimeoutError naming this rank when the
        owner of rows in lent memory has not come to its last publish by the deadline, UnavailableError once the GPU is
        lost.
        """
        if self._lost is not None:
            raise self._lost
        self._entered, self._asked = launch, False
        if layer is None:
            raise BindingError(f"slot {launch.slot_idx} has no weights: bind_layer it before forward")
        recipe = self._recipes.of(launch.sub_step)
        placed = self._placed.get(id(batch))
        if placed is None or placed.batch is not batch or placed.out is not out:
            placed = self._place(batch, out)
        call = self._call = Call(launch, layer, recipe, batch, placed.result)
        self._ask(launch, placed.at)
        # Only now: rows in lent memory are read in place, by the first launch at the earliest.
        if placed.owner is not None:
            self._await(placed.owner, launch)
        if self._graphs is not None and recipe.captured:
            self._graphs.replay(call.graph_key, partial(self._launch_all, call))
            call.in_graph = True
            return
        with self._stream.current():
            self._kernels.take(recipe.grid_rows)
        self._mark(call, "begin")

    def _place(self, batch: MoeBatch, out: torch.Tensor) -> Placed:
        """Bring tensors to where kernels reach them, in the order of whoever queued work on them."""
        owner = self._owner_of(batch.hidden_states.data_ptr())
        if any(
            tensor.is_cuda and not (owner is not None and owner.holds(tensor.data_ptr()))
            for tensor in (batch.hidden_states, batch.topk_ids, batch.topk_weights, out)
        ):
            self._stream.after_caller()
        result = self._staging.outgoing(out)
        placed = Placed(batch, out, owner, result, self._staging.bring(batch, result))
        if self._staging.is_of_callers(batch, out, owner):
            if len(self._placed) == _MAX_PLACED:
                self._placed.clear()
            self._placed[id(batch)] = placed
        return placed

    def _ask(self, launch: Launch, at: Addresses) -> None:
        """Write the request to where the first kernel takes it from. Nothing may be under way."""
        left_ns = max(int((launch.deadline_s - time.monotonic()) * 1e9), _MIN_TIMEOUT_NS)
        self._request.write(launch, at, left_ns)
        self._asked = True

    def _owner_of(self, rows: int) -> DeviceMemory | None:
        """Memory of another process in which rows lie."""
        for memory in self.lent:
            if memory.holds(rows):
                return memory
        return None

    def _await(self, memory: DeviceMemory, launch: Launch) -> None:
        """Let the owner's GPU come to its last publish. The host waits, not the stream: the owner may have died, and
        then its event never comes."""
        while not memory.is_published():
            time.sleep(0)  # other threads' turn
            if time.monotonic() > launch.deadline_s:
                rank = self._buffers.rank
                where = f"rank {rank}, slot {launch.slot_idx}, epoch {launch.epoch}"
                raise PeerTimeoutError(
                    f"rows of rank {rank}'s caller did not come to its memory in time ({where})", [rank]
                )

    def launch(self, stage: str) -> None:
        """One stage; of a sub-step that is a captured graph, nothing is left to do."""
        call = self._running()
        call.num_launches += 1
        if call.in_graph:
            return
        with self._stream.current():
            LAUNCH[stage](self._kernels, call)
        self._mark(call, stage)

    def finish(self) -> SubStepReport:
        """Wait for the result. Raises PeerTimeoutError, PeerRefusedError."""
        call = self._running()
        if not call.in_graph or call.result.needs_copy:
            with self._stream.current():
                if not call.in_graph:
                    self._launch_end(call)
                call.result.queue()
        # Every device-side wait is bounded by the launch's deadline, so this one ends too.
        self._stream.synchronize()
        self._entered = self._call = None
        status = self._report.tolist()
        raise_failures(status, call.launch, self._buffers.rank)
        call.result.take()
        return report_of(status, call, self._buffers.shape)

    def abandon(self, error: BaseException) -> None:
        """Leave a sub-step that raised. An error of this rank's own ends the launch for its peers now.

        Raises UnavailableError where the GPU does not do that any more: it was lost with the sub-step.
        """
        launch, self._entered, self._call = self._entered, None, None
        if launch is None or isinstance(error, PeerTimeoutError | PeerRefusedError | UnavailableError):
            return
        try:
            if not self._asked:
                self._ask(launch, _NO_ROWS)
            with self._stream.current():
                # The first kernel may not have been queued: peers look for this launch's epoch.
                self._kernels.take(1)
                self._kernels.abort()
            self._stream.synchronize()
        except Exception as lost:
            sub_step = launch.sub_step
            where = f"slot {launch.slot_idx}, epoch {launch.epoch}, sub-step {sub_step.sub_step_idx}"
            gpu = f"GPU of rank {self._buffers.rank} ({where}, {sub_step.path})"
            first, _, _ = str(lost).partition("\n")
            self._lost = UnavailableError(must_be(gpu, "working", f"{type(lost).__name__}: {first}"))
            raise self._lost from error

    def _launch_all(self, call: Call) -> None:
        self._kernels.take(call.recipe.grid_rows)
        for stage in STAGES[call.recipe.path]:
            LAUNCH[stage](self._kernels, call)
        self._launch_end(call)

    def _launch_end(self, call: Call) -> None:
        if call.launch.closing:
            self._kernels.close()
        self._kernels.tell()

    def _mark(self, call: Call, name: str) -> None:
        call.marks.append((name, self._stream.mark(len(call.marks))))

    def _running(self) -> Call:
        if self._call is None:
            raise InternalError("no sub-step is under way: begin comes first; this is a bug")
        return self._call
