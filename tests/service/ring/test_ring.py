"""The request ring: what goes in comes out, in order, in one copy, and nobody's death leaks a record."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megamoe import (
    Counters,
    Deployment,
    MoeShape,
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
from megamoe.errors import ConfigError, InvalidArgumentError, OverloadedError, PeerTimeoutError
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
    Request,
)
from service.ring import codec as ring_codec
from service.ring import layout as ring_layout
from service.ring import step_codec
from service.ring.async_ring import AsyncRing
from service.ring.ring import RingConsumer, RingProducer, RingSpec

SHAPE = MoeShape(hidden=64, intermediate=32, num_experts=8, num_topk=2, num_ranks=2)
DEPLOYMENT = Deployment(shape=SHAPE, max_tokens_per_rank=16, large_m_capacity=16)
SPEC = RingSpec.of(DEPLOYMENT, num_control_slots=4)
PLAN_ID = PlanId(3, 2**40, 1)


def layer_request(rows: int, *, seed: int = 0, sequence: int = 5) -> LayerRequest:
    random = torch.Generator().manual_seed(seed)
    return LayerRequest(
        lease_serial=7,
        plan_id=PLAN_ID,
        layer_idx=2,
        sequence=sequence,
        hidden_states=torch.randn((rows, 64), generator=random).bfloat16(),
        topk_ids=torch.randint(-1, 8, (rows, 2), generator=random, dtype=torch.int32),
        topk_weights=torch.rand((rows, 2), generator=random),
    )


def report(rows: tuple[int, ...] = (3, 1)) -> SubStepReport:
    return SubStepReport(
        path=Path.LARGE_M,
        runtime_capacity=16,
        num_rows_per_rank=rows,
        row_format_per_rank=(RowFormat.FP8, RowFormat.BF16),
        counters=Counters(count_exchanges=1, launches=2, bytes_sent=2**40, rows_received=9),
        times=StageTimes(quantize_us=1.5, wait_us=2.25, total_us=1e6),
    )


class Bells:
    """Counts rings instead of waking anybody."""

    def __init__(self) -> None:
        self.rung: list[bool] = []

    def __call__(self, control: bool) -> None:
        self.rung.append(control)


@pytest.fixture
def ring(group_name: str) -> Iterator[tuple[RingProducer, RingConsumer, Bells]]:
    # Just below the wrap of the 32-bit counts, so that every test of some length crosses it.
    consumer = RingConsumer.create(group_name, 0, 0, SPEC, first_number=2**32 - 3)
    bells = Bells()
    producer = RingProducer.attach(group_name, 0, 0, bells)
    yield producer, consumer, bells
    producer.close()
    consumer.close()


REQUESTS: list[Request] = [
    LeaseRequest(holder="tier-ü", lease_serial=4, release=True),
    IntentRequest(
        lease_serial=1,
        plan_id=PLAN_ID,
        num_rows=3,
        phase=Phase.PREFILL,
        dtype="mxfp8",
        num_rows_per_rank=(3, 0),
        timeout_s=0.25,
    ),
    IntentRequest(lease_serial=1, plan_id=PLAN_ID, num_rows=0, phase=Phase.IDLE),
    CloseRequest(lease_serial=1, plan_id=PLAN_ID),
    PolicyRequest(policy=PathPolicy(version=3, small_m_enabled=True)),
    DrainRequest(draining=False),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: type(r).__name__)
def test_control_requests_arrive_equal(
    ring: tuple[RingProducer, RingConsumer, Bells], request_: Request
) -> None:
    producer, consumer, bells = ring
    producer.submit(request_)
    (record,) = consumer.poll()
    assert record.request() == request_
    assert bells.rung == [True]
    record.reply(DoneReply())


PLAN_REPLY = PlanReply(
    plan=StepPlan(
        plan_id=PLAN_ID,
        num_rows_per_rank=(3, 1),
        phase=Phase.DECODE,
        dtype="bfloat16",
        weights_version=1,
        placement_version=2,
        policy_version=3,
    ),
    sub_steps=tuple(
        SubStep(
            sub_step_idx=idx,
            start_row=idx * 16,
            stop_row=idx * 16 + 16,
            path=Path.COMPACT,
            runtime_capacity=16,
            num_rows_per_rank=(16, 1),
        )
        for idx in range(DEPLOYMENT.max_sub_steps)
    ),
)


@pytest.mark.parametrize(
    "reply",
    [
        LeaseReply(
            lease_serial=1,
            generation=2**63,
            next_sequence=2**63,
            next_step_id=4,
            first_sequence=2**62,
            first_step_id=3,
        ),
        PLAN_REPLY,
        DoneReply(),
        ErrorReply(code="peer_timeout", message='rank 3 … "quoted"\n', missing_ranks=(1, 3)),
    ],
    ids=lambda r: type(r).__name__,
)
def test_replies_arrive_equal(ring: tuple[RingProducer, RingConsumer, Bells], reply: object) -> None:
    producer, consumer, _ = ring
    for request in (DrainRequest(), layer_request(0)):
        ticket = producer.submit(request)
        assert producer.try_take(ticket) is None
        consumer.poll()[0].reply(reply)  # type: ignore[arg-type]
        assert producer.try_take(ticket) == reply
        producer.release(ticket)


def test_the_longest_error_fits_every_record(ring: tuple[RingProducer, RingConsumer, Bells]) -> None:
    producer, consumer, _ = ring
    for text in ("x" * 5000, "ü" * 3000, '"\n' * 3000):
        for request in (DrainRequest(), layer_request(0)):
            ticket = producer.submit(request)
            consumer.poll()[0].reply(ErrorReply(code="invalid_argument", message=text))
            reply = producer.try_take(ticket)
            assert isinstance(reply, ErrorReply)
            assert reply.code == "invalid_argument"
            assert text.startswith(reply.message)
            assert len(reply.message.encode()) >= step_codec.MAX_TEXT_BYTES - 2
            producer.release(ticket)


@pytest.mark.parametrize("rows", [0, 1, 5, 64])
def test_a_layer_call_goes_there_and_back_as_views(
    ring: tuple[RingProducer, RingConsumer, Bells], rows: int
) -> None:
    producer, consumer, bells = ring
    request = layer_request(rows)
    ticket = producer.submit(request)
    assert bells.rung == [False]
    (record,) = consumer.poll()
    head = record.layer_head()
    assert (head.lease_serial, head.plan_id, head.layer_idx, head.sequence) == (7, PLAN_ID, 2, 5)
    assert head.refusal is None
    batch = record.batch()
    assert torch.equal(batch.hidden_states, request.hidden_states)  # type: ignore[arg-type]
    assert torch.equal(batch.topk_ids, request.topk_ids)  # type: ignore[arg-type]
    assert torch.equal(batch.topk_weights, request.topk_weights)  # type: ignore[arg-type]
    assert batch.hidden_states.is_contiguous()
    out = record.out()
    out.copy_(batch.hidden_states * 2)
    reports = tuple(report() for _ in range(DEPLOYMENT.max_sub_steps))
    record.reply(LayerReply(hidden_states=out, sub_steps=reports, queue_us=1.5, total_us=2.5))
    reply = producer.wait(ticket, 1.0)
    assert isinstance(reply, LayerReply)
    assert torch.equal(reply.hidden_states, request.hidden_states * 2)  # type: ignore[operator]
    assert (reply.sub_steps, reply.queue_us, reply.total_us) == (reports, 1.5, 2.5)
    # Views on both sides: what the rank writes, the caller sees without another copy.
    if rows:
        out.fill_(3.0)
        assert bool((reply.hidden_states == 3.0).all())
    assert not rows or torch.equal(batch.hidden_states, request.hidden_states), "the input is as it was"  # type: ignore[arg-type]


def test_mxfp8_rows_and_refusals(ring: tuple[RingProducer, RingConsumer, Bells]) -> None:
    producer, consumer, _ = ring
    plain = layer_request(3)
    codes = torch.arange(3 * 64, dtype=torch.uint8).view(3, 64)
    scales = torch.arange(6, dtype=torch.uint8).view(3, 2)
    for rows, sf in ((codes, scales), (codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu))):
        producer.submit(
            LayerRequest(
                **{
                    **{name: getattr(plain, name) for name in plain.__dataclass_fields__},
                    "hidden_states": rows,
                    "hidden_states_sf": sf,
                }
            )
        )
        (record,) = consumer.poll()
        assert record.dtype_name == "mxfp8"
        batch = record.batch()
        assert torch.equal(batch.hidden_states, codes)
        assert batch.hidden_states_sf is not None
        assert torch.equal(batch.hidden_states_sf, scales)
        assert torch.equal(batch.topk_ids, plain.topk_ids)  # type: ignore[arg-type]
        record.reply(DoneReply())
    refused = LayerRequest(
        lease_serial=7, plan_id=PLAN_ID, layer_idx=2, sequence=5, refusal=("invalid_argument", "é" * 2000)
    )
    producer.submit(refused)
    (record,) = consumer.poll()
    refusal = record.layer_head().refusal
    assert refusal is not None
    assert refusal[0] == "invalid_argument"
    assert refusal[1] + "é" * (2000 - len(refusal[1])) == "é" * 2000
    assert record.num_rows == 0
    record.reply(DoneReply())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"hidden_states": torch.zeros(3, 32).bfloat16()}, r"hidden_states must be \[3, 64\]"),
        ({"hidden_states": torch.zeros(3, 64).half()}, "hidden_states must be"),
        ({"topk_ids": torch.zeros((3, 2), dtype=torch.float32)}, "topk_ids must be"),
        ({"topk_weights": None}, "topk_weights must be"),
        ({"sequence": -1}, "sequence must be from 0"),
        ({"lease_serial": 2**64}, "lease_serial must be from 0"),
        ({"plan_id": PlanId(1, 1, 2**32)}, "micro_batch_idx must be from 0"),
        ({"layer_idx": 2**63}, "layer_idx must be"),
    ],
)
def test_what_is_no_layer_call_is_refused_and_leaves_room(
    ring: tuple[RingProducer, RingConsumer, Bells], change: dict[str, object], match: str
) -> None:
    producer, consumer, bells = ring
    plain = layer_request(3)
    fields = {name: getattr(plain, name) for name in plain.__dataclass_fields__}
    with pytest.raises(InvalidArgumentError, match=match):
        producer.submit(LayerRequest(**{**fields, **change}))  # type: ignore[arg-type]
    assert not consumer.poll()
    assert not bells.rung
    assert producer.num_in_flight == 0
    producer.submit(plain)
    consumer.poll()[0].reply(DoneReply())


def test_the_largest_request_fits_and_a_larger_one_names_the_setting(
    ring: tuple[RingProducer, RingConsumer, Bells],
) -> None:
    producer, consumer, _ = ring
    limit = DEPLOYMENT.step_rows_limit
    tickets = [producer.submit(layer_request(limit)) for _ in range(2)]
    assert len(consumer.poll()) == 2
    with pytest.raises(InvalidArgumentError, match=rf"at most {limit} \(max_step_rows\), got {limit + 1}"):
        producer.submit(layer_request(limit + 1))
    with pytest.raises(OverloadedError, match="bytes free in one piece"):
        producer.submit(layer_request(limit))
    # Control messages have room of their own, whatever the rows take.
    assert producer.submit(DrainRequest())
    assert len(tickets) == 2


def test_control_slots_are_bounded(ring: tuple[RingProducer, RingConsumer, Bells]) -> None:
    producer, consumer, _ = ring
    tickets = [producer.submit(DrainRequest()) for _ in range(4)]
    with pytest.raises(OverloadedError, match="ring_slots"):
        producer.submit(DrainRequest())
    records = consumer.poll()
    records[2].reply(DoneReply())
    producer.release(tickets[2])  # in any order
    assert producer.submit(DrainRequest())


def test_abandoned_records_come_back_when_answered(ring: tuple[RingProducer, RingConsumer, Bells]) -> None:
    producer, consumer, _ = ring
    limit = DEPLOYMENT.step_rows_limit
    tickets = [producer.submit(layer_request(limit)) for _ in range(2)]
    records = consumer.poll()
    for ticket in tickets:
        producer.release(ticket)
        producer.release(ticket)
    assert producer.num_in_flight == 2, "an unanswered record must stay: the rank still writes to it"
    with pytest.raises(OverloadedError):
        producer.submit(layer_request(limit))
    records[0].reply(DoneReply())
    assert producer.submit(layer_request(limit))
    records[1].reply(DoneReply())
    assert producer.num_in_flight == 1


def test_wait_times_out_and_sleeps(ring: tuple[RingProducer, RingConsumer, Bells]) -> None:
    producer, consumer, _ = ring
    ticket = producer.submit(DrainRequest())
    busy = time.thread_time()
    with pytest.raises(PeerTimeoutError, match=r"no reply .* within 0\.1 s"):
        producer.wait(ticket, 0.1)
    assert time.thread_time() - busy < 0.05
    (record,) = consumer.poll()
    threading.Timer(0.05, lambda: record.reply(DoneReply())).start()
    assert producer.wait(ticket, 5.0) == DoneReply()


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    actions=st.lists(
        st.tuples(st.sampled_from(["submit", "control", "poll", "reply", "release"]), st.integers(0, 63)),
        min_size=40,
        max_size=150,
    )
)
def test_any_order_of_submit_reply_and_release_keeps_every_record_intact(
    ring: tuple[RingProducer, RingConsumer, Bells], actions: list[tuple[str, int]]
) -> None:
    producer, consumer, _ = ring
    tickets: dict[int, tuple[object, int]] = {}
    waiting: list[object] = []
    sequence = 0
    for action, number in actions:
        places = sorted((ticket.offset, ticket.end) for ticket in producer._live.values())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places)), "records overlap"
        assert all(SPEC.control_at <= start and end <= SPEC.num_bytes for start, end in places)
        if action == "submit":
            try:
                ticket = producer.submit(layer_request(number, seed=sequence, sequence=sequence))
                tickets[sequence] = (ticket, number)
                sequence += 1
            except OverloadedError:
                assert producer.num_in_flight
        elif action == "control":
            try:
                producer.release(producer.submit(DrainRequest()))
            except OverloadedError:
                assert producer.num_in_flight
        elif action == "poll":
            waiting += consumer.poll()
        elif action == "reply" and waiting:
            record = waiting.pop(number % len(waiting))
            if record.kind == ring_codec.LAYER:  # type: ignore[attr-defined]
                batch, out = record.batch(), record.out()  # type: ignore[attr-defined]
                wanted = layer_request(record.num_rows, seed=record.layer_head().sequence)  # type: ignore[attr-defined]
                assert torch.equal(batch.hidden_states, wanted.hidden_states)  # type: ignore[arg-type]
                assert torch.equal(batch.topk_weights, wanted.topk_weights)  # type: ignore[arg-type]
                out.copy_(-batch.hidden_states)
                record.reply(  # type: ignore[attr-defined]
                    LayerReply(hidden_states=out, sub_steps=(), queue_us=0.0, total_us=0.0)
                )
            else:
                record.reply(DoneReply())  # type: ignore[attr-defined]
        elif action == "release" and tickets:
            key = sorted(tickets)[number % len(tickets)]
            ticket, rows = tickets.pop(key)
            reply = producer.try_take(ticket)  # type: ignore[arg-type]
            if reply is not None:
                assert isinstance(reply, LayerReply)
                assert torch.equal(reply.hidden_states, -layer_request(rows, seed=key).hidden_states)  # type: ignore[operator]
            producer.release(ticket)  # type: ignore[arg-type]
    waiting += consumer.poll()
    for record in waiting:
        record.reply(DoneReply())  # type: ignore[attr-defined]
    for ticket, _ in tickets.values():
        producer.release(ticket)  # type: ignore[arg-type]
    assert producer.num_in_flight == 0, "nothing leaks"


def _submit_and_sleep(group_name: str) -> None:
    producer = RingProducer.attach(group_name, 0, 0, Bells())
    for sequence in range(2):
        producer.submit(layer_request(32, sequence=sequence))
    time.sleep(60)


def test_a_killed_producer_leaves_a_ring_that_its_successor_uses(group_name: str) -> None:
    consumer = RingConsumer.create(group_name, 0, 0, SPEC)
    child = multiprocessing.get_context("spawn").Process(target=_submit_and_sleep, args=(group_name,))
    child.start()
    records = []
    deadline = time.monotonic() + 60
    while len(records) < 2 and time.monotonic() < deadline:
        records += consumer.poll()
        time.sleep(0.01)
    assert len(records) == 2
    with pytest.raises(ConfigError, match="must have one producer"):
        RingProducer.attach(group_name, 0, 0, Bells())
    os.kill(child.pid or 0, signal.SIGKILL)
    child.join(10)
    with pytest.raises(PeerTimeoutError, match="did not answer 2 requests of an earlier producer"):
        RingProducer.attach(group_name, 0, 0, Bells(), timeout_s=0.05)
    # The rank still works on views of the dead producer's record, and answers it.
    assert torch.equal(records[1].batch().hidden_states, layer_request(32).hidden_states)  # type: ignore[arg-type]
    threading.Timer(0.1, lambda: [record.reply(DoneReply()) for record in records]).start()
    producer = RingProducer.attach(group_name, 0, 0, Bells(), timeout_s=5.0)
    ticket = producer.submit(layer_request(DEPLOYMENT.step_rows_limit))
    (record,) = consumer.poll()
    record.reply(DoneReply())
    assert producer.wait(ticket, 1.0) == DoneReply()
    producer.close()
    consumer.close()


async def test_async_ring_answers_without_blocking_the_loop(group_name: str) -> None:
    consumer = RingConsumer.create(group_name, 0, 0, SPEC)
    wake = threading.Event()
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            wake.wait(0.05)
            wake.clear()
            for record in consumer.poll():
                if record.kind == ring_codec.LAYER:
                    out = record.out()
                    out.copy_(record.batch().hidden_states + 1)
                    record.reply(LayerReply(hidden_states=out, sub_steps=(), queue_us=0.0, total_us=0.0))
                else:
                    record.reply(DoneReply())

    thread = threading.Thread(target=serve)
    thread.start()
    producer = RingProducer.attach(group_name, 0, 0, lambda control: wake.set())
    ring = AsyncRing(producer)

    async def one(rows: int) -> None:
        with await ring.submit_patiently(layer_request(rows, seed=rows), 5.0) as pending:
            reply = await pending.reply(5.0)
            assert isinstance(reply, LayerReply)
            assert torch.equal(reply.hidden_states, layer_request(rows, seed=rows).hidden_states + 1)  # type: ignore[operator]

    # More rows than the ring holds at once: patience, not refusal.
    await asyncio.gather(*(one(rows % 64) for rows in range(40)))
    assert await ring.call(DrainRequest(), 5.0) == DoneReply()
    # A cancelled await abandons its record, which comes back.
    stop.set()
    thread.join()
    task = asyncio.create_task(one(3))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    consumer.poll()[0].reply(DoneReply())
    assert producer.num_in_flight == 0
    await ring.close()
    producer.close()
    consumer.close()


def test_sizes_follow_the_deployment() -> None:
    assert RingSpec.from_head(memoryview(SPEC.head)) == SPEC
    small = RingSpec.of(DEPLOYMENT, max_rows=8, num_control_slots=4)
    assert small.max_rows == 8
    assert small.num_bytes < SPEC.num_bytes
    assert RingSpec.of(DEPLOYMENT, max_rows=10**9).max_rows == DEPLOYMENT.step_rows_limit
    big = RingSpec.of(Deployment(shape=MoeShape(hidden=7168, intermediate=32, num_experts=8, num_topk=6)))
    assert big.layer_map(32768, False).out_at > 32768 * 7168 * 2
    assert big.num_bytes > 2 * 2 * 32768 * 7168 * 2
    with pytest.raises(InvalidArgumentError, match="ring magic"):
        RingSpec.from_head(memoryview(bytes(64)))
    for rows in (0, 1, 7, 64):
        for mxfp8 in (False, True):
            where = SPEC.layer_map(rows, mxfp8)
            starts = [where.reply_at, where.hidden_at, where.ids_at, where.weights_at, where.out_at]
            assert starts == sorted(starts)
            assert all(at % ring_layout.RECORD_ALIGN == 0 for at in starts)
