"""Intents that are wrong, late, missing or too many: every rank answers the same, nothing hangs, the group goes on."""

from __future__ import annotations

from typing import Any

import pytest

from megamoe import Phase, PlanId
from service.board.admission import AdmissionLimits
from service.messages import (
    CloseRequest,
    DoneReply,
    DrainRequest,
    ErrorReply,
    LayerReply,
    LeaseRequest,
    PlanReply,
    Request,
)
from service.rank.step_loop import LoopSettings
from tests.service.simulation import simulated_group
from tests.service.tier import RANKS, Tier, one_error


@pytest.mark.parametrize(
    ("change", "code", "texts"),
    [
        (
            {"num_rows_per_rank": (2, 2, 0, 3)},
            "agreement",
            ["num_rows_per_rank as sent to rank 3", "[2, 2, 0, 3]"],
        ),
        ({"num_rows_per_rank": (2, 1, 0)}, "invalid_argument", ["num_rows_per_rank must be 4 numbers"]),
        (
            {"num_rows_per_rank": (2, 1, 0, 4)},
            "invalid_argument",
            ["num_rows must be num_rows_per_rank[3] = 4, got 3"],
        ),
        (
            {"num_rows": 17},
            "invalid_argument",
            ["num_rows of rank 3 must be at most max_step_rows = 16, got 17"],
        ),
        ({"num_rows": -1}, "invalid_argument", ["num_rows must be from 0"]),
        ({"num_rows": 2**40}, "invalid_argument", ["num_rows must be from 0"]),
        ({"num_rows": 0}, "invalid_argument", ["phase of a rank with 0 rows must be 'idle'"]),
        ({"phase": Phase.IDLE}, "invalid_argument", ["phase of a rank with 3 rows"]),
        ({"dtype": "mxfp8"}, "agreement", ["dtype must be equal", "rank 3: mxfp8"]),
        ({"dtype": "fp4"}, "invalid_argument", ["dtype must be one of bfloat16, mxfp8, got 'fp4'"]),
        (
            {"timeout_s": float("nan")},
            "invalid_argument",
            ["timeout_s must be a number of at least 0, got nan"],
        ),
        ({"timeout_s": -1.0}, "invalid_argument", ["timeout_s must be a number of at least 0, got -1.0"]),
        ({"refusal": ("invalid_argument", "found wrong")}, "invalid_argument", ["found wrong"]),
    ],
)
def test_a_wrong_intent_of_one_rank_is_one_error_on_all(
    tier: Tier, change: dict[str, Any], code: str, texts: list[str]
) -> None:
    _, requests = tier.intents(change={3: change})
    one_error(tier.group.ask_all(requests), code, *texts)
    tier.works()


def test_a_wrong_generation_on_one_rank_is_one_error_on_all(tier: Tier) -> None:
    plan_id, requests = tier.intents()
    _, other = tier.intents(change={2: {"plan_id": PlanId(6, plan_id.step_id, 0)}})
    one_error(tier.group.ask_all({**requests, 2: other[2]}), "stale_call", "generation must be 7, got 6")
    tier.works()


def test_a_step_far_ahead_is_refused_and_uses_up_no_ids(tier: Tier) -> None:
    """The ids of a generation are for all its callers: one message must not spend them."""
    for far in (2**64 - 1, 2**63, 2**62 - 1, 2**41):
        _, requests = tier.intents(change={rank: {"plan_id": PlanId(7, far, 0)} for rank in range(4)})
        one_error(
            tier.group.ask_all(requests), "invalid_argument", f"step_id must be below {1 + 2**40}", str(far)
        )
    tier.works()
    tier.group.ask(0, LeaseRequest(holder="tier", release=True))
    Tier(tier.group, "second").works()


def test_an_uncalled_rank_whose_caller_sends_a_refused_intent_refuses_the_plan(tier: Tier) -> None:
    _, requests = tier.intents(with_counts=True, change={2: {"refusal": ("invalid_argument", "found wrong")}})
    replies = tier.group.ask_all({rank: requests[rank] for rank in (0, 1, 3)})
    plan = next(reply.plan for reply in replies.values() if isinstance(reply, PlanReply))
    late = tier.group.ask(2, requests[2])
    assert isinstance(late, ErrorReply)
    assert late.message == "found wrong"
    one_error(tier.layer(plan, ranks=(0, 1, 3)), "invalid_argument", "rank 2 refused: found wrong", ranks=3)
    tier.works()


def test_intents_that_concern_one_rank_only(tier: Tier) -> None:
    """A stale id, an impossible one or somebody else's lease is answered there and then; it disturbs no step."""
    plan = tier.open()
    plan_id = plan.plan_id
    for change, code, text in (
        ({"plan_id": plan_id}, "stale_call", f"step_id of micro-batch 0 must be above {plan_id.step_id}"),
        (
            {"plan_id": PlanId(7, plan_id.step_id + 1, 3)},
            "invalid_argument",
            "micro_batch_idx must be from 0 to 2",
        ),
        ({"plan_id": PlanId(7, 2**62, 0)}, "invalid_argument", "step_id must be below"),
        ({"lease_serial": 99}, "stale_call", "lease_serial must be 1, held by caller group 'tier', got 99"),
    ):
        _, requests = tier.intents(change={1: change})
        reply = tier.group.ask(1, requests[1])
        assert isinstance(reply, ErrorReply), reply
        assert reply.code == code
        assert text in reply.message
    tier.step_id = plan_id.step_id + 1
    tier.works()


