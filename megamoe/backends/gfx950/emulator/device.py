"""The emulated device: ranks with memory, streams, launches and graphs over one scheduler.

Work is queued when it is launched and executed when somebody synchronises, so that ranks and stages overlap in the
order that the seed draws. Ranks may be driven from one host thread or from several: the thread that waits drives the
device for everybody, and a device that cannot go on is a deadlock only when no other host thread can add work.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megamoe.backends.gfx950.emulator.buffer import Buffer
from megamoe.backends.gfx950.emulator.code_object import CodeObject, Kernel
from megamoe.backends.gfx950.emulator.config import DeviceConfig
from megamoe.backends.gfx950.emulator.errors import (
    BudgetError,
    DeadlockError,
    EmulatorError,
    MemoryFaultError,
    UnimplementedInstructionError,
)
from megamoe.backends.gfx950.emulator.lowering import lower
from megamoe.backends.gfx950.emulator.native import LaunchDesc, library
from megamoe.backends.gfx950.emulator.report import Report, describe_fault, describe_waiting, read_findings
from megamoe.backends.gfx950.emulator.stream import (
    MAX_DEPS,
    Event,
    Graph,
    LaunchHandle,
    Recorded,
    Stream,
)

_DONE, _BUDGET, _QUIET, _FAULTED, _NO_THREAD = range(5)
_SLICE = 2_000_000


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
            config.seed & 0xFFFFFFFF, quantum, config.num_workers,
        )  # fmt: skip
        self.devices = tuple(Device(self, rank) for rank in range(config.num_ranks))
        self.kernels: list[Kernel] = []
        self.buffers: dict[int, Buffer] = {}
        self._programs: dict[int, NDArray[np.void]] = {}
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting: list[Sequence[int]] = []
        self.unwanted: deque[int] = deque()
        self.hosts = 1
        self.idle_s = 0.05
        """Pause of a host thread whose waves wait for something that others may still bring."""
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
        memory = raw[start : start + num_bytes]
        return self.adopt(memory, name, rank, peer_visible=peer_visible, klass=klass, read_only=read_only)

    def adopt(
        self,
        memory: NDArray[np.uint8],
        name: str,
        rank: int,
        *,
        peer_visible: bool = False,
        klass: int = 0,
        read_only: bool = False,
    ) -> Buffer:
        """Let kernels use bytes that the caller owns, such as memory that other processes map too."""
        buffer = Buffer(name, rank, memory, self)
        with self._lock:
            self.buffers[buffer.address] = buffer
            added = self.lib.emu_alloc_add(
                self.machine,
                buffer.address,
                buffer.num_bytes,
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

    def unfinished(self, launches: Sequence[int]) -> tuple[int, ...]:
        """Those of `launches` that have not ended."""
        with self._lock:
            return tuple(k for k in launches if not self.lib.emu_launch_done(self.machine, k))

    def queue(self, rank: int, one: Recorded, after: Sequence[int]) -> LaunchHandle:
        """Queue a launch of `rank` after the launches `after`. Raises EmulatorError for more than MAX_DEPS of those."""
        kernel = one.kernel
        if len(after) > MAX_DEPS:
            raise EmulatorError(f"a launch must follow at most {MAX_DEPS} others, got {len(after)}")
        with self._changed:
            while self.unwanted:
                self.lib.emu_drop_launch(self.machine, self.unwanted.popleft())
            program, d = self.program(kernel), kernel.descriptor
            length, offset = d.preload_sgprs
            entry = 0
            if length:
                entry = next((k for k, i in enumerate(kernel.instructions) if i.offset == 256), 0)
            desc = LaunchDesc(
                program.ctypes.data, len(program), d.num_vgprs, kernel.lds_bytes + one.lds_bytes, kernel.scratch_bytes,
                d.num_user_sgprs, d.rsrc2, d.properties, d.float_mode, length, offset, entry, rank,
                (ctypes.c_uint32 * 3)(*one.grid), (ctypes.c_uint32 * 3)(*one.block), len(after),
                (ctypes.c_uint32 * MAX_DEPS)(*after), len(one.kernarg),
                ctypes.cast(ctypes.c_char_p(one.kernarg), ctypes.c_void_p).value or 0,
            )  # fmt: skip
            launch_idx = int(self.lib.emu_launch(self.machine, ctypes.byref(desc)))
            assert launch_idx == len(self.kernels)
            self.kernels.append(kernel)
            self._changed.notify_all()
            return LaunchHandle(self, kernel, launch_idx)

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
        if status == _NO_THREAD:
            raise EmulatorError(f"the system must give {self.config.num_workers} threads, got fewer")
        if status == _QUIET:
            # A thread whose launches have ended, but which has yet to wake up, may go on to queue more.
            stuck = sum(not self._done(launches) for launches in self._waiting)
            if stuck < self.hosts and time.monotonic() < deadline:
                self._changed.wait(self.idle_s)  # another host thread may still queue what the waves wait for
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
