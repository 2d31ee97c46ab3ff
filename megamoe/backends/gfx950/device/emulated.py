"""Emulated MI355X devices of all ranks in one process over one scheduler: what the proofs run on.

Memory, streams and graphs here are those of any emulated rank; `shared` has ranks in processes of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from megamoe.backends.gfx950 import emulator
from megamoe.backends.gfx950.build import Code
from megamoe.backends.gfx950.device import Arg, DeviceStuckError
from megamoe.backends.gfx950.emulator.errors import BudgetError, DeadlockError

HEAP_CLASS, WEIGHTS_CLASS = 1, 2
"""Address classes of the traffic counters; everything else is 0."""
TICK_HZ = 1e9
"""The emulated clock counts instructions. High, so that waits end by the host's clock (see `synchronize`)."""


class EmulatedMemory:
    """Memory of one rank; the host sees it directly."""

    def __init__(self, buffer: emulator.Buffer) -> None:
        self.buffer = buffer

    @property
    def address(self) -> int:
        return self.buffer.address

    def write(self, data: torch.Tensor, offset: int = 0) -> None:
        raw = data.contiguous().view(-1).view(torch.uint8).numpy() if data.numel() else np.zeros(0, np.uint8)
        self.buffer.memory[offset : offset + len(raw)] = raw

    def read(self, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> torch.Tensor:
        out = torch.empty(tuple(shape), dtype=dtype)
        if out.numel():
            num_bytes = out.numel() * out.itemsize
            out.view(-1).view(torch.uint8).numpy()[:] = self.buffer.memory[offset : offset + num_bytes]
        return out

    def read_into(self, out: torch.Tensor) -> None:
        out.copy_(self.read(out.dtype, out.shape))

    def free(self) -> None:
        self.buffer.free()


@dataclass
class EmulatedGroup:
    """The devices of all ranks over one scheduler, so that detectors see all of them."""

    num_ranks: int
    heap_bytes: int
    config: emulator.DeviceConfig
    epochs: dict[int, int] = field(default_factory=dict)
    given_up: tuple[int, tuple[int, ...]] | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self.devices = emulator.DeviceGroup(self.config)
        self.heaps = self.devices.symmetric_heap(self.heap_bytes, klass=HEAP_CLASS)

    def device(self, rank: int) -> EmulatedDevice:
        """The device of one rank."""
        return EmulatedDevice(self, rank)


class EmulatedGraph:
    """A recording of one stream."""

    def __init__(self, graph: emulator.Graph, stream: EmulatedStream) -> None:
        self._graph, self._stream = graph, stream

    def replay(self) -> None:
        self._stream.handles += self._graph.replay(self._stream.stream)


class EmulatedStream:
    """The queue of one rank. handles: launches since the last `take_handles`, with their traffic."""

    def __init__(self, stream: emulator.Stream) -> None:
        self.stream = stream
        self.handles: list[emulator.LaunchHandle] = []

    def launch(
        self, code: Code, num_groups: int, num_threads: int, args: Sequence[Arg]
    ) -> emulator.LaunchHandle | None:
        handle = self.stream.launch(code.kernel, (num_groups,), (num_threads,), list(args))
        if handle is not None:
            self.handles.append(handle)
        return handle

    def take_handles(self) -> list[emulator.LaunchHandle]:
        """The launches since the last call."""
        taken, self.handles = self.handles, []
        return taken

    def begin_capture(self) -> None:
        self.stream.begin_capture()

    def end_capture(self) -> EmulatedGraph:
        return EmulatedGraph(self.stream.end_capture(), self)

    def synchronize(self, timeout_s: float) -> None:
        try:
            self.stream.synchronize(timeout_s)
        except (DeadlockError, BudgetError) as error:
            raise DeviceStuckError(str(error)) from error


class EmulatedDevice:
    """One rank."""

    def __init__(self, group: EmulatedGroup, rank: int) -> None:
        self.group, self.rank, self.num_ranks = group, rank, group.num_ranks
        self.num_compute_units = group.config.num_cus
        self.tick_hz = TICK_HZ
        self._device = group.devices.devices[rank]
        self.stream = EmulatedStream(self._device.stream())

    def allocate(self, num_bytes: int, name: str, *, weights: bool = False) -> EmulatedMemory:
        klass = WEIGHTS_CLASS if weights else 0
        return EmulatedMemory(self._device.allocate(max(num_bytes, 1), name, klass=klass, read_only=weights))

    def heap(self) -> EmulatedMemory:
        return EmulatedMemory(self.group.heaps[self.rank])

    def heap_addresses(self) -> tuple[int, ...]:
        return tuple(heap.address for heap in self.group.heaps)

    def enter(self, epoch: int) -> tuple[int, ...]:
        with self.group.changed:
            self.group.epochs[self.rank] = epoch
            given_up = self.group.given_up
            return given_up[1] if given_up is not None and given_up[0] == epoch else ()

    def give_up(self, epoch: int) -> tuple[int, ...]:
        group = self.group
        with group.changed:
            if group.given_up is None or group.given_up[0] != epoch:
                missing = tuple(rank for rank in range(self.num_ranks) if group.epochs.get(rank) != epoch)
                group.given_up = (epoch, missing)
            return group.given_up[1]

    def close(self) -> None:
        """Nothing: the group's memory is its maker's to close."""
