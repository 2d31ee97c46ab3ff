"""A co-located caller that says anything at all: its group serves on, its peers hear of it, nothing of it stays.

Rank 0 has such a caller beside an honest one; every rank is driven in one thread with a simulated device and clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from megamoe import Phase, PlanId
from megamoe.errors import ERROR_BY_CODE, InvalidArgumentError
from service.board.layout import rank_at
from service.messages import CloseRequest, ErrorReply, IntentRequest, LayerReply, LayerRequest, PlanReply
from service.ring import codec
from service.ring.bell import FIRST_RING_WRITER, Bell
from service.ring.caller import RingCaller
from service.ring.consumer import RingConsumer
from service.ring.layout import RingSpec
from tests.service.simulation import Group, deployment, rows_of, simulated_group

GENERATION = 7
EDGES_64 = (0, 1, 2, 3, 4, 5, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
SERIALS = st.sampled_from([1, 1, 1, 1, 0, 2, 2**64 - 1])
PLAN_IDS = st.builds(
    PlanId,
    st.sampled_from([GENERATION] * 6 + [0, 8, 2**64 - 1]),
    st.sampled_from([1, 1, 1, 1, 1, 2, 2, 3, *EDGES_64]),
    st.sampled_from([0] * 6 + [1, 2, 3, 2**32 - 1]),
)
COUNTS = st.sampled_from([0, 1, 2, 3, 16, 17, -1, 2**31, 2**32, -(2**63), 2**63 - 1])
INTENTS = st.builds(
    IntentRequest,
    lease_serial=SERIALS,
    plan_id=PLAN_IDS,
    num_rows=COUNTS,
    phase=st.sampled_from(Phase),
    dtype=st.sampled_from(["bfloat16", "bfloat16", "mxfp8", "float32", "", "é" * 60]),
    num_rows_per_rank=st.one_of(st.none(), st.lists(COUNTS, max_size=8).map(tuple)),
    timeout_s=st.sampled_from([None, None, 0.0, 1.0, -1.0, math.nan, math.inf, 1e300]),
    refusal=st.sampled_from([None, None, None, ("x" * 40, "of nobody"), ("peer_timeout", "é" * 300)]),
)
CLOSES = st.builds(CloseRequest, lease_serial=SERIALS, plan_id=PLAN_IDS)
CALLS = st.fixed_dictionaries(
    {
        "names": st.tuples(SERIALS, PLAN_IDS),
        "layer_idx": st.sampled_from([0, 0, 1, 1, 2, 3, 4, -1, 2**63 - 1, -(2**63)]),
        "sequence": st.sampled_from([1, 1, 2, 2, 3, 4, 66, *EDGES_64]),
        "rows": st.sampled_from([2, 2, 2, 0, 1, 4]),
        "flags": st.sampled_from([0, 0, 0, 1, 2, 4]),
        "bad_id": st.sampled_from([False, False, False, True]),
    }
)
GOOD_CALLS = st.sampled_from([0, 0, 1, 2]).map(
    lambda idx: {
        "names": (1, PlanId(GENERATION, 1)),
        "layer_idx": idx,
        "sequence": 1 + idx,
        "rows": 2,
        "flags": 0,
        "bad_id": False,
    }
)


@contextmanager
def caller_of(group: Group, group_name: str) -> Iterator[tuple[RingCaller, RingConsumer]]:
    """A co-located caller of rank 0."""
    made = deployment(2)
    spec = RingSpec.of(made, num_control_slots=16, num_bulk_calls=8, max_rows=4)
    consumer = RingConsumer.create(group_name, 0, 2, spec, caller_shape=made.shape)
    group.states[0].attach(consumer)
    bell = Bell(group.boards[0].segment, rank_at(0), FIRST_RING_WRITER + 2)
    try:
        yield RingCaller(consumer.segment, bell, check_alive=lambda: None), consumer
    finally:
        consumer.close()


def send_call(caller: RingCaller, call: dict[str, Any]) -> int:
    serial, plan_id = call["names"]
    ids = torch.full((4, 2), 99 if call["bad_id"] else 1, dtype=torch.int32)
    x, weights = torch.zeros((4, 64), dtype=torch.bfloat16), torch.ones((4, 2))
    pointers = x.data_ptr(), x.data_ptr(), ids.data_ptr(), weights.data_ptr()
    names = serial, plan_id.generation, plan_id.step_id, plan_id.micro_batch_idx
    return caller.start_call(
        names, call["layer_idx"], call["sequence"], call["rows"], pointers, flags=call["flags"]
    )


def works(group: Group) -> None:
    """Both ranks' honest callers take the lease and run a layer."""
    lease = group.lease("honest")
    plan_id = PlanId(lease.generation, lease.next_step_id, 1)
    opened = group.ask_all(
        {
            rank: IntentRequest(
                lease_serial=lease.lease_serial, plan_id=plan_id, num_rows=2, phase=Phase.DECODE
            )
            for rank in range(2)
        }
    )
    assert all(isinstance(reply, PlanReply) for reply in opened.values()), opened
    answers = group.ask_all(
        {
            rank: LayerRequest(
                lease_serial=lease.lease_serial,
                plan_id=plan_id,
                layer_idx=0,
                sequence=lease.next_sequence,
                **rows_of(2, rank),
            )
            for rank in range(2)
        }
    )
    assert all(isinstance(reply, LayerReply) for reply in answers.values()), answers


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    said=st.lists(st.one_of(INTENTS, CLOSES, CALLS, GOOD_CALLS), max_size=14),
    num_honest=st.integers(0, 3),
    data=st.data(),
)
def test_whatever_a_caller_says_the_group_serves_on(
    group_name: str, said: list[Any], num_honest: int, data: st.DataObject
) -> None:
    with (
        simulated_group(group_name, 2, generation=GENERATION) as group,
        caller_of(group, group_name) as (caller, consumer),
    ):
        lease = group.lease("tier")
        assert lease.lease_serial == 1
        intents = [
            IntentRequest(lease_serial=1, plan_id=PlanId(GENERATION, 1), num_rows=2, phase=Phase.DECODE)
            for _ in range(2)
        ]
        places = [(caller.send(intents[0]), False)]
        group.ask(1, intents[1])
        # Rank 1's caller makes the layer calls of this step that rank 0's may make too.
        for layer_idx in range(num_honest):
            group.send(
                1,
                LayerRequest(
                    lease_serial=1,
                    plan_id=PlanId(GENERATION, 1),
                    layer_idx=layer_idx,
                    sequence=1 + layer_idx,
                    **rows_of(2, layer_idx),
                ),
            )
        for request in said:
            try:
                if isinstance(request, dict):
                    places.append((send_call(caller, request), True))
                else:
                    places.append((caller.send(request), False))
            except InvalidArgumentError:
                continue  # an integer that its field does not hold, found before anything was written
            if data.draw(st.booleans()):
                group.settle()
        for _ in range(4):
            group.time_out(12.0)
        for at, is_call in places:
            assert caller.is_answered(at), "every record is answered within its timeouts"
            kind, body = (caller.reply_of_call if is_call else caller.reply_of_control)(at)
            reply = codec.decode_reply(kind, body, 2, torch.empty(0))
            assert not isinstance(reply, ErrorReply) or reply.code in ERROR_BY_CODE
            event(reply.code if isinstance(reply, ErrorReply) else type(reply).__name__)
        assert consumer.fault is None
        assert consumer.num_open == 0
        closed: list[bool] = []
        group.states[0].retire(consumer, lambda: closed.append(True))
        for job in group.states[0].jobs:
            job()
        assert closed
        group.now += 60.0
        works(group)
