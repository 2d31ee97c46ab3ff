"""A request ring for asyncio: one waiter thread per ring sleeps on the completion word, never the event loop.

Owns that thread and the futures of requests in flight. A cancelled await abandons its record: the announced step
finishes, its result is dropped and the record is given back when the rank has answered.
"""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType

from megamoe.errors import MegaMoeError, OverloadedError, PeerTimeoutError, UnavailableError
from service.messages import Reply, Request
from service.ring.ring import RingProducer, Ticket

_ROOM_POLL_S = 0.001
"""How often a patient submit looks for room: a full ring means requests that take far longer than this."""

_LOOK_UP_S = 0.2
"""How long the waiter thread sleeps before it looks whether it should stop."""


class Pending:
    """One request in flight. Use as a context manager, so that its record always goes back."""

    __slots__ = ("_producer", "future", "ticket")

    def __init__(self, producer: RingProducer, ticket: Ticket, future: asyncio.Future[None]) -> None:
        self._producer = producer
        self.ticket = ticket
        self.future = future

    async def reply(self, timeout_s: float | None = None) -> Reply:
        """The reply; its tensors hold until `release`. Raises PeerTimeoutError, UnavailableError (ring closed)."""
        try:
            await asyncio.wait_for(asyncio.shield(self.future), timeout_s)
        except TimeoutError:
            raise PeerTimeoutError(f"the rank did not answer its request ring within {timeout_s} s") from None
        return self.take()

    def take(self) -> Reply:
        """The reply, once `future` is done; its tensors hold until `release`."""
        reply = self._producer.try_take(self.ticket)
        assert reply is not None, "woken without a reply: this is a bug"
        return reply

    def release(self) -> None:
        """Give the record back, answered or not. Idempotent."""
        self._producer.release(self.ticket)

    def __enter__(self) -> Pending:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class AsyncRing:
    """Submits from the event loop that it was made on; all methods but close() belong to that loop's thread."""

    def __init__(self, producer: RingProducer) -> None:
        self.producer = producer
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, Pending] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="ring-replies", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Requests without an answer yet."""
        return len(self._waiting)

    def submit(self, request: Request) -> Pending:
        """Submit now. Raises what RingProducer.submit raises, and UnavailableError when closed."""
        if self._closed:
            raise UnavailableError("the request ring is closed: the rank stops")
        ticket = self.producer.submit(request)
        pending = Pending(self.producer, ticket, self._loop.create_future())
        self._waiting[ticket.number] = pending
        if self.producer.is_replied(
            ticket
        ):  # answered before it was registered: the watcher may have missed it
            self._deliver()
        return pending

    async def submit_patiently(self, request: Request, timeout_s: float) -> Pending:
        """Submit, waiting up to timeout_s for room: what belongs to an agreed plan is never refused for overload."""
        deadline = self._loop.time() + timeout_s
        while True:
            try:
                return self.submit(request)
            except OverloadedError:
                if self._loop.time() >= deadline:
                    raise
                await asyncio.sleep(_ROOM_POLL_S)

    async def call(self, request: Request, timeout_s: float | None = None) -> Reply:
        """Submit and await a reply that carries no tensors (anything but a LayerRequest)."""
        with self.submit(request) as pending:
            return await pending.reply(timeout_s)

    def _deliver(self) -> None:
        for number, pending in list(self._waiting.items()):
            if self.producer.is_replied(pending.ticket):
                del self._waiting[number]
                if not pending.future.done():
                    pending.future.set_result(None)
        try:
            self.producer.check_fault()
        except MegaMoeError as error:
            for pending in self._waiting.values():
                if not pending.future.done():
                    pending.future.set_exception(type(error)(str(error)))

    def _watch(self) -> None:
        while not self._closed:
            seen = self.producer.completed
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return
            while not self._closed and not self.producer.wait_completed(seen, _LOOK_UP_S):
                pass

    async def close(self) -> None:
        """Stop the thread; who still waits gets UnavailableError. Does not close the producer. Safe to call twice."""
        self._closed = True
        await asyncio.to_thread(self._thread.join, 5.0)
        for pending in self._waiting.values():
            if pending.ticket.released:
                pending.future.cancel()
            elif not pending.future.done():
                pending.future.set_exception(UnavailableError("the request ring is closed: the rank stops"))
            pending.release()
        self._waiting.clear()
