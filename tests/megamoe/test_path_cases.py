"""The table of right answers for path choice, one test per case."""

from __future__ import annotations

import json
from pathlib import Path as FilePath
from typing import Any

import pytest

from megamoe import (
    Deployment,
    MoeShape,
    PathPolicy,
    Phase,
    PlanId,
    StepIntent,
    agree,
    choose_path,
    plan_bundle,
)

CASES: list[dict[str, Any]] = json.loads(
    (FilePath(__file__).parent / "cases" / "path_decisions.json").read_text()
)["cases"]
SHAPE_FIELDS = (
    "num_ranks",
    "hidden",
    "intermediate",
    "num_experts",
    "num_topk",
    "activation",
    "quant",
    "fused_shared_expert",
)


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_case(case: dict[str, Any]) -> None:
    given = dict(case["deployment"])
    shape = MoeShape(**{name: given.pop(name) for name in SHAPE_FIELDS})
    deployment = Deployment(shape=shape, **given)
    step = case["step"]
    intents = [
        StepIntent(
            rank=rank,
            num_ranks=shape.num_ranks,
            plan_id=PlanId(1, 7),
            num_rows=num_rows,
            phase=Phase(phase),
        )
        for rank, (num_rows, phase) in enumerate(
            zip(step["num_rows_per_rank"], step["phase_per_rank"], strict=True)
        )
    ]
    plan = agree(intents, max_step_rows=deployment.step_rows_limit)
    sub_steps = choose_path(plan, plan_bundle(deployment), PathPolicy.of(deployment))
    got = [
        {"path": sub_step.path.value, "runtime_capacity": sub_step.runtime_capacity} for sub_step in sub_steps
    ]
    assert got == case["expect"], case["why"]


def test_table_is_whole() -> None:
    assert len(CASES) == 31
    assert len({case["name"] for case in CASES}) == len(CASES)
