"""Rows between host and device: what kernels reach where it lies stays there, the rest takes one copy.

Kernels read each row once and write each result once, so pinned host memory serves them as it is as long as a
call's rows are few; above that a copy engine is faster. Ordinary host memory first goes to pinned twins, allocated
once: a copy between it and the device would block inside the driver until the stream has come to it, and other
threads' launches with it; with ranks in threads, which wait for each other on the device, that is a deadlock.
Nothing here allocates after construction, for the same reason.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megamoe.batch import MoeBatch
from megamoe.shape import MX_BLOCK, MoeShape

ALIGNMENT = 16
"""Kernels move rows in pieces of this many bytes."""
IN_PLACE_BYTES = 2 << 20
"""Rows on the host of up to so many bytes are read and written by kernels over PCIe; docs/hopper.md says why."""


class Incoming(NamedTuple):
    """A batch as kernels reach it. sources: see buffers.control_words."""

    batch: MoeBatch
    sources: tuple[int, int]


class Outgoing(NamedTuple):
    """A result on its way: kernels write `written`; it lands in `landed`, and from there the host brings it to `out`.
    Two or all three of them may be the same tensor."""

    written: torch.Tensor
    landed: torch.Tensor
    out: torch.Tensor

    @property
    def needs_copy(self) -> bool:
        """Whether the result lands elsewhere than kernels write it."""
        return self.written is not self.landed

    def queue(self) -> None:
        """Queue the result's copy to where it lands, if it needs one, on the current stream."""
        if self.needs_copy:
            self.landed.copy_(self.written, non_blocking=True)

    def take(self) -> None:
        """After the stream has finished: the result into the caller's tensor."""
        if self.landed is not self.out:
            self.out.copy_(self.landed)


def in_place(tensor: torch.Tensor) -> bool:
    """Whether kernels can read or write a tensor where it lies in device memory."""
    return tensor.device.type == "cuda" and tensor.data_ptr() % ALIGNMENT == 0


class Staging:
    """Buffers for up to `capacity` rows of one rank."""

    def __init__(self, shape: MoeShape, capacity: int, device: torch.device) -> None:
        self.in_place_bytes = IN_PLACE_BYTES
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

    def bring(self, batch: MoeBatch) -> Incoming:
        """The batch where kernels reach it, copied on the current stream as far as need be."""
        scales = batch.hidden_states_sf
        ids, ids_src = self._table("ids", batch.topk_ids)
        weights, weights_src = self._table("weights", batch.topk_weights)
        rows = self._rows("hidden" if scales is None else "codes", batch.hidden_states)
        scales = None if scales is None else self._rows("scales", scales)
        return Incoming(MoeBatch(rows, ids, weights, scales), (ids_src, weights_src))

    def _rows(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if in_place(tensor):
            return tensor
        if tensor.device.type == "cuda":
            return self._dev[name][: len(tensor)].copy_(tensor)
        pinned = self._pinned(name, tensor)
        if pinned.nbytes <= self.in_place_bytes:
            return pinned
        return self._dev[name][: len(tensor)].copy_(pinned, non_blocking=True)

    def _table(self, name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Ids or weights, which kernels read often, in device memory; and the address on the host that the first
        kernel brings them from, or 0."""
        if in_place(tensor):
            return tensor, 0
        there = self._dev[name][: len(tensor)]
        if tensor.device.type == "cuda":
            return there.copy_(tensor), 0
        return there, self._pinned(name, tensor).data_ptr()

    def _pinned(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor itself if it is pinned, or its copy in the twin."""
        if tensor.is_pinned() and tensor.data_ptr() % ALIGNMENT == 0:
            return tensor
        return self._host[name][: len(tensor)].copy_(tensor)

    def outgoing(self, out: torch.Tensor) -> Outgoing:
        """Where kernels write the result of a call, and how it comes to `out`."""
        if in_place(out):
            return Outgoing(out, out, out)
        there = self._dev["out"][: len(out)]
        if out.device.type == "cuda":
            return Outgoing(there, out, out)
        pinned = out.is_pinned() and out.data_ptr() % ALIGNMENT == 0
        landed = out if pinned else self._host["out"][: len(out)]
        return Outgoing(landed if out.nbytes <= self.in_place_bytes else there, landed, out)
