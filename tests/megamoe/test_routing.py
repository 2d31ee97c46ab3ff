"""The named distributions: what each one is at V4-Pro, that every shape gets legal routes, and who can predict them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megamoe import MoeShape, preset
from megamoe.errors import InvalidArgumentError
from megamoe.routing import DISTRIBUTIONS, route, route_rank

PRO = preset("deepseek-v4-pro")
SHAPE = MoeShape(hidden=64, intermediate=32, num_experts=8, num_topk=3, num_ranks=4)


@st.composite
def shapes(draw: st.DrawFn) -> MoeShape:
    num_ranks = draw(st.sampled_from([1, 2, 4, 8]))
    num_experts = num_ranks * draw(st.integers(1, 6))
    num_topk = draw(st.integers(1, min(num_experts, 9)))
    return MoeShape(
        hidden=32, intermediate=32, num_experts=num_experts, num_topk=num_topk, num_ranks=num_ranks
    )


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@given(shape=shapes(), num_rows=st.integers(0, 40), seed=st.integers(0, 2**31))
def test_routes_are_legal_and_distinct_at_any_shape(
    distribution: str, shape: MoeShape, num_rows: int, seed: int
) -> None:
    ids, weights = route_rank(shape, distribution, num_rows, seed=seed, rank=0)
    assert ids.dtype is torch.int32
    assert weights.dtype is torch.float32
    assert ids.shape == weights.shape == (num_rows, shape.num_topk)
    assert ids.is_contiguous()
    assert weights.is_contiguous()
    assert all(len(set(row)) == shape.num_topk for row in ids.tolist())
    assert not num_rows or (int(ids.min()) >= 0 and int(ids.max()) < shape.num_experts)
    assert bool((weights > 0).all())
    torch.testing.assert_close(weights.sum(-1), torch.ones(num_rows))


@given(shape=shapes(), seed=st.integers(0, 2**31))
def test_rank_balanced_hot_balances_ranks(shape: MoeShape, seed: int) -> None:
    ids, _ = route_rank(shape, "rank_balanced_hot", 16, seed=seed, rank=1)
    for row in (ids // shape.num_experts_per_rank).tolist():
        per_rank = [row.count(rank) for rank in range(shape.num_ranks)]
        assert len(set(row)) == min(shape.num_topk, shape.num_ranks)
        assert max(per_rank) - min(count for count in per_rank if count) <= 1


def test_distributions_have_their_shape_at_v4_pro() -> None:
    n = 2000

    def ids_of(name: str, num_rows: int = n) -> torch.Tensor:
        return route_rank(PRO, name, num_rows, seed=1, rank=2)[0]

    assert ids_of("one_rank").unique().tolist() == [0, 1, 2, 3, 4, 5]
    assert (ids_of("boundary") == torch.tensor([0, 1, 2, 3, 46, 47])).all()
    for num_rows, num_hot in ((n, 1200), (7, 4), (1, 0)):
        hot = (ids_of("hot60", num_rows) == torch.arange(6)).all(-1)
        assert int(hot.sum()) == num_hot
    balanced = ids_of("rank_balanced_hot")
    assert all(len(set(row)) == 6 for row in (balanced // 48).tolist())
    assert float((balanced % 48 == 0).double().mean()) == pytest.approx(0.6, abs=0.02)
    cold = (balanced % 48)[balanced % 48 > 0].long().bincount(minlength=48)[1:].double()
    assert float(cold.min()) > 0.5 * float(cold.mean()), "the other experts of a rank share the rest evenly"
    per_rank = (balanced // 48).long().flatten().bincount(minlength=8).double()
    assert float(per_rank.std() / per_rank.mean()) < 0.05
    uniform = ids_of("uniform").long().flatten().bincount(minlength=384).double()
    assert float(uniform.std() / uniform.mean()) < 0.25


def test_zipf_follows_its_exponent() -> None:
    one = MoeShape(hidden=32, intermediate=32, num_experts=64, num_topk=1, num_ranks=8)
    ids, _ = route_rank(one, "zipf", 40000, seed=3, rank=0)
    share = ids.flatten().long().bincount(minlength=64).double() / 40000
    want = torch.arange(1, 65).double() ** -1.3
    want /= want.sum()
    torch.testing.assert_close(share[:16], want[:16], rtol=0.15, atol=0.002)


def test_boundary_where_a_rank_is_small() -> None:
    small = MoeShape(hidden=32, intermediate=32, num_experts=16, num_topk=6, num_ranks=4)
    assert route_rank(small, "boundary", 1, seed=0, rank=0)[0].tolist() == [[0, 1, 2, 3, 4, 5]]
    fits = MoeShape(hidden=32, intermediate=32, num_experts=32, num_topk=6, num_ranks=4)
    assert route_rank(fits, "boundary", 1, seed=0, rank=0)[0].tolist() == [[0, 1, 2, 3, 6, 7]]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_any_rank_predicts_the_global_answer(distribution: str) -> None:
    counts = [0, 5, 100, 33]
    everyone = route(SHAPE, distribution, counts, seed=4)
    for rank, (ids, weights) in enumerate(everyone):
        own_ids, own_weights = route_rank(SHAPE, distribution, counts[rank], seed=4, rank=rank)
        assert torch.equal(ids, own_ids)
        assert torch.equal(weights, own_weights)
    other_seed = route(SHAPE, distribution, counts, seed=5)
    assert not torch.equal(other_seed[2][1], everyone[2][1])
    other_rank = route_rank(SHAPE, distribution, 100, seed=4, rank=3)
    assert not torch.equal(other_rank[1], everyone[2][1])


def test_another_process_draws_the_same() -> None:
    code = (
        "from megamoe import preset\nfrom megamoe.routing import route_rank\n"
        "ids, w = route_rank(preset('demo'), 'zipf', 50, seed=9, rank=5, no_expert_share=0.1)\n"
        "print(ids.sum().item(), w.double().sum(0).tolist())"
    )
    ids, w = route_rank(preset("demo"), "zipf", 50, seed=9, rank=5, no_expert_share=0.1)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == f"{ids.sum().item()} {w.double().sum(0).tolist()}"


def test_shares_of_nobody_and_duplicates() -> None:
    ids, _ = route_rank(SHAPE, "uniform", 4000, seed=1, rank=0, no_expert_share=0.25)
    assert float((ids == -1).double().mean()) == pytest.approx(0.25, abs=0.02)
    ids, _ = route_rank(SHAPE, "uniform", 4000, seed=1, rank=0, duplicate_share=0.5)
    assert float((ids[:, 0] == ids[:, -1]).double().mean()) == pytest.approx(0.5, abs=0.03)
    for ids, _ in route(SHAPE, "uniform", [10] * 4, seed=1, no_expert_share=1.0):
        assert bool((ids == -1).all())
    for ids, _ in route(SHAPE, "uniform", [10] * 4, seed=1, duplicate_share=1.0):
        assert torch.equal(ids[:, 0], ids[:, -1])


def test_hot_share_holds_where_a_rank_has_two_experts() -> None:
    small = MoeShape(hidden=32, intermediate=32, num_experts=16, num_topk=6, num_ranks=8)
    ids, _ = route_rank(small, "rank_balanced_hot", 4000, seed=1, rank=0)
    assert float((ids % 2 == 0).double().mean()) == pytest.approx(0.6, abs=0.02)


def test_refusals_name_field_wanted_and_got() -> None:
    for arguments, message in (
        ({"distribution": "hot"}, "distribution must be one of uniform, .* got 'hot'"),
        ({"num_rows": -1}, "num_rows must be at least 0, got -1"),
        ({"no_expert_share": 1.5}, "no_expert_share must be from 0 to 1, got 1.5"),
        ({"duplicate_share": -0.5}, "duplicate_share must be from 0 to 1, got -0.5"),
    ):
        good = {"distribution": "uniform", "num_rows": 4, "seed": 0, "rank": 0}
        with pytest.raises(InvalidArgumentError, match=message):
            route_rank(SHAPE, **(good | arguments))  # type: ignore[arg-type]
    with pytest.raises(
        InvalidArgumentError, match=r"num_rows_per_rank must be one count for each of 4 ranks"
    ):
        route(SHAPE, "uniform", [1, 2], seed=0)
