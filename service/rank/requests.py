"""The messages of a Forward stream <-> what goes through a ring: moe.proto <-> messages.py, both ways.

Refuses what has no place in a request with InvalidArgumentError naming field, wanted and got; of a wrong StepIntent it
makes a refusal, of which all ranks hear.
"""

from __future__ import annotations

from megamoe import Phase
from megamoe.errors import InvalidArgumentError, must_be
from service.messages import (
    CloseRequest,
    ColocatedRequest,
    ErrorReply,
    IntentRequest,
    LayerReply,
    LeaseReply,
    LeaseRequest,
    MemoryReply,
    OpenRingRequest,
    PlanReply,
    RegisterMemoryRequest,
    Reply,
    Request,
    RingReply,
    UnregisterMemoryRequest,
)
from service.net import codec, wire
from service.pb import moe_pb2 as pb

_PHASES = {codec.enum_to_pb(phase): phase for phase in Phase}
_MAX_NAME = 64
"""Characters of a caller's word that go on: enough for every known one, and for a sentence about an unknown one."""


def control_request(message: pb.ForwardRequest, num_ranks: int) -> Request:
    """Lease, StepIntent or CloseStep as a ring request."""
    kind = message.WhichOneof("request")
    if kind == "lease":
        lease = message.lease
        if not lease.holder:
            raise InvalidArgumentError(must_be("lease.holder", "the name of the caller group", "''"))
        return LeaseRequest(
            holder=lease.holder, release=lease.release, lease_serial=lease.lease_serial or None
        )
    if kind == "step_intent":
        return _intent_request(message.step_intent, num_ranks)
    if kind == "close_step":
        close = message.close_step
        return CloseRequest(lease_serial=close.lease_serial, plan_id=codec.plan_id_from_pb(close.plan_id))
    wanted = (
        "one of lease, step_intent, layer_call, close_step, open_ring, register_memory, unregister_memory"
    )
    raise InvalidArgumentError(must_be("request", wanted, "nothing"))


COLOCATED = ("open_ring", "register_memory", "unregister_memory")


def colocated_request(message: pb.ForwardRequest) -> ColocatedRequest:
    """OpenRing, RegisterMemory or UnregisterMemory as a value."""
    kind = message.WhichOneof("request")
    if kind == "open_ring":
        opened = message.open_ring
        return OpenRingRequest(
            lease_serial=opened.lease_serial,
            max_rows=opened.max_rows,
            num_calls=opened.num_calls,
            rows_in_memory=opened.rows_in_memory,
        )
    if kind == "unregister_memory":
        gone = message.unregister_memory
        return UnregisterMemoryRequest(lease_serial=gone.lease_serial, memory_id=gone.memory_id)
    lent = message.register_memory
    return RegisterMemoryRequest(
        lease_serial=lent.lease_serial,
        memory_id=lent.memory_id,
        kind=lent.kind[:_MAX_NAME],
        handle=lent.handle,
        offset=lent.offset,
        num_bytes=lent.num_bytes,
        device=lent.device[:_MAX_NAME],
    )


def _intent_request(intent: pb.StepIntent, num_ranks: int) -> IntentRequest:
    """A StepIntent as a ring request. What has no place in one is a refusal, of which all ranks hear."""
    counts, phase, wrong = tuple(intent.num_rows_per_rank), Phase.IDLE, ""
    if intent.num_rows:
        if intent.phase in _PHASES:
            phase = _PHASES[intent.phase]
        else:
            known = intent.phase in pb.Phase.values()
            said = pb.Phase.Name(intent.phase) if known else intent.phase
            wrong = must_be(f"phase of a rank with {intent.num_rows} rows", "'prefill' or 'decode'", said)
    if len(counts) not in (0, num_ranks):
        wrong = must_be("num_rows_per_rank", f"{num_ranks} numbers, one per rank", f"{len(counts)} numbers")
        counts = ()
    return IntentRequest(
        lease_serial=intent.lease_serial,
        plan_id=codec.plan_id_from_pb(intent.plan_id),
        num_rows=intent.num_rows,
        phase=phase,
        dtype=intent.dtype[:_MAX_NAME] or "bfloat16",
        num_rows_per_rank=counts or None,
        timeout_s=intent.timeout_s or None,
        refusal=(InvalidArgumentError.code, wrong) if wrong else None,
    )


def fill(reply: pb.ForwardReply, request: pb.ForwardRequest, value: Reply) -> tuple[wire.Buffer, ...]:
    """Write a ring reply into the message; returns the payload's parts (views into the ring record)."""
    if isinstance(value, LayerReply):
        call = request.layer_call
        result, parts = layer_result(value, call.plan_id, call.layer_idx, call.sequence)
        reply.layer_result.CopyFrom(result)
        return parts
    if isinstance(value, PlanReply):
        reply.step_plan.CopyFrom(codec.plan_to_pb(value.plan, value.sub_steps))
    elif isinstance(value, LeaseReply):
        reply.lease_granted.CopyFrom(
            pb.LeaseGranted(
                lease_serial=value.lease_serial,
                generation=value.generation,
                next_sequence=value.next_sequence,
                next_step_id=value.next_step_id,
                first_sequence=value.first_sequence,
                first_step_id=value.first_step_id,
            )
        )
    elif isinstance(value, RingReply):
        reply.ring_opened.CopyFrom(pb.RingOpened(**vars(value)))
    elif isinstance(value, MemoryReply):
        reply.memory_registered.memory_id = value.memory_id
    elif isinstance(value, ErrorReply):
        reply.error.CopyFrom(codec.error_to_pb(value))
    else:
        reply.closed.SetInParent()
    return ()


def layer_result(
    value: LayerReply,
    plan_id: pb.PlanId,
    layer_idx: int,
    sequence: int,
    writer: wire.PayloadWriter | None = None,
) -> tuple[pb.LayerResult, tuple[wire.Buffer, ...]]:
    """The message of a layer's result and the payload parts; a given writer collects the parts instead."""
    into = writer or wire.PayloadWriter()
    result = pb.LayerResult(
        plan_id=plan_id,
        layer_idx=layer_idx,
        sequence=sequence,
        tensors=[into.add("hidden_states", value.hidden_states)],
        sub_steps=[codec.report_to_pb(report) for report in value.sub_steps],
        queue_us=value.queue_us,
        total_us=value.total_us,
    )
    return result, () if writer else tuple(into.parts)
