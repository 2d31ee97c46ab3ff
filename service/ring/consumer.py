"""The rank's side of a request ring: records as views, answered in place.

Owns the segment of the ring, which it creates and unlinks. What this service's own processes publish is trusted, except
sizes that are derived here from the row count. A ring of a caller (`caller_shape` given) is memory of another process:
nothing in it is believed. What cannot be a record ends the ring (`fault`); what is a record and wrong is answered or,
in a layer call, becomes the call's refusal, so that all ranks answer it. See ring.py for the calling side and layout.py
for the bytes.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

import torch

from megamoe import MoeShape, SharedSegment, fence, full_fence
from megamoe.errors import InvalidArgumentError, must_be
from service.ring import codec, layout, step_codec
from service.ring.layout import RingSpec
from service.ring.lent import LentTable
from service.ring.record import CallViews, ReadyCall, Record, TypedViews

_OWN_PLACES, _OWN_ROWS = 16, 512
"""Places and rows of calls whose ids are copied into memory that a device reaches; ids of others take one copy more."""
_MOST_KEPT = 512
"""Sets of views, and calls with all that they name, that are kept for the next one in the same place."""
_unpack_head, _unpack_descriptor = layout.RECORD_HEAD.unpack_from, layout.DESCRIPTOR.unpack_from


def ring_name(group_name: str, rank: int, ring_idx: int) -> str:
    """Segment of ring ring_idx of a rank: 0 = the rank's own servicer, 1 = the front, later ones co-located callers."""
    return f"{group_name}-ring-{rank}-{ring_idx}"


