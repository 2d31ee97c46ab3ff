"""What callers send in a step <-> fixed structs: IntentRequest, LayerRequest without its tensors, CloseRequest.

Any bytes of a foreign process decode into values of the right types or into an InvalidArgumentError. Refuses integers
that do not fit their field with an InvalidArgumentError that names it. codec.py has the other messages.
"""

from __future__ import annotations

import struct
from functools import lru_cache

from megamoe import Phase, PlanId
from megamoe.errors import InvalidArgumentError, must_be
from service.messages import CloseRequest, IntentRequest, LayerRequest

Buffer = bytes | memoryview

MAX_TEXT_BYTES = 1000
"""Sentences longer than this are cut: a record's reply area is reserved before the reply is known."""

LAYER_HEAD = struct.Struct("<QQQIqQHH")  # lease, generation, step, micro-batch, layer, sequence, code, text
PLACES = struct.Struct("<IIQQQ")
"""Behind LAYER_HEAD of a call whose rows lie in lent memory: memory of rows, of out; offset of rows, scales, out."""
_IN_MEMORY = struct.Struct("<QQQIqQHHIIQQQ")
assert _IN_MEMORY.size == LAYER_HEAD.size + PLACES.size
LAYER_BODY_BYTES = 128
"""Of a layer call without a refusal, which has room for more."""
_MAX_CODE_BYTES = 32
REFUSAL_BODY_BYTES = LAYER_HEAD.size + _MAX_CODE_BYTES + MAX_TEXT_BYTES
"""The most of a layer call that is one."""
_CLOSE = struct.Struct("<QQQI")  # lease, generation, step, micro-batch
_INTENT = struct.Struct("<QQQIqBBBB8qdHHH")
"""lease, generation, step, micro-batch, rows, phase, has counts, number of counts, has a timeout, counts, timeout;
bytes of dtype, of a refusal's code, of its text, which follow."""
_MAX_INTENT_TEXT_BYTES = 600
_PHASES = tuple(Phase)
_PHASE_IDX = {phase: idx for idx, phase in enumerate(_PHASES)}
MAX_RANKS = 8


def cut_text(text: str, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """UTF-8 of text, cut to max_bytes at a character."""
    raw = text.encode()
    return raw if len(raw) <= max_bytes else raw[:max_bytes].decode(errors="ignore").encode()


plan_id_of = lru_cache(maxsize=64)(PlanId)
"""PlanId(...), made once: all layer calls of a step name the same."""


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
    fields = _IN_MEMORY if in_memory else LAYER_HEAD
    if len(body) < fields.size:
        raise InvalidArgumentError(
            must_be("body of a layer call", f"at least {fields.size} bytes", len(body))
        )
    lease, generation, step_id, micro_batch, layer, sequence, code_len, text_len, *places = (
        fields.unpack_from(body)
    )
    plan_id = plan_id_of(generation, step_id, micro_batch)
    if not code_len:
        return LayerHead(lease, plan_id, layer, sequence, None, tuple(places) if in_memory else None)
    refusal = _text(body, LAYER_HEAD.size, code_len), _text(body, LAYER_HEAD.size + code_len, text_len)
    return LayerHead(lease, plan_id, layer, sequence, refusal)


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
    if len(counts or ()) > MAX_RANKS:
        raise InvalidArgumentError(
            must_be("num_rows_per_rank", f"at most {MAX_RANKS} numbers", len(counts or ()))
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
            *(0,) * (MAX_RANKS - len(counts or ())),
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
    counts, timeout_s, lengths = tuple(rest[:MAX_RANKS]), rest[MAX_RANKS], rest[MAX_RANKS + 1 :]
    if phase >= len(_PHASES) or num_counts > MAX_RANKS:
        wanted = f"below {len(_PHASES)}, {MAX_RANKS + 1}"
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
