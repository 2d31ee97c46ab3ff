"""Weights bound to slots of a running rank: what is refused changes nothing, and a wrong layout is found."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from megamoe import LayerWeights, Path, Runtime, random_layer_weights
from megamoe.backends.cpu import CpuBackend, backend
from megamoe.backends.cpu.experts import BoundLayer, dequantized
from megamoe.backends.cpu.matrix import Matrix
from megamoe.errors import BindingError
from megamoe.reference import QUANTIZED_REL_L2, quantized_moe, relative_l2
from tests.megamoe.groups import (
    POLICY_VERSION,
    SHAPE,
    Case,
    batch_of,
    call,
    deployment,
    open_runtime,
    plan_for,
)
from tests.ranks import Rank

ALONE = replace(SHAPE, num_ranks=1, num_experts=8, name="alone")
CASE = Case(Path.COMPACT, (64,))


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with open_runtime(Rank(0, 1, f"megamoe-test-{os.getpid()}-binding"), deployment(ALONE)) as opened:
        yield opened


def weights_of(seed: int) -> LayerWeights:
    return random_layer_weights(ALONE, seed=seed)


def test_a_rebind_takes_effect_and_leaves_other_slots_alone(runtime: Runtime) -> None:
    first, second = weights_of(1), weights_of(2)
    runtime.bind_layer(0, first)
    runtime.bind_layer(1, first)
    batch = batch_of(CASE, ALONE, 0)
    runtime.bind_layer(0, second)
    got = call(runtime, CASE).hidden_states
    assert relative_l2(got, quantized_moe(batch, second, ALONE)) <= QUANTIZED_REL_L2
    other = call(runtime, replace(CASE, layer_idx=1)).hidden_states
    assert relative_l2(other, quantized_moe(batch, first, ALONE)) <= QUANTIZED_REL_L2


def test_typed_forms_are_the_same_weights(runtime: Runtime) -> None:
    weights = weights_of(1)
    runtime.bind_layer(0, weights)
    want = call(runtime, CASE).hidden_states
    typed = replace(
        weights,
        w13_scales=weights.w13_scales.view(torch.float8_e8m0fnu),
        w2_scales=weights.w2_scales.view(torch.float8_e8m0fnu),
        w2_codes=weights.w2_codes.view(torch.float4_e2m1fn_x2),
    )
    runtime.bind_layer(0, typed)
    assert torch.equal(call(runtime, CASE).hidden_states, want)


def strided(weights: LayerWeights) -> LayerWeights:
    return replace(weights, w2_codes=weights.w2_codes.mT.contiguous().mT)


def e4m3_scales(weights: LayerWeights) -> LayerWeights:
    return replace(weights, w13_scales=weights.w13_scales.view(torch.float8_e4m3fn))


def short(weights: LayerWeights) -> LayerWeights:
    return weights.experts(0, 7)


@pytest.mark.parametrize("spoil", [strided, e4m3_scales, short], ids=lambda spoil: spoil.__name__)
def test_a_refused_binding_changes_nothing(runtime: Runtime, spoil: object) -> None:
    assert callable(spoil)
    runtime.bind_layer(0, weights_of(1))
    want = call(runtime, CASE).hidden_states
    with pytest.raises(BindingError, match="must be"):
        runtime.bind_layer(0, spoil(weights_of(2)))
    with pytest.raises(BindingError, match="slot_idx must be .* from 0 to 1, got 2"):
        runtime.bind_layer(2, weights_of(2))
    assert torch.equal(call(runtime, CASE).hidden_states, want)


def test_a_wrong_layout_is_found_before_it_takes_effect(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gate and up rows changed places: plausible numbers, and the self-check says no."""
    runtime.bind_layer(0, weights_of(1))
    want = call(runtime, CASE).hidden_states

    def swapped(weights: LayerWeights) -> BoundLayer:
        inter = ALONE.intermediate
        halves = weights.w13_codes[:, :inter], weights.w13_codes[:, inter:]
        return dequantized(replace(weights, w13_codes=torch.cat(halves[::-1], dim=1)))

    monkeypatch.setattr(backend, "dequantized", swapped)
    with pytest.raises(BindingError, match=r"local expert 4 of slot 0 .* must be within relative L2"):
        runtime.bind_layer(0, weights_of(2))
    assert torch.equal(call(runtime, CASE).hidden_states, want)
    runtime.bind_layer(0, weights_of(2), self_check=False)
    assert not torch.equal(call(runtime, CASE).hidden_states, want)


def test_a_slot_without_weights_says_so_and_the_group_goes_on(runtime: Runtime) -> None:
    with pytest.raises(BindingError, match="slot 1 has no weights"):
        call(runtime, replace(CASE, layer_idx=1))
    runtime.bind_layer(0, weights_of(1))
    call(runtime, CASE)
    assert runtime.policy_of(POLICY_VERSION[Path.COMPACT])
    assert plan_for((64,)).max_rows == 64


@pytest.mark.parametrize(("k", "n"), [(96, 128), (512, 1024)], ids=["plain", "packed"])
def test_the_layout_round_trips(k: int, n: int) -> None:
    """Multiplying the unit matrix gives the canonical weights back, bit by bit, plain or packed."""
    w = torch.randn(k, n, generator=torch.Generator().manual_seed(k))
    matrix = Matrix(w)
    out = torch.empty(k, n)
    matrix.multiply(torch.eye(k), out)
    assert torch.equal(out, w)
    assert (matrix._plain is None) == (k == 512), "the large case must be the packed one on this torch"


def test_the_backend_is_the_one_the_tests_mean(runtime: Runtime) -> None:
    assert isinstance(runtime.backend, CpuBackend)
