"""A ring of a co-located caller: what it sends arrives as it is, and nothing that lies in it can hurt its rank."""

from __future__ import annotations

import struct
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megamoe import Deployment, MoeShape, Phase, PlanId, SharedMemory, share_memory
from megamoe.errors import ERROR_BY_CODE, ConfigError, InvalidArgumentError, OverloadedError, PeerTimeoutError
from megamoe.memory import HostMemory
from service.messages import CloseRequest, DoneReply, ErrorReply, IntentRequest, LayerReply
from service.ring import codec, layout, step_codec
from service.ring.bell import FIRST_RING_WRITER, Bell
from service.ring.caller import RingCaller
from service.ring.consumer import RingConsumer
from service.ring.layout import FLAG_IN_MEMORY, FLAG_MXFP8, RingSpec
from service.ring.lent import LentMemory
from service.ring.record import Record

SHAPE = MoeShape(hidden=64, intermediate=32, num_experts=8, num_topk=2, num_ranks=2)
DEPLOYMENT = Deployment(shape=SHAPE, max_tokens_per_rank=16, large_m_capacity=16)
SPEC = RingSpec.of(DEPLOYMENT, max_rows=16, num_control_slots=4)
NAMES = (7, 3, 2**40, 1)
PLAN_ID = PlanId(3, 2**40, 1)
INTENT = IntentRequest(
    lease_serial=7, plan_id=PLAN_ID, num_rows=3, phase=Phase.DECODE, num_rows_per_rank=(3, 0), timeout_s=0.5
)


@dataclass
class Ends:
    """Both ends of a ring. closed: memories that the rank let go of."""

    caller: RingCaller
    rank: RingConsumer
    closed: list[int]

    def lend(self, memory_id: int, memory: SharedMemory, lease_serial: int = 7) -> None:
        opened = HostMemory.open(memory.handle)

        def close(one: object) -> None:
            opened.close()
            self.closed.append(memory_id)

        self.rank.lent.put(LentMemory(memory_id, lease_serial, opened, close))


@pytest.fixture
def ends(group_name: str) -> Iterator[Ends]:
    # Just below the wrap of the 32-bit counts.
    rank = RingConsumer.create(group_name, 0, 2, SPEC, first_number=2**32 - 3, caller_shape=SHAPE)
    bell = Bell(rank.segment, 2048, FIRST_RING_WRITER + 2)  # words that nobody sleeps on
    caller = RingCaller(rank.segment, bell, check_alive=lambda: None)
    yield Ends(caller, rank, [])
    caller._lock_fd = -1
    rank.lent.drop_all()
    rank.close()