def test_a_missing_rank_is_named_by_all_and_late_it_hears_the_same(tier: Tier) -> None:
    group = tier.group
    plan_id, requests = tier.intents()
    late = requests.pop(2)
    sent = {rank: group.send(rank, request) for rank, request in requests.items()}
    group.settle()
    assert all(group.poll(one) is None for one in sent.values())
    group.now += 9.9
    group.settle()
    assert all(group.poll(one) is None for one in sent.values()), "not before its time"
    group.time_out(0.2)
    replies = {rank: group.poll(one) for rank, one in sent.items()}
    message = one_error(replies, "peer_timeout", f"plan {plan_id}", "10 s", "no intent of rank 2", ranks=3)
    assert replies[0].missing_ranks == (2,)  # type: ignore[union-attr]
    reply = group.ask(2, late)
    assert isinstance(reply, ErrorReply)
    assert (reply.code, reply.message, reply.missing_ranks) == ("peer_timeout", message, (2,))
    tier.works()


def test_the_timeout_of_an_intent_may_be_shorter_but_not_longer(tier: Tier) -> None:
    group = tier.group
    for asked, wait in ((0.5, 0.5), (60.0, 10.0)):
        _, requests = tier.intents(change={rank: {"timeout_s": asked} for rank in range(RANKS)})
        sent = [group.send(rank, requests[rank]) for rank in (0, 1)]
        group.settle()
        group.time_out(wait)
        assert all(isinstance(group.poll(one), ErrorReply) for one in sent)
    tier.works()


def test_a_rank_that_goes_on_without_a_step_fails_it_at_once(tier: Tier) -> None:
    group = tier.group
    _, first = tier.intents()
    _, second = tier.intents()
    sent = {rank: group.send(rank, first[rank]) for rank in (0, 1, 3)}
    ahead = group.send(2, second[2])
    group.settle()
    replies = {rank: group.poll(one) for rank, one in sent.items()}
    one_error(replies, "agreement", "got step 2 from rank 2 without it", ranks=3)
    others = group.ask_all({rank: second[rank] for rank in (0, 1, 3)})
    assert all(isinstance(reply, PlanReply) for reply in others.values())
    assert isinstance(group.poll(ahead), PlanReply)
    tier.works()


def test_draining_refuses_new_plans_on_all_ranks_and_finishes_open_ones(tier: Tier) -> None:
    plan = tier.open()
    assert tier.group.ask(2, DrainRequest()) == DoneReply()
    assert all(isinstance(reply, LayerReply) for reply in tier.layer(plan).values())
    _, requests = tier.intents(micro_batch_idx=1)
    one_error(tier.group.ask_all(requests), "draining", "draining (ranks [2])")
    assert all(isinstance(reply, LayerReply) for reply in tier.layer(plan, 3).values())
    assert tier.group.ask(2, DrainRequest(draining=False)) == DoneReply()
    tier.works()


def test_overload_is_refused_by_agreed_numbers_and_never_in_a_plan(group_name: str) -> None:
    limits = AdmissionLimits(max_queued_calls=2, max_open_rows=12)
    with simulated_group(group_name, RANKS, settings=LoopSettings(limits=limits)) as group:
        tier = Tier(group)
        first = tier.open((8, 0, 0, 0))
        _, requests = tier.intents((0, 0, 5, 0), micro_batch_idx=1)
        one_error(group.ask_all(requests), "overloaded", "max_open_rows = 12, got 13")
        assert all(isinstance(reply, LayerReply) for reply in tier.layer(first).values())
        # The layer calls of rank 1 queue up: it is the one that is loaded, all refuse.
        sent = [group.send(1, tier.calls(first, layer)[1]) for layer in (1, 2, 3)]
        group.settle()
        _, requests = tier.intents((0, 0, 1, 0), micro_batch_idx=1)
        one_error(
            group.ask_all(requests),
            "overloaded",
            "layer calls queued on rank 1",
            "max_queued_calls = 2, got 3",
        )
        tier.sequence -= 3
        for layer in (1, 2, 3):
            replies = group.ask_all(tier.calls(first, layer, ranks=(0, 2, 3)))
            assert all(isinstance(reply, LayerReply) for reply in replies.values())
        assert all(isinstance(group.poll(one), LayerReply) for one in sent)
        close: dict[int, Request] = {
            rank: CloseRequest(lease_serial=1, plan_id=first.plan_id) for rank in range(RANKS)
        }
        assert set(group.ask_all(close).values()) == {DoneReply()}
        # A plan that was closed before it was agreed takes no room.
        plan_id, requests = tier.intents((8, 0, 0, 0))
        early = [group.send(rank, request) for rank, request in requests.items()]
        early += [group.send(rank, CloseRequest(lease_serial=1, plan_id=plan_id)) for rank in range(RANKS)]
        group.settle()
        assert not any(isinstance(group.poll(one), ErrorReply) for one in early)
        assert tier.open((0, 8, 0, 0), micro_batch_idx=1)
