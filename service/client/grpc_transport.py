"""To a rank over its Forward stream: for callers on other hosts, and what the others are measured against."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import torch

from megamoe import MemoryKind, PlanId, SharedMemory, StepPlan, SubStep, SubStepReport
from megamoe.errors import InvalidArgumentError, must_be
from service.client.stream import Reply
from service.client.transport import MARGIN_S, Link, Names, Tensors
from service.client.values import add_rows
from service.messages import IntentRequest
from service.net import codec, wire
from service.pb import moe_pb2 as pb


class GrpcTransport:
    """See the module."""

    memory_kinds: tuple[MemoryKind, ...] = ()

    def __init__(self, link: Link) -> None:
        self._link = link

    def agree(self, request: IntentRequest, wait_s: float) -> tuple[StepPlan, tuple[SubStep, ...]]:
        intent = pb.StepIntent(
            lease_serial=request.lease_serial,
            plan_id=codec.plan_id_to_pb(request.plan_id),
            num_rows=request.num_rows,
            phase=codec.enum_to_pb(request.phase),
            dtype=request.dtype,
            num_rows_per_rank=request.num_rows_per_rank or (),
            timeout_s=request.timeout_s or 0.0,
        )
        reply = self._link.ask(pb.ForwardRequest(step_intent=intent), wait_s)
        return codec.plan_from_pb(reply.message.step_plan)

    def start(
        self,
        names: Names,
        layer_idx: int,
        take_sequence: Callable[[], int],
        tensors: Tensors,
        out: torch.Tensor | None,
        wait_s: float,
    ) -> GrpcCall:
        if not 0 <= layer_idx < 2**32:
            raise InvalidArgumentError(must_be("layer_idx", "from 0 to 2^32 - 1", layer_idx))
        writer = wire.PayloadWriter()
        rows = None if tensors[0] is None else [tensor for tensor in tensors if tensor is not None]
        for tensor in (*(rows or ()), *(() if out is None else (out,))):
            if not isinstance(tensor, torch.Tensor):
                raise InvalidArgumentError(
                    must_be("rows and out of a layer call", "tensors", type(tensor).__name__)
                )
        call = _call_of(names)
        call.layer_idx = layer_idx
        call.tensors.extend(add_rows(writer, rows))
        call.sequence = take_sequence()
        return self._send(call, writer, out, wait_s)

    def refuse(self, names: Names, sequence: int, error: InvalidArgumentError, wait_s: float) -> GrpcCall:
        call = _call_of(names)
        call.sequence, call.refusal = sequence, str(error)
        return self._send(call, wire.PayloadWriter(), None, wait_s)

    def _send(
        self, call: pb.LayerCall, writer: wire.PayloadWriter, out: torch.Tensor | None, wait_s: float
    ) -> GrpcCall:
        request = self._link.stream.request
        sent = self._link.loop.submit(
            lambda: request(pb.ForwardRequest(layer_call=call), tuple(writer.parts), timeout_s=wait_s)
        )
        return GrpcCall(sent, out)

    def close_step(self, lease_serial: int, plan_id: PlanId) -> None:
        close = pb.CloseStep(lease_serial=lease_serial, plan_id=codec.plan_id_to_pb(plan_id))
        request = self._link.stream.request
        self._link.loop.submit(lambda: request(pb.ForwardRequest(close_step=close), timeout_s=MARGIN_S))

    def lend(self, memory: SharedMemory) -> None:
        raise InvalidArgumentError(must_be("transport", "'memory' for lent memory", "'grpc'"))

    def take_back(self, memory: SharedMemory) -> None:
        """There is none."""

    def close(self) -> None:
        """The stream is the link's."""


def _call_of(names: Names) -> pb.LayerCall:
    lease_serial, generation, step_id, micro_batch_idx = names
    plan_id = pb.PlanId(generation=generation, step_id=step_id, micro_batch_idx=micro_batch_idx)
    return pb.LayerCall(lease_serial=lease_serial, plan_id=plan_id)


class GrpcCall:
    """A layer call on the stream."""

    def __init__(self, sent: Future[Reply], out: torch.Tensor | None) -> None:
        self._sent = sent
        self._out = out

    def wait(self) -> tuple[torch.Tensor, float, float]:
        reply = self._sent.result()  # bounded by the timeout that it was sent with
        result = reply.message.layer_result
        hidden_states = wire.named(result.tensors, reply.payload, "hidden_states")
        if self._out is not None:
            hidden_states = self._out.copy_(hidden_states)
        return hidden_states, result.queue_us, result.total_us

    def reports(self) -> tuple[SubStepReport, ...]:
        return tuple(
            codec.report_from_pb(report) for report in self._sent.result().message.layer_result.sub_steps
        )