def rows_of(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return (
        torch.randn((rows, 64), generator=random).bfloat16(),
        torch.randint(-1, 8, (rows, 2), generator=random, dtype=torch.int32),
        torch.rand((rows, 2), generator=random),
    )


def call(ends: Ends, rows: int, *, seed: int = 0) -> tuple[int, tuple[torch.Tensor, ...]]:
    x, ids, weights = rows_of(rows, seed)
    pointers = x.data_ptr(), 0, ids.data_ptr(), weights.data_ptr()
    return ends.caller.start_call(NAMES, 2, 5, rows, pointers), (x, ids, weights)


def answer(record: Record) -> None:
    """As a step loop does: refusals and what is no message are answered, rows come back twice as large."""
    if record.kind != codec.LAYER:
        try:
            record.request()
        except InvalidArgumentError as error:
            record.reply(ErrorReply.of(error))
        else:
            record.reply(DoneReply())
        return
    try:
        head = record.layer_head()
    except InvalidArgumentError as error:
        record.reply(ErrorReply.of(error))
        return
    if head.refusal is not None:
        record.reply(ErrorReply(code=head.refusal[0], message=head.refusal[1]))
    else:
        out = record.out()
        if record.num_rows:
            out.copy_(record.batch().hidden_states.view(torch.uint8)[:, :64].float() * 2)
        record.reply(LayerReply(hidden_states=out, sub_steps=(), queue_us=1.0, total_us=2.0))


@pytest.mark.parametrize("rows", [0, 1, 5, 16])
def test_a_layer_call_goes_there_and_back(ends: Ends, rows: int) -> None:
    for seed in range(5):
        at, (x, ids, weights) = call(ends, rows, seed=seed)
        (record,) = ends.rank.poll()
        head = record.layer_head()
        assert (head.lease_serial, head.plan_id, head.layer_idx, head.sequence) == (7, PLAN_ID, 2, 5)
        assert head.refusal is None
        batch = record.batch()
        assert torch.equal(batch.hidden_states, x)
        assert torch.equal(batch.topk_ids, ids)
        assert torch.equal(batch.topk_weights, weights)
        out = record.out()
        out.copy_(x * 2)
        record.reply(LayerReply(hidden_states=out, sub_steps=(), queue_us=1.5, total_us=2.5))
        ends.caller.wait_for(at, 1.0)
        kind, body = ends.caller.reply_of_call(at)
        assert kind == codec.R_LAYER
        assert codec.LAYER_REPLY_HEAD.unpack_from(body) == (1.5, 2.5, 0)
        if rows:
            got = torch.empty_like(x)
            ends.caller.copy_out(at, rows, 0, got.data_ptr())
            assert torch.equal(got, x * 2)
        ends.caller.end_call(at)


def test_ids_are_the_rank_s_own_once_they_are_checked(ends: Ends) -> None:
    at, (_, ids, _) = call(ends, 4)
    (record,) = ends.rank.poll()
    assert record.layer_head().refusal is None
    views = ends.rank.views_of(at, 4, 0)
    views.ids.fill_(1000)
    assert torch.equal(record.batch().topk_ids, ids)
    answer(record)


def test_control_messages_arrive_equal(ends: Ends) -> None:
    close = CloseRequest(lease_serial=7, plan_id=PLAN_ID)
    for request in (INTENT, close):
        at = ends.caller.send(request)
        (record,) = ends.rank.poll()
        assert record.request() == request
        record.reply(DoneReply())
        ends.caller.wait_for(at, 1.0)
        assert ends.caller.reply_of_control(at) == (codec.R_DONE, b"")
        ends.caller.end_control(at)


def test_a_full_ring_says_so_and_abandoned_places_come_back(ends: Ends) -> None:
    places = [call(ends, 1)[0] for _ in range(len(ends.caller._free_calls))]
    assert len(places) >= 2
    with pytest.raises(OverloadedError, match="free place"):
        call(ends, 1)
    for at in places:
        ends.caller.end_call(at)
    with pytest.raises(OverloadedError):
        call(ends, 1)
    for record in ends.rank.poll():
        answer(record)
    assert call(ends, 1)[0] in places
    assert ends.rank.num_open == 0


def test_an_unanswered_wait_ends(ends: Ends) -> None:
    at, _ = call(ends, 1)
    with pytest.raises(PeerTimeoutError, match="did not answer its ring"):
        ends.caller.wait_for(at, 0.05)


def test_one_producer_a_ring(ends: Ends) -> None:
    with pytest.raises(ConfigError, match="one producer"):
        RingCaller(ends.rank.segment, ends.caller._bell, check_alive=lambda: None)


# ---------------------------------------------------------------------------------------------- rows in lent memory


@pytest.fixture
def lent() -> Iterator[SharedMemory]:
    memory = share_memory(8192)
    yield memory
    memory.close()


def call_in_memory(ends: Ends, rows: int, places: tuple[int, int, int, int, int], flags: int = 0) -> Record:
    _, ids, weights = rows_of(rows)
    pointers = 0, 0, ids.data_ptr(), weights.data_ptr()
    at = ends.caller.start_call(NAMES, 2, 5, rows, pointers, places, flags=flags | FLAG_IN_MEMORY)
    ends.caller.end_call(at)
    (record,) = ends.rank.poll()
    return record


def test_rows_are_read_and_results_written_where_they_lie(ends: Ends, lent: SharedMemory) -> None:
    ends.lend(1, lent)
    x = lent.tensor(64, (3, 64), torch.bfloat16).copy_(rows_of(3)[0])
    record = call_in_memory(ends, 3, (1, 1, 64, 0, 4096))
    assert record.layer_head().refusal is None
    assert torch.equal(record.batch().hidden_states, x)
    record.out().copy_(x * 2)
    record.reply(LayerReply(hidden_states=record.out(), sub_steps=(), queue_us=0.0, total_us=0.0))
    assert torch.equal(lent.tensor(4096, (3, 64), torch.bfloat16), x * 2)
    codes = lent.tensor(0, (3, 64), torch.uint8).random_()
    record = call_in_memory(ends, 3, (1, 1, 0, 192, 4096), FLAG_MXFP8)
    batch_head = record.layer_head()
    assert batch_head.refusal is None
    assert torch.equal(record.batch().hidden_states, codes)
    assert record.batch().hidden_states_sf is not None
    ends.rank.lent.drop(1)
    assert not ends.closed, "a call in flight uses it"
    record.reply(DoneReply())
    assert ends.closed == [1]


@pytest.mark.parametrize(
    ("places", "flags", "said"),
    [
        ((2, 1, 0, 0, 4096), 0, r"memory of hidden_states must be registered in lease 7 \(1, 3\), got 2"),
        ((1, 9, 0, 0, 4096), 0, "memory of out must be registered"),
        (
            (1, 1, 8, 0, 4096),
            0,
            "hidden_states in memory 1: offset in memory must be a multiple of 16, got 8",
        ),
        ((1, 1, 8064, 0, 4096), 0, r"hidden_states in memory 1: .* inside its 8192 bytes, got bytes \[8064"),
        ((1, 1, 2**63, 0, 4096), 0, "hidden_states in memory 1: .* inside its 8192 bytes"),
        ((1, 1, 0, 0, 8192), 0, "out in memory 1: .* inside"),
        ((1, 1, 0, 0, 256), 0, r"out in the same memory must be apart from hidden_states at \[0, 384\)"),
        ((1, 1, 0, 4096, 4096), FLAG_MXFP8, "out in the same memory must be apart from hidden_states_sf"),
        ((1, 1, 0, 8192, 4096), FLAG_MXFP8, "hidden_states_sf in memory 1: .* inside"),
    ],
)
def test_places_that_cannot_be_are_refused(
    ends: Ends, lent: SharedMemory, places: tuple[int, int, int, int, int], flags: int, said: str
) -> None:
    ends.lend(1, lent)
    ends.lend(3, lent)
    record = call_in_memory(ends, 3, places, flags)
    refusal = record.layer_head().refusal
    assert refusal is not None
    assert refusal[0] == "invalid_argument"
    with pytest.raises(InvalidArgumentError, match=said):
        raise InvalidArgumentError(refusal[1])
    record.reply(ErrorReply(code=refusal[0], message=refusal[1]))
    ends.rank.lent.drop_all()
    assert sorted(ends.closed) == [1, 3], "a refused call uses no memory"


def test_nobody_keeps_rows_in_memory_that_was_taken_back(ends: Ends, lent: SharedMemory) -> None:
    ends.lend(1, lent)
    _, ids, weights = rows_of(2)
    pointers = 0, 0, ids.data_ptr(), weights.data_ptr()
    kept = []
    for rows_at in (0, 512, 0):  # two buffers in turn
        at = ends.caller.start_call(NAMES, 0, 5, 2, pointers, (1, 1, rows_at, 0, 1024), flags=FLAG_IN_MEMORY)
        (record,) = ends.rank.poll()
        record.layer_head()
        kept.append(weakref.ref(record.batch().hidden_states))
        batch_of_last = record.batch()
        answer(record)
        ends.caller.end_call(at)
        del record
    assert kept[0]() is kept[2]() is batch_of_last.hidden_states
    del batch_of_last
    ends.rank.lent.drop(1)
    assert [one() for one in kept] == [None] * 3


def test_memory_belongs_to_its_lease(ends: Ends, lent: SharedMemory) -> None:
    ends.lend(1, lent, lease_serial=6)
    record = call_in_memory(ends, 3, (1, 1, 0, 0, 4096))
    refusal = record.layer_head().refusal
    assert refusal is not None
    assert "registered in lease 7" in refusal[1]
    answer(record)
    ends.lend(2, lent)
    assert ends.closed == [1], "a new lease ends what the old one lent"
    with pytest.raises(InvalidArgumentError, match="memory_id must be a new one, got 2"):
        ends.lend(2, lent)
    with pytest.raises(InvalidArgumentError, match="memory_id must be one that is registered, got 1"):
        ends.rank.lent.drop(1)


# ---------------------------------------------------------------------------------------------- bytes of anybody


HEAD_FIELDS = (
    "state",
    "kind",
    "number",
    "submitted_ns",
    "body_bytes",
    "rows",
    "flags",
    "reply_kind",
    "reply_bytes",
)


def rewrite(ends: Ends, at: int, **change: int) -> None:
    """Overwrite fields of a record's header."""
    buf = ends.rank.buf
    values = dict(zip(HEAD_FIELDS, layout.RECORD_HEAD.unpack_from(buf, at))) | change
    layout.RECORD_HEAD.pack_into(buf, at, *values.values())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"state": 2}, "state of a record must be 1"),
        ({"kind": codec.LEASE}, "kind of a record must be one of"),
        ({"kind": 99}, "kind of a record must be one of"),
        ({"kind": codec.INTENT}, "place of a record must be in the pool of control messages"),
        ({"number": 4}, "number of a record must be"),
        ({"body_bytes": 2**32 - 1}, "body of a record must be at most 1080 bytes"),
    ],
)
def test_what_is_no_record_ends_the_ring_and_says_why(ends: Ends, change: dict[str, int], said: str) -> None:
    good = ends.caller.send(INTENT)
    at, _ = call(ends, 2)
    later, _ = call(ends, 2)
    rewrite(ends, at, **change)
    (record,) = ends.rank.poll()
    answer(record)
    ends.caller.wait_for(good, 1.0)
    for waiting in (at, later):
        if ends.rank.buf[waiting] == layout.STATE_SUBMITTED:
            with pytest.raises(InvalidArgumentError, match=said):
                ends.caller.wait_for(waiting, 5.0)
    assert ends.rank.fault is not None
    assert not ends.rank.poll(), "it is read no more"
    assert ends.rank.num_open == 0


