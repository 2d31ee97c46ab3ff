"""Wire encoding: no copies on the way in, any field order, refusals that name field, wanted and got."""

from __future__ import annotations

import pytest
import torch
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe import MoeBatch, MoeShape
from megamoe.errors import InvalidArgumentError
from service.net import wire
from service.pb import moe_pb2 as pb

SHAPE = MoeShape(hidden=64, intermediate=32, num_experts=16, num_topk=2, num_ranks=8)


def batch_of(num_rows: int, seed: int = 0) -> MoeBatch:
    generator = torch.Generator().manual_seed(seed)
    return MoeBatch.of(
        SHAPE,
        torch.randn(num_rows, SHAPE.hidden, generator=generator).to(torch.bfloat16),
        torch.randint(-1, SHAPE.num_experts, (num_rows, 2), generator=generator, dtype=torch.int32),
        torch.rand(num_rows, 2, generator=generator),
    )


def envelope_of(batch: MoeBatch) -> wire.Envelope[pb.ForwardRequest]:
    writer = wire.PayloadWriter()
    call = pb.LayerCall(layer_idx=2, sequence=7, tensors=writer.add_batch(batch))
    return wire.Envelope(pb.ForwardRequest(request_id=5, layer_call=call), tuple(writer.parts))


def test_envelope_is_plain_protobuf() -> None:
    batch = batch_of(3)
    data = wire.serialize(envelope_of(batch))
    stock = pb.ForwardRequest.FromString(data)
    assert stock.request_id == 5
    assert len(stock.payload) == 3 * (64 * 2 + 2 * 4 + 2 * 4)
    back = wire.read_batch(SHAPE, stock.layer_call.tensors, stock.payload)
    assert torch.equal(back.hidden_states, batch.hidden_states)


def test_payload_is_a_view_of_the_received_bytes() -> None:
    data = wire.serialize(envelope_of(batch_of(5)))
    envelope = wire.deserializer(pb.ForwardRequest)(data)
    assert isinstance(envelope.payload, memoryview)
    assert envelope.payload.obj is data
    batch = wire.read_batch(SHAPE, envelope.message.layer_call.tensors, envelope.payload)
    start = torch.frombuffer(data, dtype=torch.uint8).data_ptr()
    assert start <= batch.hidden_states.data_ptr() < start + len(data), "rows must not be copied"


@given(num_rows=st.integers(0, 9), order=st.permutations(range(3)), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_any_field_order(num_rows: int, order: list[int], seed: int) -> None:
    batch = batch_of(num_rows, seed)
    envelope = envelope_of(batch)
    payload = b"".join(envelope.parts)
    pieces = [
        pb.ForwardRequest(request_id=5).SerializeToString(),
        pb.ForwardRequest(layer_call=envelope.message.layer_call).SerializeToString(),
        pb.ForwardRequest(payload=payload).SerializeToString(),
    ]
    got = wire.deserializer(pb.ForwardRequest)(b"".join(pieces[idx] for idx in order))
    assert got.message.request_id == 5
    back = wire.read_batch(SHAPE, got.message.layer_call.tensors, got.payload)
    for name in ("hidden_states", "topk_ids", "topk_weights"):
        assert torch.equal(getattr(back, name), getattr(batch, name)), name


def test_the_last_payload_counts_as_in_protobuf() -> None:
    data = pb.ForwardRequest(payload=b"first").SerializeToString()
    data += pb.ForwardRequest(payload=b"second").SerializeToString()
    assert pb.ForwardRequest.FromString(data).payload == b"second"
    assert bytes(wire.deserializer(pb.ForwardRequest)(data).payload) == b"second"


@given(st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_garbage_is_refused_exactly_where_protobuf_refuses_it(data: bytes) -> None:
    try:
        stock = pb.ForwardRequest.FromString(data)
    except DecodeError:
        with pytest.raises(DecodeError):
            wire.deserializer(pb.ForwardRequest)(data)
        return
    try:
        got = wire.deserializer(pb.ForwardRequest)(data)
    except DecodeError:
        return  # group wire types and over-long tags are legal protobuf that no generated sender writes
    assert bytes(got.payload) == stock.payload


def test_every_cut_of_a_message_is_refused_or_a_prefix() -> None:
    data = wire.serialize(envelope_of(batch_of(1)))
    for end in range(len(data) - 1, len(data) - 130, -1):
        with pytest.raises(DecodeError):
            wire.deserializer(pb.ForwardRequest)(data[:end])


def test_mxfp8_rows_with_typed_or_byte_scales() -> None:
    rows = torch.zeros(2, 64, dtype=torch.float8_e4m3fn)
    scales = torch.full((2, 2), 127, dtype=torch.uint8)
    for typed in (scales, scales.view(torch.float8_e8m0fnu)):
        writer = wire.PayloadWriter()
        tensors = [
            writer.add("hidden_states_sf", typed),
            writer.add("hidden_states", rows),
            writer.add("topk_weights", torch.zeros(2, 2)),
            writer.add("topk_ids", torch.zeros(2, 2, dtype=torch.int32)),
        ]
        batch = wire.read_batch(SHAPE, tensors, b"".join(writer.parts))
        assert batch.hidden_states_sf is not None
        assert torch.equal(batch.hidden_states_sf, scales)


def test_misaligned_tensors_are_still_right() -> None:
    ids = torch.arange(4, dtype=torch.int32)
    payload = b"x" + ids.numpy().tobytes()
    got = wire.read_tensor(pb.Tensor(name="topk_ids", dtype="int32", shape=[2, 2], offset=1), payload)
    assert torch.equal(got, ids.view(2, 2))


def mutated(**change: object) -> tuple[list[pb.Tensor], bytes]:
    envelope = envelope_of(batch_of(2))
    tensors = list(envelope.message.layer_call.tensors)
    payload = b"".join(envelope.parts)
    for name, value in change.items():
        if name == "payload":
            payload = payload[: int(str(value))]
        elif name == "drop":
            del tensors[int(str(value))]
        elif name == "twice":
            tensors.append(tensors[0])
        elif name == "shape":
            tensors[0].shape[:] = value  # type: ignore[call-overload]
        else:
            setattr(tensors[0], name, value)
    return tensors, payload


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"dtype": "bf16"}, "hidden_states.dtype must be one of bfloat16, .*got 'bf16'"),
        ({"dtype": "float16"}, "hidden_states.dtype must be bfloat16, got float16"),
        ({"shape": [2, 63]}, r"hidden_states.shape must be \[2, 64\], got \[2, 63\]"),
        ({"shape": [-1, 64]}, "hidden_states.shape must be sizes of at least 0"),
        ({"shape": []}, "hidden_states.shape must be sizes of at least 0"),
        ({"offset": 1 << 60}, "hidden_states .*must be inside the payload of 288 bytes"),
        ({"payload": 270}, r"topk_ids .*must be inside the payload of 270 bytes, got bytes \[256, 272\)"),
        ({"name": "hidden"}, "name must be each of hidden_states, .* at most once, got 'hidden'"),
        ({"twice": 1}, "name must be each of .* at most once, got 'hidden_states'"),
        ({"drop": 1}, r"tensors must be all of .*, got \['hidden_states', 'topk_weights'\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refusals_name_field_wanted_and_got(change: dict[str, object], sentence: str) -> None:
    tensors, payload = mutated(**change)
    with pytest.raises(InvalidArgumentError, match=sentence):
        wire.read_batch(SHAPE, tensors, payload)
