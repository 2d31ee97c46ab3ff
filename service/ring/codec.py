"""Requests and replies of messages.py <-> bytes of a ring record. Knows no shared memory and no positions.

What callers send in a step (IntentRequest, LayerRequest, CloseRequest) and LayerReply are fixed structs: any bytes of a
foreign process decode into values of the right types or into an InvalidArgumentError. The others, which only this
service's own processes send, are JSON. Tensors are not here: a record says how many rows it has, whether they are
MXFP8 and whether they lie in lent memory; ring.py lays them out.
Refuses integers that do not fit their field with an InvalidArgumentError that names it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

from megamoe import (
    Counters,
    Path,
    PathPolicy,
    Phase,
    PlanId,
    RowFormat,
    StageTimes,
    StepPlan,
    SubStep,
    SubStepReport,
)
from megamoe.errors import InternalError, InvalidArgumentError, must_be
from service.messages import (
    CloseRequest,
    DoneReply,
    DrainRequest,
    ErrorReply,
    IntentRequest,
    LayerReply,
    LayerRequest,
    LeaseReply,
    LeaseRequest,
    PlanReply,
    PolicyRequest,
    Reply,
    Request,
)

Buffer = bytes | memoryview

LEASE, INTENT, LAYER, CLOSE, POLICY, DRAIN = range(1, 7)
"""Kinds of requests; a reply has the kind of what it is, which the request does not fix (ErrorReply)."""
R_LEASE, R_PLAN, R_LAYER, R_DONE, R_ERROR = range(1, 6)

MAX_TEXT_BYTES = 1000
"""Sentences longer than this are cut: a record's reply area is reserved before the reply is known."""

LAYER_HEAD = struct.Struct("<QQQIqQHH")  # lease, generation, step, micro-batch, layer, sequence, code, text
PLACES = struct.Struct("<IIQQQ")
"""Behind LAYER_HEAD of a call whose rows lie in lent memory: memory of rows, of out; offset of rows, scales, out."""
LAYER_BODY_BYTES = 128
"""Of a layer call without a refusal, which has room for more."""
_CLOSE = struct.Struct("<QQQI")  # lease, generation, step, micro-batch
_INTENT = struct.Struct("<QQQIqBBBB8qdHHH")
"""lease, generation, step, micro-batch, rows, phase, has counts, number of counts, has a timeout, counts, timeout;
bytes of dtype, of a refusal's code, of its text, which follow."""
_MAX_INTENT_TEXT_BYTES = 600
LAYER_REPLY_HEAD = struct.Struct("<ddI")
_REPORT = struct.Struct("<BI8I8B8Q7d")  # path, capacity, rows per rank, formats per rank, counters, times
REPORT_BYTES = _REPORT.size

_PHASES = tuple(Phase)
_PHASE_IDX = {phase: idx for idx, phase in enumerate(_PHASES)}
_PATHS = tuple(Path)
_FORMATS = tuple(RowFormat)
_PATH_IDX = {path: idx for idx, path in enumerate(_PATHS)}
_FORMAT_IDX = {row_format: idx for idx, row_format in enumerate(_FORMATS)}
_MAX_RANKS = 8