def test_counts_and_places_that_cannot_be_end_the_ring(ends: Ends) -> None:
    ends.caller._published.store(ends.caller._number + layout.TABLE_LEN + 1)
    assert not ends.rank.poll()
    assert "requests in flight must be at most 512" in str(ends.rank.fault)


@pytest.mark.parametrize(
    "offset", [0, 64, SPEC.control_at + 128, SPEC.num_bytes, SPEC.num_bytes - 128, 2**63, SPEC.bulk_at + 1]
)
def test_a_record_starts_where_one_can(ends: Ends, offset: int) -> None:
    call(ends, 1)
    slot = (ends.caller._number - 1) % layout.TABLE_LEN
    struct.pack_into("<Q", ends.rank.buf, layout.TABLE_AT + 8 * slot, offset)
    assert not ends.rank.poll()
    assert ends.rank.fault is not None
    assert "place of a" in str(ends.rank.fault)


def test_a_place_holds_one_record_at_a_time(ends: Ends) -> None:
    """Else a second one could change what was checked of the first."""
    at, _ = call(ends, 2)
    (record,) = ends.rank.poll()
    ends.caller._free_calls.append(at)
    assert call(ends, 2)[0] == at
    assert not ends.rank.poll()
    assert "place of a record must be free" in str(ends.rank.fault)
    answer(record)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rows": 17}, r"rows of a layer call must be at most 16 \(max_rows of its ring\), got 17"),
        ({"rows": 2**32 - 1}, "rows of a layer call must be at most 16"),
        ({"flags": 4}, "flags of a layer call must be below 4, got 4"),
        ({"flags": FLAG_IN_MEMORY}, "memory of hidden_states must be registered in lease 7"),
        ({"body_bytes": 8}, "body of a layer call must be at least 48 bytes, got 8"),
    ],
)
def test_a_wrong_call_is_refused_and_the_ring_goes_on(ends: Ends, change: dict[str, int], said: str) -> None:
    at, _ = call(ends, 2)
    rewrite(ends, at, **change)
    (record,) = ends.rank.poll()
    answer(record)
    kind, body = ends.caller.reply_of_call(at)
    reply = codec.decode_reply(kind, body, 2, torch.empty(0))
    assert isinstance(reply, ErrorReply)
    with pytest.raises(InvalidArgumentError, match=said):
        raise reply.exception()
    ends.caller.end_call(at)
    at, _ = call(ends, 2)
    answer(ends.rank.poll()[0])
    assert ends.caller.reply_of_call(at)[0] == codec.R_LAYER


