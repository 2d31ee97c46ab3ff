"""Routes of the rows: whole pools look as their model says, slices do too, and drift is slow, deep and per layer."""

from __future__ import annotations

import pytest
import torch

from loadgen.moe.routing_model import DRIFT, ROUTINGS, Drift, RoutingModel
from megamoe import MoeShape
from megamoe.errors import ConfigError

SHAPE = MoeShape(hidden=64, intermediate=32, num_experts=64, num_topk=6, num_ranks=8)


def counts(
    model: RoutingModel, step: int, layer: int, rows: int = 256, ranks: range = range(8)
) -> torch.Tensor:
    ids = torch.cat([model.slice(step, layer, rank, rows)[0].flatten() for rank in ranks])
    return torch.bincount(ids, minlength=SHAPE.num_experts).float()


def alike(a: torch.Tensor, b: torch.Tensor) -> float:
    """Correlation of two experts' loads."""
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_row_names_distinct_experts_and_weighs_them(routing: str) -> None:
    ids, weights = RoutingModel(SHAPE, 2, 64, routing).slice(5, 1, 3, 64)
    assert (ids.dtype, ids.shape, weights.shape) == (torch.int32, (64, 6), (64, 6))
    assert ids.is_contiguous()
    assert all(len(set(row)) == 6 for row in ids.tolist())
    assert int(ids.min()) >= 0
    assert int(ids.max()) < 64
    assert torch.allclose(weights.sum(-1), torch.ones(64))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_slices_do_not_depend_on_the_order_of_execution(routing: str) -> None:
    places = [
        (step, layer, rank, 1 + step % 7) for step in (4095, 0, 77) for layer in (2, 0) for rank in (7, 1)
    ]
    one, two = (RoutingModel(SHAPE, 3, 64, routing, seed=9) for _ in range(2))
    first = {place: one.slice(*place)[0].tolist() for place in places}
    assert {place: two.slice(*place)[0].tolist() for place in reversed(places)} == first
    other = RoutingModel(SHAPE, 3, 64, routing, seed=10)
    if routing not in ("one_rank", "boundary"):  # these name the same experts for everybody
        assert {place: other.slice(*place)[0].tolist() for place in places} != first


def test_uniform_layers_have_routes_of_their_own_and_use_all_experts() -> None:
    pools = RoutingModel(SHAPE, 3, 64, "uniform").ids_per_layer
    assert not torch.equal(pools[0], pools[1])
    for pool in pools:
        load = torch.bincount(pool.flatten(), minlength=64).float()
        assert load.min() > 0.7 * load.mean()
        assert load.max() < 1.3 * load.mean()


def test_a_skew_is_in_every_slice() -> None:
    model = RoutingModel(SHAPE, 2, 64, "hot60")
    for layer in range(2):
        for step in range(20):
            ids, _ = model.slice(step, layer, 0, 64)
            hot = (ids == torch.arange(6, dtype=torch.int32)).all(-1).float().mean()
            assert 0.3 < hot < 0.9


@pytest.fixture(scope="module")
def drifting() -> RoutingModel:
    return RoutingModel(SHAPE, 3, 2048, DRIFT, seed=3)


def test_drift_is_slow(drifting: RoutingModel) -> None:
    """Steps next to each other are alike; a quarter of a period on they are not."""
    for step in (10, 1500, 4000):
        now = counts(drifting, step, 0)
        assert alike(now, counts(drifting, step + 1, 0)) > 0.9
        assert alike(now, counts(drifting, step + 20, 0)) > 0.8
        assert abs(alike(now, counts(drifting, step + 1024, 0))) < 0.5


def test_drift_comes_round_without_a_jump(drifting: RoutingModel) -> None:
    assert alike(counts(drifting, 4095, 1), counts(drifting, 4096, 1)) > 0.9
    pool = drifting.ids_per_layer[1]
    assert torch.equal(pool[-2048:], pool[:2048])


def test_drift_is_shared_by_ranks_and_differs_by_layer(drifting: RoutingModel) -> None:
    one, other = (counts(drifting, 200, 0, rows=512, ranks=range(at, at + 4)) for at in (0, 4))
    assert alike(one, other) > 0.8
    assert not torch.equal(one, other)
    assert abs(alike(counts(drifting, 200, 0), counts(drifting, 200, 1))) < 0.5


def test_drift_is_skewed_at_any_moment_and_fair_in_the_long_run(drifting: RoutingModel) -> None:
    now = counts(drifting, 300, 2)
    assert 2 < float(now.max() / now.mean()) < 8
    whole = torch.bincount(drifting.ids_per_layer[2].flatten(), minlength=64).float()
    assert float(whole.max() / whole.mean()) < 2
    flat = counts(RoutingModel(SHAPE, 1, 2048, DRIFT, drift=Drift(sigma=0.0)), 300, 0)
    assert float(flat.max() / flat.mean()) < 1.3


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"sigma": -1.0}, "sigma must be at least 0, got -1.0"),
        ({"period_steps": 1}, "period_steps must be at least 2, got 1"),
        ({"num_keyframes": 0}, "num_keyframes must be at least 2, got 0"),
        ({"jitter": 1.5}, "jitter must be from 0 to 1, got 1.5"),
    ],
)
def test_an_impossible_drift_is_refused(change: dict[str, float], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Drift(**change)
