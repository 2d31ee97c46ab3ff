"""Ranks that no caller calls: with the counts vector they follow the others."""

from __future__ import annotations

from service.messages import (
    ErrorReply,
    IntentRequest,
    LayerReply,
    PlanReply,
)
from tests.service.tier import Tier, one_error


def test_uncalled_ranks_follow_and_answer_their_caller_if_it_comes_after_all(tier: Tier) -> None:
    group = tier.group
    _, requests = tier.intents((2, 0, 0, 3), with_counts=True)
    replies = group.ask_all({rank: requests[rank] for rank in (0, 3)})
    (plan,) = {reply.plan for reply in replies.values() if isinstance(reply, PlanReply)}
    calls = tier.calls(plan, 1)
    replies = group.ask_all({rank: calls[rank] for rank in (0, 3)})
    assert all(isinstance(reply, LayerReply) for reply in replies.values())
    assert group.begun[1] == group.begun[0]
    # Rank 2's caller comes late: it is given what was agreed and what was done, once.
    late = group.ask(2, requests[2])
    assert isinstance(late, PlanReply)
    assert late.plan == plan
    done = group.ask(2, calls[2])
    assert isinstance(done, LayerReply)
    assert len(done.sub_steps) == 1
    again = group.ask(2, calls[2])
    assert isinstance(again, ErrorReply)
    assert again.code == "stale_call"
    tier.works()


def test_an_uncalled_rank_whose_caller_disagrees_refuses_every_call_of_the_plan(tier: Tier) -> None:
    group = tier.group
    _, requests = tier.intents((2, 0, 1, 3), with_counts=True)
    replies = group.ask_all({rank: requests[rank] for rank in (0, 2, 3)})
    (plan,) = {reply.plan for reply in replies.values() if isinstance(reply, PlanReply)}
    _, other = tier.intents((2, 1, 1, 3), with_counts=True)
    wrong = other[1]
    assert isinstance(wrong, IntentRequest)
    mine = IntentRequest(**{**vars(wrong), "plan_id": plan.plan_id})
    reply = group.ask(1, mine)
    assert isinstance(reply, ErrorReply)
    assert reply.code == "agreement"
    assert "[2, 0, 1, 3] as other ranks' callers sent, got [2, 1, 1, 3]" in reply.message
    replies = group.ask_all(tier.calls(plan, ranks=(0, 2, 3)))
    one_error(replies, "agreement", f"rank 1 refused: {reply.message}", ranks=3)
    tier.works()


def test_nothing_launches_until_every_entry_carries_the_vector(tier: Tier) -> None:
    group = tier.group
    _, requests = tier.intents((2, 0, 0, 3), with_counts=True)
    sent = {rank: group.send(rank, requests[rank]) for rank in (0, 3)}
    for _ in range(5):
        for rank in (0, 1, 3):
            group.turn(rank)
    assert all(group.poll(one) is None for one in sent.values()), "rank 2 has not posted"
    group.turn(2)
    group.settle()
    assert all(isinstance(group.poll(one), PlanReply) for one in sent.values())


def test_an_uncalled_rank_that_lags_far_behind_catches_up(tier: Tier) -> None:
    """Empty steps need nobody: the called ranks may run far ahead of the others' memory of them."""
    group = tier.group
    _, requests = tier.intents((0, 0, 0, 0), with_counts=True)
    replies = group.ask_all(requests)
    (plan,) = {reply.plan for reply in replies.values() if isinstance(reply, PlanReply)}
    for _ in range(200):
        _, requests = tier.intents((0, 0, 0, 0), with_counts=True)
        plan = tier.open((0, 0, 0, 0), with_counts=True)
        sent = group.send(0, tier.calls(plan)[0])
        group.turn(0)
        assert isinstance(group.poll(sent), LayerReply)
    tier.works()


def test_an_uncalled_rank_follows_a_call_that_waited_while_many_plans_came_and_went(tier: Tier) -> None:
    """A caller that gives up step after step leaves calls in the queue: their plans must not be forgotten before."""
    group, counts = tier.group, (2, 1, 0, 3)
    blocked = tier.open(counts, with_counts=True, micro_batch_idx=1)
    waited_for = tier.calls(blocked)
    held = [group.send(rank, waited_for[rank]) for rank in (0, 1)]
    _, requests = tier.intents(counts, with_counts=True)
    replies = group.ask_all({rank: requests[rank] for rank in (0, 1, 3)})
    plan = next(reply.plan for reply in replies.values() if isinstance(reply, PlanReply))
    calls = [group.send(rank, call) for rank, call in tier.calls(plan, ranks=(0, 1, 3)).items()]
    for _ in range(100):
        _, requests = tier.intents(counts, with_counts=True)
        replies = group.ask_all({rank: requests[rank] for rank in (0, 1, 3)})
        assert all(isinstance(reply, PlanReply) for reply in replies.values()), replies
    held.append(group.send(3, waited_for[3]))
    group.settle()
    assert all(isinstance(group.poll(sent), LayerReply) for sent in (*held, *calls))
    tier.works()
