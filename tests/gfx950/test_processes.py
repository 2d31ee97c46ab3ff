"""Ranks in processes of their own on one shared heap, as the service starts them."""

from __future__ import annotations

import time

import pytest
import torch

from megamoe import Runtime
from megamoe.backends.gfx950.lockstep import batches_of, emulated, layer_weights, shape_of
from megamoe.bundle import Deployment, Path
from megamoe.errors import PeerTimeoutError
from megamoe.reference import QUANTIZED_REL_L2, quantized_moe, relative_l2, tolerance
from megamoe.shape import MoeShape
from megamoe.step import Phase, PlanId, StepIntent, StepPlan, agree
from megamoe.weights import shard
from tests.ranks import Rank, run_ranks

STEPS = [[2, 0, 3, 1], [8, 5, 0, 7]]


def deployment_of(shape: MoeShape) -> Deployment:
    return emulated(shape, max_tokens_per_rank=8, fixed_slot_max=4, large_m_capacity=8, small_m_capacities=())


def plan_of(step_id: int, rows: list[int]) -> StepPlan:
    return agree(
        [
            StepIntent(
                rank=rank, num_ranks=len(rows), plan_id=PlanId(1, step_id, 0), num_rows=count,
                phase=Phase.DECODE if count else Phase.IDLE,
            )
            for rank, count in enumerate(rows)
        ]
    )  # fmt: skip


def forward_steps(rank: Rank, shape: MoeShape) -> list[tuple[Path, torch.Tensor]]:
    torch.set_num_threads(1)
    with Runtime.open(
        deployment_of(shape), rank=rank.rank, group_name=rank.group_name, timeout_s=120
    ) as runtime:
        runtime.bind_layer(0, shard(layer_weights(shape), shape, rank.rank))
        out = []
        for step_id, rows in enumerate(STEPS):
            batch = batches_of(shape, rows, seed=step_id)[rank.rank]
            result = runtime.forward(batch, plan_of(step_id, rows), 0, timeout_s=100)
            out.append((result.sub_steps[0].path, result.hidden_states))
        return out


def wait_until_given_up(runtime: Runtime) -> None:
    deadline = time.monotonic() + 100
    while not runtime.backend.device.given_up(0):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def miss_one_step(rank: Rank, shape: MoeShape) -> tuple[int, ...]:
    """Rank 1 comes too late for the first step; everyone names it; the second step works."""
    torch.set_num_threads(1)
    with Runtime.open(
        deployment_of(shape), rank=rank.rank, group_name=rank.group_name, timeout_s=120
    ) as runtime:
        runtime.bind_identity(0)
        missing: tuple[int, ...] = ()
        batches = batches_of(shape, [1] * rank.num_ranks)
        for step_id in range(2):
            if step_id == 0 and rank.rank == 1:
                wait_until_given_up(runtime)
            try:
                plan = plan_of(step_id, [1] * rank.num_ranks)
                runtime.forward(batches[rank.rank], plan, 0, timeout_s=1.0 if step_id == 0 else 60.0)
            except PeerTimeoutError as error:
                assert step_id == 0
                missing = error.missing_ranks
        return missing


@pytest.mark.e2e
def test_processes_agree_with_the_oracle() -> None:
    shape = shape_of(num_ranks=4, num_experts=16, num_layers=1)
    weights = layer_weights(shape)
    per_rank = run_ranks(4, forward_steps, shape, timeout_s=200)
    for step_id, (rows, path) in enumerate(zip(STEPS, (Path.FIXED_SLOT, Path.COMPACT), strict=True)):
        assert {steps[step_id][0] for steps in per_rank} == {path}
        got = torch.cat([steps[step_id][1] for steps in per_rank])
        want = torch.cat(
            [quantized_moe(batch, weights, shape) for batch in batches_of(shape, rows, seed=step_id)]
        )
        assert relative_l2(got, want) <= tolerance(QUANTIZED_REL_L2, len(want))


@pytest.mark.e2e
def test_a_process_that_is_late_is_named_by_all_and_the_next_step_works() -> None:
    shape = shape_of(num_ranks=2, num_experts=16, num_layers=1)
    assert run_ranks(2, miss_one_step, shape, timeout_s=200) == [(1,), (1,)]
