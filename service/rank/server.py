"""The gRPC servicer of one rank: Forward streams become requests of the rank's ring, replies go back as they come.

Owns: the translation between moe.proto and messages.py on a stream, and the validation of rows (once, by MoeBatch).
A request that fails is answered with an Error on the open stream. A layer call that is found wrong here still joins
the layer, as a refusal, so that all ranks answer the same error and none waits. When a caller disappears, what it
announced goes on in the ring: the step finishes for the others, only the reply is dropped. One that says nothing, or
does not read its replies, loses its stream: what it holds of the ring and of the server belongs to others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from megamoe import MoeShape
from megamoe.errors import (
    InternalError,
    InvalidArgumentError,
    MegaMoeError,
    OverloadedError,
    UnavailableError,
)
from service.messages import (
    ErrorReply,
    LayerReply,
    LayerRequest,
    Reply,
    Request,
)
from service.metrics import RankMetrics
from service.net import codec, wire
from service.net.grpc_server import elsewhere, unary
from service.pb import moe_pb2 as pb
from service.rank.colocated import Caller, Colocated
from service.rank.requests import COLOCATED, colocated_request, control_request, fill
from service.ring.async_ring import AsyncRing, Pending

In = wire.Envelope[pb.ForwardRequest]
Out = wire.Envelope[pb.ForwardReply]

log = logging.getLogger("megamoe.rank")


MAX_IN_FLIGHT_PER_STREAM = 64
"""Requests of one stream that are read ahead; the rest waits in gRPC's flow control."""


class RankServicer:
    """MoELayer of one rank."""

    def __init__(
        self,
        *,
        shape: MoeShape,
        ring: AsyncRing,
        info: Callable[[], pb.ServiceInfo],
        metrics: RankMetrics,
        step_timeout_s: float,
        colocated: Colocated,
    ) -> None:
        self._shape = shape
        self._colocated = colocated
        self._ring = ring
        self._info = info
        self._metrics = metrics
        self._step_timeout_s = step_timeout_s

    def handlers(self) -> dict[str, Any]:
        return {
            "GetInfo": unary(self.get_info, pb.GetInfoRequest, pb.ServiceInfo.SerializeToString),
            "Forward": grpc.stream_stream_rpc_method_handler(
                self.forward,
                request_deserializer=wire.deserializer(pb.ForwardRequest),
                response_serializer=bytes,
            ),
            "ForwardStep": elsewhere(
                grpc.unary_unary_rpc_method_handler,
                "ForwardStep goes to the front, not to a rank: GetInfo names its address",
            ),
        }

    async def get_info(self, request: pb.GetInfoRequest) -> pb.ServiceInfo:
        return self._info()

    async def forward(self, requests: AsyncIterator[In], context: Any) -> None:
        """One caller rank's stream."""
        caller = self._colocated.caller()
        stream = _Stream(partial(self._take, caller), requests, self._step_timeout_s)
        try:
            async for call in stream:
                data = wire.serialize(self._answer(call))
                call.release()
                async with asyncio.timeout(self._step_timeout_s):
                    await context.write(data)
        except DecodeError as error:
            wrong = grpc.StatusCode.INVALID_ARGUMENT, f"message must be a ForwardRequest, got: {error}"
        except TimeoutError:
            what = "replies must be read" if stream.has_begun else "the first request must come"
            wrong = grpc.StatusCode.DEADLINE_EXCEEDED, f"{what} within {self._step_timeout_s:g} s, got none"
        else:
            return
        finally:
            stream.close()
            caller.close()
        await context.abort(*wrong)

    # ------------------------------------------------------------------------------ in

    async def _take(self, caller: Caller, envelope: In) -> _Call:
        """Put one request into the ring. A request that cannot even be put there is answered at once."""
        message = envelope.message
        call = _Call(message)
        try:
            kind = message.WhichOneof("request")
            if kind == "layer_call":
                call.pending = await self._take_layer(envelope)
            elif kind in COLOCATED:
                call.pending = _Job(caller.handle(colocated_request(message)))
            else:
                call.pending = await self._submit(control_request(message, self._shape.num_ranks))
        except MegaMoeError as error:
            call.error = error
        except Exception as error:
            call.error = _bug(error)
        return call

    async def _take_layer(self, envelope: In) -> Pending:
        call = envelope.message.layer_call
        fields: dict[str, Any] = {
            "lease_serial": call.lease_serial,
            "plan_id": codec.plan_id_from_pb(call.plan_id),
            "layer_idx": call.layer_idx,
            "sequence": call.sequence,
        }
        try:
            if call.refusal:
                raise InvalidArgumentError(call.refusal)
            batch = wire.read_batch(self._shape, call.tensors, envelope.payload)
            rows = {} if batch.num_rows == 0 else batch.tensors()
            return await self._submit(LayerRequest(**fields, **rows))
        except InvalidArgumentError as error:
            refused: MegaMoeError = error
        except OverloadedError:
            raise
        except Exception as error:  # whatever it is, the others must not wait for this rank
            refused = _bug(error)
        return await self._submit(LayerRequest(**fields, refusal=(refused.code, str(refused))))

    async def _submit(self, request: Request) -> Pending:
        """Wait a little for room: a full ring holds up whoever fills it, and is not an error of a step."""
        return await self._ring.submit_patiently(request, self._step_timeout_s)

    # ------------------------------------------------------------------------------ out

    def _answer(self, call: _Call) -> Out:
        message = pb.ForwardReply(request_id=call.message.request_id)
        try:
            parts = fill(message, call.message, self._reply_of(call))
        except MegaMoeError as error:
            message.error.CopyFrom(codec.error_to_pb(ErrorReply.of(error)))
            parts = ()
        if call.pending is None:  # what reached the step loop is counted there
            self._metrics.record_error(message.error.code)
        return wire.Envelope(message, parts)

    def _reply_of(self, call: _Call) -> Reply:
        """The reply, which is there. Raises the error of a request that never got into the ring."""
        if call.pending is None:
            raise call.error or UnavailableError("the request was dropped: the rank stops")
        if call.pending.future.cancelled():
            raise UnavailableError("the request was dropped: the rank stops")
        call.pending.future.result()
        return call.take()


