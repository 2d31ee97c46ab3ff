"""Runtime: one rank of a group. open, bind_layer, forward, close; owns sequences and epochs, one call at a time.

Every rank calls `forward` with the same plan, layer and sequence (SPMD). The epoch of a launch follows from agreed
numbers alone, so a refused, timed-out or skipped call needs no repair: the next sequence is a new epoch everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from types import TracebackType

import torch

from megamoe.backends import Backend, Launch, open_backend
from megamoe.batch import MoeBatch, MoeOutput, SubStepReport
from megamoe.bundle import Bundle, Deployment, plan_bundle
from megamoe.errors import (
    ConfigError,
    InvalidArgumentError,
    PeerRefusedError,
    StaleCallError,
    must_be,
)
from megamoe.memory import MemoryHandle, MemoryKind, OpenMemory
from megamoe.path import PathPolicy, StagedPolicies, SubStep, choose_path
from megamoe.selftest import ExpertRows, check_expert
from megamoe.step import StepPlan
from megamoe.weights import LayerWeights, check_binding

EPOCH_BITS = 32


class Runtime:
    """One rank's runtimes of all paths on one symmetric heap. Not thread-safe: one thread owns it."""

    def __init__(self, bundle: Bundle, backend: Backend, *, rank: int, num_slots: int) -> None:
        self.bundle = bundle
        self.backend = backend
        self.rank = rank
        self.num_slots = num_slots
        self._shape = bundle.shape
        self._devices = frozenset({backend.tensor_device})
        self._max_sub_steps = bundle.deployment.max_sub_steps
        self._policies = StagedPolicies(PathPolicy.of(bundle.deployment))
        self._next_sequence = 0
        self._plan: StepPlan | None = None
        self._sub_steps: tuple[SubStep, ...] = ()

    @classmethod
    def open(
        cls,
        deployment: Deployment,
        *,
        rank: int,
        group_name: str,
        num_slots: int | None = None,
        timeout_s: float = 30.0,
    ) -> Runtime:
        """Open rank `rank` of the group; collective: returns when every rank has opened.

        group_name: prefix of all shared-memory segments, "megamoe-...", the same on all ranks. num_slots: protocol
        slots, by default one per layer. Raises ConfigError (bad rank or settings, ranks that differ in them),
        HeapError (shared memory short or taken), PeerTimeoutError naming ranks that did not open in timeout_s.
        """
        num_ranks = deployment.shape.num_ranks
        if not 0 <= rank < num_ranks:
            raise ConfigError(must_be("rank", f"from 0 to {num_ranks - 1}", rank))
        bundle = plan_bundle(deployment)
        slots = deployment.shape.num_layers if num_slots is None else num_slots
        backend = open_backend(
            deployment.backend, bundle, rank=rank, group_name=group_name, num_slots=slots, timeout_s=timeout_s
        )
        return cls(bundle, backend, rank=rank, num_slots=slots)

    # ------------------------------------------------------------------------------------- weights, policies

    def bind_layer(self, slot_idx: int, weights: LayerWeights, *, self_check: bool = True) -> None:
        """Bind this rank's experts of a layer to its protocol slot. Raises BindingError; then nothing changed.

        self_check: run one expert in the backend's layout against the oracle before the binding takes effect.
        """
        shape = self.bundle.shape
        checked = check_binding(weights, shape, slot_idx=slot_idx, num_slots=self.num_slots)
        self.backend.bind(
            slot_idx, checked, partial(self._check_expert, slot_idx, checked) if self_check else None
        )

    def _check_expert(self, slot_idx: int, weights: LayerWeights, expert_rows: ExpertRows) -> None:
        check_expert(weights, self.bundle.shape, expert_rows, slot_idx=slot_idx)

    def bind_identity(self, slot_idx: int) -> None:
        """Bind identity experts, which give a row back as it came: transport without the GEMMs, for tests."""
        self.backend.bind_identity(slot_idx)

    @property
    def policy(self) -> PathPolicy:
        """The newest staged policy."""
        return self._policies.newest

    def stage_policy(self, policy: PathPolicy) -> None:
        """Make a newer policy known; a plan takes it when all ranks have it. The same one twice is no error.

        Raises ConfigError when the version is known with other contents or is older than the newest.
        """
        self._policies.stage(policy)

    def policy_of(self, version: int) -> PathPolicy:
        """The staged policy of an agreed version. Raises ConfigError if this rank has none such."""
        return self._policies.of(version)

    # ------------------------------------------------------------------------------------- forward

    @property
    def next_sequence(self) -> int:
        """The lowest sequence that the next forward may carry, and the one it takes when none is given."""
        return self._next_sequence

    def forward(
        self,
        batch: MoeBatch | None,
        plan: StepPlan,
        layer_idx: int,
        *,
        sequence: int | None = None,
        refusal: bool = False,
        timeout_s: float = 10.0,
        out: torch.Tensor | None = None,
    ) -> MoeOutput:
        """One layer call; all ranks of the plan call it, ranks without rows too.

        batch: this rank's rows, as many as the plan says; None for a rank without rows. refusal: the caller's call
        was refused here: join with zero rows and the error bit. sequence: the agreed number of this layer call,
        above all earlier ones; None counts by itself. out: [n, hidden] bf16, contiguous, to write into; None makes it
        where the rows are. Rows on a device may still be under way on this thread's current stream; rows on the host
        must be there.

        Raises, alike on all ranks: PeerTimeoutError (ranks missing after timeout_s), PeerRefusedError (some rank
        refused). On this rank only, before anything is posted: StaleCallError (sequence done), InvalidArgumentError
        (layer or plan impossible). A batch or out that does not fit the plan, and tensors on a device that is not
        this rank's, are InvalidArgumentError here and PeerRefusedError elsewhere. After any of these the next sequence
        works.
        """
        sub_steps = self._begin(plan, layer_idx, sequence)
        number = self._next_sequence - 1
        rows = plan.num_rows_per_rank[self.rank]
        wrong = None if refusal else self._mismatch(batch, rows, out)
        refused = refusal or wrong is not None
        if batch is None or refused:
            batch = MoeBatch.empty(self._shape)
        if out is None or refused:
            rows_at = batch.hidden_states.device
            out = torch.empty((batch.num_rows, self._shape.hidden), dtype=torch.bfloat16, device=rows_at)
        deadline_s = time.monotonic() + timeout_s
        try:
            reports = tuple(
                self._run(sub_step, number, layer_idx, batch, out, refused, deadline_s, len(sub_steps))
                for sub_step in sub_steps
            )
        except PeerRefusedError:
            if wrong is not None:
                raise wrong from None
            raise
        if wrong is not None:
            raise wrong
        return MoeOutput(out, reports)

    def _begin(self, plan: StepPlan, layer_idx: int, sequence: int | None) -> tuple[SubStep, ...]:
        """Check what is agreed, take the sequence, and choose paths (once per plan: it holds for all layers)."""
        if not 0 <= layer_idx < self.num_slots:
            raise InvalidArgumentError(must_be("layer_idx", f"from 0 to {self.num_slots - 1}", layer_idx))
        if plan.num_ranks != self._shape.num_ranks:
            raise InvalidArgumentError(must_be("ranks of the plan", self._shape.num_ranks, plan.num_ranks))
        if sequence is None:
            sequence = self._next_sequence
        elif sequence < self._next_sequence:
            raise StaleCallError(must_be("sequence", f"at least {self._next_sequence}", sequence))
        if plan is not self._plan:
            self._sub_steps = choose_path(plan, self.bundle, self.policy_of(plan.policy_version))
            self._plan = plan
        self._next_sequence = sequence + 1
        return self._sub_steps

    def _mismatch(
        self, batch: MoeBatch | None, rows: int, out: torch.Tensor | None
    ) -> InvalidArgumentError | None:
        got = 0 if batch is None else batch.num_rows
        if got != rows:
            return InvalidArgumentError(must_be(f"rows of rank {self.rank}", f"the plan's {rows}", got))
        wanted = (rows, self._shape.hidden)
        if out is not None and (out.shape != wanted or out.dtype is not torch.bfloat16):
            return InvalidArgumentError(
                must_be("out", f"bfloat16 {list(wanted)}", f"{out.dtype} {list(out.shape)}")
            )
        if out is not None and not out.is_contiguous():
            return InvalidArgumentError(must_be("out strides", "contiguous", list(out.stride())))
        return None if batch is None else self._elsewhere(batch, out)

    def _elsewhere(self, batch: MoeBatch, out: torch.Tensor | None) -> InvalidArgumentError | None:
        """What is wrong with where tensors lie."""
        device = self.backend.tensor_device
        if device is None or (
            batch.devices <= self._devices and (out is None or out.is_cpu or out.device == device)
        ):
            return None
        for name, tensor in (*batch.tensors().items(), ("out", out)):
            if tensor is not None and not tensor.is_cpu and tensor.device != device:
                wanted = "the host" if device.type == "cpu" else f"the host or {device}"
                return InvalidArgumentError(must_be(f"{name}.device", wanted, tensor.device))
        return None

    def _run(
        self,
        sub_step: SubStep,
        sequence: int,
        layer_idx: int,
        batch: MoeBatch,
        out: torch.Tensor,
        refused: bool,
        deadline_s: float,
        num_sub_steps: int,
    ) -> SubStepReport:
        idx = sub_step.sub_step_idx
        launch_idx = sequence * self._max_sub_steps + idx
        launch = Launch(
            slot_idx=layer_idx,
            epoch=launch_idx % (1 << EPOCH_BITS),
            buffer_idx=(sequence + idx) & 1,
            sub_step=sub_step,
            closing=num_sub_steps > 1 and idx == num_sub_steps - 1,
            refused=refused,
            deadline_s=deadline_s,
        )
        num_rows = batch.num_rows
        start = min(sub_step.start_row, num_rows)
        stop = start if refused else min(start + sub_step.num_rows_per_rank[self.rank], num_rows)
        backend = self.backend
        try:
            if stop - start < num_rows:
                batch, out = batch.rows(start, stop), out[start:stop]
            backend.begin(launch, batch, out)
            for stage in backend.stages(sub_step.path):
                backend.launch(stage)
            return backend.finish()
        except BaseException as error:
            backend.abandon(error)
            raise

    # ------------------------------------------------------------------------------------- memory of callers

    @property
    def memory_kinds(self) -> tuple[MemoryKind, ...]:
        """Kinds of memory that `open_memory` opens."""
        return self.backend.memory_kinds

    def open_memory(self, handle: MemoryHandle) -> OpenMemory:
        """Memory that a caller on this host lends (`share_memory`): `forward` takes tensors in it as rows and as out.

        Raises InvalidArgumentError: a kind that this backend does not open, or memory that is not as the handle says.
        """
        kinds = self.backend.memory_kinds
        if handle.kind not in kinds:
            wanted = (
                f"one of {', '.join(kinds)} (backend {self.bundle.deployment.backend})" if kinds else "none"
            )
            raise InvalidArgumentError(must_be("memory.kind", wanted, handle.kind))
        return self.backend.open_memory(handle)

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        """Let the device reach memory of this host where it lies, for tensors that `forward` will get.

        memory: contiguous. Returns what undoes it, to be called before the memory goes; `close` does so too. Raises
        HeapError when the memory cannot be pinned.
        """
        return self.backend.pin(memory)

    # ------------------------------------------------------------------------------------- end

    def close(self) -> None:
        """Give back memory and names. Safe to call twice."""
        self.backend.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
