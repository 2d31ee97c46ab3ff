"""A checkpoint gives every rank its own experts, and says what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megamoe import MoeShape
from megamoe.checkpoint import checkpoint_version, layer_file, load_layer, save_layer
from megamoe.errors import BindingError
from megamoe.weights import random_layer_weights, random_version, shard

SHAPE = MoeShape(hidden=64, intermediate=32, num_experts=8, num_topk=3, num_ranks=4, num_layers=2)


def test_every_rank_gets_its_own_experts(tmp_path: Path) -> None:
    layers = [random_layer_weights(SHAPE, seed=3, layer_idx=idx) for idx in range(2)]
    for idx, whole in enumerate(layers):
        save_layer(tmp_path, idx, whole)
    for idx, whole in enumerate(layers):
        for rank in range(4):
            loaded = load_layer(tmp_path, SHAPE, idx, rank=rank)
            assert loaded.fingerprint() == shard(whole, SHAPE, rank).fingerprint()
            assert all(tensor.is_contiguous() for tensor in loaded.tensors().values())


def test_a_version_tells_weights_apart(tmp_path: Path) -> None:
    for idx in range(2):
        save_layer(tmp_path, idx, random_layer_weights(SHAPE, seed=3, layer_idx=idx))
    version = checkpoint_version(tmp_path, 2)
    assert version == checkpoint_version(tmp_path, 2)
    save_layer(tmp_path, 1, random_layer_weights(SHAPE, seed=4, layer_idx=1))  # as many bytes
    versions = [version, checkpoint_version(tmp_path, 2), checkpoint_version(tmp_path, 1)]
    versions += [random_version(seed) for seed in range(1000)]
    assert len(set(versions)) == len(versions)
    assert all(0 < number == int(float(number)) for number in versions), "a metric holds them exactly"
    with pytest.raises(BindingError, match=r"a folder with layer-00002\.safetensors, got .* without it"):
        checkpoint_version(tmp_path, 3)


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(BindingError, match=r"layer-00001\.safetensors"):
        load_layer(tmp_path, SHAPE, 1, rank=0)
    whole = random_layer_weights(SHAPE, seed=3).tensors()
    save_file(
        {name: whole[name].contiguous() for name in ("w13_codes", "w13_scales", "w2_codes")},
        str(layer_file(tmp_path, 0)),
    )
    with pytest.raises(BindingError, match="with w2_scales"):
        load_layer(tmp_path, SHAPE, 0, rank=0)
    save_file(whole | {"w2_scales": torch.zeros(8, 64, 2, dtype=torch.uint8)}, str(layer_file(tmp_path, 0)))
    with pytest.raises(
        BindingError, match=r"w2_scales of layer-00000.* must be \[8, 64, 1\], got \[8, 64, 2\]"
    ):
        load_layer(tmp_path, SHAPE, 0, rank=0)
    layer_file(tmp_path, 0).write_bytes(b"not a safetensors file")
    with pytest.raises(BindingError, match="must be a safetensors file"):
        load_layer(tmp_path, SHAPE, 0, rank=0)
    whole_file = save_layer(tmp_path, 0, random_layer_weights(SHAPE, seed=3)).read_bytes()
    for num_bytes in (0, 7, len(whole_file) // 2, len(whole_file) - 1):
        layer_file(tmp_path, 0).write_bytes(whole_file[:num_bytes])
        with pytest.raises(BindingError, match="must be a safetensors file"):
            load_layer(tmp_path, SHAPE, 0, rank=0)


def test_a_scale_of_nan_is_refused_naming_its_expert(tmp_path: Path) -> None:
    """One bad byte would make every token of an expert NaN, long after the service said that it is ready."""
    weights = random_layer_weights(SHAPE, seed=3)
    weights.w2_scales.view(torch.uint8)[5, 3, 0] = 0xFF
    save_layer(tmp_path, 0, weights)
    owner = 5 // SHAPE.num_experts_per_rank
    with pytest.raises(BindingError, match=r"w2_scales of layer-00000.* got it in experts \[5\]"):
        load_layer(tmp_path, SHAPE, 0, rank=owner)
    load_layer(tmp_path, SHAPE, 0, rank=owner - 1)
