"""The recorded trace format, field by field: one session as a JSON object <-> `trace.Trace`.

Field names, types and the rules for odd values are those of the public replay harness: a field that it does not know
is refused, a missing optional field takes its default, an output of 0 is played as 1, and a sub-agent's request times
that lie before its spawn are relative to it. What is wrong is refused with `where` (file and line) and the field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from loadgen.trace.trace import JOIN_EPSILON_S, HashIds, SubagentEntry, Trace, TraceRequest
from megamoe.errors import InvalidArgumentError, must_be

MISSING = object()
"""Default of a field that must be there."""
AS_RECORDED = "hash_ids as recorded"
"""Where a reader puts a `hash_ids` that is no list of numbers, beside a null."""


MAX_NUMBER = 2**53
"""Above it a number in JSON is not the same number for every reader, and sums of times would lose their seconds."""


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and _is_number(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


def _is_text(value: object) -> bool:
    """Half of a surrogate pair is no text: nothing could be written or hashed with it."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


_KINDS: dict[str, Callable[[Any], bool]] = {
    "a string of Unicode text": _is_text,
    "a number within 2^53": _is_number,
    "a number within 2^53, or null": lambda value: value is None or _is_number(value),
    "a whole number within 2^53": _is_whole,
    "a whole number within 2^53, or null": lambda value: value is None or _is_whole(value),
    "a list": lambda value: isinstance(value, list),
    "a list of strings": lambda value: isinstance(value, list) and all(map(_is_text, value)),
    "an object or null": lambda value: value is None or isinstance(value, dict),
}

_Fields = Mapping[str, tuple[str, Any]]

_REQUEST: _Fields = {
    "t": ("a number within 2^53", MISSING),
    "type": ("a string of Unicode text", MISSING),
    "model": ("a string of Unicode text", MISSING),
    "in": ("a whole number within 2^53", MISSING),
    "out": ("a whole number within 2^53", MISSING),
    "hash_ids": ("a whole number within 2^53", MISSING),  # the place of the list among hash_lists
    "input_types": ("a list of strings", []),
    "output_types": ("a list of strings", []),
    "stop": ("a string of Unicode text", ""),
    "api_time": ("a number within 2^53, or null", None),
    "think_time": ("a number within 2^53, or null", None),
    "ttft": ("a number within 2^53, or null", None),
}
_SUBAGENT: _Fields = {
    "t": ("a number within 2^53", MISSING),
    "type": ("a string of Unicode text", MISSING),
    "agent_id": ("a string of Unicode text", MISSING),
    "subagent_type": ("a string of Unicode text", MISSING),
    "duration_ms": ("a whole number within 2^53, or null", None),
    "total_tokens": ("a whole number within 2^53, or null", None),
    "tool_use_count": ("a whole number within 2^53, or null", None),
    "status": ("a string of Unicode text", MISSING),
    "requests": ("a list", MISSING),
    "models": ("a list of strings", MISSING),
    "tool_tokens": ("a whole number within 2^53", 0),
    "system_tokens": ("a whole number within 2^53", 0),
}
_TRACE: _Fields = {
    "id": ("a string of Unicode text", MISSING),
    "models": ("a list of strings", MISSING),
    "block_size": ("a whole number within 2^53", MISSING),
    "hash_id_scope": ("a string of Unicode text", MISSING),
    "tool_tokens": ("a whole number within 2^53", 0),
    "system_tokens": ("a whole number within 2^53", 0),
    "requests": ("a list", MISSING),
    "totals": ("an object or null", None),
}


def trace_from_record(record: object, hash_lists: Sequence[HashIds], where: str = "trace") -> Trace:
    """A session from its JSON object, in which every `hash_ids` is the place of its list in `hash_lists`.

    Raises InvalidArgumentError naming `where` and the field.
    """
    values = _checked(record, _TRACE, where)
    block_size = values["block_size"]
    if values["hash_id_scope"] != "local":
        raise InvalidArgumentError(
            must_be(f"{where}: hash_id_scope", "'local'", shown(values["hash_id_scope"]))
        )
    if block_size < 1:
        raise InvalidArgumentError(must_be(f"{where}: block_size", "at least 1", block_size))
    entries: list[TraceRequest | SubagentEntry] = []
    agent_ids: set[str] = set()
    for idx, entry in enumerate(values["requests"]):
        at = f"{where}: requests[{idx}]"
        if isinstance(entry, dict) and entry.get("type") == "subagent":
            subagent = _subagent(entry, hash_lists, block_size, at)
            if subagent.agent_id in agent_ids:
                raise InvalidArgumentError(
                    must_be(f"{at}: agent_id", "unique in its trace", shown(subagent.agent_id))
                )
            agent_ids.add(subagent.agent_id)
            entries.append(subagent)
        else:
            entries.append(_request(entry, hash_lists, block_size, at))
    if not any(isinstance(entry, TraceRequest) for entry in entries):
        raise InvalidArgumentError(must_be(f"{where}: requests", "at least one main request", 0))
    return Trace(
        id=values["id"],
        requests=tuple(entries),
        models=tuple(values["models"]),
        block_size=block_size,
        hash_id_scope=values["hash_id_scope"],
        tool_tokens=values["tool_tokens"],
        system_tokens=values["system_tokens"],
        totals=values["totals"],
    )


