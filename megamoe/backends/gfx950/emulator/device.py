"""The emulated device: ranks with memory, streams, launches and graphs over one scheduler.

Work is queued when it is launched and executed when somebody synchronises, so that ranks and stages overlap in the
order that the seed draws. Ranks may be driven from one host thread or from several: the thread that waits drives the
device for everybody, and a device that cannot go on is a deadlock only when no other host thread can add work.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megamoe.backends.gfx950.emulator.code_object import CodeObject, Kernel
from megamoe.backends.gfx950.emulator.errors import (
    BudgetError,
    DeadlockError,
    EmulatorError,
    MemoryFaultError,
    UnimplementedInstructionError,
)
from megamoe.backends.gfx950.emulator.native import LaunchDesc, library, lower
from megamoe.backends.gfx950.emulator.report import (
    Report,
    Traffic,
    describe_fault,
    describe_waiting,
    read_findings,
    read_traffic,
)

_DONE, _BUDGET, _QUIET, _FAULTED = range(4)
_SLICE = 2_000_000
Value = int | float | bytes


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """What is emulated. An MI355X has 256 compute units in 8 dies (XCD), 160 KiB of LDS each.

    detect_waits: registers and LDS used before their `s_waitcnt`. detect_lds, detect_global: races.
    seed: 0 runs waves in turn, another number draws wave and slice length. quantum: most instructions of a slice.
    max_groups: most resident workgroups of a launch (0: as many as fit). max_instructions: budget of one wait.
    """

    num_ranks: int = 1
    num_cus: int = 256
    num_xcds: int = 8
    lds_per_cu: int = 160 * 1024
    max_groups: int = 0
    detect_waits: bool = False
    detect_lds: bool = False
    detect_global: bool = False
    seed: int = 0
    quantum: int = 0
    max_instructions: int = 20_000_000_000

    @property
    def detect(self) -> int:
        """The detectors as the core's bit mask."""
        return self.detect_waits | self.detect_lds << 1 | self.detect_global << 2

    @classmethod
    def checked(cls, **settings: Any) -> DeviceConfig:
        """A configuration with every detector on."""
        return cls(detect_waits=True, detect_lds=True, detect_global=True, **settings)


class Buffer:
    """Device memory: `address` for kernels, `view` for the host. Bounds are exact; neighbours are 256 bytes away."""

    def __init__(self, name: str, rank: int, memory: NDArray[np.uint8], owner: DeviceGroup) -> None:
        self.name, self.rank, self.memory, self._owner = name, rank, memory, owner

    @property
    def address(self) -> int:
        """Address on the device."""
        return int(self.memory.ctypes.data)

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return int(self.memory.nbytes)

    def view(self, dtype: DTypeLike = np.uint8, shape: Sequence[int] | None = None) -> NDArray[np.generic]:
        """The bytes as an array; writes are seen by the device."""
        out: NDArray[np.generic] = self.memory.view(dtype)
        return out if shape is None else out.reshape(tuple(shape))

    def free(self) -> None:
        """Give the memory back; a kernel that still uses it faults."""
        self._owner.release(self)


@dataclass(frozen=True)
class LaunchHandle:
    """One queued launch."""

    group: DeviceGroup
    kernel: Kernel
    launch_idx: int

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return bool(self.group.lib.emu_launch_done(self.group.machine, self.launch_idx))

    @property
    def traffic(self) -> Traffic:
        """What it moved and executed so far."""
        return read_traffic(self.group, self.launch_idx, self.kernel)


@dataclass(frozen=True)
class _Recorded:
    kernel: Kernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    kernarg: bytes
    lds_bytes: int


class Graph:
    """Launches recorded on one stream; replay queues them again with the same arguments."""

    def __init__(self) -> None:
        self.recorded: list[_Recorded] = []

    def replay(self, stream: Stream) -> list[LaunchHandle]:
        """Queue the recorded launches on `stream`, in order."""
        return [stream.queue(one) for one in self.recorded]


class Event:
    """A point in a stream that other streams of the same group can wait for."""

    def __init__(self, launches: tuple[int, ...]) -> None:
        self.launches = launches


