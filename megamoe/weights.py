"""Expert weights in canonical packing, sharding by rank, and the binding contract.

Canonical packing is MXFP4 (see mx.py), gate rows first in W1, then up rows. A backend makes its own layout from it at
bind time; nothing else in the house knows that layout. `check_binding` looks at everything that can refuse BEFORE
anything changes, so a refused binding leaves every view, table and slot as it was.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from megamoe import mx
from megamoe.errors import BindingError, must_be
from megamoe.shape import MX_BLOCK, MoeShape

_CODE_DTYPES = tuple(
    dtype for dtype in (torch.uint8, getattr(torch, "float4_e2m1fn_x2", None)) if dtype is not None
)
_SCALE_DTYPES = (torch.uint8, torch.float8_e8m0fnu)


@dataclass(frozen=True)
class LayerWeights:
    """The experts of one layer that one rank owns (E = num_experts_per_rank), MXFP4 codes and E8M0 scales.

    w13_codes [E, 2 * intermediate, hidden / 2], w13_scales [E, 2 * intermediate, hidden / 32] (gate rows, then up);
    w2_codes [E, hidden, intermediate / 2], w2_scales [E, hidden, intermediate / 32]. Bytes (uint8) and the typed
    forms (float4_e2m1fn_x2, float8_e8m0fnu) are equivalent.
    """

    w13_codes: torch.Tensor
    w13_scales: torch.Tensor
    w2_codes: torch.Tensor
    w2_scales: torch.Tensor

    @classmethod
    def quantized(cls, w13: torch.Tensor, w2: torch.Tensor) -> LayerWeights:
        """From dense w13 [E, 2 * intermediate, hidden] and w2 [E, hidden, intermediate], any float dtype.

        Raises BindingError where the two do not belong together, InvalidArgumentError where MX blocks do not fit.
        """
        if w13.dim() != 3 or w13.shape[1] % 2:
            raise BindingError(must_be("w13.shape", "[experts, 2 * intermediate, hidden]", list(w13.shape)))
        wanted = [w13.shape[0], w13.shape[2], w13.shape[1] // 2]
        if list(w2.shape) != wanted:
            raise BindingError(must_be("w2.shape", f"{wanted} beside this w13", list(w2.shape)))
        return cls(*mx.quantize_mxfp4(w13), *mx.quantize_mxfp4(w2))

    def dequantized(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(w13 [E, 2 * intermediate, hidden], w2 [E, hidden, intermediate]) in fp32."""
        return (
            mx.dequantize_mxfp4(self.w13_codes, self.w13_scales),
            mx.dequantize_mxfp4(self.w2_codes, self.w2_scales),
        )

    def as_bytes(self) -> LayerWeights:
        """The same memory as uint8 views."""
        return LayerWeights(*(tensor.view(torch.uint8) for tensor in self.tensors().values()))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The four tensors by name, in canonical order."""
        return {
            "w13_codes": self.w13_codes,
            "w13_scales": self.w13_scales,
            "w2_codes": self.w2_codes,
            "w2_scales": self.w2_scales,
        }

    def experts(self, start: int, stop: int) -> LayerWeights:
        """Experts [start, stop) as views."""
        return LayerWeights(*(tensor[start:stop] for tensor in self.tensors().values()))

    def fingerprint(self) -> str:
        """Digest of shapes and bytes: tells weight sets apart. Reads everything (about 1 GB/s); not for hot paths."""
        digest = hashlib.sha256()
        for tensor in self.as_bytes().tensors().values():
            digest.update(f"{list(tensor.shape)}".encode())
            digest.update(tensor.contiguous().cpu().numpy().data)
        return digest.hexdigest()[:16]


def shard(weights: LayerWeights, shape: MoeShape, rank: int) -> LayerWeights:
    """The experts of `rank` out of all experts of a layer, as views: contiguous blocks of num_experts_per_rank.

    Raises BindingError when a tensor has not all experts of the shape, or the rank is not one of it.
    """
    for name, tensor in weights.tensors().items():
        if tensor.shape[0] != shape.num_experts:
            raise BindingError(must_be(f"experts of {name} to shard", shape.num_experts, tensor.shape[0]))
    experts = _experts_of(shape, rank)
    return weights.experts(experts.start, experts.stop)


def _experts_of(shape: MoeShape, rank: int) -> range:
    if not 0 <= rank < shape.num_ranks:
        raise BindingError(must_be("rank", f"from 0 to {shape.num_ranks - 1}", rank))
    start = rank * shape.num_experts_per_rank
    return range(start, start + shape.num_experts_per_rank)


def wanted_shapes(shape: MoeShape) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of a rank's LayerWeights."""
    num_experts, hidden, inter = shape.num_experts_per_rank, shape.hidden, shape.intermediate
    return {
        "w13_codes": (num_experts, 2 * inter, hidden // 2),
        "w13_scales": (num_experts, 2 * inter, hidden // MX_BLOCK),
        "w2_codes": (num_experts, hidden, inter // 2),
        "w2_scales": (num_experts, hidden, inter // MX_BLOCK),
    }


def check_slot(slot_idx: int, num_slots: int) -> None:
    """Raises BindingError where there is no such protocol slot."""
    if not isinstance(slot_idx, int) or isinstance(slot_idx, bool) or not 0 <= slot_idx < num_slots:
        raise BindingError(must_be("slot_idx", f"an int from 0 to {num_slots - 1}", repr(slot_idx)))


def check_binding(
    weights: LayerWeights,
    shape: MoeShape,
    *,
    slot_idx: int,
    num_slots: int,
    device: torch.device | str = "cpu",
) -> LayerWeights:
    """Everything that can refuse a binding, before anything changes; returns the byte views to bind, not copies.

    device: the runtime's; with an index (cuda:1) weights on another index are refused too. Raises BindingError naming
    field, wanted and got: slot out of range, not a tensor, wrong dtype (scales must be one-byte E8M0: e4m3, int8 and
    bool are refused), wrong shape, wrong device, not contiguous.
    """
    check_slot(slot_idx, num_slots)
    wanted_device = torch.device(device)
    wanted = wanted_shapes(shape)
    for name, tensor in weights.tensors().items():
        if not isinstance(tensor, torch.Tensor):
            raise BindingError(must_be(name, "a torch.Tensor", type(tensor).__name__))
        dtypes = _SCALE_DTYPES if name.endswith("scales") else _CODE_DTYPES
        if tensor.dtype not in dtypes:
            known = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise BindingError(must_be(f"{name}.dtype", known, str(tensor.dtype).removeprefix("torch.")))
        if tuple(tensor.shape) != wanted[name]:
            raise BindingError(must_be(f"{name}.shape", list(wanted[name]), list(tensor.shape)))
        if tensor.device.type != wanted_device.type or wanted_device.index not in (None, tensor.device.index):
            raise BindingError(must_be(f"{name}.device", wanted_device, tensor.device))
        if not tensor.is_contiguous():
            raise BindingError(must_be(f"{name} strides", "contiguous", list(tensor.stride())))
    return weights.as_bytes()


def version_of(*facts: object) -> int:
    """A number from 1 to 2^48 - 1 (exact as a float, for metrics) that tells weights with other facts apart."""
    return int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:6], "little") or 1


def random_version(seed: int) -> int:
    """The version of `random_layer_weights` of a seed."""
    return version_of("random", seed)


def random_layer_weights(
    shape: MoeShape, *, seed: int, layer_idx: int = 0, rank: int | None = None
) -> LayerWeights:
    """Plausible random experts (unit-variance outputs for unit-variance rows), deterministic per expert.

    rank: only that rank's experts, equal to `shard` of all of them; None: all experts of the layer. Holds one dense
    expert at a time beside the packed ones.
    """
    experts = range(shape.num_experts) if rank is None else _experts_of(shape, rank)
    packed = []
    for expert in experts:
        digest = hashlib.sha256(f"{seed}:{layer_idx}:{expert}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        w13 = torch.randn(2 * shape.intermediate, shape.hidden, generator=generator)
        w2 = torch.randn(shape.hidden, shape.intermediate, generator=generator)
        w13.mul_(shape.hidden**-0.5)
        w2.mul_(1.5 * shape.intermediate**-0.5)
        packed.append((*mx.quantize_mxfp4(w13), *mx.quantize_mxfp4(w2)))
    return LayerWeights(*(torch.stack(parts) for parts in zip(*packed, strict=True)))