class RingConsumer:
    """The rank's side of a ring: made, polled and answered by the step loop; unlinked with the rank.

    caller_shape: given for the ring of a co-located caller, against which its calls are checked. fault: why such a ring
    is read no more. lent: memory that its calls may name. on_close: what undoes what was done to its memory.
    """

    def __init__(self, segment: SharedSegment, spec: RingSpec, caller_shape: MoeShape | None = None) -> None:
        self.segment = segment
        self.buf = segment.buf
        self.spec = spec
        self.caller_shape = caller_shape
        self.ready_calls: dict[tuple[object, ...], ReadyCall] = {}
        """Of a caller: by their place in the ring, rows, flags, lease and places in lent memory."""
        self.lent = LentTable(self.ready_calls.clear)
        self.no_rows = torch.empty((0, spec.hidden), dtype=torch.bfloat16)
        self.fault: InvalidArgumentError | None = None
        self.on_close: Callable[[], None] = _nothing
        self.num_open = 0
        """Records taken and not answered."""
        self._typed = TypedViews(segment)
        self._own_slots: dict[int, int] = {}
        self._own_ids: torch.Tensor | None = None
        if caller_shape is not None:
            columns = min(spec.max_rows, _OWN_ROWS) * spec.num_topk
            pages = mmap.mmap(-1, 4 * _OWN_PLACES * columns)
            self._own_ids = torch.frombuffer(pages, dtype=torch.int32).view(_OWN_PLACES, columns)
        self._views: dict[tuple[int, int, int], CallViews] = {}
        self._published = segment.word(layout.PUBLISHED_AT)
        self._completed = segment.word(layout.COMPLETED_AT)
        self._awake = segment.word(layout.AWAKE_AT)
        self._places: dict[int, bool] = {}
        """Where a caller's records start: whether there is one that is not answered."""
        self._num_taken = self._num_completed = self._published.load()

    @classmethod
    def create(
        cls,
        group_name: str,
        rank: int,
        ring_idx: int,
        spec: RingSpec,
        *,
        first_number: int = 0,
        caller_shape: MoeShape | None = None,
    ) -> RingConsumer:
        """Allocate ring ring_idx of a rank. first_number: where the 32-bit counts start (they wrap).

        Raises HeapError when /dev/shm is short.
        """
        name = ring_name(group_name, rank, ring_idx)
        segment = SharedSegment.create(name, spec.num_bytes, prefault=caller_shape is not None)
        segment.word(layout.PUBLISHED_AT).store(first_number)
        segment.word(layout.COMPLETED_AT).store(first_number)
        segment.buf[: layout.HEAD.size] = spec.head
        return cls(segment, spec, caller_shape)

    def poll(self) -> list[Record]:
        """All requests published since the last poll, in order."""
        published = self._published.load()
        if published == self._num_taken or self.fault is not None:
            return []
        records: list[Record] = []
        if self.caller_shape is not None and (published - self._num_taken) & 0xFFFFFFFF > layout.TABLE_LEN:
            self._fail(
                must_be("requests in flight", f"at most {layout.TABLE_LEN}", published - self._num_taken)
            )
            return records
        buf = self.buf
        while self._num_taken != published:
            slot = self._num_taken % layout.TABLE_LEN
            (offset,) = _unpack_descriptor(buf, layout.TABLE_AT + slot * layout.DESCRIPTOR.size)
            if self.caller_shape is None:
                head = _unpack_head(buf, offset)
            else:
                head = self._checked_head(offset)
                if not head:
                    break
            records.append(Record(self, offset, head))
            self._num_taken = (self._num_taken + 1) & 0xFFFFFFFF
        self.num_open += len(records)
        return records

    def _checked_head(self, offset: int) -> tuple[int, ...]:
        """The head of a caller's next record; () where there is none, and then the ring is read no more."""
        is_taken = self._places.get(offset)
        wrong = layout.misplaced(self.spec, offset) if is_taken is None else ""
        head = () if wrong else _unpack_head(self.buf, offset)
        wrong = wrong or _malformed(self.spec, offset, head, self._num_taken)
        if is_taken:
            wrong = must_be("place of a record", "free: its last record is not answered", offset)
        if wrong:
            self._fail(wrong)
            return ()
        self._places[offset] = True
        return head

    def _fail(self, text: str) -> None:
        """Read no more, and say why where the producer looks."""
        self.fault = InvalidArgumentError(text)
        layout.write_fault(self.buf, self.fault.code, text)
        fence()
        self._num_completed = (self._num_completed + 1) & 0xFFFFFFFF
        self._completed.store(self._num_completed)
        self._completed.wake_all()

    def views_of(self, offset: int, rows: int, flags: int) -> CallViews:
        """The tensors of a call's record, which has no refusal (else it has no rows).

        Raises InvalidArgumentError where the ring ends before them.
        """
        key = (offset, rows, flags)
        found = self._views.get(key)
        if found is None:
            in_memory = bool(flags & layout.FLAG_IN_MEMORY)
            where = self.spec.layer_map(rows, bool(flags & layout.FLAG_MXFP8), in_memory=in_memory)
            if offset + where.num_bytes > self.spec.num_bytes:
                wanted = f"inside the ring's {self.spec.num_bytes} bytes"
                raise InvalidArgumentError(
                    must_be(
                        f"layer call of {rows} rows", wanted, f"bytes [{offset}, {offset + where.num_bytes})"
                    )
                )
            own = self._own_ids_at(offset, rows)
            found = CallViews(self._typed, self.spec, offset, where, rows, flags, own)
            if len(self._views) >= _MOST_KEPT:
                self._views.clear()
            self._views[key] = found
        return found

    def keep_ready(self, key: tuple[object, ...], call: ReadyCall) -> None:
        """For the next call of a caller that names the same. Until any of its lent memory goes."""
        if len(self.ready_calls) >= _MOST_KEPT:
            self.ready_calls.clear()
        self.ready_calls[key] = call

    def _own_ids_at(self, offset: int, rows: int) -> torch.Tensor | None:
        """Room of a place's own for a caller's ids; None where there is none left, or they are too many."""
        if self._own_ids is None or rows * self.spec.num_topk > self._own_ids.shape[1]:
            return None
        slot = self._own_slots.setdefault(offset, len(self._own_slots))
        if slot >= len(self._own_ids):
            del self._own_slots[offset]
            return None
        return self._own_ids[slot, : rows * self.spec.num_topk].view(rows, self.spec.num_topk)

    @property
    def memories(self) -> tuple[torch.Tensor, ...]:
        """What a device reads and writes of this ring, each in pages of its own."""
        segment = self.segment.bytes_u8
        return (segment,) if self._own_ids is None else (segment, self._own_ids)

    def complete(self, offset: int, kind: int, reply_offset: int, body: bytes) -> None:
        """Publish a reply: body, then state, then the count that the producer sleeps on."""
        buf = self.buf
        buf[reply_offset : reply_offset + len(body)] = body
        layout.REPLY_TAIL.pack_into(buf, offset + layout.REPLY_KIND_AT, kind, len(body))
        fence()
        buf[offset + layout.STATE_AT] = layout.STATE_REPLIED
        self.num_open -= 1
        if self.caller_shape is not None:
            self._places[offset] = False
        self._num_completed = (self._num_completed + 1) & 0xFFFFFFFF
        self._completed.store(self._num_completed)
        full_fence()
        if not self._awake.load():
            self._completed.wake_all()

    def close(self) -> None:
        """Drop and unlink the ring: producers keep their mapping until they close it. Safe to call twice."""
        on_close, self.on_close = self.on_close, _nothing
        on_close()
        self._views.clear()
        self.ready_calls.clear()
        self.segment.close()
        self.segment.unlink()


def _nothing() -> None:
    """Of a ring to which nothing was done."""


_CALLER_KINDS = (codec.INTENT, codec.LAYER, codec.CLOSE)


def _malformed(spec: RingSpec, offset: int, head: tuple[int, ...], number: int) -> str:
    """Why these bytes of a caller are no record, "" if they are one: then a reply to it stays inside the ring."""
    state, kind, said, _, body_bytes, _, _, _, _ = head
    if state != layout.STATE_SUBMITTED:
        return must_be("state of a record", f"{layout.STATE_SUBMITTED} (submitted)", state)
    if kind not in _CALLER_KINDS:
        return must_be("kind of a record", f"one of {_CALLER_KINDS} (intent, layer call, close)", kind)
    if said != number:
        return must_be("number of a record", number, said)
    is_call = offset >= spec.bulk_at
    if is_call != (kind == codec.LAYER):
        pool = "layer calls" if kind == codec.LAYER else "control messages"
        return must_be("place of a record", f"in the pool of {pool}", offset)
    most = step_codec.REFUSAL_BODY_BYTES if is_call else layout.CONTROL_BODY_BYTES
    if body_bytes > most:
        return must_be("body of a record", f"at most {most} bytes", body_bytes)
    end = offset + layout.layer_reply_at(body_bytes) + spec.layer_reply_bytes
    if is_call and end > spec.num_bytes:
        return must_be("end of a record", f"inside a ring of {spec.num_bytes} bytes", end)
    return ""
