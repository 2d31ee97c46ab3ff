"""Rows between host and device: what kernels reach where it lies stays there, the rest takes one copy.

Kernels read each row once and write each result once, so pinned host memory serves them as it is as long as a
call's rows are few; above that a copy engine takes as long and keeps no multiprocessor busy. Ordinary host memory
first goes to pinned twins, allocated once: a copy between it and the device would block inside the driver until the
stream has come to it, and other threads' launches with it; with ranks in threads, which wait for each other on the
device, that is a deadlock.
Nothing here allocates after construction, for the same reason.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from megamoe.backends.hopper.buffers import Addresses
from megamoe.backends.hopper.memory import DeviceMemory
from megamoe.backends.hopper.pinned import Pins
from megamoe.backends.hopper.stream import RankStream
from megamoe.batch import MoeBatch
from megamoe.shape import MX_BLOCK, MoeShape

ALIGNMENT = 16
"""Kernels move rows in pieces of this many bytes."""
IN_PLACE_BYTES = 2 << 20
"""Rows on the host of up to so many bytes are read and written by kernels over PCIe; docs/hopper.md says why."""
_SMALL_BYTES = 1 << 15
"""What one thread copies sooner than torch begins to."""


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
    return tensor.is_cuda and tensor.data_ptr() % ALIGNMENT == 0


class Staging:
    """Buffers for up to `capacity` rows of one rank."""

    def __init__(self, shape: MoeShape, capacity: int, device: torch.device, stream: RankStream) -> None:
        self._stream = stream
        self.pins = Pins()
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

    def bring(self, batch: MoeBatch, result: Outgoing) -> Addresses:
        """The batch where kernels reach it, copied on the rank's stream as far as need be."""
        scales = batch.hidden_states_sf
        ids, ids_src = self._table("ids", batch.topk_ids)
        weights, weights_src = self._table("weights", batch.topk_weights)
        return Addresses(
            batch.num_rows,
            self._rows("hidden" if scales is None else "codes", batch.hidden_states),
            0 if scales is None else self._rows("scales", scales),
            ids,
            weights,
            result.written.data_ptr(),
            ids_src,
            weights_src,
        )

    def is_of_callers(self, batch: MoeBatch, out: torch.Tensor, owner: DeviceMemory | None) -> bool:
        """Whether all of these lie in memory of callers that kernels reach: then nothing of them is copied, and nobody
        waits for this process to let go of the tensors."""
        hold, scales = self.pins.hold, batch.hidden_states_sf
        rows = (batch.hidden_states, out) if scales is None else (batch.hidden_states, out, scales)
        if not (hold(batch.topk_ids) and hold(batch.topk_weights)):
            return False
        if any(tensor.data_ptr() % ALIGNMENT for tensor in (*rows, batch.topk_ids, batch.topk_weights)):
            return False
        if owner is not None:
            return all(owner.holds(tensor.data_ptr()) for tensor in rows)
        return all(hold(tensor) and tensor.nbytes <= self.in_place_bytes for tensor in rows)

    def _rows(self, name: str, tensor: torch.Tensor) -> int:
        if in_place(tensor):
            return tensor.data_ptr()
        if tensor.is_cuda:
            return self._copied(name, tensor)
        address = self._pinned(name, tensor)
        if tensor.nbytes <= self.in_place_bytes:
            return address
        return self._copied(name, tensor if address == tensor.data_ptr() else self._host[name][: len(tensor)])

    def _copied(self, name: str, tensor: torch.Tensor) -> int:
        """Address of its copy on the device: from there or from pinned memory."""
        with self._stream.current():
            return self._dev[name][: len(tensor)].copy_(tensor, non_blocking=True).data_ptr()

    def _table(self, name: str, tensor: torch.Tensor) -> tuple[int, int]:
        """Ids or weights, which kernels read often, in device memory; and the address on the host that the first
        kernel brings them from, or 0."""
        if in_place(tensor):
            return tensor.data_ptr(), 0
        if tensor.is_cuda:
            return self._copied(name, tensor), 0
        return self._dev[name].data_ptr(), self._pinned(name, tensor)

    def _reachable(self, tensor: torch.Tensor) -> bool:
        """Whether kernels can read or write a tensor where it lies on the host."""
        return tensor.data_ptr() % ALIGNMENT == 0 and (self.pins.hold(tensor) or tensor.is_pinned())

    def _pinned(self, name: str, tensor: torch.Tensor) -> int:
        """Address of a host tensor itself if it is pinned, or of its copy in the twin."""
        if self._reachable(tensor):
            return tensor.data_ptr()
        twin = self._host[name]
        # More rows than there is room for raise below; memmove would not look.
        if tensor.nbytes <= min(_SMALL_BYTES, twin.nbytes) and tensor.is_contiguous():
            ctypes.memmove(twin.data_ptr(), tensor.data_ptr(), tensor.nbytes)
        else:
            twin[: len(tensor)] = tensor
        return twin.data_ptr()

    def outgoing(self, out: torch.Tensor) -> Outgoing:
        """Where kernels write the result of a call, and how it comes to `out`."""
        if in_place(out):
            return Outgoing(out, out, out)
        landed = out if out.is_cuda or self._reachable(out) else self._host["out"][: len(out)]
        if not out.is_cuda and out.nbytes <= self.in_place_bytes:
            return Outgoing(landed, landed, out)
        return Outgoing(self._dev["out"][: len(out)], landed, out)
