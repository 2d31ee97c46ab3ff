"""Requests and replies of messages.py <-> bytes of a ring record. Knows no shared memory and no positions.

What callers send in a step is in step_codec.py; LayerReply is a fixed struct too. The others, which only this service's
own processes send, are JSON. Tensors are not here: a record says how many rows it has, whether they are MXFP8 and
whether they lie in lent memory; ring.py lays them out.
"""

from __future__ import annotations

import json
import struct
from functools import lru_cache
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
from megamoe.errors import InternalError
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
from service.ring.step_codec import (
    MAX_RANKS,
    Buffer,
    cut_text,
    decode_close,
    decode_intent,
    encode_close,
    encode_intent,
    encode_layer,
)

LEASE, INTENT, LAYER, CLOSE, POLICY, DRAIN = range(1, 7)
"""Kinds of requests; a reply has the kind of what it is, which the request does not fix (ErrorReply)."""
R_LEASE, R_PLAN, R_LAYER, R_DONE, R_ERROR = range(1, 6)


LAYER_REPLY_HEAD = struct.Struct("<ddI")
_FACTS = struct.Struct("<BI8I8B")  # path, capacity, rows per rank, formats per rank
_MEASURED = struct.Struct("<8Q7d")  # counters, times
_REPORT = struct.Struct("<BI8I8B8Q7d")
REPORT_BYTES = _REPORT.size
assert _FACTS.size + _MEASURED.size == REPORT_BYTES

_PATHS = tuple(Path)
_FORMATS = tuple(RowFormat)
_PATH_IDX = {path: idx for idx, path in enumerate(_PATHS)}
_FORMAT_IDX = {row_format: idx for idx, row_format in enumerate(_FORMATS)}


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
            head = LAYER_REPLY_HEAD.pack(reply.queue_us, reply.total_us, len(reply.sub_steps))
            return R_LAYER, b"".join((head, *map(_pack_report, reply.sub_steps)))
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
    path, capacity, rows, formats, counters, times = report
    return _pack_facts(path, capacity, rows, formats) + _MEASURED.pack(*counters, *times)


@lru_cache(maxsize=256)
def _pack_facts(path: Path, capacity: int, rows: tuple[int, ...], formats: tuple[RowFormat, ...]) -> bytes:
    """The part of a report that the layers of a step have in common."""
    return _FACTS.pack(
        _PATH_IDX[path],
        capacity,
        *rows,
        *_PADS[len(rows)],
        *map(_FORMAT_IDX.__getitem__, formats),
        *_PADS[len(formats)],
    )


def _unpack_report(body: Buffer, at: int, num_ranks: int) -> SubStepReport:
    values = _REPORT.unpack_from(body, at)
    rows_at, formats_at, counters_at = 2, 2 + MAX_RANKS, 2 + 2 * MAX_RANKS
    times_at = counters_at + len(Counters._fields)
    return SubStepReport(
        path=_PATHS[values[0]],
        runtime_capacity=values[1],
        num_rows_per_rank=values[rows_at : rows_at + num_ranks],
        row_format_per_rank=tuple(_FORMATS[idx] for idx in values[formats_at : formats_at + num_ranks]),
        counters=Counters._make(values[counters_at:times_at]),
        times=StageTimes._make(values[times_at:]),
    )


_PADS = tuple((0,) * (MAX_RANKS - count) for count in range(MAX_RANKS + 1))
assert (len(Counters._fields), len(StageTimes._fields)) == (8, 7), (
    "_REPORT must be widened with Counters and StageTimes"
)
