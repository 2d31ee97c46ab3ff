"""What callers can do wrong, on one rank or on all: every rank answers the same, nothing hangs, the group goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megamoe import Path, PathPolicy, Phase, PlanId, StagedPolicies, StepPlan, SubStepReport
from megamoe.errors import PeerTimeoutError
from service.board.admission import AdmissionLimits
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
    Reply,
    Request,
)
from service.rank.call_order import CallId
from service.rank.step_loop import LoopSettings
from tests.service.simulation import Group, Sent, codes, rows_of, simulated_group

RANKS = 4
NO_TENSORS = dict.fromkeys(("hidden_states", "topk_ids", "topk_weights"))
BAD_ID = {"refusal": ("invalid_argument", "topk_ids[0][1] ..."), **NO_TENSORS}


class Tier:
    """A caller group that counts steps and sequences for itself."""

    def __init__(self, group: Group, holder: str = "tier") -> None:
        self.group = group
        self.lease = group.lease(holder)
        self.sequence = self.lease.next_sequence
        self.step_id = self.lease.next_step_id

    def intents(
        self,
        counts: tuple[int, ...] = (2, 1, 0, 3),
        *,
        phase: Phase = Phase.DECODE,
        micro_batch_idx: int = 0,
        with_counts: bool = False,
        change: dict[int, dict[str, Any]] | None = None,
    ) -> tuple[PlanId, dict[int, Request]]:
        plan_id = PlanId(self.lease.generation, self.step_id, micro_batch_idx)
        self.step_id += 1
        requests: dict[int, Request] = {}
        for rank, rows in enumerate(counts):
            fields: dict[str, Any] = {
                "lease_serial": self.lease.lease_serial,
                "plan_id": plan_id,
                "num_rows": rows,
                "phase": phase if rows else Phase.IDLE,
                "num_rows_per_rank": counts if with_counts else None,
            }
            requests[rank] = IntentRequest(**(fields | (change or {}).get(rank, {})))
        return plan_id, requests

    def open(self, counts: tuple[int, ...] = (2, 1, 0, 3), **more: Any) -> StepPlan:
        _, requests = self.intents(counts, **more)
        replies = self.group.ask_all(requests)
        plans = {reply.plan for reply in replies.values() if isinstance(reply, PlanReply)}
        assert len(plans) == 1, replies
        assert all(isinstance(reply, PlanReply) for reply in replies.values()), replies
        return plans.pop()

    def calls(
        self,
        plan: StepPlan,
        layer_idx: int = 0,
        *,
        ranks: tuple[int, ...] = tuple(range(RANKS)),
        change: dict[int, dict[str, Any]] | None = None,
        sequence: int | None = None,
    ) -> dict[int, Request]:
        if sequence is None:
            sequence = self.sequence
            self.sequence += 1
        requests: dict[int, Request] = {}
        for rank in ranks:
            fields: dict[str, Any] = {
                "lease_serial": self.lease.lease_serial,
                "plan_id": plan.plan_id,
                "layer_idx": layer_idx,
                "sequence": sequence,
                **rows_of(plan.num_rows_per_rank[rank], seed=rank),
            }
            requests[rank] = LayerRequest(**(fields | (change or {}).get(rank, {})))
        return requests

    def layer(self, plan: StepPlan, layer_idx: int = 0, **more: Any) -> dict[int, Reply]:
        return self.group.ask_all(self.calls(plan, layer_idx, **more))

    def works(self) -> None:
        """A whole step works, with the right values on all ranks."""
        plan = self.open((1, 2, 0, 5))
        sequence = self.sequence
        replies = self.layer(plan, 1)
        for rank, reply in replies.items():
            assert isinstance(reply, LayerReply), (rank, reply)
            rows = plan.num_rows_per_rank[rank]
            if rows:
                wanted = rows_of(rows, seed=rank)["hidden_states"] + (sequence % 64 + 8)
                assert torch.equal(reply.hidden_states, wanted)
        assert not self.group.inside
        assert not self.group.errors


@pytest.fixture
def group(group_name: str) -> Iterator[Group]:
    with simulated_group(group_name, RANKS) as made:
        yield made


@pytest.fixture
def tier(group: Group) -> Tier:
    return Tier(group)


def one_error(replies: dict[int, Reply], code: str, *texts: str, ranks: int = RANKS) -> str:
    """All ranks answer one and the same error."""
    said = codes(replies)
    assert len(replies) == ranks
    assert len(said) == 1, said
    ((got, message),) = said
    assert got == code, message
    for text in texts:
        assert text in message, message
    return message


# ------------------------------------------------------------------------------ intents


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
    message = one_error(replies, "peer_timeout", f"plan {plan_id}", "10 s", "no intent of rank 2", ranks=3)  # type: ignore[arg-type]
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
    one_error(replies, "agreement", "got step 2 from rank 2 without it", ranks=3)  # type: ignore[arg-type]
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


# ------------------------------------------------------------------------------ layer calls


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
    one_error({rank: tier.group.poll(sent[rank]) for rank in range(RANKS)}, code, *texts)  # type: ignore[misc]
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
    one_error(replies, "invalid_argument", "rank 1 refused: no 1; rank 3 refused: no 3")  # type: ignore[arg-type]
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
    message = one_error(replies, "peer_timeout", "waited for ranks [1]", ranks=3)  # type: ignore[arg-type]
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
    one_error(replies, "peer_timeout", f"must follow sequence {lost}, which came to no rank within 10 s")  # type: ignore[arg-type]
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
    one_error(replies, "stale_call", f"plan {plan_id} must be open, got failed (dtype must be equal")  # type: ignore[arg-type]
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


# ------------------------------------------------------------------------------ counts vector


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


# ------------------------------------------------------------------------------ leases


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
    one_error(replies, "stale_call", "rank 2 refused: lease 1 is over", ranks=3)  # type: ignore[arg-type]
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
    one_error(dict(enumerate(replies[3])), "stale_call", f"plan {plan_id} must be open")  # type: ignore[arg-type]
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


# ------------------------------------------------------------------------------ policies


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


# ------------------------------------------------------------------------------ the group goes down


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
    one_error({rank: group.poll(one) for rank, one in late.items()}, "unavailable", "rank 2 died")  # type: ignore[misc]
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
    slot, conflict = order(0).join(1, first)
    assert (slot.call, conflict) == (first, None)
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
