"""One Forward stream: requests go out in order, replies find their request by id, every wait ends.

Owns: the stream to one rank. When it breaks, every request in flight and every later one raises the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc

from megamoe.errors import MegaMoeError, UnavailableError
from service import wire
from service.client.errors import from_message, from_rpc, same_error
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
        self._write_lock = asyncio.Lock()
        self._reader = asyncio.create_task(self._read(), name=f"replies of rank {rank}")

    async def request(
        self, message: pb.ForwardRequest, parts: tuple[wire.Buffer, ...] = (), *, timeout_s: float
    ) -> Reply:
        """Send one request and wait for its reply. Raises the error that the rank answers, UnavailableError when
        the stream breaks or nothing comes within timeout_s."""
        future = self.send(message, parts)
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            kind = message.WhichOneof("request")
            raise UnavailableError(
                f"rank {self.rank} at {self.address} did not answer {kind} within {timeout_s} s"
            ) from None

    def send(self, message: pb.ForwardRequest, parts: tuple[wire.Buffer, ...] = ()) -> asyncio.Task[Reply]:
        """Queue one request behind all earlier ones; the task ends with its reply."""
        request_id = self._next_id
        self._next_id += 1
        message.request_id = request_id
        return asyncio.ensure_future(self._exchange(request_id, wire.Envelope(message, parts)))

    async def _exchange(self, request_id: int, envelope: wire.Envelope[pb.ForwardRequest]) -> Reply:
        self._raise_if_broken()
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        try:
            async with self._write_lock:
                self._raise_if_broken()
                try:
                    await self._call.write(envelope)
                except grpc.aio.AioRpcError as error:
                    raise from_rpc(error, where=self._where, rank=self.rank) from error
                except (asyncio.InvalidStateError, grpc.aio.UsageError) as error:
                    await asyncio.wait({self._reader}, timeout=1.0)  # it knows why the stream ended
                    self._raise_if_broken()
                    raise UnavailableError(f"the stream to {self._where} is closed") from error
            return await future
        finally:
            self._waiting.pop(request_id, None)

    @property
    def _where(self) -> str:
        return f"rank {self.rank} at {self.address}"

    async def _read(self) -> None:
        try:
            while (reply := await self._call.read()) is not _EOF:
                future = self._waiting.get(reply.message.request_id)
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
                future.set_exception(same_error(error))
                future.exception()  # seen: its request may have been abandoned

    def _raise_if_broken(self) -> None:
        """Each raise gets an exception of its own: a shared one would collect everybody's tracebacks."""
        if self._broken is not None:
            raise same_error(self._broken)

    async def close(self) -> None:
        """End the stream and its channel. Safe to call twice."""
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._call.done_writing(), 1.0)
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self._reader
        self._call.cancel()
        await self._channel.close(None)