def test_what_a_caller_refuses_itself_is_answered_with_its_sentence(ends: Ends) -> None:
    """However long it is; the record fits its place even where the ring's calls have one row."""
    for text in ("rows must be good, got bad", "e" * 5000):
        at = ends.caller.refuse_call(NAMES, 5, ErrorReply(code="invalid_argument", message=text))
        (record,) = ends.rank.poll()
        head = record.layer_head()
        assert (head.lease_serial, head.plan_id, head.sequence) == (7, PLAN_ID, 5)
        answer(record)
        reply = codec.decode_reply(
            *ends.caller.reply_of_call(at, step_codec.REFUSAL_BODY_BYTES), 2, torch.empty(0)
        )
        assert reply == ErrorReply(code="invalid_argument", message=text[: step_codec.MAX_TEXT_BYTES])
        ends.caller.end_call(at)
    ends.caller.refuse_call(NAMES, 5, ErrorReply(code="overloaded", message="no"))
    (record,) = ends.rank.poll()
    refusal = record.layer_head().refusal
    assert refusal is not None
    assert refusal[0] == "invalid_argument"
    assert "code of a refusal must be 'invalid_argument'" in refusal[1]
    answer(record)
    smallest = RingSpec.of(DEPLOYMENT, max_rows=1, num_control_slots=1, num_bulk_calls=64, in_memory=True)
    refusal_bytes = smallest.layer_map(0, False, step_codec.REFUSAL_BODY_BYTES).num_bytes
    assert smallest.num_bulk_bytes >= 64 * refusal_bytes


