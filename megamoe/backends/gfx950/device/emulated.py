"""Ranks on emulated MI355X devices, all in one process, each driven by its own thread or all by one."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from megamoe.backends.gfx950 import emulator
from megamoe.backends.gfx950.build import Code
from megamoe.backends.gfx950.device import Arg, DeviceStuckError
from megamoe.backends.gfx950.emulator.errors import BudgetError, DeadlockError
from megamoe.errors import ConfigError, PeerTimeoutError, must_be

HEAP_CLASS, WEIGHTS_CLASS = 1, 2
"""Address classes of the traffic counters; everything else is 0."""
_TICK_HZ = 1e9
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

    def free(self) -> None:
        self.buffer.free()


@dataclass
class EmulatedGroup:
    """The devices of all ranks. Make one and give it to all ranks, or let `join` find it by name."""

    num_ranks: int
    heap_bytes: int
    config: emulator.DeviceConfig
    fingerprint: str = ""
    joined: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    epochs: dict[int, int] = field(default_factory=dict)
    given_up: tuple[int, tuple[int, ...]] | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self.devices = emulator.DeviceGroup(self.config)
        self.heaps = self.devices.symmetric_heap(self.heap_bytes, klass=HEAP_CLASS)

    def device(self, rank: int) -> EmulatedDevice:
        """The device of one rank."""
        return EmulatedDevice(self, rank)


_lock = threading.Lock()
_groups: dict[str, EmulatedGroup] = {}


def join(
    name: str,
    *,
    rank: int,
    num_ranks: int,
    heap_bytes: int,
    fingerprint: str,
    timeout_s: float,
    config: emulator.DeviceConfig | None = None,
) -> EmulatedDevice:
    """The device of `rank` in the group called `name`; returns when all ranks have joined, each from its own thread.

    Raises ConfigError (rank taken, or another deployment), PeerTimeoutError naming ranks that did not come.
    """
    with _lock:
        group = _groups.get(name)
        if group is None:
            group = EmulatedGroup(
                num_ranks, heap_bytes, config or emulator.DeviceConfig(num_ranks=num_ranks), fingerprint
            )
            group.devices.hosts = num_ranks
            _groups[name] = group
    if group.fingerprint != fingerprint:
        raise ConfigError(
            must_be(f"deployment of rank {rank}", f"the group's ({group.fingerprint})", fingerprint)
        )
    deadline_s = time.monotonic() + timeout_s
    with group.changed:
        if rank in group.joined:
            raise ConfigError(must_be("rank", f"one that group {name} does not have yet", rank))
        group.joined.add(rank)
        group.changed.notify_all()
        while len(group.joined) < num_ranks:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not group.changed.wait(left_s):
                missing = [peer for peer in range(num_ranks) if peer not in group.joined]
                group.joined.discard(rank)
                _drop_if_empty(name, group)
                raise PeerTimeoutError(
                    f"ranks {missing} of group {name} did not open within {timeout_s} s (rank {rank})",
                    missing,
                )
    device = group.device(rank)
    device.name = name
    return device


def _drop_if_empty(name: str, group: EmulatedGroup) -> None:
    if group.left >= group.joined:
        with _lock:
            if _groups.get(name) is group:
                del _groups[name]
        group.devices.close()


class EmulatedGraph:
    """A recording of one stream."""

    def __init__(self, graph: emulator.Graph, stream: EmulatedStream) -> None:
        self._graph, self._stream = graph, stream

    def replay(self) -> None:
        self._stream.handles += self._graph.replay(self._stream.stream)


class EmulatedStream:
    """The queue of one rank. handles: launches since the last `take_handles`, with their traffic."""

    def __init__(self, group: EmulatedGroup, rank: int) -> None:
        self.stream = group.devices.devices[rank].stream()
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
        self.name = ""
        self.num_compute_units = group.config.num_cus
        self.tick_hz = _TICK_HZ
        self.stream = EmulatedStream(group, rank)
        self._device = group.devices.devices[rank]

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
        with self.group.changed:
            self.group.left.add(self.rank)
            if self.name:
                _drop_if_empty(self.name, self.group)
