"""The request ring of a rank: the one way into its step loop, for the gRPC servicer and co-located callers alike.

One ring per rank and producer, single producer and single consumer. The producer copies the tensors of a request
into the record once and reads the reply out of the same record; the consumer works on views. All bookkeeping of
space is the producer's, in its own memory: what it published stays until the consumer has replied AND the producer
has released it, in any order, so a dead or impatient producer leaves nothing broken and nothing leaked.
Refuses what does not fit: a request above max_rows (InvalidArgumentError), a full ring (OverloadedError).
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from bisect import insort
from collections.abc import Callable

import torch

from megamoe import MX_BLOCK, SharedSegment, fence
from megamoe.errors import (
    ConfigError,
    InvalidArgumentError,
    OverloadedError,
    PeerTimeoutError,
    must_be,
)
from service.messages import LayerReply, LayerRequest, Reply, Request
from service.ring import codec, layout
from service.ring.consumer import RingConsumer, ring_name
from service.ring.layout import RingSpec
from service.ring.record import Record, TypedViews

__all__ = ["Record", "RingConsumer", "RingProducer", "RingSpec", "Ticket", "ring_name"]

Wake = Callable[[bool], None]
"""Wakes the consumer; True for control messages, which are served even while a layer call runs."""


class Ticket:
    """One request in flight: handed out by `submit`, given back with `release`."""

    __slots__ = (
        "end",
        "is_control",
        "num_rows",
        "number",
        "offset",
        "out_offset",
        "released",
        "reply_offset",
    )

    def __init__(self, number: int, offset: int, end: int, reply_offset: int, num_rows: int) -> None:
        self.number = number
        self.offset = offset
        self.end = end
        self.reply_offset = reply_offset
        self.num_rows = num_rows
        self.out_offset = 0
        self.is_control = False
        self.released = False


class RingProducer:
    """The calling side of a ring. Thread-safe; one per ring at a time (held by a lock that dies with the process)."""

    def __init__(self, segment: SharedSegment, bell: Wake) -> None:
        self._segment = segment
        self._bell = bell
        self.spec = RingSpec.from_head(segment.buf)
        self._lock_fd = os.open(segment.path, os.O_RDWR)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock_fd)
            raise ConfigError(f"ring {segment.name} must have one producer, got a second one") from None
        self._views = TypedViews(segment)
        self._published = segment.word(layout.PUBLISHED_AT)
        self._completed = segment.word(layout.COMPLETED_AT)
        self._num_published = self._published.load()
        self._lock = threading.Lock()
        self._bulk: list[tuple[int, int, Ticket]] = []  # [offset, end) of live records, sorted
        self._control_free = list(range(self.spec.num_control_slots))
        self._live: dict[int, Ticket] = {}
        # A predecessor may have died with requests in flight: their records are free when the consumer has replied.
        self._inherited = (self._num_published - self._completed.load()) & 0xFFFFFFFF

    @classmethod
    def attach(
        cls, group_name: str, rank: int, ring_idx: int, bell: Wake, *, timeout_s: float = 10.0
    ) -> RingProducer:
        """Connect to a ring that the rank made, and wait until what a dead predecessor left is answered.

        Raises HeapError if it is not there, ConfigError if it has a living producer, PeerTimeoutError if
        the rank does not answer what the predecessor left.
        """
        segment = SharedSegment.attach(ring_name(group_name, rank, ring_idx), timeout_s=timeout_s)
        try:
            producer = cls(segment, bell)
        except ConfigError:
            segment.close()
            raise
        if not producer.drain_inherited(timeout_s):
            producer.close()
            raise PeerTimeoutError(
                f"rank {rank} did not answer {producer._inherited} requests of an earlier producer of ring "
                f"{ring_idx} within {timeout_s} s",
                [rank],
            )
        return producer

    def drain_inherited(self, timeout_s: float) -> bool:
        """Wait until no request of an earlier producer is in flight; False if some are after timeout_s."""
        deadline = time.monotonic() + timeout_s
        while True:
            seen = self._completed.load()
            self._inherited = (self._num_published - seen) & 0xFFFFFFFF
            if not self._inherited:
                return True
            if not self._completed.wait_while(seen, max(deadline - time.monotonic(), 0.0)):
                return False

    @property
    def completed(self) -> int:
        """Number of replies so far, mod 2^32: sleep on it with wait_completed."""
        return self._completed.load()

    def wait_completed(self, seen: int, timeout_s: float) -> bool:
        """Sleep until there are more replies than `seen`; False after timeout_s."""
        return self._completed.wait_while(seen, timeout_s)

    @property
    def num_in_flight(self) -> int:
        """Records that are not free yet."""
        with self._lock:
            self._reclaim()
            return len(self._live)

    # ------------------------------------------------------------------------------ submit

    def submit(self, request: Request) -> Ticket:
        """Copy a request into the ring and wake the rank. Tensors are copied exactly once.

        Raises InvalidArgumentError (too many rows for this ring, or tensors that are no MoeBatch's) and
        OverloadedError (the ring is full); then nothing was written.
        """
        kind, body = codec.encode_request(request)
        with self._lock:
            if isinstance(request, LayerRequest):
                ticket = self._write_layer(request, body)
            else:
                ticket = self._write_control(kind, body)
        self._bell(kind != codec.LAYER)
        return ticket

    def _write_control(self, kind: int, body: bytes) -> Ticket:
        spec = self.spec
        if len(body) > layout.CONTROL_BODY_BYTES:
            raise InvalidArgumentError(
                must_be("request", f"at most {layout.CONTROL_BODY_BYTES} bytes as JSON", len(body))
            )
        offset = self._allocate_control()
        reply_offset = offset + layout.RECORD_ALIGN + layout.CONTROL_BODY_BYTES
        ticket = Ticket(self._num_published, offset, offset + spec.control_bytes, reply_offset, 0)
        ticket.is_control = True
        self._publish(ticket, kind, body, flags=0)
        return ticket

    def _write_layer(self, request: LayerRequest, body: bytes) -> Ticket:
        spec = self.spec
        tensors = (request.hidden_states, request.topk_ids, request.topk_weights)
        scales = request.hidden_states_sf
        rows = 0 if request.hidden_states is None else int(request.hidden_states.shape[0])
        if rows > spec.max_rows:
            raise InvalidArgumentError(
                must_be("rows of a layer call", f"at most {spec.max_rows} (max_step_rows)", rows)
            )
        mxfp8 = scales is not None
        where = spec.layer_map(rows, mxfp8, len(body))
        offset = self._allocate_bulk(where.num_bytes)
        ticket = Ticket(self._num_published, offset, offset + where.num_bytes, offset + where.reply_at, rows)
        ticket.out_offset = offset + where.out_at
        if rows:
            hidden_dtype = torch.uint8 if mxfp8 else torch.bfloat16
            view = self._views.at
            _put("hidden_states", view(offset + where.hidden_at, rows, spec.hidden, hidden_dtype), tensors[0])
            _put("topk_ids", view(offset + where.ids_at, rows, spec.num_topk, torch.int32), tensors[1])
            weights = view(offset + where.weights_at, rows, spec.num_topk, torch.float32)
            _put("topk_weights", weights, tensors[2])
            if mxfp8:
                sf = view(offset + where.sf_at, rows, spec.hidden // MX_BLOCK, torch.uint8)
                _put("hidden_states_sf", sf, scales)
        insort(self._bulk, (offset, ticket.end, ticket), key=_first)
        self._publish(ticket, codec.LAYER, body, flags=layout.FLAG_MXFP8 if mxfp8 else 0)
        return ticket

    def _publish(self, ticket: Ticket, kind: int, body: bytes, *, flags: int) -> None:
        offset, buf = ticket.offset, self._segment.buf
        layout.RECORD_HEAD.pack_into(
            buf,
            offset,
            layout.STATE_SUBMITTED,
            kind,
            ticket.number,
            time.monotonic_ns(),
            len(body),
            ticket.num_rows,
            flags,
            0,
            0,
        )
        buf[offset + layout.RECORD_ALIGN : offset + layout.RECORD_ALIGN + len(body)] = body
        slot = ticket.number % layout.TABLE_LEN
        layout.DESCRIPTOR.pack_into(buf, layout.TABLE_AT + slot * layout.DESCRIPTOR.size, offset)
        self._live[ticket.number] = ticket
        self._num_published = (self._num_published + 1) & 0xFFFFFFFF
        self._published.store(self._num_published)

    # ------------------------------------------------------------------------------ room

    def _allocate_control(self) -> int:
        if not self._control_free:
            self._reclaim()
        if not self._control_free or len(self._live) >= layout.TABLE_LEN:
            raise OverloadedError(
                f"ring {self._segment.name} must have a free control slot, got {self.spec.num_control_slots} in "
                "flight (ring_slots)"
            )
        return self.spec.control_at + self._control_free.pop() * self.spec.control_bytes

    def _allocate_bulk(self, num_bytes: int) -> int:
        self._reclaim()
        at = self.spec.bulk_at
        if len(self._live) < layout.TABLE_LEN:
            for start, end, _ in self._bulk:  # first fit: low addresses stay warm
                if start - at >= num_bytes:
                    return at
                at = end
            if self.spec.num_bytes - at >= num_bytes:
                return at
        raise OverloadedError(
            f"ring {self._segment.name} must have {num_bytes} bytes free in one piece for a layer call, got "
            f"{len(self._bulk)} calls in flight in {self.spec.num_bulk_bytes} bytes"
        )

    def _reclaim(self) -> None:
        for ticket in [t for t in self._live.values() if t.released and self.is_replied(t)]:
            self._free(ticket)

    def _free(self, ticket: Ticket) -> None:
        del self._live[ticket.number]
        if ticket.is_control:
            self._control_free.append((ticket.offset - self.spec.control_at) // self.spec.control_bytes)
        else:
            self._bulk = [entry for entry in self._bulk if entry[2] is not ticket]

    # ------------------------------------------------------------------------------ replies

    def is_replied(self, ticket: Ticket) -> bool:
        return self._segment.buf[ticket.offset + layout.STATE_AT] == layout.STATE_REPLIED

    def try_take(self, ticket: Ticket) -> Reply | None:
        """The reply if it is there. Its tensors are views that hold until `release`.

        Raises the error for which the rank reads this ring no more.
        """
        if not self.is_replied(ticket):
            self.check_fault()
            return None
        fence()
        buf = self._segment.buf
        head = layout.RECORD_HEAD.unpack_from(buf, ticket.offset)
        kind, num_bytes = head[7], head[8]
        rows = _NO_ROWS
        if kind == codec.R_LAYER:
            rows = self._views.at(ticket.out_offset, ticket.num_rows, self.spec.hidden, torch.bfloat16)
        body = buf[ticket.reply_offset : ticket.reply_offset + num_bytes]
        return codec.decode_reply(kind, body, self.spec.num_ranks, rows)

    def check_fault(self) -> None:
        """Raise what the rank wrote when it stopped reading this ring, if it did."""
        fault = layout.read_fault(self._segment.buf)
        if fault is not None:
            raise fault.exception()

    def wait(self, ticket: Ticket, timeout_s: float) -> Reply:
        """The reply, sleeping for it. Raises PeerTimeoutError if the rank does not answer within timeout_s."""
        deadline = time.monotonic() + timeout_s
        while True:
            seen = self._completed.load()
            reply = self.try_take(ticket)
            if reply is not None:
                return reply
            if not self._completed.wait_while(seen, max(deadline - time.monotonic(), 0.0)):
                raise PeerTimeoutError(f"no reply on ring {self._segment.name} within {timeout_s} s")

    def release(self, ticket: Ticket) -> None:
        """Give the record back: at once if it is answered, else (abandoned) as soon as it will be. Idempotent."""
        with self._lock:
            if ticket.released:
                return
            ticket.released = True
            if self.is_replied(ticket):
                self._free(ticket)

    def call(self, request: Request, timeout_s: float) -> Reply:
        """Submit, wait and release; rows of the reply are copied out of the record."""
        ticket = self.submit(request)
        try:
            reply = self.wait(ticket, timeout_s)
            if isinstance(reply, LayerReply):
                reply = reply._replace(hidden_states=reply.hidden_states.clone())
            return reply
        finally:
            self.release(ticket)

    def close(self) -> None:
        """Let go of the ring. What is in flight is answered into it and dropped. Safe to call twice."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
            self._segment.close()


def _first(entry: tuple[int, int, Ticket]) -> int:
    return entry[0]


_NO_ROWS = torch.empty((0, 0), dtype=torch.bfloat16)


def _put(name: str, place: torch.Tensor, tensor: torch.Tensor | None) -> None:
    """Copy one tensor into its place; a wrong dtype or shape here was not validated by MoeBatch."""
    if tensor is not None and place.dtype is torch.uint8 and tensor.dtype.itemsize == 1:
        tensor = tensor.view(torch.uint8)  # e4m3 codes and E8M0 scales in their typed forms
    if tensor is None or tensor.shape != place.shape or tensor.dtype is not place.dtype:
        got = "None" if tensor is None else f"{list(tensor.shape)} {tensor.dtype}"
        raise InvalidArgumentError(must_be(name, f"{list(place.shape)} {place.dtype}", got))
    place.copy_(tensor)
