"""Callers on this host: the rings that a rank opens for them and the memory that they lend, both bound to a stream.

Owns how many there are, what they are called, and that nothing of them stays: when a stream ends, because its caller is
done or dead, what it announced is finished, then its ring goes and its memory is let go of. The step loop reads the
rings like any other. Refuses more rings than the setting, and what its runtime cannot open.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, wait
from functools import partial

from megamoe import Deployment, MemoryHandle
from megamoe.errors import InvalidArgumentError, OverloadedError, PeerTimeoutError, UnavailableError, must_be
from service.messages import (
    ColocatedRequest,
    DoneReply,
    MemoryReply,
    OpenRingRequest,
    RegisterMemoryRequest,
    Reply,
    RingReply,
    UnregisterMemoryRequest,
)
from service.rank.loop_door import LoopDoor
from service.ring.bell import FIRST_RING_WRITER, NUM_RING_WRITERS
from service.ring.consumer import RingConsumer, ring_name
from service.ring.layout import RingSpec
from service.ring.lent import LentMemory
from service.ring.specs import FIRST_COLOCATED_RING, MAX_CALLS_PER_RING

MAX_MEMORIES_PER_CALLER = 64


class Colocated:
    """All co-located callers of one rank. bell: (segment, offset of the page, offset in it) of the rank's words."""

    def __init__(
        self,
        loop: LoopDoor,
        deployment: Deployment,
        *,
        group_name: str,
        rank: int,
        bell: tuple[str, int, int],
        max_rings: int,
        num_control_slots: int,
        timeout_s: float,
    ) -> None:
        self.loop = loop
        self.timeout_s = timeout_s
        self._deployment = deployment
        self._group_name = group_name
        self._rank = rank
        self._bell = bell
        self._max_rings = max_rings
        self._num_control_slots = num_control_slots
        self._lock = threading.Lock()
        self._open: set[int] = set()
        self._next = 0

    def caller(self) -> Caller:
        """For one stream."""
        return Caller(self)

    def make_ring(self, request: OpenRingRequest) -> tuple[int, RingConsumer, RingReply]:
        """Allocate and prefault; blocks for the time that takes.

        Raises OverloadedError (as many are open), InvalidArgumentError, HeapError (shared memory is short).
        """
        num_calls = request.num_calls or 2
        if num_calls > MAX_CALLS_PER_RING:
            raise InvalidArgumentError(must_be("num_calls", f"at most {MAX_CALLS_PER_RING}", num_calls))
        limit = self._deployment.step_rows_limit
        if request.max_rows > limit:
            raise InvalidArgumentError(
                must_be("max_rows", f"at most {limit} (max_step_rows)", request.max_rows)
            )
        spec = RingSpec.of(
            self._deployment,
            max_rows=request.max_rows or None,
            num_control_slots=self._num_control_slots,
            num_bulk_calls=num_calls,
            in_memory=request.rows_in_memory,
        )
        idx = self._take_idx()
        ring_idx = FIRST_COLOCATED_RING + idx
        try:
            ring = RingConsumer.create(
                self._group_name, self._rank, ring_idx, spec, caller_shape=self._deployment.shape
            )
        except BaseException:
            self.give_back(idx)
            raise
        segment, page, offset = self._bell
        reply = RingReply(
            segment=ring_name(self._group_name, self._rank, ring_idx),
            num_bytes=spec.num_bytes,
            bell_segment=segment,
            bell_page=page,
            bell_offset=offset,
            writer_id=FIRST_RING_WRITER + ring_idx,
            memory_kinds=tuple(map(str, self.loop.memory_kinds)),
        )
        return idx, ring, reply

    def _take_idx(self) -> int:
        """A number for a ring. They come back late, so that bells of an earlier ring and of this one stay apart."""
        with self._lock:
            if len(self._open) >= self._max_rings:
                raise OverloadedError(
                    must_be(
                        f"rings of co-located callers on rank {self._rank}",
                        f"at most max_colocated_rings = {self._max_rings}",
                        len(self._open) + 1,
                    )
                )
            while self._next in self._open:
                self._next = (self._next + 1) % (NUM_RING_WRITERS - FIRST_COLOCATED_RING)
            idx = self._next
            self._next = (idx + 1) % (NUM_RING_WRITERS - FIRST_COLOCATED_RING)
            self._open.add(idx)
            return idx

    def give_back(self, idx: int) -> None:
        with self._lock:
            self._open.discard(idx)


