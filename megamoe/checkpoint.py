"""Checkpoints of expert weights: a folder of safetensors files, one per MoE layer, read expert by expert.

Canonical form: `layer-00000.safetensors` ... with the four tensors of LayerWeights for ALL experts of the layer. A rank
reads only its own experts' slices, so that no process ever holds a whole layer. Weights in another form (dense, other
names) are converted once with `LayerWeights.quantized` and `save_layer`. Refuses missing files and tensors and wrong
shapes with BindingError, before anything is bound.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megamoe.errors import BindingError, must_be
from megamoe.mx import SCALE_NAN
from megamoe.shape import MoeShape
from megamoe.weights import LayerWeights, version_of, wanted_shapes


def layer_file(folder: Path, layer_idx: int) -> Path:
    """Where a layer lies."""
    return folder / f"layer-{layer_idx:05d}.safetensors"


def save_layer(folder: Path, layer_idx: int, weights: LayerWeights) -> Path:
    """Write all experts of a layer (w13_codes [num_experts, ...] and so on) as bytes; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = layer_file(folder, layer_idx)
    save_file({name: tensor.contiguous() for name, tensor in weights.as_bytes().tensors().items()}, str(path))
    return path


def checkpoint_version(folder: Path, num_layers: int) -> int:
    """A number that changes when a layer's file is written anew: of names, sizes and times, not of gigabytes.

    Ranks read one folder and must find the same in it. Raises BindingError naming a layer's file that is missing.
    """
    files = [_there(folder, layer_idx) for layer_idx in range(num_layers)]
    return version_of(*((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files))


def _there(folder: Path, layer_idx: int) -> Path:
    path = layer_file(folder, layer_idx)
    if not path.is_file():
        raise BindingError(must_be("checkpoint", f"a folder with {path.name}", f"{folder} without it"))
    return path


def load_layer(folder: Path, shape: MoeShape, layer_idx: int, *, rank: int) -> LayerWeights:
    """The experts of `rank` of one layer, [num_experts_per_rank, ...] uint8.

    Raises BindingError naming file, tensor, wanted and got.
    """
    path = _there(folder, layer_idx)
    start = rank * shape.num_experts_per_rank
    stop = start + shape.num_experts_per_rank
    tensors: dict[str, torch.Tensor] = {}
    try:
        with safe_open(str(path), framework="pt") as file:
            names = set(file.keys())
            for name, rank_shape in wanted_shapes(shape).items():
                if name not in names:
                    raise BindingError(must_be(f"tensors of {path.name}", f"with {name}", sorted(names)))
                stored = file.get_slice(name)
                wanted = [shape.num_experts, *rank_shape[1:]]
                if stored.get_shape() != wanted:
                    raise BindingError(must_be(f"{name} of {path.name}", wanted, stored.get_shape()))
                tensors[name] = stored[start:stop].contiguous()
    except SafetensorError as error:
        raise BindingError(f"{path.name} must be a safetensors file, got: {error}") from error
    for name in ("w13_scales", "w2_scales"):
        scales = tensors[name]
        nan = (
            (scales.view(torch.uint8) == SCALE_NAN).flatten(1).any(1) if scales.dtype.itemsize == 1 else None
        )
        if nan is not None and nan.any():
            experts = (start + nan.nonzero().flatten()).tolist()
            raise BindingError(
                must_be(f"{name} of {path.name}", "without NaN (0xFF)", f"it in experts {experts[:8]}")
            )
    return LayerWeights(**tensors)
