"""Rows between host and device: pinned twins of what a call brings and takes, allocated once.

A copy from or to ordinary host memory blocks inside the driver until the stream has come to it, and other threads'
launches with it; with ranks in threads, which wait for each other on the device, that is a deadlock. Pinned copies
are only queued. Nothing here allocates after construction, for the same reason.
"""

from __future__ import annotations

import torch

from megamoe.batch import MoeBatch
from megamoe.shape import MX_BLOCK, MoeShape

ALIGNMENT = 16
"""Kernels move rows in pieces of this many bytes."""


def in_place(tensor: torch.Tensor) -> bool:
    """Whether kernels can read or write a tensor where it lies."""
    return tensor.device.type == "cuda" and tensor.data_ptr() % ALIGNMENT == 0


class Staging:
    """Buffers for up to `capacity` rows of one rank."""

    def __init__(self, shape: MoeShape, capacity: int, device: torch.device) -> None:
        columns = {
            "hidden": (shape.hidden, torch.bfloat16),
            "codes": (shape.hidden, torch.uint8),
            "scales": (shape.hidden // MX_BLOCK, torch.uint8),
            "ids": (shape.num_topk, torch.int32),
            "weights": (shape.num_topk, torch.float32),
            "out": (shape.hidden, torch.bfloat16),
        }
        self._host = {
            name: torch.empty((capacity, width), dtype=dtype, pin_memory=device.type == "cuda")
            for name, (width, dtype) in columns.items()
        }
        self._dev = {name: torch.empty_like(host, device=device) for name, host in self._host.items()}

    def to_device(self, batch: MoeBatch) -> MoeBatch:
        """The batch on the device, copied on the current stream; tensors that are there already stay as they are,
        unless they begin between 16-byte borders."""
        scales = batch.hidden_states_sf
        return MoeBatch(
            self._in("hidden" if scales is None else "codes", batch.hidden_states),
            self._in("ids", batch.topk_ids),
            self._in("weights", batch.topk_weights),
            None if scales is None else self._in("scales", scales),
        )

    def _in(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if in_place(tensor):
            return tensor
        rows = len(tensor)
        if tensor.device.type == "cuda":
            return self._dev[name][:rows].copy_(tensor)
        self._host[name][:rows] = tensor
        return self._dev[name][:rows].copy_(self._host[name][:rows], non_blocking=True)

    def out_dev(self, out: torch.Tensor) -> torch.Tensor:
        """Where kernels write the result: `out` itself if they can."""
        return out if in_place(out) else self._dev["out"][: len(out)]

    def queue_out(self, out: torch.Tensor) -> None:
        """Queue the result's copy towards where it goes, if kernels did not write there."""
        if out.device.type == "cuda" and not in_place(out):
            out.copy_(self._dev["out"][: len(out)])
        elif out.device.type != "cuda":
            self._host["out"][: len(out)].copy_(self._dev["out"][: len(out)], non_blocking=True)

    def take_out(self, out: torch.Tensor) -> None:
        """After the stream has finished: the result into the caller's tensor."""
        if out.device.type != "cuda":
            out.copy_(self._host["out"][: len(out)])
