"""Byte map of a request ring: the one place that says how large a ring is and where in a record what lies.

A ring is one shared-memory segment per rank and producer: a head page with the two words that both sides sleep on,
a table of descriptors (where each published record starts), a pool of small records for control messages and a
pool for layer calls. A record is a fixed header, the request's body, its tensors and the area reserved for the
reply, all multiples of RECORD_ALIGN. Allocates nothing.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from functools import cache, cached_property

from megamoe import MX_BLOCK, Deployment
from megamoe.errors import InvalidArgumentError, must_be
from service.messages import ErrorReply
from service.ring.codec import REPORT_BYTES
from service.ring.step_codec import LAYER_BODY_BYTES, MAX_TEXT_BYTES, REFUSAL_BODY_BYTES, cut_text

RECORD_ALIGN = 128
MAGIC = 0x4D4F4552_0002  # layout version in the low half

# Head page: who made the ring, then words on cache lines of their own.
HEAD = struct.Struct(
    "<QQQQQQQQ"
)  # magic, hidden, topk, ranks, max rows, sub-steps, control slots, bulk bytes
PUBLISHED_AT, COMPLETED_AT, AWAKE_AT, FAULT_AT, TABLE_AT = 128, 256, 320, 384, 4096
"""The two counts; whether the producer looks at them before it sleeps (then it needs no waking); and why the consumer
reads no more: bytes of a code, of a text (16 bits each), then both."""
MAX_FAULT_BYTES = 1024
FAULT_HEAD = struct.Struct("<HH")
TABLE_LEN = 512
"""Most records in flight in one ring; a power of two, so that 32-bit counts may wrap."""
DESCRIPTOR = struct.Struct("<Q")

RECORD_HEAD = struct.Struct("<IIQQIIIIQ")
"""state, kind, number, submitted_ns, body bytes, rows, flags, reply kind, reply bytes."""
FLAG_MXFP8, FLAG_IN_MEMORY = 1, 2
"""Rows are MXFP8; rows and result lie in memory that the caller lent, and the record has no room for them."""
REPLY_TAIL = struct.Struct("<IQ")
"""The last two fields of RECORD_HEAD."""
STATE_SUBMITTED, STATE_REPLIED = 1, 2
STATE_AT, REPLY_KIND_AT = 0, RECORD_HEAD.size - REPLY_TAIL.size

CONTROL_BODY_BYTES = 1024
_TEXT_REPLY_BYTES = 2 * MAX_TEXT_BYTES + 256  # JSON may escape
_PLAN_BYTES_PER_SUB_STEP = 384


def align_up(num_bytes: int, align: int = RECORD_ALIGN) -> int:
    return -(-num_bytes // align) * align


@cache
def layer_reply_at(body_bytes: int) -> int:
    """Where in the record of a layer call its reply starts. body_bytes: checked, so that few of them are remembered."""
    return RECORD_ALIGN + align_up(max(body_bytes, LAYER_BODY_BYTES))


@dataclass(frozen=True, kw_only=True)
class RingSpec:
    """Sizes of a ring, a pure function of the deployment: both sides derive the same.

    max_rows: the most rows of one layer call (max_step_rows, less for a ring whose producer is capped).
    max_sub_steps: pieces that such a call is cut into.
    num_control_slots: control messages in flight that never compete with rows for room.
    num_bulk_bytes: the pool of layer calls; it holds at least one call of max_rows.
    """

    hidden: int
    num_topk: int
    num_ranks: int
    max_rows: int
    max_sub_steps: int
    num_control_slots: int
    num_bulk_bytes: int

    @classmethod
    def of(
        cls,
        deployment: Deployment,
        *,
        max_rows: int | None = None,
        num_control_slots: int = 16,
        num_bulk_calls: int = 2,
        in_memory: bool = False,
    ) -> RingSpec:
        """The ring of a deployment: room for num_bulk_calls layer calls of max_rows (default max_step_rows).

        in_memory: for a caller whose rows always lie in memory that it lends.
        """
        shape = deployment.shape
        max_rows = min(max_rows or deployment.step_rows_limit, deployment.step_rows_limit)
        for name, value in (("num_control_slots", num_control_slots), ("num_bulk_calls", num_bulk_calls)):
            if value < 1:
                raise InvalidArgumentError(must_be(name, "at least 1", value))
        sized = cls(
            hidden=shape.hidden,
            num_topk=shape.num_topk,
            num_ranks=shape.num_ranks,
            max_rows=max_rows,
            max_sub_steps=-(-max_rows // deployment.max_tokens_per_rank),
            num_control_slots=num_control_slots,
            num_bulk_bytes=0,
        )
        # Small calls share the pool with large ones: each slot's worth of calls without rows fits beside them.
        refusal_bytes = sized.layer_map(0, False, REFUSAL_BODY_BYTES).num_bytes
        call_bytes = sized.layer_map(max_rows, False, in_memory=in_memory).num_bytes
        num_bulk_bytes = num_bulk_calls * max(call_bytes, refusal_bytes)
        num_bulk_bytes += num_control_slots * sized.layer_map(0, False).num_bytes
        return replace(sized, num_bulk_bytes=num_bulk_bytes)

    @cached_property
    def control_reply_bytes(self) -> int:
        return align_up(_TEXT_REPLY_BYTES + _PLAN_BYTES_PER_SUB_STEP * (self.max_sub_steps + 2))

    @cached_property
    def control_bytes(self) -> int:
        """One record of the control pool."""
        return RECORD_ALIGN + CONTROL_BODY_BYTES + self.control_reply_bytes

    @cached_property
    def control_at(self) -> int:
        return align_up(TABLE_AT + TABLE_LEN * DESCRIPTOR.size, 4096)

    @cached_property
    def bulk_at(self) -> int:
        return self.control_at + align_up(self.num_control_slots * self.control_bytes, 4096)

    @cached_property
    def num_bytes(self) -> int:
        """Of the whole segment."""
        return self.bulk_at + self.num_bulk_bytes

    @property
    def head(self) -> bytes:
        """What the creator writes and who attaches compares."""
        return HEAD.pack(
            MAGIC,
            self.hidden,
            self.num_topk,
            self.num_ranks,
            self.max_rows,
            self.max_sub_steps,
            self.num_control_slots,
            self.num_bulk_bytes,
        )

    @classmethod
    def from_head(cls, raw: memoryview) -> RingSpec:
        """The sizes that a ring was made with. Raises InvalidArgumentError if it is no ring of this version."""
        magic, hidden, topk, ranks, max_rows, sub_steps, slots, bulk = HEAD.unpack_from(raw)
        if magic != MAGIC:
            raise InvalidArgumentError(must_be("ring magic", hex(MAGIC), hex(magic)))
        return cls(
            hidden=hidden,
            num_topk=topk,
            num_ranks=ranks,
            max_rows=max_rows,
            max_sub_steps=sub_steps,
            num_control_slots=slots,
            num_bulk_bytes=bulk,
        )

    @cached_property
    def layer_reply_bytes(self) -> int:
        """Room for the reply of a layer call, without its rows."""
        return align_up(max(64 + REPORT_BYTES * self.max_sub_steps, _TEXT_REPLY_BYTES))

    def layer_map(
        self, num_rows: int, mxfp8: bool, body_bytes: int = 0, *, in_memory: bool = False
    ) -> LayerMap:
        """Where the parts of a layer call's record lie, relative to its start: the reply first, because its place must
        not depend on how many rows a record claims to have."""
        at = reply_at = layer_reply_at(body_bytes)
        at += self.layer_reply_bytes
        rows_in_record = 0 if in_memory else num_rows
        hidden_at = at
        at += align_up(rows_in_record * self.hidden * (1 if mxfp8 else 2))
        sf_at = at
        at += align_up(rows_in_record * (self.hidden // MX_BLOCK)) if mxfp8 else 0
        ids_at = at
        at += align_up(num_rows * self.num_topk * 4)
        weights_at = at
        at += align_up(num_rows * self.num_topk * 4)
        out_at = at
        at += align_up(rows_in_record * self.hidden * 2)
        return LayerMap(reply_at, hidden_at, sf_at, ids_at, weights_at, out_at, at)


@dataclass(frozen=True, slots=True)
class LayerMap:
    """Offsets inside the record of one layer call."""

    reply_at: int
    hidden_at: int
    sf_at: int
    ids_at: int
    weights_at: int
    out_at: int
    num_bytes: int


def misplaced(spec: RingSpec, offset: int) -> str:
    """Why no record can start there, "" if one can."""
    if offset % RECORD_ALIGN:
        return must_be("place of a record", f"a multiple of {RECORD_ALIGN}", offset)
    in_control = spec.control_at <= offset < spec.control_at + spec.num_control_slots * spec.control_bytes
    if in_control:
        aligned = (offset - spec.control_at) % spec.control_bytes == 0
        return "" if aligned else must_be("place of a control message", "the start of a slot", offset)
    least = RECORD_ALIGN + align_up(LAYER_BODY_BYTES) + spec.layer_reply_bytes
    if spec.bulk_at <= offset <= spec.num_bytes - least:
        return ""
    return must_be("place of a record", f"inside the pools of a ring of {spec.num_bytes} bytes", offset)


def write_fault(buf: memoryview, code: str, text: str) -> None:
    """Say why a ring is read no more; the lengths last."""
    raw = code.encode(), cut_text(text, MAX_FAULT_BYTES - 64)
    at = FAULT_AT + FAULT_HEAD.size
    buf[at : at + len(raw[0]) + len(raw[1])] = raw[0] + raw[1]
    FAULT_HEAD.pack_into(buf, FAULT_AT, len(raw[0]), len(raw[1]))


def read_fault(buf: memoryview) -> ErrorReply | None:
    """Why the ring is read no more, None if it is."""
    code_len, text_len = FAULT_HEAD.unpack_from(buf, FAULT_AT)
    if not code_len:
        return None
    at = FAULT_AT + FAULT_HEAD.size
    code, text = bytes(buf[at : at + code_len]), bytes(buf[at + code_len : at + code_len + text_len])
    return ErrorReply(code=code.decode(), message=text.decode())
