"""Layer calls that are wrong, late, repeated or missing: all ranks answer alike, nothing hangs, the group goes on."""

from __future__ import annotations

from typing import Any

import pytest

from megamoe import Phase, PlanId, StepPlan
from megamoe.errors import PeerTimeoutError
from service.messages import (
    CloseRequest,
    DoneReply,
    ErrorReply,
    LayerReply,
    Request,
)
from tests.service.simulation import Sent, rows_of
from tests.service.tier import BAD_ID, NO_TENSORS, RANKS, Tier, one_error


@pytest.mark.parametrize("late", [False, True], ids=["first", "after_it_was_begun"])
@pytest.mark.parametrize(
    ("change", "code", "texts"),
    [
        (BAD_ID, "invalid_argument", ["rank 3 refused: topk_ids[0][1] ..."]),
        (rows_of(2, seed=0), "invalid_argument", ["rows of the layer call must be 3, as plan 7/1/0 agreed, got 2"]),
        ({"plan_id": PlanId(7, 90, 0)}, "stale_call", ["plan_id must be an open plan, got 7/90/0"]),
        ({"plan_id": PlanId(6, 1, 0)}, "stale_call", ["generation must be 7, got 6"]),
        ({"layer_idx": 4}, "invalid_argument", ["layer_idx must be from 0 to 3, got 4"]),
        ({"layer_idx": -1}, "invalid_argument", ["layer_idx must be from 0 to 3, got -1"]),
        ({"layer_idx": 0}, "stale_call", ["layer_idx of plan 7/1/0 must be above 0, the last one, got 0"]),
        ({"layer_idx": 2}, "agreement", ["must be the same call on all ranks"]),
    ],
)  # fmt: skip
def test_a_wrong_layer_call_of_one_rank_is_one_error_on_all(
    tier: Tier, change: dict[str, Any], code: str, texts: list[str], late: bool
) -> None:
    if not late and code == "agreement":
        texts = [*texts, "got layer 1"]
    plan = tier.open()
    assert all(isinstance(reply, LayerReply) for reply in tier.layer(plan, 0).values())
    calls = tier.calls(plan, 1, change={3: change})
    order = (0, 1, 2, 3) if late else (3, 0, 1, 2)
    sent: dict[int, Sent] = {}
    for rank in order:
        sent[rank] = tier.group.send(rank, calls[rank])
        tier.group.settle()
    one_error({rank: tier.group.poll(sent[rank]) for rank in range(RANKS)}, code, *texts)
    # The plan is still open and its next layer works; so does the refused one, with a new sequence.
    for layer in (1, 3):
        assert all(isinstance(reply, LayerReply) for reply in tier.layer(plan, layer).values())
    tier.works()


def test_two_refusals_are_one_sentence_with_both(tier: Tier) -> None:
    plan = tier.open()
    refused = {rank: {"refusal": ("invalid_argument", f"no {rank}"), **NO_TENSORS} for rank in (1, 3)}
    calls = tier.calls(plan, 1, change=refused)
    sent: dict[int, Sent] = {}
    for rank in (0, 3, 2, 1):
        sent[rank] = tier.group.send(rank, calls[rank])
        tier.group.settle()
    replies = {rank: tier.group.poll(one) for rank, one in sent.items()}
    one_error(replies, "invalid_argument", "rank 1 refused: no 1; rank 3 refused: no 3")
    tier.works()


def test_a_missing_layer_call_times_out_alike_and_the_late_one_is_stale(tier: Tier) -> None:
    group = tier.group
    plan = tier.open()
    calls = tier.calls(plan, 1)
    late = calls.pop(1)
    sent = {rank: group.send(rank, request) for rank, request in calls.items()}
    group.settle()
    assert sorted(group.inside) == [0, 2, 3]
    group.time_out()
    replies = {rank: group.poll(one) for rank, one in sent.items()}
    message = one_error(replies, "peer_timeout", "waited for ranks [1]", ranks=3)
    assert replies[3].missing_ranks == (1,)  # type: ignore[union-attr]
    for _ in range(2):
        reply = group.ask(1, late)
        assert isinstance(reply, ErrorReply)
        assert reply.code == "stale_call"
        assert message in reply.message
        assert f"sequence {tier.sequence - 1} is done, the next one is {tier.sequence}" in reply.message
    assert all(isinstance(reply, LayerReply) for reply in tier.layer(plan, 2).values())
    tier.works()


