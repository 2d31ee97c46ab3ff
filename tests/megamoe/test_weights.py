"""The binding contract: every refusal names field, wanted and got, and byte views equal typed ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
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


@pytest.mark.parametrize("slot_idx", [-1, 3, True, None, 1.5])
def test_slot_out_of_range(slot_idx: object) -> None:
    with pytest.raises(BindingError, match=f"slot_idx must be an int from 0 to 2, got {slot_idx}"):
        checked(WEIGHTS, slot_idx)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [None, np.zeros(3, dtype=np.uint8)], ids=["none", "numpy"])
def test_refuses_what_is_no_tensor(bad: object) -> None:
    with pytest.raises(BindingError, match=r"w2_codes must be a torch\.Tensor, got (NoneType|ndarray)"):
        checked(replace(WEIGHTS, w2_codes=bad))  # type: ignore[arg-type]


def test_device_index_is_part_of_the_device() -> None:
    meta = LayerWeights(*(tensor.to("meta") for tensor in WEIGHTS.tensors().values()))

    def check_on(device: str) -> LayerWeights:
        return check_binding(meta, SHAPE, slot_idx=0, num_slots=1, device=device)

    assert check_on("meta").w13_codes.shape == WEIGHTS.w13_codes.shape
    with pytest.raises(BindingError, match=r"w13_codes\.device must be meta:1, got meta"):
        check_on("meta:1")


def test_a_refusal_leaves_the_weights_as_they_were() -> None:
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in WEIGHTS.tensors().items()}
    with pytest.raises(BindingError):
        checked(replace(WEIGHTS, w2_scales=WEIGHTS.w2_scales.to(torch.int8)))
    for name, tensor in WEIGHTS.tensors().items():
        assert tensor.data_ptr() == before[name][0]
        assert torch.equal(tensor, before[name][1])


def test_shard_wants_all_experts_and_a_rank_of_the_shape() -> None:
    with pytest.raises(BindingError, match="experts of w13_codes to shard must be 8, got 2"):
        shard(WEIGHTS, SHAPE, 0)
    whole = random_layer_weights(SHAPE, seed=1)
    with pytest.raises(BindingError, match="experts of w2_scales to shard must be 8, got 7"):
        shard(replace(whole, w2_scales=whole.w2_scales[:7]), SHAPE, 0)
    for rank in (-1, 4):
        with pytest.raises(BindingError, match=f"rank must be from 0 to 3, got {rank}"):
            shard(whole, SHAPE, rank)
        with pytest.raises(BindingError, match=f"rank must be from 0 to 3, got {rank}"):
            random_layer_weights(SHAPE, seed=1, rank=rank)


def test_random_weights_are_the_same_sharded_or_whole() -> None:
    whole = random_layer_weights(SHAPE, seed=1)
    for rank in range(4):
        own = random_layer_weights(SHAPE, seed=1, rank=rank)
        assert own.fingerprint() == shard(whole, SHAPE, rank).fingerprint()
        assert checked(shard(whole, SHAPE, rank)).w2_codes.data_ptr() == whole.w2_codes[2 * rank].data_ptr()
    w13, w2 = whole.dequantized()
    assert float(w13.square().mean()) == pytest.approx(1 / 64, rel=0.1)
    assert float(w2.square().mean()) == pytest.approx(1.5**2 / 32, rel=0.1)


def test_fingerprint_tells_weight_sets_apart() -> None:
    prints = {WEIGHTS.fingerprint()}
    assert LayerWeights(*WEIGHTS.tensors().values()).fingerprint() in prints
    prints.add(random_layer_weights(SHAPE, seed=2, rank=2).fingerprint())
    prints.add(random_layer_weights(SHAPE, seed=1, rank=1).fingerprint())
    prints.add(random_layer_weights(SHAPE, seed=1, layer_idx=1, rank=2).fingerprint())
    for name, tensor in WEIGHTS.tensors().items():
        changed = tensor.clone()
        changed.view(-1)[-1] ^= 1
        prints.add(replace(WEIGHTS, **{name: changed}).fingerprint())
        prints.add(replace(WEIGHTS, **{name: tensor.flatten()}).fingerprint())
    assert len(prints) == 12


def test_gate_rows_come_first_and_experts_in_order() -> None:
    """The canonical packing, value by value: a dense matrix that MXFP4 holds exactly comes back in its places."""
    w13 = torch.arange(2 * 64 * 64).view(2, 64, 64).remainder(7).sub(3.0)
    w2 = torch.arange(2 * 64 * 32).view(2, 64, 32).remainder(5).sub(2.0) * 4.0
    weights = LayerWeights.quantized(w13.bfloat16(), w2)
    assert weights.w13_codes.shape == (2, 64, 32)
    assert weights.w2_scales.shape == (2, 64, 1)
    for got, want in zip(weights.dequantized(), (w13, w2), strict=True):
        assert torch.equal(got, want)
    for got, want in zip(weights.experts(1, 2).dequantized(), (w13[1:], w2[1:]), strict=True):
        assert torch.equal(got, want)


def test_dense_weights_that_do_not_belong_together() -> None:
    w13 = torch.zeros(2, 64, 96)
    with pytest.raises(
        BindingError, match=r"w2\.shape must be \[2, 96, 32\] beside this w13, got \[2, 96, 64\]"
    ):
        LayerWeights.quantized(w13, torch.zeros(2, 96, 64))
    with pytest.raises(BindingError, match=r"w13\.shape must be \[experts, .*got \[64, 96\]"):
        LayerWeights.quantized(w13[0], torch.zeros(2, 96, 32))
    with pytest.raises(BindingError, match=r"w13\.shape must be \[experts, .*got \[2, 65, 96\]"):
        LayerWeights.quantized(torch.zeros(2, 65, 96), torch.zeros(2, 96, 32))
    with pytest.raises(
        BindingError, match=r"w2\.shape must be \[2, 96, 32\] beside this w13, got \[2, 64, 32\]"
    ):
        LayerWeights.quantized(w13, torch.zeros(2, 64, 32))
    with_gradient = torch.ones(2, 64, 96, requires_grad=True)
    assert torch.equal(
        LayerWeights.quantized(with_gradient, torch.zeros(2, 96, 32)).dequantized()[0], with_gradient
    )


def test_quantizing_dense_weights() -> None:
    w13 = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0))
    w2 = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(1))
    back13, back2 = LayerWeights.quantized(w13, w2).dequantized()
    for got, want in ((back13, w13), (back2, w2)):
        error = (got - want).norm() / want.norm()
        assert 0.05 < error < 0.16