class Stream:
    """An ordered queue of one rank. Launches of different streams overlap."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._tail: tuple[int, ...] = ()
        self._graph: Graph | None = None

    def launch(
        self,
        kernel: Kernel,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Value],
        *,
        lds_bytes: int = 0,
    ) -> LaunchHandle | None:
        """Queue a kernel. grid: workgroups per axis; block: work-items per axis; lds_bytes: dynamic LDS.

        Returns None while a graph is captured. Raises EmulatorError for sizes that the kernel does not allow.
        """
        full_grid, full_block = _three("grid", grid), _three("block", block)
        items = full_block[0] * full_block[1] * full_block[2]
        if items > kernel.max_block_size:
            raise EmulatorError(
                f"block of {kernel.name} must have at most {kernel.max_block_size} items, got {items}"
            )
        one = _Recorded(kernel, full_grid, full_block, kernel.pack(args, full_grid, full_block), lds_bytes)
        if self._graph is not None:
            self._graph.recorded.append(one)
            return None
        return self.queue(one)

    def queue(self, one: _Recorded) -> LaunchHandle:
        """Queue a recorded launch."""
        launch_idx = self.device.group.submit(self.device.rank, one.kernel, one, self._tail)
        self._tail = (launch_idx,)
        return LaunchHandle(self.device.group, one.kernel, launch_idx)

    def begin_capture(self) -> None:
        """Record the launches that follow instead of queueing them."""
        if self._graph is not None:
            raise EmulatorError("stream must not be capturing when a capture begins, got a second begin")
        self._graph = Graph()

    def end_capture(self) -> Graph:
        """End the recording and return it."""
        if self._graph is None:
            raise EmulatorError("stream must be capturing when a capture ends, got none")
        graph, self._graph = self._graph, None
        return graph

    def record_event(self) -> Event:
        """The point after everything queued so far."""
        return Event(self._tail)

    def wait_event(self, event: Event) -> None:
        """What is queued from now on starts after `event`."""
        self._tail = tuple(dict.fromkeys((*self._tail, *event.launches)))[-8:]

    def synchronize(self, timeout_s: float = 600.0) -> None:
        """Run the device until this stream is empty. Raises EmulatorError with what went wrong."""
        self.device.group.wait(self._tail, timeout_s)


def _three(name: str, sizes: Sequence[int]) -> tuple[int, int, int]:
    full = (*sizes, 1, 1)[:3]
    if len(sizes) > 3 or any(n < 1 for n in full):
        raise EmulatorError(f"{name} must be up to three sizes of at least 1, got {tuple(sizes)}")
    return full[0], full[1], full[2]


class Device:
    """One rank's device."""

    def __init__(self, group: DeviceGroup, rank: int) -> None:
        self.group, self.rank = group, rank
        self.default_stream = Stream(self)

    def stream(self) -> Stream:
        """A new stream."""
        return Stream(self)

    def allocate(
        self, num_bytes: int, name: str = "buffer", *, klass: int = 0, read_only: bool = False
    ) -> Buffer:
        """Private memory of this rank, zeroed. `klass` (0-14) is the address class of the traffic counters."""
        return self.group.allocate(num_bytes, name, self.rank, klass=klass, read_only=read_only)

    def upload(
        self, array: NDArray[np.generic], name: str = "buffer", *, klass: int = 0, read_only: bool = False
    ) -> Buffer:
        """Private memory that holds a copy of `array`."""
        data = np.ascontiguousarray(array)
        out = self.allocate(max(data.nbytes, 1), name, klass=klass, read_only=read_only)
        out.memory[: data.nbytes] = data.view(np.uint8).reshape(-1)
        return out