U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
FEW = st.integers(0, 200)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    header=st.fixed_dictionaries(
        {},
        optional={
            "kind": st.integers(0, 9),
            "body_bytes": st.one_of(FEW, U32),
            "rows": st.one_of(FEW, U32),
            "flags": st.one_of(st.integers(0, 7), U32),
            "submitted_ns": U64,
        },
    ),
    body=st.binary(max_size=128),
    control=st.booleans(),
)
@example(header={}, body=bytes(52) + b"\xff\xff\xff\xff", control=False)
@example(header={"body_bytes": 128}, body=b"\xff" * 128, control=True)
def test_any_bytes_get_a_typed_answer_or_end_the_ring(
    ends: Ends, header: dict[str, int], body: bytes, control: bool
) -> None:
    """Whatever the record says: nothing is raised, nothing is written outside it, its memory is not used."""
    if ends.rank.fault is not None:  # hypothesis goes on with this ring: as a new one
        ends.rank.fault = None
        layout.FAULT_HEAD.pack_into(ends.rank.buf, layout.FAULT_AT, 0, 0)
        ends.rank._num_taken = ends.caller._number
    at = ends.caller.send(INTENT) if control else call(ends, 2)[0]
    start = at + layout.RECORD_ALIGN
    ends.rank.buf[start : start + len(body)] = body
    rewrite(ends, at, **header)
    outside = bytes(ends.rank.buf[: SPEC.control_at][4096:])
    for record in ends.rank.poll():
        answer(record)
        if control:
            kind, raw = ends.caller.reply_of_control(at)
        else:
            kind, raw = ends.caller.reply_of_call(at, header.get("body_bytes", 128))
        reply = codec.decode_reply(kind, raw, 2, torch.empty(0))
        if isinstance(reply, ErrorReply):
            assert reply.code in ERROR_BY_CODE
            assert " must be " in reply.message
    assert ends.rank.num_open == 0
    assert bytes(ends.rank.buf[: SPEC.control_at][4096:]) == outside
    ends.rank.buf[at] = layout.STATE_REPLIED
    (ends.caller.end_control if control else ends.caller.end_call)(at)
