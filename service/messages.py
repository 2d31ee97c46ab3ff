"""What goes through a rank's request ring and what comes back: plain values, no transport.

The gRPC servicer, the front and co-located callers all speak these; ring.py lays them out in shared memory and
step_loop.py answers them. Tensors are views into the ring record, never copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from megamoe import PathPolicy, Phase, PlanId, StepPlan, SubStep, SubStepReport
from megamoe.errors import MegaMoeError, error_from_code, ranks_of


@dataclass(frozen=True, kw_only=True)
class LeaseRequest:
    """Take, keep or give back the lease of the caller group called `holder`. One rank's release counts for all.

    lease_serial: with a release, the lease that is meant; a late release then never ends a newer lease of the same
    holder. None = whichever the holder has.
    """

    holder: str
    release: bool = False
    lease_serial: int | None = None


@dataclass(frozen=True, kw_only=True)
class IntentRequest:
    """Open a plan: this rank's part of a step. num_rows_per_rank may carry the whole counts vector.

    timeout_s: how long this plan and each of its layer calls may wait for other ranks; None, or anything above the
    step timeout, means the step timeout.
    refusal: (code, message) when the servicer already found the intent wrong: every rank answers that error.
    """

    lease_serial: int
    plan_id: PlanId
    num_rows: int
    phase: Phase
    dtype: str = "bfloat16"
    num_rows_per_rank: tuple[int, ...] | None = None
    timeout_s: float | None = None
    refusal: tuple[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class LayerRequest:
    """One layer of an open plan. Rows travel as views; a refused call carries `refusal` and no rows.

    The tensors are those of a validated MoeBatch (dtypes and shapes there); all None = no rows. hidden_states may be
    an unaligned view: it is only copied from.
    refusal: (code, message) when the servicer already found the call wrong (bad id, wrong length): the rank joins
    the layer with zero rows and the error bit, so that every rank answers the same error.
    """

    lease_serial: int
    plan_id: PlanId
    layer_idx: int
    sequence: int
    hidden_states: torch.Tensor | None = None
    topk_ids: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None
    hidden_states_sf: torch.Tensor | None = None
    refusal: tuple[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class CloseRequest:
    """Close a plan; the next step_id of its micro-batch closes it too."""

    lease_serial: int
    plan_id: PlanId


@dataclass(frozen=True, kw_only=True)
class PolicyRequest:
    """Stage a newer policy on this rank; it takes effect at an agreed step on all ranks at once."""

    policy: PathPolicy


@dataclass(frozen=True, kw_only=True)
class DrainRequest:
    """From now on this rank's intents say draining."""

    draining: bool = True


@dataclass(frozen=True, kw_only=True)
class OpenRingRequest:
    """A ring of its own for a caller on this host. 0 = the default; rows_in_memory: it needs no room for rows."""

    lease_serial: int
    max_rows: int = 0
    num_calls: int = 0
    rows_in_memory: bool = False


@dataclass(frozen=True, kw_only=True)
class RegisterMemoryRequest:
    """Memory that a caller on this host lends: the fields of megamoe.MemoryHandle, under an id of its choice."""

    lease_serial: int
    memory_id: int
    kind: str
    handle: bytes
    offset: int
    num_bytes: int
    device: str


@dataclass(frozen=True, kw_only=True)
class UnregisterMemoryRequest:
    lease_serial: int
    memory_id: int


ColocatedRequest = OpenRingRequest | RegisterMemoryRequest | UnregisterMemoryRequest
"""What a caller on the rank's host asks of it beside the steps."""

Request = LeaseRequest | IntentRequest | LayerRequest | CloseRequest | PolicyRequest | DrainRequest


@dataclass(frozen=True, kw_only=True)
class LeaseReply:
    """The lease as granted: use serial in every message; sequences go on from next_sequence, and steps of every
    micro-batch from next_step_id upwards. first_*: what these two were when the lease was granted first."""

    lease_serial: int
    generation: int
    next_sequence: int
    next_step_id: int
    first_sequence: int
    first_step_id: int


@dataclass(frozen=True, kw_only=True)
class PlanReply:
    """The agreed plan and the path of each of its sub-steps."""

    plan: StepPlan
    sub_steps: tuple[SubStep, ...]


class LayerReply(NamedTuple):
    """Output rows [n, hidden] bf16 (a view into the ring record, valid until the record is released) and reports."""

    hidden_states: torch.Tensor
    sub_steps: tuple[SubStepReport, ...]
    queue_us: float
    total_us: float


@dataclass(frozen=True, kw_only=True)
class DoneReply:
    """A request without a value of its own (release, close, policy, drain) is done."""


@dataclass(frozen=True, kw_only=True)
class ErrorReply:
    """A refusal or a failure: `code` of megamoe.errors, its sentence and the ranks it names, the same on all ranks.

    It is what crosses processes of an exception: `of` and `exception` go from one to the other.
    """

    code: str
    message: str
    missing_ranks: tuple[int, ...] = ()

    @classmethod
    def of(cls, error: MegaMoeError) -> ErrorReply:
        return cls(code=error.code, message=str(error), missing_ranks=ranks_of(error))

    def exception(self) -> MegaMoeError:
        """A new exception of the class that `code` names."""
        return error_from_code(self.code, self.message, self.missing_ranks)


@dataclass(frozen=True, kw_only=True)
class RingReply:
    """Where a caller's ring is, and the words that wake the rank: block bell_offset of the page at bell_page."""

    segment: str
    num_bytes: int
    bell_segment: str
    bell_page: int
    bell_offset: int
    writer_id: int
    memory_kinds: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class MemoryReply:
    memory_id: int


Reply = LeaseReply | PlanReply | LayerReply | DoneReply | ErrorReply | RingReply | MemoryReply
