"""Requests and replies of messages.py <-> bytes of a ring record. Knows no shared memory and no positions.

The two hot messages (LayerRequest, LayerReply) are fixed structs; the others, sent once a step or less, are JSON.
Tensors are not here: a record says only how many rows it has and whether they are MXFP8, ring.py lays them out.
Refuses integers that do not fit their field with an InvalidArgumentError that names it.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
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

LEASE, INTENT, LAYER, CLOSE, POLICY, DRAIN = range(1, 7)
"""Kinds of requests; a reply has the kind of what it is, which the request does not fix (ErrorReply)."""
R_LEASE, R_PLAN, R_LAYER, R_DONE, R_ERROR = range(1, 6)

MAX_TEXT_BYTES = 1000
"""Sentences longer than this are cut: a record's reply area is reserved before the reply is known."""

_LAYER_HEAD = struct.Struct("<QQQIqQHH")  # lease, generation, step, micro-batch, layer, sequence, code, text
LAYER_BODY_BYTES = 64
_LAYER_REPLY_HEAD = struct.Struct("<ddI")
_REPORT = struct.Struct("<BI8I8B8Q7d")  # path, capacity, rows per rank, formats per rank, counters, times
REPORT_BYTES = _REPORT.size

_PATHS = tuple(Path)
_FORMATS = tuple(RowFormat)
_PATH_IDX = {path: idx for idx, path in enumerate(_PATHS)}
_FORMAT_IDX = {row_format: idx for idx, row_format in enumerate(_FORMATS)}
_MAX_RANKS = 8


def cut_text(text: str, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """UTF-8 of text, cut to max_bytes at a character."""
    raw = text.encode()
    return raw if len(raw) <= max_bytes else raw[:max_bytes].decode(errors="ignore").encode()


@dataclass(frozen=True)
class LayerHead:
    """The part of a LayerRequest that is not tensors."""

    lease_serial: int
    plan_id: PlanId
    layer_idx: int
    sequence: int
    refusal: tuple[str, str] | None


def encode_layer(request: LayerRequest) -> bytes:
    """The body of a LAYER record. Raises InvalidArgumentError naming a field that is out of range."""
    code, text = (b"", b"") if request.refusal is None else map(cut_text, request.refusal)
    plan_id = request.plan_id
    try:
        head = _LAYER_HEAD.pack(
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
        fields = {
            "lease_serial": request.lease_serial,
            "generation": plan_id.generation,
            "step_id": plan_id.step_id,
            "micro_batch_idx": plan_id.micro_batch_idx,
            "sequence": request.sequence,
        }
        _check_unsigned(fields)
        raise InvalidArgumentError(must_be("layer_idx", "a 64-bit integer", request.layer_idx)) from None
    return head + code + text if code else head


def decode_layer(body: memoryview) -> LayerHead:
    lease, generation, step_id, micro_batch, layer, sequence, code_len, text_len = _LAYER_HEAD.unpack_from(
        body
    )
    refusal = None
    if code_len:
        at = _LAYER_HEAD.size
        text_at = at + code_len
        refusal = (
            bytes(body[at:text_at]).decode(),
            bytes(body[text_at : text_at + text_len]).decode(),
        )
    return LayerHead(lease, PlanId(generation, step_id, micro_batch), layer, sequence, refusal)


def _check_unsigned(fields: dict[str, int]) -> None:
    for name, value in fields.items():
        bits = 32 if name == "micro_batch_idx" else 64
        if not 0 <= value < 2**bits:
            raise InvalidArgumentError(must_be(name, f"from 0 to 2^{bits} - 1", value))


def encode_request(request: Request) -> tuple[int, bytes]:
    """(kind, body) of any request; of a LayerRequest without its tensors."""
    match request:
        case LayerRequest():
            return LAYER, encode_layer(request)
        case IntentRequest():
            _check_unsigned(
                {
                    "lease_serial": request.lease_serial,
                    "generation": request.plan_id.generation,
                    "step_id": request.plan_id.step_id,
                    "micro_batch_idx": request.plan_id.micro_batch_idx,
                }
            )
            return INTENT, _json(request)
        case LeaseRequest():
            return LEASE, _json(request)
        case CloseRequest():
            return CLOSE, _json(request)
        case PolicyRequest():
            return POLICY, _json(request)
        case DrainRequest():
            return DRAIN, _json(request)
    raise InternalError(f"no such request: {type(request).__name__}; this is a bug")


def decode_request(kind: int, body: memoryview) -> Request:
    """The request of a control record (any kind but LAYER)."""
    table: dict[str, Any] = json.loads(bytes(body))
    if "plan_id" in table:
        table["plan_id"] = PlanId(**table["plan_id"])
    if kind == LEASE:
        return LeaseRequest(**table)
    if kind == INTENT:
        pairs = {name: table[name] for name in ("num_rows_per_rank", "refusal")}
        return IntentRequest(
            **{
                **table,
                "phase": Phase(table["phase"]),
                **{name: None if value is None else tuple(value) for name, value in pairs.items()},
            }
        )
    if kind == CLOSE:
        return CloseRequest(**table)
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
            parts = [_LAYER_REPLY_HEAD.pack(reply.queue_us, reply.total_us, len(reply.sub_steps))]
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


def decode_reply(kind: int, body: memoryview, num_ranks: int, rows: torch.Tensor) -> Reply:
    """The reply of a record; `rows` [n, hidden] bf16 are what a LayerReply carries."""
    if kind == R_LAYER:
        queue_us, total_us, num_reports = _LAYER_REPLY_HEAD.unpack_from(body)
        at = _LAYER_REPLY_HEAD.size
        reports = tuple(
            _unpack_report(body, at + idx * REPORT_BYTES, num_ranks) for idx in range(num_reports)
        )
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
    pad = _MAX_RANKS - len(report.num_rows_per_rank)
    counters, times = report.counters, report.times
    return _REPORT.pack(
        _PATH_IDX[report.path],
        report.runtime_capacity,
        *report.num_rows_per_rank,
        *(0,) * pad,
        *(_FORMAT_IDX[row_format] for row_format in report.row_format_per_rank),
        *(0,) * (_MAX_RANKS - len(report.row_format_per_rank)),
        *(getattr(counters, name) for name in _COUNTER_NAMES),
        *(getattr(times, name) for name in _TIME_NAMES),
    )


def _unpack_report(body: memoryview, at: int, num_ranks: int) -> SubStepReport:
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
assert (len(_COUNTER_NAMES), len(_TIME_NAMES)) == (8, 7), (
    "_REPORT must be widened with Counters and StageTimes"
)