class _Job:
    """A request that is not the step loop's, as its Pending would be."""

    def __init__(self, work: Coroutine[Any, Any, Reply]) -> None:
        self.future: asyncio.Future[Any] = asyncio.ensure_future(_without_bugs(work))

    def take(self) -> Reply:
        reply: Reply = self.future.result()
        return reply

    def release(self) -> None:
        """It goes on: the caller's end undoes it."""


async def _without_bugs(work: Coroutine[Any, Any, Reply]) -> Reply:
    try:
        return await work
    except MegaMoeError:
        raise
    except Exception as error:
        raise _bug(error) from error


class _Call:
    """A request of a stream on its way: in the ring, or refused before it got there."""

    __slots__ = ("error", "message", "pending", "reply")

    def __init__(self, message: pb.ForwardRequest) -> None:
        self.message = message
        self.pending: Pending | _Job | None = None
        self.error: MegaMoeError | None = None
        self.reply: Reply | None = None

    def take(self) -> Reply:
        """The reply, which is there. Only one with rows stays in the ring until `release`."""
        if self.reply is None:
            assert self.pending is not None
            self.reply = self.pending.take()
            if not isinstance(self.reply, LayerReply):
                self.pending.release()
        return self.reply

    def release(self) -> None:
        if self.pending is not None:
            self.pending.release()


class _Stream:
    """Requests of one stream, read ahead in order; iterating gives them in the order in which they are answered."""

    def __init__(self, take: Callable[[In], Any], requests: AsyncIterator[In], patience_s: float) -> None:
        self._take = take
        self._patience_s = patience_s
        self.has_begun = False
        self._done: asyncio.Queue[_Call | None] = asyncio.Queue()
        self._open: set[_Call] = set()
        self._slots = asyncio.Semaphore(MAX_IN_FLIGHT_PER_STREAM)
        self._ended = False
        self._reader = asyncio.create_task(self._read(requests), name="Forward reader")

    def __aiter__(self) -> _Stream:
        return self

    async def __anext__(self) -> _Call:
        while not (self._ended and not self._open and self._done.empty()):
            call = await self._done.get()
            if call is not None:
                self._open.discard(call)
                self._slots.release()
                return call
        self._reader.result()  # a bug in reading must not end the stream as if all were well
        raise StopAsyncIteration

    async def _read(self, requests: AsyncIterator[In]) -> None:
        try:
            async with asyncio.timeout(self._patience_s) as patience:
                async for envelope in requests:
                    patience.reschedule(None)
                    self.has_begun = True
                    await self._slots.acquire()
                    call = await self._take(envelope)
                    self._open.add(call)
                    if call.pending is None:
                        self._done.put_nowait(call)
                    else:
                        call.pending.future.add_done_callback(lambda _, call=call: self._finish(call))
        finally:
            self._ended = True
            self._done.put_nowait(None)

    def _finish(self, call: _Call) -> None:
        future = call.pending.future if call.pending is not None else None
        if future is not None and not future.cancelled() and future.exception() is None:
            call.take()
        self._done.put_nowait(call)

    def close(self) -> None:
        """The caller is gone or done: give back all records, each as soon as the rank has answered it."""
        self._reader.cancel()
        for call in self._open:
            call.release()
        while not self._done.empty():
            call_or_end = self._done.get_nowait()
            if call_or_end is not None:
                call_or_end.release()


def _bug(error: Exception) -> InternalError:
    log.error("a request could not be taken", exc_info=error)
    return InternalError(f"a request could not be taken: {error!r}; this is a bug")
