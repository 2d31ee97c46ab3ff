"""One request in a ring as the step loop sees it: views of its tensors, checked where a caller wrote them.

See consumer.py for who makes records and what is believed of them.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from megamoe import MX_BLOCK, HostIds, MoeBatch, MoeShape, SharedSegment
from megamoe.errors import InvalidArgumentError, must_be
from service.messages import ErrorReply, LayerReply, Reply, Request
from service.ring import codec, layout, step_codec
from service.ring.layout import LayerMap, RingSpec
from service.ring.lent import LentMemory

if TYPE_CHECKING:
    from service.ring.consumer import RingConsumer


_memmove = ctypes.memmove
_MOST_BATCHES = 16


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

    __slots__ = ("_batches", "_copy", "_host_ids", "ids", "out", "own_ids", "rows", "sf", "weights")

    def __init__(
        self,
        views: TypedViews,
        spec: RingSpec,
        start: int,
        where: LayerMap,
        rows: int,
        flags: int,
        own_ids: torch.Tensor | None,
    ) -> None:
        """own_ids: [rows, num_topk] int32 of this process alone, for `checked`."""
        view, mxfp8 = views.at, bool(flags & layout.FLAG_MXFP8)
        self.ids = view(start + where.ids_at, rows, spec.num_topk, torch.int32)
        self.weights = view(start + where.weights_at, rows, spec.num_topk, torch.float32)
        self.own_ids = torch.empty_like(self.ids) if own_ids is None else own_ids
        self._host_ids = HostIds(self.own_ids)
        self._batches: dict[int, MoeBatch] = {}
        """By the id of their rows, which they keep: callers with rows in memory of theirs use few places in turn."""
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

    def checked(self, shape: MoeShape, x: torch.Tensor, sf: torch.Tensor | None) -> MoeBatch:
        """The batch of a caller's rows with the ids as they are now. Holds until the place's next record.

        Raises InvalidArgumentError for ids that are none. They are copied to where no other process can change them
        before they are checked.
        """
        _memmove(*self._copy)
        self._host_ids.check(shape)
        batch = self._batches.get(id(x))
        if batch is None or batch.hidden_states is not x or batch.hidden_states_sf is not sf:
            batch = MoeBatch(x, self.own_ids, self.weights, sf)
            if len(self._batches) == _MOST_BATCHES:
                self._batches.clear()
            self._batches[id(x)] = batch
        return batch

    def forget_batches(self) -> None:
        """Let go of rows in memory of the caller."""
        self._batches.clear()


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
        self._head: step_codec.LayerHead | None = None
        self._batch: MoeBatch | None = None
        self._out: torch.Tensor | None = None
        self._in_use: tuple[LentMemory, LentMemory] | None = None
        at = offset + layout.RECORD_ALIGN
        # Copied, so that nobody changes it between a check and its use.
        self._body = bytes(consumer.buf[at : at + body_bytes])
        self._reply_at = (
            offset + layout.layer_reply_at(body_bytes)
            if self.kind == codec.LAYER
            else at + layout.CONTROL_BODY_BYTES
        )

    def layer_head(self) -> step_codec.LayerHead:
        """A layer call without its tensors; its refusal says what is wrong with them.

        Raises InvalidArgumentError for a body that is no call.
        """
        if self._head is None:
            in_memory = bool(self._flags & layout.FLAG_IN_MEMORY)
            head = self._head = step_codec.decode_layer(self._body, in_memory=in_memory)
            if self._consumer.caller_shape is not None:
                try:
                    self._check_call(head, self._consumer.caller_shape)
                except InvalidArgumentError as error:
                    self.num_rows = 0
                    head.refusal = error.code, str(error)
        return self._head

    def _check_call(self, head: step_codec.LayerHead, shape: MoeShape) -> None:
        """The rows of a caller's record. Raises InvalidArgumentError naming what is wrong with them."""
        consumer, flags, rows = self._consumer, self._flags, self.num_rows
        if head.refusal is not None:
            self.num_rows = 0
            if head.refusal[0] != InvalidArgumentError.code:
                wanted = f"{InvalidArgumentError.code!r}, a caller's own"
                raise InvalidArgumentError(must_be("code of a refusal", wanted, repr(head.refusal[0][:64])))
            return
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
        self._batch = views.checked(shape, x, sf)

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
                given = reply.hidden_states
                if given is not out and given.data_ptr() != out.data_ptr():
                    out.copy_(given)
        kind, body = codec.encode_reply(reply)
        if len(body) > limit:
            too_long = f"reply of {len(body)} bytes does not fit {limit}: this is a bug"
            kind, body = codec.encode_reply(ErrorReply(code="internal", message=too_long))
        consumer.complete(self._offset, kind, self._reply_at, body)
        if self._in_use is not None:
            for memory in self._in_use:
                memory.release()
            self._in_use = None