def test_repeated_and_far_sequences(tier: Tier) -> None:
    group = tier.group
    plan = tier.open()
    assert all(isinstance(reply, LayerReply) for reply in tier.layer(plan, 0).values())
    done = tier.layer(plan, 1, sequence=tier.sequence - 1)
    one_error(done, "stale_call", f"sequence {tier.sequence - 1} is done, the next one is {tier.sequence}")
    far = tier.layer(plan, 1, sequence=tier.sequence + 64)
    one_error(far, "invalid_argument", "sequence must be contiguous", f"next is {tier.sequence}")
    # Twice on one rank while it waits: the second is refused, the first runs.
    calls = tier.calls(plan, 1)
    first = group.send(2, calls[2])
    reply = group.ask(2, calls[2])
    assert isinstance(reply, ErrorReply)
    assert (reply.code, "is repeated" in reply.message) == ("stale_call", True)
    assert all(
        isinstance(r, LayerReply) for r in group.ask_all({k: v for k, v in calls.items() if k != 2}).values()
    )
    assert isinstance(group.poll(first), LayerReply)
    tier.works()


def test_a_sequence_that_nobody_sends_is_given_up(tier: Tier) -> None:
    group = tier.group
    plan = tier.open()
    lost = tier.sequence
    tier.sequence += 1
    sent = {rank: group.send(rank, call) for rank, call in tier.calls(plan, 1).items()}
    group.settle()
    assert not group.inside
    group.time_out()
    replies = {rank: group.poll(one) for rank, one in sent.items()}
    one_error(replies, "peer_timeout", f"must follow sequence {lost}, which came to no rank within 10 s")
    one_error(tier.layer(plan, 0, sequence=lost), "stale_call", f"sequence {lost} is done")
    tier.works()


def test_ranks_behind_a_given_up_sequence_go_on_at_once(tier: Tier) -> None:
    """No clock moves: giving up wakes who waits for it, after a refusal and after a timeout."""
    group = tier.group
    plan = tier.open()
    refused = group.send(3, tier.calls(plan, 0, change={3: BAD_ID})[3])
    behind = {rank: group.send(rank, call) for rank, call in tier.calls(plan, 1).items() if rank != 3}
    group.settle()
    assert isinstance(group.poll(refused), ErrorReply)
    assert sorted(group.inside) == [0, 1, 2]
    behind[3] = group.send(3, tier.calls(plan, 1, sequence=tier.sequence - 1)[3])
    group.settle()
    assert all(isinstance(group.poll(one), LayerReply) for one in behind.values())

    begun = [group.send(rank, call) for rank, call in tier.calls(plan, 2, ranks=(0, 2, 3)).items()]
    waiting = group.send(1, tier.calls(plan, 3)[1])
    group.settle()
    for rank, work in list(group.inside.items()):
        group._finish(rank, work, PeerTimeoutError("rank 1 did not come", [1]))
    assert all(isinstance(group.poll(one), ErrorReply) for one in begun)
    group.settle()
    assert sorted(group.inside) == [1]
    rest = group.ask_all(tier.calls(plan, 3, ranks=(0, 2, 3), sequence=tier.sequence - 1))
    assert all(isinstance(reply, LayerReply) for reply in (*rest.values(), group.poll(waiting)))
    tier.works()