class DeviceGroup:
    """All ranks: one address space, one scheduler. Close it to give its memory back."""

    def __init__(self, config: DeviceConfig) -> None:
        self.config, self.lib = config, library()
        quantum = config.quantum or (200 if config.seed else 4000)
        self.machine: int = self.lib.emu_new(
            config.num_ranks, config.num_cus, config.num_xcds, config.lds_per_cu, config.max_groups, config.detect,
            config.seed & 0xFFFFFFFF, quantum,
        )  # fmt: skip
        self.devices = tuple(Device(self, rank) for rank in range(config.num_ranks))
        self.kernels: list[Kernel] = []
        self.buffers: dict[int, Buffer] = {}
        self._programs: dict[int, NDArray[np.void]] = {}
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting: list[Sequence[int]] = []
        self.hosts = 1
        self.num_executed = 0

    def __enter__(self) -> DeviceGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop what is in flight and give everything back. Safe to call twice."""
        with self._lock:
            if self.machine:
                self.lib.emu_free(self.machine)
                self.machine = 0
                self.buffers.clear()

    def schedule(self, seed: int, quantum: int = 0) -> None:
        """Draw the order of waves from another seed from now on."""
        with self._lock:
            self.lib.emu_schedule(self.machine, seed & 0xFFFFFFFF, quantum or (200 if seed else 4000))

    def allocate(
        self,
        num_bytes: int,
        name: str,
        rank: int,
        *,
        peer_visible: bool = False,
        klass: int = 0,
        read_only: bool = False,
    ) -> Buffer:
        """Memory of `rank` (-1: nobody's, open to all), 256-byte aligned, zeroed."""
        if num_bytes < 1 or not 0 <= klass < 15:
            raise EmulatorError(
                f"{name} must have at least 1 byte and a class of 0 to 14, got {num_bytes} and {klass}"
            )
        raw = np.zeros(num_bytes + 1024, np.uint8)
        start = -int(raw.ctypes.data) % 256 + 256
        buffer = Buffer(name, rank, raw[start : start + num_bytes], self)
        with self._lock:
            self.buffers[buffer.address] = buffer
            added = self.lib.emu_alloc_add(
                self.machine,
                buffer.address,
                num_bytes,
                rank,
                peer_visible,
                read_only,
                klass,
                len(self.buffers),
            )
        assert added, "host memory overlaps an allocation"
        return buffer

    def symmetric_heap(self, num_bytes: int, name: str = "heap", *, klass: int = 1) -> tuple[Buffer, ...]:
        """One buffer of the same size per rank that every rank may read and write."""
        return tuple(
            self.allocate(num_bytes, f"{name}[{rank}]", rank, peer_visible=True, klass=klass)
            for rank in range(self.config.num_ranks)
        )

    def release(self, buffer: Buffer) -> None:
        """Give a buffer back."""
        with self._lock:
            if self.machine and self.buffers.pop(buffer.address, None) is not None:
                self.lib.emu_alloc_remove(self.machine, buffer.address)

    def find_buffer(self, address: int) -> Buffer | None:
        """The buffer that holds `address`."""
        for buffer in self.buffers.values():
            if buffer.address <= address < buffer.address + buffer.num_bytes:
                return buffer
        return None

    def program(self, kernel: Kernel) -> NDArray[np.void]:
        """The lowered code of a kernel, made once."""
        if id(kernel) not in self._programs:
            self._programs[id(kernel)] = lower(kernel)
        return self._programs[id(kernel)]

    def submit(self, rank: int, kernel: Kernel, one: _Recorded, after: Sequence[int]) -> int:
        """Queue a launch after the launches `after`; returns its index."""
        with self._changed:
            program, d = self.program(kernel), kernel.descriptor
            length, offset = d.preload_sgprs
            entry = 0
            if length:
                entry = next((k for k, i in enumerate(kernel.instructions) if i.offset == 256), 0)
            desc = LaunchDesc(
                program.ctypes.data, len(program), d.num_vgprs, kernel.lds_bytes + one.lds_bytes, kernel.scratch_bytes,
                d.num_user_sgprs, d.rsrc2, d.properties, d.float_mode, length, offset, entry, rank,
                (ctypes.c_uint32 * 3)(*one.grid), (ctypes.c_uint32 * 3)(*one.block), len(after),
                (ctypes.c_uint32 * 8)(*after), len(one.kernarg),
                ctypes.cast(ctypes.c_char_p(one.kernarg), ctypes.c_void_p).value or 0,
            )  # fmt: skip
            launch_idx = int(self.lib.emu_launch(self.machine, ctypes.byref(desc)))
            assert launch_idx == len(self.kernels)
            self.kernels.append(kernel)
            self._changed.notify_all()
            return launch_idx

    def synchronize(self, timeout_s: float = 600.0) -> None:
        """Run until every queue of every rank is empty."""
        self.wait(range(len(self.kernels)), timeout_s)

    def wait(self, launches: Sequence[int], timeout_s: float) -> None:
        """Run the device until `launches` are done.

        Raises MemoryFaultError, UnimplementedInstructionError, DeadlockError, BudgetError. After one of these the
        device is empty: everything that was queued is dropped.
        """
        deadline, budget = time.monotonic() + timeout_s, self.config.max_instructions
        with self._changed:
            self._waiting.append(launches)
            try:
                while not self._done(launches):
                    used = ctypes.c_uint64()
                    status = self.lib.emu_step(self.machine, min(_SLICE, budget), ctypes.byref(used))
                    budget -= used.value
                    self.num_executed += used.value
                    self._after_step(status, budget, deadline)
            finally:
                self._waiting.remove(launches)
                self._changed.notify_all()

    def _done(self, launches: Sequence[int]) -> bool:
        return all(self.lib.emu_launch_done(self.machine, k) for k in launches)

    def _after_step(self, status: int, budget: int, deadline: float) -> None:
        if status == _FAULTED:
            text, error = describe_fault(self)
            self.lib.emu_reset(self.machine)
            raise error(text)
        if status == _QUIET:
            # A thread whose launches have ended, but which has yet to wake up, may go on to queue more.
            stuck = sum(not self._done(launches) for launches in self._waiting)
            if stuck < self.hosts and time.monotonic() < deadline:
                self._changed.wait(0.05)  # another host thread may still queue what the waves wait for
                return
            text = describe_waiting(self)
            self.lib.emu_reset(self.machine)
            raise DeadlockError(text)
        if budget <= 0 or time.monotonic() > deadline:
            text = describe_waiting(self)
            self.lib.emu_reset(self.machine)
            raise BudgetError(f"the run must end within {self.config.max_instructions} instructions; {text}")

    def reports(self) -> list[Report]:
        """What the detectors found so far."""
        with self._lock:
            return read_findings(self)

    def clear_reports(self) -> None:
        """Forget what was found."""
        with self._lock:
            self.lib.emu_clear_findings(self.machine)


def load(code: bytes) -> CodeObject:
    """Read a code object."""
    return CodeObject(code)


__all__ = [
    "Buffer", "Device", "DeviceConfig", "DeviceGroup", "Event", "Graph", "LaunchHandle", "MemoryFaultError", "Stream",
    "UnimplementedInstructionError", "load",
]  # fmt: skip
