"""One request in a ring as the step loop sees it: views of its tensors, checked where a caller wrote them.

See consumer.py for who makes records and what is believed of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from megamoe import MX_BLOCK, HostIds, MoeBatch, MoeShape, SharedSegment
from megamoe.errors import InvalidArgumentError, must_be
from service.messages import ErrorReply, LayerReply, Reply, Request
from service.ring import codec, layout, step_codec
from service.ring.layout import LayerMap, RingSpec
from service.ring.lent import LentMemory

if TYPE_CHECKING:
    from service.ring.consumer import RingConsumer


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

    __slots__ = ("_host_ids", "_own", "_theirs", "ids", "out", "own_ids", "rows", "sf", "weights")

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
        """own_ids: [rows, num_topk] int32 of this process alone, for `take_ids`."""
        view, mxfp8 = views.at, bool(flags & layout.FLAG_MXFP8)
        self.ids = view(start + where.ids_at, rows, spec.num_topk, torch.int32)
        self.weights = view(start + where.weights_at, rows, spec.num_topk, torch.float32)
        self.own_ids = torch.empty_like(self.ids) if own_ids is None else own_ids
        self._host_ids = HostIds(self.own_ids)
        self._own, self._theirs = _bytes_of(self.own_ids), _bytes_of(self.ids)
        self.rows: torch.Tensor | None = None
        self.sf: torch.Tensor | None = None
        self.out: torch.Tensor | None = None
        if not flags & layout.FLAG_IN_MEMORY:
            dtype = torch.uint8 if mxfp8 else torch.bfloat16
            self.rows = view(start + where.hidden_at, rows, spec.hidden, dtype)
            self.out = view(start + where.out_at, rows, spec.hidden, torch.bfloat16)
            if mxfp8:
                self.sf = view(start + where.sf_at, rows, spec.hidden // MX_BLOCK, torch.uint8)

    def take_ids(self, shape: MoeShape) -> None:
        """A caller's ids into own_ids, where no other process can change them, and only then checked.

        They hold until the place's next record. Raises InvalidArgumentError for ids that are none.
        """
        self._own[:] = self._theirs
        self._host_ids.check(shape)


class ReadyCall(NamedTuple):
    """All that a caller's call names, as its ring keeps it for the next one that names the same. memories: where its
    rows and its result lie."""

    views: CallViews
    batch: MoeBatch
    out: torch.Tensor | None
    memories: tuple[LentMemory, ...]


class Record:
    """One request as the step loop sees it: views until `reply`, which must be called exactly once."""

    __slots__ = (
        "_batch",
        "_body",
        "_consumer",
        "_flags",
        "_head",
        "_memories",
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
        self._memories: tuple[LentMemory, ...] = ()
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
        key = self._offset, rows, flags, head.lease_serial, head.places
        ready = consumer.ready_calls.get(key)
        if ready is None:
            ready = self._make_ready(head, shape)
            consumer.keep_ready(key, ready)
        ready.views.take_ids(shape)
        for memory in ready.memories:
            memory.use()
        _, self._batch, self._out, self._memories = ready

    def _make_ready(self, head: step_codec.LayerHead, shape: MoeShape) -> ReadyCall:
        """Raises InvalidArgumentError naming what of its places cannot be."""
        consumer, flags, rows = self._consumer, self._flags, self.num_rows
        views = consumer.views_of(self._offset, rows, flags)
        if views.rows is not None:
            return ReadyCall(
                views, MoeBatch(views.rows, views.own_ids, views.weights, views.sf), views.out, ()
            )
        assert head.places is not None
        mxfp8 = bool(flags & layout.FLAG_MXFP8)
        x, sf, out, memories = consumer.lent.rows(head.places, head.lease_serial, rows, shape.hidden, mxfp8)
        return ReadyCall(views, MoeBatch(x, views.own_ids, views.weights, sf), out, memories)

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
        for memory in self._memories:
            memory.release()
        self._memories = ()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Of a contiguous one on the host."""
    return tensor.view(torch.uint8).view(-1).numpy().data