def test_calls_may_come_in_any_order(tier: Tier) -> None:
    group = tier.group
    plan = tier.open()
    first, second = tier.calls(plan, 0), tier.calls(plan, 1)
    sent = [group.send(1, second[1]), *(group.send(rank, first[rank]) for rank in (0, 2, 3))]
    group.settle()
    assert sorted(group.inside) == [0, 2, 3]
    sent += [group.send(1, first[1]), *(group.send(rank, second[rank]) for rank in (3, 2, 0))]
    group.settle()
    assert all(isinstance(group.poll(one), LayerReply) for one in sent)


def test_a_sequence_begun_by_a_rank_that_vanished_is_given_up(tier: Tier) -> None:
    group = tier.group
    plan = tier.open()
    group.send(0, tier.calls(plan, 0)[0])
    waiting = {rank: group.send(rank, call) for rank, call in tier.calls(plan, 1).items() if rank}
    group.settle()
    assert list(group.inside) == [0]
    group.now += 19.9
    for rank in (1, 2, 3):
        group.turn(rank)
    assert list(group.inside) == [0]
    group.now += 0.2
    for _ in range(3):
        for rank in (1, 2, 3):
            group.turn(rank)
    assert sorted(group.inside) == [0, 1, 2, 3]
    slot = group.states[2].calls._order.read(tier.sequence - 2)
    assert slot is not None
    assert slot.error is not None
    assert "neither finished nor given up within 20 s" in slot.error.message
    assert all(group.poll(one) is None for one in waiting.values())


def test_all_ranks_calling_a_closed_plan_are_told_at_once(tier: Tier) -> None:
    first = tier.open()
    second = tier.open()
    one_error(tier.layer(first), "stale_call", f"plan {first.plan_id} must be open, got closed")
    assert all(isinstance(reply, LayerReply) for reply in tier.layer(second).values())
    close: dict[int, Request] = {
        rank: CloseRequest(lease_serial=1, plan_id=second.plan_id) for rank in range(RANKS)
    }
    for _ in range(2):
        assert set(tier.group.ask_all(close).values()) == {DoneReply()}
    one_error(tier.layer(second, 1), "stale_call", f"plan {second.plan_id} must be open, got closed")
    unknown: dict[int, Request] = {
        rank: CloseRequest(lease_serial=1, plan_id=PlanId(7, 50, 0)) for rank in range(RANKS)
    }
    one_error(tier.group.ask_all(unknown), "stale_call", "plan_id must be a plan of this lease, got 7/50/0")
    tier.works()


def test_layer_calls_sent_ahead_of_a_plan_that_fails_fail_with_it(tier: Tier) -> None:
    group = tier.group
    plan_id, intents = tier.intents(change={3: {"dtype": "mxfp8"}})
    plan = StepPlan(
        plan_id=plan_id, num_rows_per_rank=(2, 1, 0, 3), phase=Phase.DECODE, dtype="bfloat16",
        weights_version=0, placement_version=0, policy_version=0,
    )  # fmt: skip
    sent = [group.send(rank, request) for rank, request in intents.items()]
    calls = {rank: group.send(rank, request) for rank, request in tier.calls(plan).items()}
    group.settle()
    assert all(isinstance(group.poll(one), ErrorReply) for one in sent)
    replies = {rank: group.poll(one) for rank, one in calls.items()}
    one_error(replies, "stale_call", f"plan {plan_id} must be open, got failed (dtype must be equal")
    tier.works()


def test_retry_opens_a_new_plan_at_any_layer(tier: Tier) -> None:
    plan = tier.open()
    assert all(isinstance(reply, LayerReply) for reply in tier.layer(plan, 3).values())
    again = tier.open()
    assert all(isinstance(reply, LayerReply) for reply in tier.layer(again, 2).values())


def test_all_ranks_empty_runs_nothing(tier: Tier) -> None:
    plan = tier.open((0, 0, 0, 0))
    before = [len(begun) for begun in tier.group.begun]
    replies = tier.layer(plan)
    assert all(
        isinstance(r, LayerReply) and r.hidden_states.shape == (0, 32) and not r.sub_steps
        for r in replies.values()
    )
    assert [len(begun) for begun in tier.group.begun] == before
    tier.works()