def _subagent(
    record: dict[str, Any], hash_lists: Sequence[HashIds], block_size: int, where: str
) -> SubagentEntry:
    values = _checked(record, _SUBAGENT, where)
    spawned = float(values["t"])
    requests = []
    for idx, inner in enumerate(values["requests"]):
        request = _request(inner, hash_lists, block_size, f"{where}.requests[{idx}]")
        if request.t + JOIN_EPSILON_S < spawned:
            request = replace(request, t=spawned + request.t)
        requests.append(request)
    return SubagentEntry(
        t=spawned,
        agent_id=values["agent_id"],
        requests=tuple(requests),
        subagent_type=values["subagent_type"],
        duration_ms=values["duration_ms"],
        total_tokens=values["total_tokens"],
        tool_use_count=values["tool_use_count"],
        status=values["status"],
        models=tuple(values["models"]),
        tool_tokens=values["tool_tokens"],
        system_tokens=values["system_tokens"],
    )


def _request(record: object, hash_lists: Sequence[HashIds], block_size: int, where: str) -> TraceRequest:
    values = _checked(record, _REQUEST, where)
    if values["type"] not in ("n", "s"):
        raise InvalidArgumentError(must_be(f"{where}: type", "'n', 's' or 'subagent'", shown(values["type"])))
    hash_ids = hash_lists[values["hash_ids"]]
    if values["in"] < 1 or values["in"] != block_size * len(hash_ids):
        wanted = f"block_size x number of hash_ids = {block_size * len(hash_ids)}, at least 1"
        raise InvalidArgumentError(must_be(f"{where}: in", wanted, values["in"]))
    if values["out"] < 0:
        raise InvalidArgumentError(must_be(f"{where}: out", "at least 0", values["out"]))
    return TraceRequest(
        t=float(values["t"]),
        num_input=values["in"],
        num_output=max(values["out"], 1),
        hash_ids=hash_ids,
        type=values["type"],
        model=values["model"],
        input_types=tuple(values["input_types"]),
        output_types=tuple(values["output_types"]),
        stop=values["stop"],
        api_time=values["api_time"],
        think_time=values["think_time"],
        ttft=values["ttft"],
    )


def shown(value: object) -> str:
    """A value as a sentence can have it: whole when it is short."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _checked(record: object, fields: _Fields, where: str) -> dict[str, Any]:
    """Every field with its value or default."""
    if not isinstance(record, dict):
        raise InvalidArgumentError(must_be(where, "a JSON object", type(record).__name__))
    values = {}
    for name, (kind, default) in fields.items():
        value = record.get(name, default)
        if value is MISSING or (value is not default and not _KINDS[kind](value)):
            wanted = "a list of whole numbers" if name == "hash_ids" else kind
            value = record.get(AS_RECORDED, value) if name == "hash_ids" else value
            got = "nothing" if value is MISSING else shown(value)
            raise InvalidArgumentError(must_be(f"{where}: {name}", wanted, got))
        values[name] = value
    for name in record:
        if name not in fields:
            raise InvalidArgumentError(
                must_be(f"{where}: {name}", f"one of {', '.join(fields)}", "an unknown field")
            )
    return values


# ---------------------------------------------------------------- writing


def trace_to_record(trace: Trace) -> tuple[dict[str, Any], list[HashIds]]:
    """The JSON object of a session, in which every `hash_ids` is the place of its list in the second result."""
    hash_lists: list[HashIds] = []
    entries = []
    for entry in trace.requests:
        if isinstance(entry, TraceRequest):
            entries.append(_request_record(entry, hash_lists))
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
                "requests": [_request_record(request, hash_lists) for request in entry.requests],
                "models": list(entry.models),
                "tool_tokens": entry.tool_tokens,
                "system_tokens": entry.system_tokens,
            }
        )
    record = {
        "id": trace.id,
        "models": list(trace.models),
        "block_size": trace.block_size,
        "hash_id_scope": trace.hash_id_scope,
        "tool_tokens": trace.tool_tokens,
        "system_tokens": trace.system_tokens,
        "requests": entries,
        "totals": dict(trace.totals) if trace.totals is not None else None,
    }
    return record, hash_lists


def _request_record(request: TraceRequest, hash_lists: list[HashIds]) -> dict[str, Any]:
    record: dict[str, Any] = {
        "t": request.t,
        "type": request.type,
        "model": request.model,
        "in": request.num_input,
        "out": request.num_output,
        "hash_ids": len(hash_lists),
        "input_types": list(request.input_types),
        "output_types": list(request.output_types),
        "stop": request.stop,
        "api_time": request.api_time,
        "think_time": request.think_time,
    }
    if request.type == "s":  # only streamed calls have it
        record["ttft"] = request.ttft
    hash_lists.append(request.hash_ids)
    return record


def with_hash_lists(record: Mapping[str, Any], hash_lists: Sequence[HashIds]) -> dict[str, Any]:
    """The JSON object with the lists themselves in it, for whoever wants one plain value."""

    def filled(entry: Mapping[str, Any]) -> dict[str, Any]:
        if "requests" in entry:
            return {**entry, "requests": [filled(inner) for inner in entry["requests"]]}
        return {**entry, "hash_ids": np.asarray(hash_lists[entry["hash_ids"]]).tolist()}

    return filled(record)