class Caller:
    """What one stream has of this: at most one ring, and its memories. `handle` belongs to the event loop."""

    def __init__(self, home: Colocated) -> None:
        self._home = home
        self._ring: RingConsumer | None = None
        self._idx = -1
        self._closed: dict[int, Future[None]] = {}
        self._is_opening = False
        self._is_closed = False

    async def handle(self, request: ColocatedRequest) -> Reply:
        """Do one request. Raises what is wrong with it."""
        self._home.loop.check_lease(request.lease_serial)
        if isinstance(request, OpenRingRequest):
            return await self._open_ring(request)
        ring = self._ring
        if ring is None:
            raise InvalidArgumentError(
                must_be("a ring of this stream", "open (OpenRing) before memory", "none")
            )
        if isinstance(request, RegisterMemoryRequest):
            return await self._register(ring, request)
        return await self._unregister(ring, request)

    async def _open_ring(self, request: OpenRingRequest) -> RingReply:
        if self._ring is not None or self._is_opening:
            raise InvalidArgumentError(must_be("rings of this stream", "at most 1", 2))
        self._is_opening = True
        try:
            # In a thread, because touching its pages takes long; what it makes is kept or closed, whoever still waits.
            return await asyncio.to_thread(self._open_ring_now, request)
        finally:
            self._is_opening = False

    def _open_ring_now(self, request: OpenRingRequest) -> RingReply:
        home = self._home
        idx, ring, reply = home.make_ring(request)

        def pin_and_attach() -> None:
            home.loop.pin(ring)
            with home.loop.with_lock():
                if self._is_closed:
                    raise UnavailableError("the stream ended while its ring was made")
                self._idx, self._ring = idx, ring
                home.loop.attach(ring)

        done = home.loop.on_device(pin_and_attach)
        try:
            wait([done], home.timeout_s)
            if done.cancel():
                what = f"the ring must be taken within {home.timeout_s:g} s"
                raise PeerTimeoutError(f"{what}, got a layer call that takes longer")
            done.result()
        except BaseException:
            ring.close()
            home.give_back(idx)
            raise
        return reply

    async def _register(self, ring: RingConsumer, request: RegisterMemoryRequest) -> MemoryReply:
        handle = MemoryHandle(
            kind=request.kind,
            payload=request.handle,
            offset=request.offset,
            num_bytes=request.num_bytes,
            device=request.device,
        )
        loop = self._home.loop
        closed: Future[None] = Future()

        def open_and_put() -> None:
            opened = loop.open_memory(handle)
            with loop.with_lock():
                try:
                    if self._is_closed:
                        raise UnavailableError("the stream ended while its memory was opened")
                    if len(ring.lent) >= MAX_MEMORIES_PER_CALLER:
                        limit = f"at most {MAX_MEMORIES_PER_CALLER}"
                        raise OverloadedError(must_be("memories of a caller", limit, len(ring.lent) + 1))
                    ring.lent.put(
                        LentMemory(
                            request.memory_id,
                            request.lease_serial,
                            opened,
                            lambda memory: loop.close_memory(memory, closed),
                        )
                    )
                    self._closed[request.memory_id] = closed
                except BaseException:
                    opened.close()
                    raise

        opened = asyncio.wrap_future(loop.on_device(open_and_put))
        await self._within("opened", request.memory_id, opened)
        return MemoryReply(memory_id=request.memory_id)

    async def _unregister(self, ring: RingConsumer, request: UnregisterMemoryRequest) -> DoneReply:
        with self._home.loop.with_lock():
            ring.lent.drop(request.memory_id)
            closed = self._closed.pop(request.memory_id)
        # Whoever gives up waiting: the memory is let go of all the same.
        await self._within("let go of", request.memory_id, asyncio.shield(asyncio.wrap_future(closed)))
        return DoneReply()

    async def _within(self, what: str, memory_id: int, done: asyncio.Future[None]) -> None:
        try:
            async with asyncio.timeout(self._home.timeout_s):
                await done
        except TimeoutError:
            wanted = f"memory {memory_id} must be {what} within {self._home.timeout_s:g} s"
            raise PeerTimeoutError(f"{wanted}, got a layer call that takes longer") from None

    def close(self) -> None:
        """The stream has ended. Safe to call twice."""
        with self._home.loop.with_lock():
            ring, self._ring, was_closed, self._is_closed = self._ring, None, self._is_closed, True
        if ring is not None and not was_closed:
            self._home.loop.retire(ring, partial(self._home.give_back, self._idx))
