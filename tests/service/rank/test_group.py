"""What a group has in common: policies, its end, progress, the order of layer calls, what observers hear of it."""

from __future__ import annotations

from typing import Any

import pytest

from megamoe import Path, PathPolicy, Phase, PlanId, StagedPolicies, StepPlan, SubStepReport
from service.messages import (
    DoneReply,
    ErrorReply,
    PlanReply,
    PolicyRequest,
)
from service.rank.call_order import CallId
from tests.service.simulation import Group, simulated_group
from tests.service.tier import BAD_ID, RANKS, Tier, one_error


def test_a_new_policy_takes_effect_at_one_step_on_all_ranks(tier: Tier) -> None:
    group = tier.group
    old = group.states[0].policies.newest
    new = old.with_path(Path.FIXED_SLOT, False)
    assert tier.open((2, 1, 0, 3)).policy_version == 0
    for rank in (0, 1, 3):
        assert group.ask(rank, PolicyRequest(policy=new)) == DoneReply()
    assert tier.open().policy_version == 0, "rank 2 has not staged it"
    assert group.ask(2, PolicyRequest(policy=new)) == DoneReply()
    assert group.ask(2, PolicyRequest(policy=new)) == DoneReply(), "staging again is no error"
    _, requests = tier.intents()
    for reply in group.ask_all(requests).values():
        assert isinstance(reply, PlanReply)
        assert reply.plan.policy_version == 1
        assert [piece.path for piece in reply.sub_steps] == [Path.COMPACT]
    stale = group.ask(0, PolicyRequest(policy=PathPolicy(version=1)))
    assert isinstance(stale, ErrorReply)
    assert "policy.version must be above 1, got 1" in stale.message


def test_a_rank_that_lacks_the_agreed_policy_is_an_error_on_all(tier: Tier) -> None:
    group = tier.group
    new = group.states[0].policies.newest.with_path(Path.FIXED_SLOT, False)
    for rank in range(RANKS):
        assert group.ask(rank, PolicyRequest(policy=new)) == DoneReply()
    forgetful = StagedPolicies(PathPolicy(version=0))
    forgetful.stage(PathPolicy(version=2))
    group.states[3].plans._policies = forgetful
    _, requests = tier.intents()
    replies = group.ask_all(requests)
    assert isinstance(replies[3], ErrorReply)
    assert isinstance(replies[0], PlanReply)
    one_error(
        tier.layer(replies[0].plan),
        "internal",
        "rank 3: policy_version of the plan must be one staged here (0, 2), got 1",
    )


def test_a_group_that_is_down_says_so_to_everything(tier: Tier) -> None:
    group = tier.group
    plan = tier.open()
    sent = [group.send(rank, call) for rank, call in tier.calls(plan, ranks=(0, 1, 3)).items()]
    _, requests = tier.intents(micro_batch_idx=1)
    sent.append(group.send(0, requests[0]))
    group.settle()
    group.boards[0].post_down(ErrorReply(code="unavailable", message="rank 2 died"))
    group.boards[1].post_down(ErrorReply(code="unavailable", message="second"))
    group.settle()
    assert {group.poll(one) for one in sent} == {ErrorReply(code="unavailable", message="rank 2 died")}
    _, requests = tier.intents()
    one_error(group.ask_all(requests), "unavailable", "rank 2 died")
    late = {rank: group.send(rank, call) for rank, call in tier.calls(plan).items()}
    group.now += 0.3
    group.settle()
    one_error({rank: group.poll(one) for rank, one in late.items()}, "unavailable", "rank 2 died")
    assert sorted(group.inside) == [0, 1, 3]
    group.time_out()
    assert not group.inside, "what they were inside of was answered already"


def test_progress_is_marked_by_ranks_that_make_it(tier: Tier) -> None:
    board = tier.group.boards[0]
    assert board.last_progress_s(2) == 0.0
    plan = tier.open()
    first = board.last_progress_s(2)
    assert first > 0
    tier.layer(plan)
    assert board.last_progress_s(2) > first


@pytest.mark.parametrize("first_sequence", [2**31 - 3, 2**32 - 3, 2**62])
def test_sequences_are_64_bit(group_name: str, first_sequence: int) -> None:
    with simulated_group(group_name, RANKS, first_sequence=first_sequence) as group:
        tier = Tier(group)
        assert tier.sequence == first_sequence
        for _ in range(6):
            tier.works()


def test_the_order_of_the_board_alone(group: Group) -> None:
    """Claims, conflicts and give-ups as two ranks see them, without any loop."""

    def order(rank: int) -> Any:
        return group.states[rank].calls._order

    first, second = CallId(1, PlanId(7, 1, 0), 2), CallId(1, PlanId(7, 1, 0), 3)
    assert order(0).join(1, first) is None
    assert order(0).join(1, first) is None, "claimed for just this call"
    slot, conflict = order(1).join(1, second)
    assert slot.call == first
    assert "must be the same call on all ranks: layer 2 of plan 7/1/0, got layer 3" in conflict.message
    assert order(2).refusal(1).message.startswith("rank 1 refused: sequence 1 must be the same call")
    assert order(0).give_up(3, ErrorReply(code="x", message="a"), first=1) is None, "1 is begun"
    assert order(0).give_up(3, ErrorReply(code="x", message="a"), first=2).message == "a"
    assert order(1).give_up(2, ErrorReply(code="x", message="b")).message == "a", "the first error wins"
    assert group.boards[2].highest_sequence == 3


class Watcher:
    """An observer that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, object]] = []

    def record_plan(self, plan: StepPlan, policy: PathPolicy) -> None:
        self.told.append(("plan", (plan.max_rows, policy.version)))

    def record_step(self, plan: StepPlan, policy: PathPolicy, reports: tuple[SubStepReport, ...]) -> None:
        self.told.append(("step", [str(report.path) for report in reports]))

    def record_error(self, code: str) -> None:
        self.told.append(("error", code))

    def record_policy(self, policy: PathPolicy) -> None:
        self.told.append(("policy", policy.version))


def test_observers_hear_of_every_plan_call_and_error_on_their_rank(group_name: str) -> None:
    watchers = [Watcher() for _ in range(RANKS)]
    with simulated_group(group_name, RANKS, observers=watchers) as group:
        tier = Tier(group)
        plan = tier.open((2, 0, 0, 16), phase=Phase.PREFILL)
        tier.layer(plan, 1)
        none = tier.open((0, 0, 0, 0))
        tier.layer(none, 1)
        _, requests = tier.intents(change={3: {"dtype": "mxfp8"}})
        group.ask_all(requests)
        # A call that rank 1 follows without being called, and that rank 0 refuses.
        _, requests = tier.intents((2, 0, 1, 1), with_counts=True)
        plans = group.ask_all({rank: requests[rank] for rank in (0, 2, 3)})
        assert isinstance(plans[0], PlanReply)
        calls = tier.calls(plans[0].plan, change={0: BAD_ID}, ranks=(0, 2, 3))
        for rank in (2, 3, 0):
            group.send(rank, calls[rank])
            group.settle()
        policy = group.states[1].policies.newest.with_path(Path.SMALL_M, True)
        group.ask(1, PolicyRequest(policy=policy))
        large = ["compact", "compact"]
        wanted = [
            ("plan", (16, 0)), ("step", large), ("plan", (0, 0)), ("error", "agreement"), ("plan", (2, 0)),
            ("error", "invalid_argument"),
        ]  # fmt: skip
        for rank, watcher in enumerate(watchers):
            assert watcher.told == wanted + ([("policy", 1)] if rank == 1 else []), rank
