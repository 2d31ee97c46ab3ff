"""What the backend needs of a device, and nothing more: memory, a symmetric heap, streams, code, launches, graphs.

`emulated` runs gfx950 code objects on the CPU, all ranks in one process; `hip` runs them on MI355X, one rank a process,
and imports MORI and the ROCm build of torch only when it is opened. The backend's host code is the same on both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from megamoe.backends.gfx950.build import Code

Arg = int


class Memory(Protocol):
    """Device memory of one rank."""

    @property
    def address(self) -> int:
        """Where kernels find it."""

    def write(self, data: torch.Tensor, offset: int = 0) -> None:
        """Copy a contiguous tensor, from host or device, to `offset` bytes on; done when the call returns."""

    def read(self, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> torch.Tensor:
        """A copy on the host of what lies `offset` bytes on."""

    def read_into(self, out: torch.Tensor) -> None:
        """Copy the first bytes to a contiguous tensor on host or device; done when the call returns."""

    def free(self) -> None:
        """Give it back."""


class Graph(Protocol):
    """Recorded launches, with the arguments that they were recorded with."""

    def replay(self) -> None:
        """Queue them again on the stream that recorded them."""


class Stream(Protocol):
    """An ordered queue of launches."""

    def launch(self, code: Code, num_groups: int, num_threads: int, args: Sequence[Arg]) -> Any:
        """Queue a kernel of num_groups workgroups."""

    def begin_capture(self) -> None:
        """Record launches from now on instead of queueing them."""

    def end_capture(self) -> Graph:
        """The recording."""

    def synchronize(self, timeout_s: float) -> None:
        """Wait until the queue is empty. Raises DeviceStuckError when it is not in time."""


class Device(Protocol):
    """One rank's device and its place in the group. num_compute_units: as kernels see them; tick_hz: of their clock."""

    rank: int
    num_ranks: int
    num_compute_units: int
    tick_hz: float

    @property
    def stream(self) -> Stream:
        """The queue that this backend uses."""

    def allocate(self, num_bytes: int, name: str, *, weights: bool = False) -> Memory:
        """Zeroed private memory, 256-byte aligned. weights: kernels never write it."""

    def heap(self) -> Memory:
        """This rank's part of the symmetric heap."""

    def heap_addresses(self) -> tuple[int, ...]:
        """Where this rank's kernels find every rank's part."""

    def enter(self, epoch: int) -> tuple[int, ...]:
        """Say that this rank has come to launch `epoch`. Returns the missing ranks if the group gave it up before."""

    def give_up(self, epoch: int) -> tuple[int, ...]:
        """Ranks that did not come to launch `epoch`, as the first to give it up saw it; () where only kernels know."""

    def close(self) -> None:
        """Give everything back."""


class DeviceStuckError(Exception):
    """A stream did not become empty in time: kernels wait for something that did not come."""


__all__ = ["Arg", "Device", "DeviceStuckError", "Graph", "Memory", "Stream"]
