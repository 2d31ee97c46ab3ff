"""The binding contract: every refusal names field, wanted and got, and byte views equal typed ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from megamoe import MoeShape
from megamoe.errors import BindingError
from megamoe.weights import LayerWeights, check_binding, random_layer_weights, shard

SHAPE = MoeShape(hidden=64, intermediate=32, num_experts=8, num_topk=3, num_ranks=4)
WEIGHTS = random_layer_weights(SHAPE, seed=1, rank=2)


def checked(weights: LayerWeights, slot_idx: int = 0) -> LayerWeights:
    return check_binding(weights, SHAPE, slot_idx=slot_idx, num_slots=3)


def test_good_weights_pass_as_bytes_without_a_copy() -> None:
    typed = LayerWeights(
        WEIGHTS.w13_codes.view(torch.float4_e2m1fn_x2),
        WEIGHTS.w13_scales.view(torch.float8_e8m0fnu),
        WEIGHTS.w2_codes,
        WEIGHTS.w2_scales.view(torch.float8_e8m0fnu),
    )
    for weights in (WEIGHTS, typed):
        bound = checked(weights)
        for name, tensor in bound.tensors().items():
            assert tensor.dtype is torch.uint8
            assert tensor.data_ptr() == weights.tensors()[name].data_ptr()
    assert checked(typed).fingerprint() == WEIGHTS.fingerprint()


def strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


@pytest.mark.parametrize("name", ["w13_codes", "w13_scales", "w2_codes", "w2_scales"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (strided, ["strides", "contiguous"]),
        (lambda t: t[:1].contiguous(), ["shape", "[2, ", "[1, "]),
        (lambda t: torch.cat([t, t], dim=-1), ["shape"]),
        (lambda t: t.to("meta"), ["device", "cpu", "meta"]),
        (lambda t: t.to(torch.int8), ["dtype", "uint8", "int8"]),
        (lambda t: t.to(torch.bool), ["dtype", "uint8", "bool"]),
        (lambda t: t.float().to(torch.float8_e4m3fn), ["dtype", "uint8", "float8_e4m3fn"]),
        (lambda t: t.float(), ["dtype", "float32"]),
    ],
    ids=["strided", "experts", "width", "device", "int8", "bool", "e4m3", "float32"],
)
def test_refuses(name: str, change: Callable[[torch.Tensor], torch.Tensor], words: list[str]) -> None:
    bad = replace(WEIGHTS, **{name: change(WEIGHTS.tensors()[name])})
    with pytest.raises(BindingError) as caught:
        checked(bad)
    for word in (name, *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("slot_idx", [-1, 3])
def test_slot_out_of_range(slot_idx: int) -> None:
    with pytest.raises(BindingError, match=f"slot_idx must be from 0 to 2, got {slot_idx}"):
        checked(WEIGHTS, slot_idx)


def test_shard_wants_all_experts() -> None:
    with pytest.raises(BindingError, match="experts to shard must be 8, got 2"):
        shard(WEIGHTS, SHAPE, 0)


def test_quantizing_dense_weights() -> None:
    w13 = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0))
    w2 = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(1))
    back13, back2 = LayerWeights.quantized(w13, w2).dequantized()
    for got, want in ((back13, w13), (back2, w2)):
        error = (got - want).norm() / want.norm()
        assert 0.05 < error < 0.16
