"""The calling side of a co-located caller: one blocking thread, fixed places in its ring, nothing made per call.

Does what ring.py's RingProducer does for one process that counts microseconds: records are packed with structs made
once, rows are moved by address, and a reply is looked for in a bounded spin before the thread sleeps on the ring's
word. Checks nothing of rows: who calls has checked dtypes and sizes (the rank believes neither).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import time
from collections.abc import Callable

from megamoe import MX_BLOCK, PlanId, SharedSegment, fence, full_fence
from megamoe.errors import ConfigError, OverloadedError, PeerTimeoutError
from service.messages import CloseRequest, ErrorReply, IntentRequest, LayerRequest
from service.ring import codec, layout, step_codec
from service.ring.bell import Bell
from service.ring.layout import RingSpec

_LOOK_UP_S = 0.1
"""How long a thread sleeps before it looks whether its rank still lives."""
_SPINS_PER_LOOK = 16
"""Loads of the state between two looks at the clock."""

_memmove = ctypes.memmove
_pack_record = layout.RECORD_HEAD.pack_into
_pack_call = struct.Struct(
    f"{layout.RECORD_HEAD.format}{layout.RECORD_ALIGN - layout.RECORD_HEAD.size}x"
    + (step_codec.LAYER_HEAD.format + step_codec.PLACES.format).replace("<", "")
).pack_into
"""The record of a layer call with its body."""
_pack_descriptor = layout.DESCRIPTOR.pack_into
_SUBMITTED, _REPLIED, _ALIGN = layout.STATE_SUBMITTED, layout.STATE_REPLIED, layout.RECORD_ALIGN
_LAYER, _BODY_BYTES, _NO_PLACES = codec.LAYER, step_codec.LAYER_BODY_BYTES, (0, 0, 0, 0, 0)
_now_ns, _now = time.monotonic_ns, time.monotonic


class RingCaller:
    """A ring of this process's own, for one thread. check_alive: raises when the rank is gone.

    spin_s: how long a wait looks for its answer before it sleeps. It keeps a core busy: give it where the caller's core
    has nothing else to do, and about as long as a layer call takes.
    """

    def __init__(
        self, segment: SharedSegment, bell: Bell, *, check_alive: Callable[[], None], spin_s: float = 0.0
    ) -> None:
        self.spec = spec = RingSpec.from_head(segment.buf)
        self._segment = segment
        self._buf = segment.buf
        self._bell = bell
        self._check_alive = check_alive
        self.spin_s = spin_s
        self._lock_fd = os.open(segment.path, os.O_RDWR)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock_fd)
            raise ConfigError(f"ring {segment.name} must have one producer, got a second one") from None
        self._published = segment.word(layout.PUBLISHED_AT)
        self._completed = segment.word(layout.COMPLETED_AT)
        self._awake = segment.word(layout.AWAKE_AT)
        self._awake.store(1)
        self._number = self._published.load()
        self._base = segment.base_ptr
        of_rows = (
            spec.layer_map(spec.max_rows, mxfp8, in_memory=in_memory).num_bytes
            for mxfp8 in (False, True)
            for in_memory in (False, True)
            if in_memory or self._holds_rows(spec)
        )
        largest = max(spec.layer_map(0, False, step_codec.REFUSAL_BODY_BYTES).num_bytes, *of_rows)
        count = spec.num_bulk_bytes // largest
        self._free_calls = [spec.bulk_at + idx * largest for idx in reversed(range(count))]
        self._free_controls = [
            spec.control_at + idx * spec.control_bytes for idx in reversed(range(spec.num_control_slots))
        ]
        self._abandoned: list[int] = []
        self._maps: dict[int, tuple[int, int, int, int, int]] = {}

    @staticmethod
    def _holds_rows(spec: RingSpec) -> bool:
        """Whether a call of max_rows fits with its rows, or only with rows in lent memory."""
        return spec.num_bulk_bytes >= spec.layer_map(spec.max_rows, False).num_bytes

    # ------------------------------------------------------------------------------ layer calls

    def start_call(
        self,
        names: tuple[int, int, int, int],
        layer_idx: int,
        sequence: int,
        num_rows: int,
        pointers: tuple[int, int, int, int],
        places: tuple[int, int, int, int, int] = _NO_PLACES,
        *,
        flags: int = 0,
    ) -> int:
        """Publish one layer call and wake the rank; returns the place of its record for `wait_for` and `end_call`.

        names: lease, generation, step, micro-batch. pointers: host addresses of hidden_states, scales, topk_ids,
        topk_weights; the first two are not read with FLAG_IN_MEMORY, whose rows `places` says instead.
        Raises OverloadedError when every place is taken (see `check_place`).
        """
        self.check_place()
        at = self._free_calls.pop()
        hidden_at, sf_at, ids_at, weights_at, _ = self._maps.get(num_rows << 2 | flags) or self._map(
            num_rows, flags
        )
        if num_rows:
            spec, start = self.spec, self._base + at
            if not flags & layout.FLAG_IN_MEMORY:
                mxfp8 = flags & layout.FLAG_MXFP8
                _memmove(start + hidden_at, pointers[0], num_rows * spec.hidden * (1 if mxfp8 else 2))
                if mxfp8:
                    _memmove(start + sf_at, pointers[1], num_rows * (spec.hidden // MX_BLOCK))
            _memmove(start + ids_at, pointers[2], num_rows * spec.num_topk * 4)
            _memmove(start + weights_at, pointers[3], num_rows * spec.num_topk * 4)
        number = self._number
        head = _SUBMITTED, _LAYER, number, _now_ns(), _BODY_BYTES, num_rows, flags, 0, 0
        _pack_call(self._buf, at, *head, *names, layer_idx, sequence, 0, 0, *places)
        self._publish(at, number, control=False)
        return at

    def check_place(self) -> None:
        """Raise OverloadedError when every place is taken: before a sequence is, for that must be sent."""
        if not self._free_calls:
            self._reclaim()
        if not self._free_calls:
            raise OverloadedError(
                "a layer call must find a free place in its ring (num_calls), got all of them in flight or "
                "their results not taken"
            )

    def refuse_call(self, names: tuple[int, int, int, int], sequence: int, error: ErrorReply) -> int:
        """`start_call` of a call that the caller found wrong itself: all ranks answer the error.

        Its reply lies behind a body of REFUSAL_BODY_BYTES. Raises OverloadedError when every place is taken.
        """
        self.check_place()
        at = self._free_calls.pop()
        body = step_codec.encode_layer(
            LayerRequest(
                lease_serial=names[0],
                plan_id=PlanId(*names[1:]),
                layer_idx=0,
                sequence=sequence,
                refusal=(error.code, error.message),
            )
        )
        number, buf, size = self._number, self._buf, step_codec.REFUSAL_BODY_BYTES
        buf[at + _ALIGN : at + _ALIGN + size] = body.ljust(size, b"\0")
        _pack_record(buf, at, _SUBMITTED, _LAYER, number, _now_ns(), size, 0, 0, 0, 0)
        self._publish(at, number, control=False)
        return at

    def _map(self, num_rows: int, flags: int) -> tuple[int, int, int, int, int]:
        where = self.spec.layer_map(
            num_rows, bool(flags & layout.FLAG_MXFP8), in_memory=bool(flags & layout.FLAG_IN_MEMORY)
        )
        found = where.hidden_at, where.sf_at, where.ids_at, where.weights_at, where.out_at
        self._maps[num_rows << 2 | flags] = found
        return found

    def _publish(self, at: int, number: int, *, control: bool) -> None:
        _pack_descriptor(self._buf, layout.TABLE_AT + number % layout.TABLE_LEN * layout.DESCRIPTOR.size, at)
        self._number = (number + 1) & 0xFFFFFFFF
        self._published.store(self._number)
        self._bell(control)

    def is_answered(self, at: int) -> bool:
        """Whether a record's reply is there."""
        return self._buf[at] == _REPLIED

    def wait_for(self, at: int, timeout_s: float) -> None:
        """Until a record is answered: spins spin_s, then sleeps.

        Raises PeerTimeoutError, what the rank wrote when it stopped reading this ring, and what check_alive raises.
        """
        buf = self._buf
        if buf[at] == _REPLIED:
            return
        start = _now()
        if self.spin_s:
            until = start + min(self.spin_s, timeout_s)
            while True:
                for _ in range(_SPINS_PER_LOOK):
                    if buf[at] == _REPLIED:
                        return
                if _now() >= until:
                    break
        self._awake.store(0)
        full_fence()
        try:
            self._sleep_for(at, timeout_s, start + timeout_s)
        finally:
            self._awake.store(1)

    def _sleep_for(self, at: int, timeout_s: float, deadline: float) -> None:
        buf, completed = self._buf, self._completed
        while True:
            seen = completed.load()
            if buf[at] == _REPLIED:
                return
            left_s = deadline - _now()
            if left_s <= 0:
                raise PeerTimeoutError(
                    f"the rank did not answer its ring {self._segment.name} within {timeout_s:g} s"
                )
            if not completed.wait_while(seen, min(left_s, _LOOK_UP_S)):
                self._check_alive()
            fault = layout.read_fault(buf)
            if fault is not None:
                raise fault.exception()

    def reply_of_call(self, at: int, body_bytes: int = step_codec.LAYER_BODY_BYTES) -> tuple[int, bytes]:
        """(kind, body) of an answered layer call, whose own body had body_bytes."""
        fence()
        kind, num_bytes = layout.REPLY_TAIL.unpack_from(self._buf, at + layout.REPLY_KIND_AT)
        start = at + layout.layer_reply_at(body_bytes)
        return kind, bytes(self._buf[start : start + num_bytes])

    def copy_out(self, at: int, num_rows: int, flags: int, target_ptr: int) -> None:
        """The result rows of an answered call with its rows in the ring, to a host address."""
        source = self._base + at + self._maps[num_rows << 2 | flags][4]
        _memmove(target_ptr, source, num_rows * self.spec.hidden * 2)

    def end_call(self, at: int) -> None:
        """Give its place back: at once if it is answered, else as soon as it will be."""
        if self._buf[at] == _REPLIED:
            self._free_calls.append(at)
        else:
            self._abandoned.append(at)

    # ------------------------------------------------------------------------------ control messages

    def send(self, request: IntentRequest | CloseRequest) -> int:
        """Publish a control message; returns its record's place. Raises OverloadedError when all are in flight."""
        if not self._free_controls:
            self._reclaim()
        if not self._free_controls:
            raise OverloadedError(
                "a control message must find a free slot in its ring (ring_slots), got none"
            )
        kind, body = codec.encode_request(request)
        at = self._free_controls.pop()
        number, buf = self._number, self._buf
        _pack_record(buf, at, _SUBMITTED, kind, number, _now_ns(), len(body), 0, 0, 0, 0)
        buf[at + _ALIGN : at + _ALIGN + len(body)] = body
        self._publish(at, number, control=True)
        return at

    def reply_of_control(self, at: int) -> tuple[int, bytes]:
        """(kind, body) of an answered control message."""
        fence()
        kind, num_bytes = layout.REPLY_TAIL.unpack_from(self._buf, at + layout.REPLY_KIND_AT)
        start = at + _ALIGN + layout.CONTROL_BODY_BYTES
        return kind, bytes(self._buf[start : start + num_bytes])

    def end_control(self, at: int) -> None:
        """Give its slot back, now or when it is answered."""
        if self._buf[at] == _REPLIED:
            self._free_controls.append(at)
        else:
            self._abandoned.append(at)

    def _reclaim(self) -> None:
        still: list[int] = []
        for at in self._abandoned:
            if self._buf[at] != _REPLIED:
                still.append(at)
            elif at >= self.spec.bulk_at:
                self._free_calls.append(at)
            else:
                self._free_controls.append(at)
        self._abandoned = still

    def close(self) -> None:
        """Let go of the ring. Safe to call twice."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
            self._segment.close()