def cut_text(text: str, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """UTF-8 of text, cut to max_bytes at a character."""
    raw = text.encode()
    return raw if len(raw) <= max_bytes else raw[:max_bytes].decode(errors="ignore").encode()


class LayerHead:
    """The part of a LayerRequest that is not tensors. places: (memory of rows, of out, offset of rows, of scales, of
    out) of a call whose rows lie in lent memory."""

    __slots__ = ("layer_idx", "lease_serial", "places", "plan_id", "refusal", "sequence")

    def __init__(
        self,
        lease_serial: int,
        plan_id: PlanId,
        layer_idx: int,
        sequence: int,
        refusal: tuple[str, str] | None,
        places: tuple[int, int, int, int, int] | None = None,
    ) -> None:
        self.lease_serial = lease_serial
        self.plan_id = plan_id
        self.layer_idx = layer_idx
        self.sequence = sequence
        self.refusal = refusal
        self.places = places


def encode_layer(request: LayerRequest) -> bytes:
    """The body of a LAYER record. Raises InvalidArgumentError naming a field that is out of range."""
    code, text = (b"", b"") if request.refusal is None else map(cut_text, request.refusal)
    plan_id = request.plan_id
    try:
        head = LAYER_HEAD.pack(
            request.lease_serial,
            plan_id.generation,
            plan_id.step_id,
            plan_id.micro_batch_idx,
            request.layer_idx,
            request.sequence,
            len(code),
            len(text),
        )
    except struct.error:
        _check_unsigned(_names_of(request) | {"sequence": request.sequence})
        raise InvalidArgumentError(must_be("layer_idx", "a 64-bit integer", request.layer_idx)) from None
    return head + code + text if code else head


def decode_layer(body: Buffer, *, in_memory: bool = False) -> LayerHead:
    """The head of a layer call. Raises InvalidArgumentError for a body that is none."""
    needed = LAYER_HEAD.size + (PLACES.size if in_memory else 0)
    if len(body) < needed:
        raise InvalidArgumentError(must_be("body of a layer call", f"at least {needed} bytes", len(body)))
    lease, generation, step_id, micro_batch, layer, sequence, code_len, text_len = LAYER_HEAD.unpack_from(
        body
    )
    refusal = places = None
    if code_len:
        refusal = _text(body, LAYER_HEAD.size, code_len), _text(body, LAYER_HEAD.size + code_len, text_len)
    elif in_memory:
        places = PLACES.unpack_from(body, LAYER_HEAD.size)
    return LayerHead(lease, PlanId(generation, step_id, micro_batch), layer, sequence, refusal, places)


def _text(body: Buffer, at: int, num_bytes: int) -> str:
    raw = bytes(body[at : at + num_bytes])
    try:
        if len(raw) == num_bytes:
            return raw.decode()
    except UnicodeDecodeError:
        pass
    raise InvalidArgumentError(must_be("text of a record", f"{num_bytes} bytes of UTF-8", repr(raw[:64])))


def _names_of(request: LayerRequest | IntentRequest | CloseRequest) -> dict[str, int]:
    plan_id = request.plan_id
    return {
        "lease_serial": request.lease_serial,
        "generation": plan_id.generation,
        "step_id": plan_id.step_id,
        "micro_batch_idx": plan_id.micro_batch_idx,
    }


def _check_unsigned(fields: dict[str, int]) -> None:
    for name, value in fields.items():
        bits = 32 if name == "micro_batch_idx" else 64
        if not 0 <= value < 2**bits:
            raise InvalidArgumentError(must_be(name, f"from 0 to 2^{bits} - 1", value))


def encode_intent(request: IntentRequest) -> bytes:
    """The body of an INTENT record. Raises InvalidArgumentError naming a field that is out of range."""
    counts = request.num_rows_per_rank
    code, text = ("", "") if request.refusal is None else request.refusal
    texts = [cut_text(part, _MAX_INTENT_TEXT_BYTES // 4) for part in (request.dtype, code)]
    texts.append(cut_text(text, _MAX_INTENT_TEXT_BYTES))
    if len(counts or ()) > _MAX_RANKS:
        raise InvalidArgumentError(
            must_be("num_rows_per_rank", f"at most {_MAX_RANKS} numbers", len(counts or ()))
        )
    try:
        head = _INTENT.pack(
            *_names_of(request).values(),
            request.num_rows,
            _PHASE_IDX[request.phase],
            counts is not None,
            len(counts or ()),
            request.timeout_s is not None,
            *(counts or ()),
            *(0,) * (_MAX_RANKS - len(counts or ())),
            request.timeout_s or 0.0,
            *map(len, texts),
        )
    except struct.error:
        _check_unsigned(_names_of(request))
        got = [request.num_rows, *(counts or ())]
        raise InvalidArgumentError(must_be("num_rows", "64-bit integers", got)) from None
    return b"".join((head, *texts))


def decode_intent(body: Buffer) -> IntentRequest:
    """What `encode_intent` encoded. Raises InvalidArgumentError for bytes that are no intent."""
    if len(body) < _INTENT.size:
        raise InvalidArgumentError(must_be("body of an intent", f"at least {_INTENT.size} bytes", len(body)))
    lease, generation, step_id, micro_batch, rows, phase, has_counts, num_counts, has_timeout, *rest = (
        _INTENT.unpack_from(body)
    )
    counts, timeout_s, lengths = tuple(rest[:_MAX_RANKS]), rest[_MAX_RANKS], rest[_MAX_RANKS + 1 :]
    if phase >= len(_PHASES) or num_counts > _MAX_RANKS:
        wanted = f"below {len(_PHASES)}, {_MAX_RANKS + 1}"
        raise InvalidArgumentError(must_be("phase, number of counts", wanted, f"{phase}, {num_counts}"))
    texts, at = [], _INTENT.size
    for length in lengths:
        texts.append(_text(body, at, length))
        at += length
    return IntentRequest(
        lease_serial=lease,
        plan_id=PlanId(generation, step_id, micro_batch),
        num_rows=rows,
        phase=_PHASES[phase],
        dtype=texts[0],
        num_rows_per_rank=counts[:num_counts] if has_counts else None,
        timeout_s=timeout_s if has_timeout else None,
        refusal=(texts[1], texts[2]) if texts[1] else None,
    )


def encode_close(request: CloseRequest) -> bytes:
    """The body of a CLOSE record. Raises InvalidArgumentError naming a field that is out of range."""
    names = _names_of(request)
    _check_unsigned(names)
    return _CLOSE.pack(*names.values())


def decode_close(body: Buffer) -> CloseRequest:
    """What `encode_close` encoded. Raises InvalidArgumentError for bytes that are no close."""
    if len(body) < _CLOSE.size:
        raise InvalidArgumentError(must_be("body of a close", f"{_CLOSE.size} bytes", len(body)))
    lease, *plan_id = _CLOSE.unpack_from(body)
    return CloseRequest(lease_serial=lease, plan_id=PlanId(*plan_id))


def encode_request(request: Request) -> tuple[int, bytes]:
    """(kind, body) of any request; of a LayerRequest without its tensors."""
    match request:
        case LayerRequest():
            return LAYER, encode_layer(request)
        case IntentRequest():
            return INTENT, encode_intent(request)
        case LeaseRequest():
            return LEASE, _json(request)
        case CloseRequest():
            return CLOSE, encode_close(request)
        case PolicyRequest():
            return POLICY, _json(request)
        case DrainRequest():
            return DRAIN, _json(request)
    raise InternalError(f"no such request: {type(request).__name__}; this is a bug")


def decode_request(kind: int, body: Buffer) -> Request:
    """The request of a control record (any kind but LAYER). Raises InvalidArgumentError for what is none."""
    if kind == INTENT:
        return decode_intent(body)
    if kind == CLOSE:
        return decode_close(body)
    table: dict[str, Any] = json.loads(bytes(body))
    if kind == LEASE:
        return LeaseRequest(**table)
    if kind == POLICY:
        return PolicyRequest(policy=PathPolicy(**table["policy"]))
    if kind == DRAIN:
        return DrainRequest(**table)
    raise InternalError(f"no such kind of record: {kind}; this is a bug")


def _json(value: Any) -> bytes:
    return _dumps(value).encode()


_dumps = json.JSONEncoder(separators=(",", ":"), default=vars).encode
"""Dataclasses become objects of their fields; enums are strings already."""


def encode_reply(reply: Reply) -> tuple[int, bytes]:
    """(kind, body) of any reply; of a LayerReply without its rows."""
    match reply:
        case LayerReply():
            parts = [LAYER_REPLY_HEAD.pack(reply.queue_us, reply.total_us, len(reply.sub_steps))]
            parts += [_pack_report(report) for report in reply.sub_steps]
            return R_LAYER, b"".join(parts)
        case PlanReply():
            return R_PLAN, _json(reply)
        case LeaseReply():
            return R_LEASE, _json(reply)
        case DoneReply():
            return R_DONE, b""
        case ErrorReply():
            table = vars(reply) | {"message": cut_text(reply.message).decode()}
            return R_ERROR, json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    raise InternalError(f"no such reply: {type(reply).__name__}; this is a bug")


def decode_reply(kind: int, body: Buffer, num_ranks: int, rows: torch.Tensor) -> Reply:
    """The reply of a record; `rows` [n, hidden] bf16 are what a LayerReply carries."""
    if kind == R_LAYER:
        queue_us, total_us, _ = LAYER_REPLY_HEAD.unpack_from(body)
        reports = decode_reports(body, num_ranks)
        return LayerReply(hidden_states=rows, sub_steps=reports, queue_us=queue_us, total_us=total_us)
    if kind == R_DONE:
        return DoneReply()
    table: dict[str, Any] = json.loads(bytes(body))
    if kind == R_ERROR:
        table["missing_ranks"] = tuple(table["missing_ranks"])
        return ErrorReply(**table)
    if kind == R_LEASE:
        return LeaseReply(**table)
    if kind == R_PLAN:
        return _plan_reply(table)
    raise InternalError(f"no such kind of reply: {kind}; this is a bug")


def decode_reports(body: Buffer, num_ranks: int) -> tuple[SubStepReport, ...]:
    """The reports of a LayerReply."""
    _, _, num_reports = LAYER_REPLY_HEAD.unpack_from(body)
    at = LAYER_REPLY_HEAD.size
    return tuple(_unpack_report(body, at + idx * REPORT_BYTES, num_ranks) for idx in range(num_reports))


def _plan_reply(table: dict[str, Any]) -> PlanReply:
    plan = table["plan"]
    plan["plan_id"] = PlanId(**plan["plan_id"])
    plan["phase"] = Phase(plan["phase"])
    plan["num_rows_per_rank"] = tuple(plan["num_rows_per_rank"])
    sub_steps = tuple(
        SubStep(
            **{
                **piece,
                "path": Path(piece["path"]),
                "num_rows_per_rank": tuple(piece["num_rows_per_rank"]),
            }
        )
        for piece in table["sub_steps"]
    )
    return PlanReply(plan=StepPlan(**plan), sub_steps=sub_steps)


def _pack_report(report: SubStepReport) -> bytes:
    rows, formats = report.num_rows_per_rank, report.row_format_per_rank
    return _REPORT.pack(
        _PATH_IDX[report.path],
        report.runtime_capacity,
        *rows,
        *_PADS[len(rows)],
        *map(_FORMAT_IDX.__getitem__, formats),
        *_PADS[len(formats)],
        *_counters_of(report.counters),
        *_times_of(report.times),
    )


def _unpack_report(body: Buffer, at: int, num_ranks: int) -> SubStepReport:
    values = _REPORT.unpack_from(body, at)
    rows_at, formats_at, counters_at = 2, 2 + _MAX_RANKS, 2 + 2 * _MAX_RANKS
    times_at = counters_at + len(_COUNTER_NAMES)
    return SubStepReport(
        path=_PATHS[values[0]],
        runtime_capacity=values[1],
        num_rows_per_rank=values[rows_at : rows_at + num_ranks],
        row_format_per_rank=tuple(_FORMATS[idx] for idx in values[formats_at : formats_at + num_ranks]),
        counters=Counters(**dict(zip(_COUNTER_NAMES, values[counters_at:times_at]))),
        times=StageTimes(**dict(zip(_TIME_NAMES, values[times_at:]))),
    )


_COUNTER_NAMES = tuple(Counters.__dataclass_fields__)
_TIME_NAMES = tuple(StageTimes.__dataclass_fields__)
_counters_of: Callable[[Counters], tuple[int, ...]] = attrgetter(*_COUNTER_NAMES)
_times_of: Callable[[StageTimes], tuple[float, ...]] = attrgetter(*_TIME_NAMES)
_PADS = tuple((0,) * (_MAX_RANKS - count) for count in range(_MAX_RANKS + 1))
assert (len(_COUNTER_NAMES), len(_TIME_NAMES)) == (8, 7), (
    "_REPORT must be widened with Counters and StageTimes"
)
