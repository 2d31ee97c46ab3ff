"""One Forward stream: requests go out in order, replies find their request by id, every wait ends.

Owns: the stream to one rank. When it breaks, every request in flight and every later one raises the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import grpc

from megamoe.errors import MegaMoeError, UnavailableError
from service.client.errors import from_message, from_rpc, same_error
from service.net import wire
from service.pb import moe_pb2 as pb

_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]
METHOD = "/megamoe.v1.MoELayer/Forward"
Reply = wire.Envelope[pb.ForwardReply]


def channel_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Both directions from the one number that the service announces."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
    ]


class RankStream:
    """An open Forward stream to one rank. Use from one event loop."""

    def __init__(self, rank: int, address: str, *, max_message_bytes: int) -> None:
        self.rank = rank
        self.address = address
        self._channel = grpc.aio.insecure_channel(address, options=channel_options(max_message_bytes))
        method: Any = self._channel.stream_stream(
            METHOD,
            request_serializer=wire.serialize,
            response_deserializer=wire.deserializer(pb.ForwardReply),
        )
        self._call = method()
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._next_id = 1
        self._broken: MegaMoeError | None = None
        self._out: asyncio.Queue[wire.Envelope[pb.ForwardRequest]] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read(), name=f"replies of rank {rank}")
        self._writer = asyncio.create_task(self._write(), name=f"requests to rank {rank}")

    def request(
        self, message: pb.ForwardRequest, parts: tuple[wire.Buffer, ...] = (), *, timeout_s: float
    ) -> Coroutine[Any, Any, Reply]:
        """Send one request now, whatever becomes of the awaitable that is returned: it waits for the reply.

        That raises the error that the rank answers, UnavailableError when the stream breaks or nothing comes within
        timeout_s.
        """
        return self._reply(message, self.send(message, parts), timeout_s)

    async def _reply(
        self, message: pb.ForwardRequest, future: asyncio.Future[Reply], timeout_s: float
    ) -> Reply:
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            kind = message.WhichOneof("request")
            raise UnavailableError(f"{self._where} did not answer {kind} within {timeout_s} s") from None
        finally:
            self._waiting.pop(message.request_id, None)

    def send(self, message: pb.ForwardRequest, parts: tuple[wire.Buffer, ...] = ()) -> asyncio.Future[Reply]:
        """Queue one request behind all earlier ones; the future ends with its reply. Cancelling it abandons the
        reply, not the request."""
        message.request_id = self._next_id
        self._next_id += 1
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        if self._broken is not None:
            future.set_exception(same_error(self._broken))
            return future
        self._waiting[message.request_id] = future
        self._out.put_nowait(wire.Envelope(message, parts))
        return future

    def check_alive(self) -> None:
        """Raise what broke the stream, if it is broken. From any thread."""
        if self._broken is not None:
            raise same_error(self._broken)

    async def _write(self) -> None:
        """The only writer: gRPC ends a whole stream when a write is cancelled, so requests never write themselves."""
        while True:
            envelope = await self._out.get()
            try:
                await self._call.write(envelope)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
                return  # the reader knows why the stream ended

    @property
    def _where(self) -> str:
        return f"rank {self.rank} at {self.address}"

    async def _read(self) -> None:
        try:
            while (reply := await self._call.read()) is not _EOF:
                future = self._waiting.pop(reply.message.request_id, None)
                if future is None or future.done():
                    continue  # the caller gave up on it
                if reply.message.HasField("error"):
                    future.set_exception(from_message(reply.message.error, self.rank))
                else:
                    future.set_result(reply)
            await self._call  # raises what ended the stream, if it was an error
            self._fail(UnavailableError(f"{self._where} ended the stream"))
        except grpc.aio.AioRpcError as error:
            self._fail(from_rpc(error, where=self._where, rank=self.rank))
        except asyncio.CancelledError:
            self._fail(UnavailableError(f"the stream to {self._where} was closed"))
            raise

    def _fail(self, error: MegaMoeError) -> None:
        self._broken = error
        for future in self._waiting.values():
            if not future.done():
                # Each gets an exception of its own: a shared one would collect everybody's tracebacks.
                future.set_exception(same_error(error))
                future.exception()  # seen: its request may have been abandoned
        self._waiting.clear()

    async def close(self) -> None:
        """End the stream and its channel. Safe to call twice."""
        self._writer.cancel()
        self._reader.cancel()
        await asyncio.wait({self._writer, self._reader}, timeout=1.0)
        self._call.cancel()
        await self._channel.close(None)
