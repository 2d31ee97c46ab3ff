"""A caller group of a simulated group, which a test tells step by step what to send, wrong things too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megamoe import Phase, PlanId, StepPlan
from service.messages import IntentRequest, LayerReply, LayerRequest, PlanReply, Reply, Request
from tests.service.simulation import Group, codes, rows_of

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


def one_error(replies: Mapping[int, Reply | None], code: str, *texts: str, ranks: int = RANKS) -> str:
    """All ranks answer one and the same error."""
    said = codes(replies)
    assert len(replies) == ranks
    assert len(said) == 1, said
    ((got, message),) = said
    assert got == code, message
    for text in texts:
        assert text in message, message
    return message
