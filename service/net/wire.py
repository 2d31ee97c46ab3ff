"""Protobuf messages with a tensor payload, taken and given without copying the payload where possible.

Owns the encoding rule of moe.proto: descriptors in the message, one `bytes payload` with the highest field number. A
reader here slices the payload out of the received bytes as a memoryview, wherever it stands, and lets protobuf parse
the small rest; a writer serializes the small rest and appends the payload in one join. Refuses malformed descriptors
with a sentence naming field, wanted and got; what the tensors mean is `MoeBatch.of`'s business.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from google.protobuf.message import DecodeError, Message

from megamoe import MoeBatch, MoeShape
from megamoe.errors import InvalidArgumentError, must_be
from service.pb import moe_pb2 as pb

# Received bytes are read-only, and torch says so once per process; nothing behind this file writes into its input.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)

PAYLOAD_FIELD = 1000
_PAYLOAD_TAG = PAYLOAD_FIELD << 3 | 2

DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e8m0fnu": torch.float8_e8m0fnu,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "float32": torch.float32,
    # Never wanted, but known by name, so that the refusal names the field they were meant for.
    "float16": torch.float16,
    "float64": torch.float64,
    "int8": torch.int8,
    "int64": torch.int64,
    "bool": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_NAME = 64
"""Characters of a caller's word that an error repeats."""
_MAX_DIMS = 4
_MAX_ELEMENTS = 2**48
_REQUIRED = ("hidden_states", "topk_ids", "topk_weights")
_INPUTS = (*_REQUIRED, "hidden_states_sf")

M = TypeVar("M", bound=Message)
Buffer = bytes | memoryview


@dataclass(frozen=True)
class Envelope(Generic[M]):
    """A message whose `payload` field is empty, and its payload beside it, in one or several parts."""

    message: M
    parts: tuple[Buffer, ...] = ()

    @property
    def payload(self) -> Buffer:
        """The payload as one buffer; without a copy when it is one part, as it always is when received."""
        if not self.parts:
            return b""
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)


def serialize(envelope: Envelope[M]) -> bytes:
    """The wire bytes of an envelope; the payload is copied once."""
    head = envelope.message.SerializeToString()
    num_bytes = sum(len(part) for part in envelope.parts)
    if num_bytes == 0:
        return head
    return b"".join((head, _varint(_PAYLOAD_TAG), _varint(num_bytes), *envelope.parts))


def deserializer(message_type: type[M]) -> Callable[[bytes], Envelope[M]]:
    """A function from wire bytes to Envelope[message_type]. It raises DecodeError for what is not protobuf."""

    def deserialize(data: bytes) -> Envelope[M]:
        rest, payload = split_payload(data)
        message = message_type()
        message.ParseFromString(rest)
        return Envelope(message, (payload,) if len(payload) else ())

    return deserialize


def split_payload(data: bytes) -> tuple[bytes, memoryview]:
    """(message bytes without the payload field, the payload as a view into `data`).

    Any field order; of several payload fields the last one counts, as in protobuf. Raises DecodeError.
    """
    view = memoryview(data)
    payload = view[:0]
    rest: list[memoryview] = []
    kept_from = at = 0
    try:
        while at < len(data):
            field_start = at
            tag, at = _read_varint(data, at)
            wire_type = tag & 7
            if wire_type == 0:
                _, at = _read_varint(data, at)
            elif wire_type == 1:
                at += 8
            elif wire_type == 5:
                at += 4
            elif wire_type == 2:
                num_bytes, at = _read_varint(data, at)
                if tag == _PAYLOAD_TAG:
                    if at + num_bytes > len(data):
                        raise DecodeError(f"payload of {num_bytes} bytes is truncated")
                    payload = view[at : at + num_bytes]
                    rest.append(view[kept_from:field_start])
                    kept_from = at + num_bytes
                at += num_bytes
            else:
                raise DecodeError(f"wire type {wire_type} at byte {field_start}")
    except IndexError:
        raise DecodeError("message is truncated") from None
    if at != len(data):
        raise DecodeError("message is truncated")
    if not rest:
        return data, payload
    rest.append(view[kept_from:])
    return b"".join(rest), payload


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise DecodeError("varint is longer than 64 bits")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


# ---------------------------------------------------------------------------------------------- tensors


