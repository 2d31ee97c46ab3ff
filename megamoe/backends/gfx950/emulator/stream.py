"""Queues of launches: streams, events between them, graphs that record and replay what was queued."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from megamoe.backends.gfx950.emulator.code_object import Kernel
from megamoe.backends.gfx950.emulator.errors import EmulatorError
from megamoe.backends.gfx950.emulator.report import Traffic, read_traffic

if TYPE_CHECKING:
    from megamoe.backends.gfx950.emulator.device import Device, DeviceGroup

_MAX_ITEMS, _MAX_GROUPS, _MAX_AXIS_ITEMS = 1024, 1 << 31, 1 << 32
MAX_DEPS = 32  # the core's room for predecessors of one launch
Value = int | float | bytes


@dataclass(frozen=True)
class LaunchHandle:
    """One queued launch. Its counters live as long as this handle."""

    group: DeviceGroup
    kernel: Kernel
    launch_idx: int

    def __post_init__(self) -> None:
        weakref.finalize(self, self.group.unwanted.append, self.launch_idx)

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return bool(self.group.lib.emu_launch_done(self.group.machine, self.launch_idx))

    @property
    def traffic(self) -> Traffic:
        """What it moved and executed so far."""
        return read_traffic(self.group, self.launch_idx, self.kernel)


@dataclass(frozen=True)
class Recorded:
    """A launch with everything but its place in a queue."""

    kernel: Kernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    kernarg: bytes
    lds_bytes: int


@dataclass
class Graph:
    """Launches with their order, captured on one stream or on several that fork from it and join it again."""

    recorded: list[Recorded] = field(default_factory=list)
    after: list[tuple[int, ...]] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)

    def add(self, one: Recorded, after: tuple[int, ...]) -> int:
        """Append a launch that follows the launches `after`; returns its index."""
        self.recorded.append(one)
        self.after.append(after)
        return len(self.recorded) - 1

    @property
    def ends(self) -> tuple[int, ...]:
        """Launches that no other one follows."""
        followed = {index for after in self.after for index in after}
        return tuple(k for k in range(len(self.recorded)) if k not in followed)

    def replay(self, stream: Stream) -> list[LaunchHandle]:
        """Queue the recorded launches on `stream`: the first ones after what it holds, then it holds the last ones."""
        handles: list[LaunchHandle] = []
        start = stream.tail
        for one, after in zip(self.recorded, self.after):
            wanted = tuple(handles[k].launch_idx for k in after) or start
            handles.append(stream.device.group.queue(stream.device.rank, one, wanted))
        if handles:
            stream.tail = tuple(handles[k].launch_idx for k in self.ends)
        return handles


@dataclass(frozen=True)
class Event:
    """A point in a stream that other streams of the group can wait for; during a capture, a point of the graph."""

    launches: tuple[int, ...]
    graph: Graph | None = None


class Stream:
    """An ordered queue of one rank. Launches of different streams overlap.

    `tail`: launches that the next one follows; while a graph is captured, their indices in the graph.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.tail: tuple[int, ...] = ()
        self._graph: Graph | None = None
        self._before: tuple[int, ...] = ()

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
        full_grid, full_block = three("grid", grid), three("block", block)
        items = full_block[0] * full_block[1] * full_block[2]
        most = min(kernel.max_block_size, _MAX_ITEMS)
        if items > most:
            raise EmulatorError(f"block of {kernel.name} must have at most {most} items, got {items}")
        axis = max(groups * size for groups, size in zip(full_grid, full_block))
        if prod(full_grid) >= _MAX_GROUPS or axis >= _MAX_AXIS_ITEMS:
            raise EmulatorError(
                f"grid of {kernel.name} must have below 2^31 workgroups and 2^32 items an axis, got {full_grid}"
            )
        check_fits(kernel, items, kernel.lds_bytes + lds_bytes, self.device.group.config.lds_per_cu)
        one = Recorded(kernel, full_grid, full_block, kernel.pack(args, full_grid, full_block), lds_bytes)
        if self._graph is not None:
            self.tail = (self._graph.add(one, self.tail),)
            return None
        return self.queue(one)

    def queue(self, one: Recorded) -> LaunchHandle:
        """Queue a recorded launch."""
        handle = self.device.group.queue(self.device.rank, one, self.tail)
        self.tail = (handle.launch_idx,)
        return handle

    def begin_capture(self) -> None:
        """Record the launches that follow instead of queueing them."""
        if self._graph is not None:
            raise EmulatorError("stream must not be capturing when a capture begins, got a second begin")
        self._join(Graph(), ())

    def _join(self, graph: Graph, tail: tuple[int, ...]) -> None:
        self._graph, self._before, self.tail = graph, self.tail, tail
        graph.streams.append(self)

    def end_capture(self) -> Graph:
        """End the recording and return it. Raises EmulatorError unless streams that forked off have joined again."""
        graph = self._graph
        if graph is None or graph.streams[0] is not self:
            raise EmulatorError("stream must have begun the capture that it ends, got none")
        loose, self_ends = [k for k in graph.ends if k not in self.tail], len(graph.ends)
        for stream in graph.streams:
            stream.tail, stream._graph = stream._before, None
        graph.streams.clear()
        if loose:
            raise EmulatorError(
                f"a capture must end after all {self_ends} last launches, got {len(loose)} on streams not joined"
            )
        return graph

    def record_event(self) -> Event:
        """The point after everything queued so far."""
        return Event(self.tail, self._graph)

    def wait_event(self, event: Event) -> None:
        """What is queued from now on starts after `event`. An event of a capture draws this stream into the capture.

        Raises EmulatorError for an event of another capture, or of none while this stream is captured.
        """
        if event.graph is not None and self._graph is None and event.graph.streams:
            self._join(event.graph, event.launches)
            return
        if event.graph is not self._graph:
            raise EmulatorError("an event must be of the capture that the stream is in, got one of another")
        self.tail = tuple(dict.fromkeys((*self.tail, *event.launches)))
        if self._graph is None:
            self.tail = self.device.group.unfinished(self.tail)

    def synchronize(self, timeout_s: float = 600.0) -> None:
        """Run the device until this stream is empty. Raises EmulatorError with what went wrong."""
        if self._graph is not None:
            raise EmulatorError("stream must not be capturing when it is synchronized, got a capture")
        self.device.group.wait(self.tail, timeout_s)


def three(name: str, sizes: Sequence[int]) -> tuple[int, int, int]:
    """Sizes of three axes, absent ones 1. Raises EmulatorError for more, or for one below 1."""
    full = (*sizes, 1, 1)[:3]
    if len(sizes) > 3 or any(n < 1 for n in full):
        raise EmulatorError(f"{name} must be up to three sizes of at least 1, got {tuple(sizes)}")
    return full[0], full[1], full[2]


def check_fits(kernel: Kernel, items: int, lds_bytes: int, lds_per_cu: int) -> None:
    """Raise EmulatorError when an empty compute unit cannot hold one workgroup: four SIMDs of 512 registers, LDS."""
    waves, most = -(-items // 64), 4 * max(1, min(8, 512 // kernel.descriptor.num_vgprs))
    if waves > most:
        raise EmulatorError(
            f"a workgroup of {kernel.name} with {kernel.descriptor.num_vgprs} registers must have at most {most} "
            f"waves, got {waves}"
        )
    if lds_bytes > lds_per_cu:
        raise EmulatorError(
            f"LDS of a workgroup of {kernel.name} must be at most {lds_per_cu} bytes, got {lds_bytes}"
        )
