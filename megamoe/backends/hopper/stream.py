"""The stream that a rank's kernels run on, and its order with the stream of whoever calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from megamoe.backends.hopper import driver


class RankStream:
    """One rank's, on its GPU. Events are made once and used again: making one costs more than recording it."""

    def __init__(self, device: torch.device) -> None:
        self._device_idx = device.index
        self._stream = torch.cuda.Stream(device)
        self._handle: int = self._stream.cuda_stream
        self._caller = torch.cuda.Event()
        self._marks: list[torch.cuda.Event] = []

    def current(self) -> AbstractContextManager[None]:
        """In here it is the current stream, and its GPU the current one."""
        entered: AbstractContextManager[None] = torch.cuda.stream(self._stream)
        return entered

    def launcher(self, graph: int) -> Callable[[], None]:
        """What queues an instantiated graph (cudaGraphExec_t) on it. To make the stream the current one costs more."""
        return driver.graph_launcher(graph, self._handle, self._device_idx)

    def after_caller(self) -> None:
        """What follows here waits for all that this thread's current stream holds."""
        self._caller.record(torch.cuda.current_stream(self._device_idx))
        self._stream.wait_event(self._caller)

    def mark(self, number: int) -> torch.cuda.Event:
        """A point in the stream's time, until the same number is marked again."""
        while number >= len(self._marks):
            self._marks.append(torch.cuda.Event(enable_timing=True))
        event = self._marks[number]
        event.record(self._stream)
        return event

    def synchronize(self) -> None:
        """Wait for all that was queued, without holding up other threads."""
        self._stream.synchronize()
