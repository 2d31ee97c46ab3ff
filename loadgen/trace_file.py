"""Trace files: one session a line, JSON, in the format in which AgentX sessions are recorded.

Reads one session at a time, so that a file may be larger than memory. What is wrong is refused with file, line and
field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.trace import SubagentEntry, Trace, TraceRequest
from megamoe.errors import InvalidArgumentError, must_be


def request_to_record(request: TraceRequest) -> dict[str, Any]:
    """The recorded form of one request; `ttft` only where the request was streamed."""
    record: dict[str, Any] = {
        "t": request.t,
        "type": request.type,
        "model": request.model,
        "in": request.num_input,
        "out": request.num_output,
        "hash_ids": request.hash_ids.tolist(),
        "input_types": list(request.input_types),
        "output_types": list(request.output_types),
        "stop": request.stop,
        "api_time": request.api_time,
        "think_time": request.think_time,
    }
    if request.type == "s":
        record["ttft"] = request.ttft
    return record


def trace_to_record(trace: Trace) -> dict[str, Any]:
    """The recorded form of one session, ready for json.dumps."""
    entries: list[dict[str, Any]] = []
    for entry in trace.requests:
        if isinstance(entry, TraceRequest):
            entries.append(request_to_record(entry))
            continue
        entries.append(
            {
                "t": entry.t,
                "type": "subagent",
                "agent_id": entry.agent_id,
                "subagent_type": entry.subagent_type,
                "duration_ms": entry.duration_ms,
                "total_tokens": entry.total_tokens,
                "tool_use_count": entry.tool_use_count,
                "status": entry.status,
                "requests": [request_to_record(request) for request in entry.requests],
                "models": list(entry.models),
                "tool_tokens": entry.tool_tokens,
                "system_tokens": entry.system_tokens,
            }
        )
    return {
        "id": trace.id,
        "models": list(trace.models),
        "block_size": trace.block_size,
        "hash_id_scope": trace.hash_id_scope,
        "tool_tokens": trace.tool_tokens,
        "system_tokens": trace.system_tokens,
        "requests": entries,
        "totals": dict(trace.totals) if trace.totals is not None else None,
    }


def trace_from_record(record: Mapping[str, Any], where: str = "trace") -> Trace:
    """A session from its recorded form. Raises InvalidArgumentError naming `where` and the field."""
    scope = _field(record, "hash_id_scope", str, where)
    if scope != "local":
        raise InvalidArgumentError(must_be(f"{where}: hash_id_scope", "'local'", repr(scope)))
    block_size = _field(record, "block_size", int, where)
    if block_size < 1:
        raise InvalidArgumentError(must_be(f"{where}: block_size", "at least 1", block_size))
    entries: list[TraceRequest | SubagentEntry] = []
    for idx, entry in enumerate(_field(record, "requests", list, where)):
        at = f"{where}: requests[{idx}]"
        if entry.get("type") != "subagent":
            entries.append(_request_from_record(entry, block_size, at))
            continue
        inner = tuple(
            _request_from_record(request, block_size, f"{at}.requests[{inner_idx}]")
            for inner_idx, request in enumerate(_field(entry, "requests", list, at))
        )
        entries.append(
            SubagentEntry(
                t=_field(entry, "t", float, at),
                agent_id=_field(entry, "agent_id", str, at),
                requests=inner,
                subagent_type=entry.get("subagent_type", ""),
                duration_ms=entry.get("duration_ms"),
                total_tokens=entry.get("total_tokens"),
                tool_use_count=entry.get("tool_use_count"),
                status=entry.get("status", ""),
                models=tuple(entry.get("models", ())),
                tool_tokens=entry.get("tool_tokens", 0),
                system_tokens=entry.get("system_tokens", 0),
            )
        )
    return Trace(
        id=_field(record, "id", str, where),
        requests=tuple(entries),
        models=tuple(record.get("models", ())),
        block_size=block_size,
        hash_id_scope=scope,
        tool_tokens=record.get("tool_tokens", 0),
        system_tokens=record.get("system_tokens", 0),
        totals=record.get("totals"),
    )


def _request_from_record(record: Mapping[str, Any], block_size: int, where: str) -> TraceRequest:
    kind = _field(record, "type", str, where)
    if kind not in ("n", "s"):
        raise InvalidArgumentError(must_be(f"{where}: type", "'n', 's' or 'subagent'", repr(kind)))
    num_input = _field(record, "in", int, where)
    num_output = _field(record, "out", int, where)
    hash_ids = np.asarray(_field(record, "hash_ids", list, where), dtype=np.int64)
    if num_input < 1 or num_input != block_size * len(hash_ids):
        wanted = f"block_size x number of hash_ids = {block_size * len(hash_ids)}"
        raise InvalidArgumentError(must_be(f"{where}: in", wanted, num_input))
    if num_output < 1:
        raise InvalidArgumentError(must_be(f"{where}: out", "at least 1", num_output))
    return TraceRequest(
        t=_field(record, "t", float, where),
        num_input=num_input,
        num_output=num_output,
        hash_ids=hash_ids,
        type=kind,
        model=record.get("model", ""),
        input_types=tuple(record.get("input_types", ())),
        output_types=tuple(record.get("output_types", ())),
        stop=record.get("stop", ""),
        api_time=record.get("api_time"),
        think_time=record.get("think_time"),
        ttft=record.get("ttft"),
    )


def _field(record: Mapping[str, Any], name: str, kind: type, where: str) -> Any:
    value = record.get(name)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if (
        not isinstance(value, kind)
        or isinstance(value, bool)
        or (isinstance(value, float) and not math.isfinite(value))
    ):
        raise InvalidArgumentError(must_be(f"{where}: {name}", f"a {kind.__name__}", repr(value)))
    return value


def read_traces(path: Path) -> Iterator[Trace]:
    """The sessions of a JSON Lines file, one at a time. Raises InvalidArgumentError naming file, line and field."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path.name}:{number}"
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise InvalidArgumentError(f"{where}: line must be a JSON object, got {error}") from None
            if not isinstance(record, dict):
                raise InvalidArgumentError(must_be(f"{where}: line", "a JSON object", type(record).__name__))
            yield trace_from_record(record, where)


def write_traces(path: Path, traces: Iterable[Trace]) -> int:
    """Write sessions as JSON Lines; returns how many."""
    count = 0
    with path.open("w", encoding="utf-8") as out:
        for trace in traces:
            out.write(json.dumps(trace_to_record(trace), separators=(",", ":")) + "\n")
            count += 1
    return count
