"""Sub-steps that launch alike share a recipe; captured graphs go with the binding they were captured for."""

from __future__ import annotations

from typing import Any

import pytest

from megamoe import Deployment, MoeShape, Path, SubStep, plan_bundle
from megamoe.backends.hopper.call import GraphKey, Recipes
from megamoe.backends.hopper.graphs import StepGraphs

SHAPE = MoeShape(hidden=96, intermediate=64, num_experts=16, num_topk=4, num_ranks=2)
BUNDLE = plan_bundle(
    Deployment(
        shape=SHAPE, backend="hopper", max_tokens_per_rank=2048, fixed_slot_max=64, large_m_capacity=2048
    )
)


def sub_step(path: Path, rows: int) -> SubStep:
    capacity = min(c for c in BUNDLE.capacities(path) if c >= rows)
    return SubStep.whole(path, capacity, (rows, 0))


def test_a_slot_that_is_bound_anew_loses_its_graphs_and_no_others() -> None:
    graph: Any = object()
    stream: Any = None  # nothing is captured here
    graphs = StepGraphs(stream)
    keys = [GraphKey(slot, 0, recipe, False, False) for slot in (0, 1) for recipe in (7, 8)]
    graphs._graphs = dict.fromkeys(keys, (1, graph))
    graphs.forget(0)
    assert list(graphs._graphs) == keys[2:]
    assert len(graphs) == 2


def test_steps_of_nearly_as_many_rows_share_a_recipe() -> None:
    recipes = Recipes(BUNDLE)
    five = recipes.of(sub_step(Path.FIXED_SLOT, 5))
    assert five is recipes.of(sub_step(Path.FIXED_SLOT, 8))
    assert five is not recipes.of(sub_step(Path.FIXED_SLOT, 9))
    assert five is not recipes.of(sub_step(Path.COMPACT, 5))
    assert (five.grid_rows, five.capacity) == (8, 64)


@pytest.mark.parametrize(
    ("path", "rows", "captured"),
    [
        (Path.FIXED_SLOT, 64, True),
        (Path.COMPACT, 512, True),
        (Path.COMPACT, 513, False),
        (Path.LARGE_M, 64, False),
    ],
)
def test_steps_whose_launches_cost_little_beside_their_kernels_are_not_captured(
    path: Path, rows: int, captured: bool
) -> None:
    assert Recipes(BUNDLE).of(sub_step(path, rows)).captured is captured
