"""A rank's stream whose steps go through a ring in shared memory: for AsyncMoeGroup on the service's host.

Speaks the messages of RankStream, so that a group need not know which it has; leases and all else stay on the stream.
For the last microsecond there is MoeRank.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import torch

from megamoe import MoeShape, Phase, SharedSegment
from megamoe.errors import HeapError, OverloadedError, UnavailableError
from service.client.errors import remote_error
from service.client.stream import RankStream, Reply
from service.messages import (
    CloseRequest,
    ErrorReply,
    IntentRequest,
    LayerReply,
    LayerRequest,
    PlanReply,
    Request,
)
from service.messages import Reply as RingReply
from service.net import codec, wire
from service.pb import moe_pb2 as pb
from service.ring.async_ring import AsyncRing, Pending
from service.ring.bell import Bell
from service.ring.ring import RingProducer

_LOOK_UP_S = 0.2
"""How long a wait goes on before it looks whether the rank still lives."""


class RingStream:
    """See the module. Made by `open`; closes the stream that it was opened on."""

    def __init__(
        self, stream: RankStream, shape: MoeShape, ring: AsyncRing, bell_page: SharedSegment
    ) -> None:
        self.rank = stream.rank
        self.address = stream.address
        self._stream = stream
        self._shape = shape
        self._ring = ring
        self._bell_page = bell_page

    @classmethod
    async def open(
        cls, stream: RankStream, shape: MoeShape, lease_serial: int, *, num_calls: int, timeout_s: float
    ) -> RingStream:
        """Ask the rank for a ring. Raises OverloadedError (too many), UnavailableError (not on this host)."""
        request = pb.ForwardRequest(open_ring=pb.OpenRing(lease_serial=lease_serial, num_calls=num_calls))
        opened = (await stream.request(request, timeout_s=timeout_s)).message.ring_opened
        try:
            segment = SharedSegment.attach(opened.segment)
            page = SharedSegment.attach_page(opened.bell_segment, opened.bell_page)
        except HeapError as error:
            where = f"rank {stream.rank} at {stream.address}"
            raise UnavailableError(f"{where} must be on this host for its ring, got: {error}") from error
        producer = RingProducer(segment, Bell(page, opened.bell_offset, opened.writer_id))
        return cls(stream, shape, AsyncRing(producer), page)

    def request(
        self, message: pb.ForwardRequest, parts: tuple[wire.Buffer, ...] = (), *, timeout_s: float
    ) -> Coroutine[Any, Any, Reply]:
        """As RankStream.request: sent now, the awaitable waits for the reply."""
        request = self._ring_request(message, parts)
        if request is None:
            return self._stream.request(message, parts, timeout_s=timeout_s)
        try:
            pending: Pending | None = self._ring.submit(request)
        except OverloadedError:
            pending = None  # what belongs to a step waits for room
        return self._reply(message, request, pending, timeout_s)

    async def _reply(
        self, message: pb.ForwardRequest, request: Request, pending: Pending | None, timeout_s: float
    ) -> Reply:
        deadline = asyncio.get_running_loop().time() + timeout_s
        with pending or await self._ring.submit_patiently(request, timeout_s) as sent:
            while not sent.future.done():
                left_s = deadline - asyncio.get_running_loop().time()
                if left_s <= 0:
                    kind = message.WhichOneof("request")
                    where = f"rank {self.rank} at {self.address}"
                    raise UnavailableError(f"{where} did not answer {kind} within {timeout_s} s")
                await asyncio.wait({sent.future}, timeout=min(left_s, _LOOK_UP_S))
                self._stream.check_alive()
            sent.future.result()
            return self._envelope(message, sent.take())

    def _ring_request(self, message: pb.ForwardRequest, parts: tuple[wire.Buffer, ...]) -> Request | None:
        """What goes through the ring; None for what does not."""
        kind = message.WhichOneof("request")
        if kind == "step_intent":
            intent = message.step_intent
            return IntentRequest(
                lease_serial=intent.lease_serial,
                plan_id=codec.plan_id_from_pb(intent.plan_id),
                num_rows=intent.num_rows,
                phase=codec.enum_from_pb(Phase, intent.phase, "phase"),
                dtype=intent.dtype or "bfloat16",
                num_rows_per_rank=tuple(intent.num_rows_per_rank) or None,
                timeout_s=intent.timeout_s or None,
            )
        if kind == "close_step":
            close = message.close_step
            return CloseRequest(lease_serial=close.lease_serial, plan_id=codec.plan_id_from_pb(close.plan_id))
        if kind != "layer_call":
            return None
        call = message.layer_call
        payload = wire.Envelope(message, parts).payload
        # The rank checks what the tensors mean.
        tensors: dict[str, Any] = {
            one.name: wire.read_tensor(one, payload, aligned=False) for one in call.tensors
        }
        rows = tensors.get("hidden_states")
        return LayerRequest(
            lease_serial=call.lease_serial,
            plan_id=codec.plan_id_from_pb(call.plan_id),
            layer_idx=call.layer_idx,
            sequence=call.sequence,
            **(tensors if rows is not None and len(rows) else {}),
        )

    def _envelope(self, request: pb.ForwardRequest, reply: RingReply) -> Reply:
        """The reply as the stream would have brought it; its rows are copied out of the ring."""
        message = pb.ForwardReply(request_id=request.request_id)
        if isinstance(reply, ErrorReply):
            raise remote_error(
                reply.code,
                reply.message,
                status=codec.status_of(reply.code),
                missing_ranks=reply.missing_ranks,
                rank=self.rank,
            )
        if isinstance(reply, PlanReply):
            message.step_plan.CopyFrom(codec.plan_to_pb(reply.plan, reply.sub_steps))
        elif isinstance(reply, LayerReply):
            writer = wire.PayloadWriter()
            hidden_states = reply.hidden_states
            if not len(hidden_states):
                hidden_states = torch.empty((0, self._shape.hidden), dtype=torch.bfloat16)
            call = request.layer_call
            message.layer_result.CopyFrom(
                pb.LayerResult(
                    plan_id=call.plan_id,
                    layer_idx=call.layer_idx,
                    sequence=call.sequence,
                    tensors=[writer.add("hidden_states", hidden_states)],
                    sub_steps=[codec.report_to_pb(report) for report in reply.sub_steps],
                    queue_us=reply.queue_us,
                    total_us=reply.total_us,
                )
            )
            return wire.Envelope(message, (b"".join(writer.parts),) if writer.parts else ())
        else:
            message.closed.SetInParent()
        return wire.Envelope(message)

    async def close(self) -> None:
        """End the ring and its stream. Safe to call twice."""
        await self._ring.close()
        self._ring.producer.close()
        self._bell_page.close()
        await self._stream.close()
