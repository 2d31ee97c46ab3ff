"""Whose steps are served: one caller group at a time, and nothing of it holds up the next one."""

from __future__ import annotations

from megamoe import Phase, PlanId, StepPlan
from service.messages import (
    CloseRequest,
    DoneReply,
    ErrorReply,
    IntentRequest,
    LayerReply,
    LeaseReply,
    LeaseRequest,
    PlanReply,
)
from tests.service.simulation import Group
from tests.service.tier import RANKS, Tier, one_error


def test_a_second_caller_group_is_refused_naming_the_holder(tier: Tier) -> None:
    group = tier.group
    for rank in range(RANKS):
        reply = group.ask(rank, LeaseRequest(holder="other"))
        assert isinstance(reply, ErrorReply)
        assert reply.code == "lease_held"
        assert "held by caller group 'tier'" in reply.message
        same = group.ask(rank, LeaseRequest(holder="tier"))
        assert isinstance(same, LeaseReply)
        assert same.lease_serial == tier.lease.lease_serial
    reply = group.ask(0, LeaseRequest(holder="other", release=True))
    assert isinstance(reply, ErrorReply)
    assert reply.code == "lease_held"
    tier.works()


def test_a_lease_ends_by_release_or_after_ten_seconds_without_traffic(tier: Tier) -> None:
    group = tier.group
    plan = tier.open()
    group.now += 9.0
    assert all(isinstance(reply, LayerReply) for reply in tier.layer(plan).values()), "traffic on any rank"
    group.now += 9.0
    assert isinstance(group.ask(1, LeaseRequest(holder="other")), ErrorReply)
    group.now += 1.5
    other = Tier(group, "other")
    assert other.lease.lease_serial == tier.lease.lease_serial + 1
    assert other.lease.next_sequence == tier.sequence
    assert other.lease.next_step_id > plan.plan_id.step_id
    # Everything of the old lease is stale, and takes no sequence away from the new one.
    one_error(
        tier.layer(plan, 1), "stale_call", "lease_serial must be 2, held by caller group 'other', got 1"
    )
    _, requests = tier.intents()
    one_error(group.ask_all(requests), "stale_call", "lease_serial must be 2")
    other.works()
    assert group.ask(3, LeaseRequest(holder="other", release=True, lease_serial=1)) == DoneReply()
    other.works()
    assert group.ask(3, LeaseRequest(holder="other", release=True, lease_serial=2)) == DoneReply()
    one_error(other.layer(plan, 1), "stale_call", "lease 2 was given back")
    Tier(group, "third").works()


def test_a_new_lease_does_not_wait_for_what_the_old_one_left(tier: Tier) -> None:
    """Ranks inside a call that the vanished holder never sent to rank 2 are let out by the next lease."""
    group = tier.group
    plan = tier.open()
    sent = {rank: group.send(rank, call) for rank, call in tier.calls(plan, ranks=(0, 1, 3)).items()}
    _, requests = tier.intents(micro_batch_idx=1)
    waiting = group.send(0, requests[0])
    group.settle()
    assert sorted(group.inside) == [0, 1, 3]
    assert group.ask(1, LeaseRequest(holder="tier", release=True)) == DoneReply()
    assert not group.inside
    replies = {rank: group.poll(one) for rank, one in sent.items()}
    one_error(replies, "stale_call", "rank 2 refused: lease 1 is over", ranks=3)
    reply = group.poll(waiting)
    assert isinstance(reply, ErrorReply)
    assert reply.code == "stale_call"
    Tier(group, "next").works()


def test_leases_that_end_with_half_brought_steps_use_nothing_up(group: Group) -> None:
    for turn in range(20):
        tier = Tier(group, f"tier {turn}")
        _, requests = tier.intents()
        waiting = group.send(2, requests[2])
        group.settle()
        assert group.ask(0, LeaseRequest(holder=f"tier {turn}", release=True)) == DoneReply()
        reply = group.poll(waiting)
        assert isinstance(reply, ErrorReply)
        assert reply.code == "stale_call"
    Tier(group, "last").works()


def test_a_step_sent_ahead_in_one_go_is_closed_by_its_own_close(tier: Tier) -> None:
    """Intent, layer call and CloseStep without waiting for anything; what comes after the close is stale."""
    group = tier.group
    plan_id, intents = tier.intents()
    plan = StepPlan(
        plan_id=plan_id, num_rows_per_rank=(2, 1, 0, 3), phase=Phase.DECODE, dtype="bfloat16",
        weights_version=0, placement_version=0, policy_version=0,
    )  # fmt: skip
    calls, after = tier.calls(plan, 0), tier.calls(plan, 1)
    sent = []
    for rank in range(RANKS):
        close = CloseRequest(lease_serial=1, plan_id=plan_id)
        sent.append([group.send(rank, one) for one in (intents[rank], calls[rank], close, after[rank])])
    group.settle()
    replies = [[group.poll(one) for one in column] for column in zip(*sent)]
    assert all(isinstance(reply, PlanReply) for reply in replies[0])
    assert all(isinstance(reply, LayerReply) for reply in replies[1])
    assert set(replies[2]) == {DoneReply()}
    one_error(dict(enumerate(replies[3])), "stale_call", f"plan {plan_id} must be open")
    tier.works()


def test_nobody_calls_without_a_lease(group: Group) -> None:
    intent = IntentRequest(lease_serial=0, plan_id=PlanId(7, 1, 0), num_rows=1, phase=Phase.DECODE)
    reply = group.ask(0, intent)
    assert isinstance(reply, ErrorReply)
    assert "nobody holds a lease" in reply.message
    for holder in ("", "x" * 600):
        reply = group.ask(0, LeaseRequest(holder=holder))
        assert isinstance(reply, ErrorReply)
        assert reply.code == "invalid_argument"