class PayloadWriter:
    """Lays tensors one after the other into a payload and fills in their descriptors.

    Every tensor starts at a multiple of 8 bytes of the payload.
    """

    def __init__(self) -> None:
        self.parts: list[Buffer] = []
        self.num_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> pb.Tensor:
        """Append a contiguous host tensor (not copied here) and return its descriptor."""
        padding = -self.num_bytes % 8
        if padding:
            self.parts.append(bytes(padding))
            self.num_bytes += padding
        offset = self.num_bytes
        if tensor.numel():
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            self.parts.append(flat.numpy().data)
            self.num_bytes += flat.numel()
        dtype = _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
        return pb.Tensor(name=name, dtype=dtype, shape=list(tensor.shape), offset=offset)

    def add_batch(self, batch: MoeBatch) -> list[pb.Tensor]:
        """Append the rows of a batch."""
        tensors = [
            self.add("hidden_states", batch.hidden_states),
            self.add("topk_ids", batch.topk_ids),
            self.add("topk_weights", batch.topk_weights),
        ]
        if batch.hidden_states_sf is not None:
            tensors.append(self.add("hidden_states_sf", batch.hidden_states_sf))
        return tensors


def read_tensor(descriptor: pb.Tensor, payload: Buffer, *, aligned: bool = True) -> torch.Tensor:
    """The tensor of a descriptor: a view into the payload.

    aligned: copy where the bytes do not lie at a multiple of the element size; without it such a view is only good
    for copying elsewhere.
    Raises InvalidArgumentError for an unknown dtype, a negative size or bytes outside the payload.
    """
    name = descriptor.name
    dtype = DTYPES.get(descriptor.dtype)
    if dtype is None:
        raise InvalidArgumentError(
            must_be(f"{name}.dtype", f"one of {', '.join(DTYPES)}", repr(descriptor.dtype[:_MAX_NAME]))
        )
    shape = tuple(descriptor.shape)
    if not 1 <= len(shape) <= _MAX_DIMS or min(shape) < 0:
        wanted = f"sizes of at least 0, 1 to {_MAX_DIMS} of them"
        raise InvalidArgumentError(must_be(f"{name}.shape", wanted, _shown(shape)))
    if (
        math.prod(max(size, 1) for size in shape) >= _MAX_ELEMENTS
    ):  # of an empty tensor too: strides must exist
        raise InvalidArgumentError(must_be(f"{name}.shape", f"below {_MAX_ELEMENTS} values", _shown(shape)))
    num_elements = math.prod(shape)
    num_bytes = num_elements * dtype.itemsize
    start = descriptor.offset
    if start + num_bytes > len(payload):
        raise InvalidArgumentError(
            must_be(
                f"{name} (shape {list(shape)}, {descriptor.dtype}, {num_bytes} bytes at offset {start})",
                f"inside the payload of {len(payload)} bytes",
                f"bytes [{start}, {start + num_bytes})",
            )
        )
    if num_elements == 0:
        return torch.empty(shape, dtype=dtype)
    raw = torch.frombuffer(payload, dtype=torch.uint8, count=num_bytes, offset=start)
    if aligned and raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).view(shape)


def _shown(sizes: Sequence[int]) -> str:
    """A list of sizes for a sentence, cut where it is endless."""
    return str(list(sizes[:8]))[:-1] + (f", ... {len(sizes)} sizes]" if len(sizes) > 8 else "]")


def read_batch(shape: MoeShape, tensors: Sequence[pb.Tensor], payload: Buffer) -> MoeBatch:
    """The validated rows of a layer call; no tensors at all = no rows.

    Raises InvalidArgumentError naming field, wanted and got: a tensor unknown, missing or given twice, and all that
    `MoeBatch.of` refuses.
    """
    if not tensors:
        return MoeBatch.empty(shape)
    found: dict[str, torch.Tensor] = {}
    for descriptor in tensors:
        if descriptor.name not in _INPUTS or descriptor.name in found:
            wanted = f"each of {', '.join(_INPUTS)} at most once"
            raise InvalidArgumentError(must_be("tensors[].name", wanted, repr(descriptor.name[:_MAX_NAME])))
        # The rows are the bulk and go straight into the ring; the rest is computed with here.
        found[descriptor.name] = read_tensor(descriptor, payload, aligned=descriptor.name != "hidden_states")
    missing = [name for name in _REQUIRED if name not in found]
    if missing:
        raise InvalidArgumentError(must_be("tensors", f"all of {', '.join(_REQUIRED)}", sorted(found)))
    return MoeBatch.of(
        shape,
        found["hidden_states"],
        found["topk_ids"],
        found["topk_weights"],
        found.get("hidden_states_sf"),
    )


def named(tensors: Iterable[pb.Tensor], payload: Buffer, name: str) -> torch.Tensor:
    """The tensor called `name`. Raises InvalidArgumentError when it is not there."""
    for descriptor in tensors:
        if descriptor.name == name:
            return read_tensor(descriptor, payload)
    raise InvalidArgumentError(must_be("tensors", f"to hold {name}", "nothing of that name"))
