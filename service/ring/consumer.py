"""The rank's side of a request ring: records as views, answered in place.

Owns the segment of the ring, which it creates and unlinks. Trusts what the producer published, except sizes that it
derives itself from the row count. See ring.py for the calling side and layout.py for the bytes.
"""

from __future__ import annotations

import torch

from megamoe import MX_BLOCK, MoeBatch, SharedSegment, fence
from service.messages import ErrorReply, LayerReply, Reply, Request
from service.ring import codec, layout
from service.ring.layout import RingSpec


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


class Record:
    """One request as the step loop sees it: views until `reply`, which must be called exactly once."""

    __slots__ = (
        "_body_bytes",
        "_consumer",
        "_map",
        "_mxfp8",
        "_offset",
        "kind",
        "num_rows",
        "replied",
        "submitted_ns",
    )

    def __init__(self, consumer: RingConsumer, offset: int) -> None:
        head = layout.RECORD_HEAD.unpack_from(consumer.buf, offset)
        self._consumer = consumer
        self._offset = offset
        self.kind: int = head[1]
        self.submitted_ns: int = head[3]
        self._body_bytes: int = head[4]
        self.num_rows: int = head[5]
        self._mxfp8 = bool(head[6])
        self.replied = False
        self._map = (
            consumer.spec.layer_map(self.num_rows, self._mxfp8, self._body_bytes)
            if self.kind == codec.LAYER
            else None
        )

    @property
    def _body(self) -> memoryview:
        at = self._offset + layout.RECORD_ALIGN
        return self._consumer.buf[at : at + self._body_bytes]

    def layer_head(self) -> codec.LayerHead:
        """A layer call without its tensors."""
        return codec.decode_layer(self._body)

    def request(self) -> Request:
        """A control message."""
        return codec.decode_request(self.kind, self._body)

    @property
    def dtype_name(self) -> str:
        """Wire dtype of the rows."""
        return "mxfp8" if self._mxfp8 else "bfloat16"

    def batch(self) -> MoeBatch:
        """The rows of a layer call as views. The producer validated them."""
        spec, where, start, rows = self._consumer.spec, self._map, self._offset, self.num_rows
        assert where is not None
        view = self._consumer.views.at
        return MoeBatch(
            view(start + where.hidden_at, rows, spec.hidden, torch.uint8 if self._mxfp8 else torch.bfloat16),
            view(start + where.ids_at, rows, spec.num_topk, torch.int32),
            view(start + where.weights_at, rows, spec.num_topk, torch.float32),
            view(start + where.sf_at, rows, spec.hidden // MX_BLOCK, torch.uint8) if self._mxfp8 else None,
        )

    def out(self) -> torch.Tensor:
        """Where the result rows go: [n, hidden] bf16, inside the record."""
        assert self._map is not None
        return self._consumer.views.at(
            self._offset + self._map.out_at, self.num_rows, self._consumer.spec.hidden, torch.bfloat16
        )

    def reply(self, reply: Reply) -> None:
        """Answer and wake the producer. Rows of a LayerReply are copied unless they are `out` already."""
        assert not self.replied, "a record is answered once: this is a bug"
        self.replied = True
        consumer = self._consumer
        if self._map is not None:
            reply_offset = self._offset + self._map.reply_at
            limit = self._map.out_at - self._map.reply_at
            if isinstance(reply, LayerReply) and self.num_rows:
                out = self.out()
                if reply.hidden_states.data_ptr() != out.data_ptr():
                    out.copy_(reply.hidden_states)
        else:
            reply_offset = self._offset + layout.RECORD_ALIGN + layout.CONTROL_BODY_BYTES
            limit = consumer.spec.control_reply_bytes
        kind, body = codec.encode_reply(reply)
        if len(body) > limit:
            too_long = f"reply of {len(body)} bytes does not fit {limit}: this is a bug"
            kind, body = codec.encode_reply(ErrorReply(code="internal", message=too_long))
        consumer.complete(self._offset, kind, reply_offset, body)


class RingConsumer:
    """The rank's side of a ring: made, polled and answered by the step loop; unlinked with the rank."""

    def __init__(self, segment: SharedSegment) -> None:
        self._segment = segment
        self.buf = segment.buf
        self.spec = RingSpec.from_head(segment.buf)
        self.views = TypedViews(segment)
        self._published = segment.word(layout.PUBLISHED_AT)
        self._completed = segment.word(layout.COMPLETED_AT)
        self._num_taken = self._published.load()

    @classmethod
    def create(
        cls, group_name: str, rank: int, ring_idx: int, spec: RingSpec, *, first_number: int = 0
    ) -> RingConsumer:
        """Allocate ring ring_idx of a rank. first_number: where the 32-bit counts start (they wrap).

        Raises HeapError when /dev/shm is short.
        """
        segment = SharedSegment.create(ring_name(group_name, rank, ring_idx), spec.num_bytes)
        segment.word(layout.PUBLISHED_AT).store(first_number)
        segment.word(layout.COMPLETED_AT).store(first_number)
        segment.buf[layout.HEAD.size : layout.HEAD.size + 8] = bytes(8)
        segment.buf[: layout.HEAD.size] = spec.head
        return cls(segment)

    def poll(self) -> list[Record]:
        """All requests published since the last poll, in order."""
        published = self._published.load()
        if published == self._num_taken:
            return []
        records = []
        while self._num_taken != published:
            slot = self._num_taken % layout.TABLE_LEN
            (offset,) = layout.DESCRIPTOR.unpack_from(
                self.buf, layout.TABLE_AT + slot * layout.DESCRIPTOR.size
            )
            records.append(Record(self, offset))
            self._num_taken = (self._num_taken + 1) & 0xFFFFFFFF
        return records

    def complete(self, offset: int, kind: int, reply_offset: int, body: bytes) -> None:
        """Publish a reply: body, then state, then the count that the producer sleeps on."""
        buf = self.buf
        buf[reply_offset : reply_offset + len(body)] = body
        layout.REPLY_TAIL.pack_into(buf, offset + layout.REPLY_KIND_AT, kind, len(body))
        fence()
        buf[offset + layout.STATE_AT] = layout.STATE_REPLIED
        self._completed.store(self._completed.load() + 1)
        self._completed.wake_all()

    def close(self) -> None:
        """Drop and unlink the ring: producers keep their mapping until they close it. Safe to call twice."""
        self._segment.close()
        self._segment.unlink()
