"""The rank's side of a request ring: records as views, answered in place.

Owns the segment of the ring, which it creates and unlinks. What this service's own processes publish is trusted, except
sizes that are derived here from the row count. A ring of a caller (`caller_shape` given) is memory of another process:
nothing in it is believed. What cannot be a record ends the ring (`fault`); what is a record and wrong is answered or,
in a layer call, becomes the call's refusal, so that all ranks answer it. See ring.py for the calling side and layout.py
for the bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from megamoe import MX_BLOCK, MoeBatch, MoeShape, SharedSegment, fence, full_fence
from megamoe.errors import InvalidArgumentError, must_be
from service.messages import ErrorReply, LayerReply, Reply, Request
from service.ring import codec, layout
from service.ring.layout import LayerMap, RingSpec
from service.ring.lent import LentMemory, LentTable

_MOST_VIEWS = 512
"""Sets of views that are kept for the next call in the same place with as many rows."""


def ring_name(group_name: str, rank: int, ring_idx: int) -> str:
    """Segment of ring ring_idx of a rank: 0 = the rank's own servicer, 1 = the front, later ones co-located callers."""
    return f"{group_name}-ring-{rank}-{ring_idx}"


class TypedViews:
    """Typed views of one segment: one strided call per tensor, 64-bit offsets."""

    def __init__(self, segment: SharedSegment) -> None:
        self._bases = {
            dtype: segment.bytes_u8.view(dtype)
            for dtype in (torch.uint8, torch.bfloat16, torch.int32, torch.float32)
        }

    def at(self, offset: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        return self._bases[dtype].as_strided((rows, columns), (columns, 1), offset // dtype.itemsize)


class CallViews:
    """The tensors of one place in the ring. rows: None where they lie in lent memory, as do scales and out."""

    __slots__ = ("_copy", "ids", "out", "own_ids", "rows", "sf", "weights")

    def __init__(self, views: TypedViews, spec: RingSpec, start: int, where: LayerMap, rows: int, flags: int):
        view, mxfp8 = views.at, bool(flags & layout.FLAG_MXFP8)
        self.ids = view(start + where.ids_at, rows, spec.num_topk, torch.int32)
        self.weights = view(start + where.weights_at, rows, spec.num_topk, torch.float32)
        self.own_ids = torch.empty_like(self.ids)
        self._copy = self.own_ids.data_ptr(), self.ids.data_ptr(), 4 * rows * spec.num_topk
        self.rows: torch.Tensor | None = None
        self.sf: torch.Tensor | None = None
        self.out: torch.Tensor | None = None
        if not flags & layout.FLAG_IN_MEMORY:
            dtype = torch.uint8 if mxfp8 else torch.bfloat16
            self.rows = view(start + where.hidden_at, rows, spec.hidden, dtype)
            self.out = view(start + where.out_at, rows, spec.hidden, torch.bfloat16)
            if mxfp8:
                self.sf = view(start + where.sf_at, rows, spec.hidden // MX_BLOCK, torch.uint8)

    def copy_ids(self) -> torch.Tensor:
        """The ids as they are now, where no other process can change them. Holds until the place's next record."""
        ctypes.memmove(*self._copy)
        return self.own_ids


class Record:
    """One request as the step loop sees it: views until `reply`, which must be called exactly once."""

    __slots__ = (
        "_batch",
        "_body",
        "_consumer",
        "_flags",
        "_head",
        "_in_use",
        "_offset",
        "_out",
        "_reply_at",
        "kind",
        "num_rows",
        "replied",
        "submitted_ns",
    )

    def __init__(self, consumer: RingConsumer, offset: int, head: tuple[int, ...]) -> None:
        _, self.kind, _, self.submitted_ns, body_bytes, self.num_rows, self._flags, _, _ = head
        self._consumer = consumer
        self._offset = offset
        self.replied = False
        self._head: codec.LayerHead | None = None
        self._batch: MoeBatch | None = None
        self._out: torch.Tensor | None = None
        self._in_use: tuple[LentMemory, LentMemory] | None = None
        at = offset + layout.RECORD_ALIGN
        # Copied, so that nobody changes it between a check and its use.
        self._body = bytes(consumer.buf[at : at + body_bytes])
        self._reply_at = at + (
            layout.align_up(max(body_bytes, codec.LAYER_BODY_BYTES))
            if self.kind == codec.LAYER
            else layout.CONTROL_BODY_BYTES
        )

    def layer_head(self) -> codec.LayerHead:
        """A layer call without its tensors; its refusal says what is wrong with them.

        Raises InvalidArgumentError for a body that is no call.
        """
        if self._head is None:
            in_memory = bool(self._flags & layout.FLAG_IN_MEMORY)
            head = self._head = codec.decode_layer(self._body, in_memory=in_memory)
            if self._consumer.caller_shape is not None:
                try:
                    self._check_call(head, self._consumer.caller_shape)
                except InvalidArgumentError as error:
                    self.num_rows = 0
                    head.refusal = error.code, str(error)
        return self._head

    def _check_call(self, head: codec.LayerHead, shape: MoeShape) -> None:
        """The rows of a caller's record. Raises InvalidArgumentError naming what is wrong with them."""
        consumer, flags, rows = self._consumer, self._flags, self.num_rows
        if head.refusal is not None:
            raise InvalidArgumentError(
                must_be("refusal of a layer call", "none: ranks refuse", head.refusal[0][:64])
            )
        if flags & ~(layout.FLAG_MXFP8 | layout.FLAG_IN_MEMORY):
            raise InvalidArgumentError(must_be("flags of a layer call", "below 4", flags))
        if rows > consumer.spec.max_rows:
            raise InvalidArgumentError(
                must_be(
                    "rows of a layer call", f"at most {consumer.spec.max_rows} (max_rows of its ring)", rows
                )
            )
        if not rows:
            return
        views = consumer.views_of(self._offset, rows, flags)
        if views.rows is not None:
            x, sf, self._out = views.rows, views.sf, views.out
        else:
            assert head.places is not None
            mxfp8 = bool(flags & layout.FLAG_MXFP8)
            x, sf, self._out, self._in_use = consumer.lent.rows(
                head.places, head.lease_serial, rows, shape.hidden, mxfp8
            )
        # The ids are copied before they are checked: the caller could change them afterwards.
        self._batch = MoeBatch.of_views(shape, x, views.copy_ids(), views.weights, sf)

    def request(self) -> Request:
        """A control message. Raises InvalidArgumentError for one that is none."""
        return codec.decode_request(self.kind, self._body)

    @property
    def dtype_name(self) -> str:
        """Wire dtype of the rows."""
        return "mxfp8" if self._flags & layout.FLAG_MXFP8 else "bfloat16"

    def batch(self) -> MoeBatch:
        """The rows of a layer call as views; validated, here or by the producer."""
        if self._batch is None:
            views = self._consumer.views_of(self._offset, self.num_rows, self._flags)
            assert views.rows is not None, "a caller's call is checked first: this is a bug"
            self._batch = MoeBatch(views.rows, views.ids, views.weights, views.sf)
            self._out = views.out
        return self._batch

    def out(self) -> torch.Tensor:
        """Where the result rows go: [n, hidden] bf16, inside the record or in the caller's memory."""
        if not self.num_rows:
            return self._consumer.no_rows
        if self._out is None:
            self.batch()
        assert self._out is not None
        return self._out

    def reply(self, reply: Reply) -> None:
        """Answer and wake the producer. Rows of a LayerReply are copied unless they are `out` already."""
        assert not self.replied, "a record is answered once: this is a bug"
        self.replied = True
        consumer = self._consumer
        limit = consumer.spec.control_reply_bytes
        if self.kind == codec.LAYER:
            limit = consumer.spec.layer_reply_bytes
            if isinstance(reply, LayerReply) and self.num_rows:
                out = self.out()
                if reply.hidden_states.data_ptr() != out.data_ptr():
                    out.copy_(reply.hidden_states)
        kind, body = codec.encode_reply(reply)
        if len(body) > limit:
            too_long = f"reply of {len(body)} bytes does not fit {limit}: this is a bug"
            kind, body = codec.encode_reply(ErrorReply(code="internal", message=too_long))
        consumer.complete(self._offset, kind, self._reply_at, body)
        if self._in_use is not None:
            for memory in self._in_use:
                memory.release()
            self._in_use = None


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
        self.lent = LentTable()
        self.no_rows = torch.empty((0, spec.hidden), dtype=torch.bfloat16)
        self.fault: InvalidArgumentError | None = None
        self.on_close: Callable[[], None] = _nothing
        self.num_open = 0
        """Records taken and not answered."""
        self._typed = TypedViews(segment)
        self._views: dict[tuple[int, int, int], CallViews] = {}
        self._published = segment.word(layout.PUBLISHED_AT)
        self._completed = segment.word(layout.COMPLETED_AT)
        self._awake = segment.word(layout.AWAKE_AT)
        self._places: set[int] = set()
        self._taken: set[int] = set()
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
        while self._num_taken != published:
            slot = self._num_taken % layout.TABLE_LEN
            (offset,) = layout.DESCRIPTOR.unpack_from(
                self.buf, layout.TABLE_AT + slot * layout.DESCRIPTOR.size
            )
            if self.caller_shape is not None:
                wrong = "" if offset in self._places else layout.misplaced(self.spec, offset)
                head = layout.RECORD_HEAD.unpack_from(self.buf, offset) if not wrong else ()
                wrong = wrong or _malformed(self.spec, offset, head, self._num_taken)
                if offset in self._taken:
                    wrong = must_be("place of a record", "free: its last record is not answered", offset)
                if wrong:
                    self._fail(wrong)
                    break
                self._places.add(offset)
                self._taken.add(offset)
            else:
                head = layout.RECORD_HEAD.unpack_from(self.buf, offset)
            records.append(Record(self, offset, head))
            self._num_taken = (self._num_taken + 1) & 0xFFFFFFFF
        self.num_open += len(records)
        return records

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
            found = CallViews(self._typed, self.spec, offset, where, rows, flags)
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            self._views[key] = found
        return found

    def complete(self, offset: int, kind: int, reply_offset: int, body: bytes) -> None:
        """Publish a reply: body, then state, then the count that the producer sleeps on."""
        buf = self.buf
        buf[reply_offset : reply_offset + len(body)] = body
        layout.REPLY_TAIL.pack_into(buf, offset + layout.REPLY_KIND_AT, kind, len(body))
        fence()
        buf[offset + layout.STATE_AT] = layout.STATE_REPLIED
        self.num_open -= 1
        self._taken.discard(offset)
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
        self.segment.close()
        self.segment.unlink()


def _nothing() -> None:
    """Of a ring to which nothing was done."""


_CALLER_KINDS = (codec.INTENT, codec.LAYER, codec.CLOSE)


def _malformed(spec: RingSpec, offset: int, head: tuple[int, ...], number: int) -> str:
    """Why these bytes of a caller are no record, "" if they are one: then a reply to it stays inside the ring."""
    state, kind, said, _, body_bytes, *_ = head
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
    most = codec.LAYER_BODY_BYTES if is_call else layout.CONTROL_BODY_BYTES
    if body_bytes > most:
        return must_be("body of a record", f"at most {most} bytes", body_bytes)
    return ""
