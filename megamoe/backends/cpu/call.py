"""One sub-step on one rank: what its stages share, count and time. Made by the backend, filled in by a path."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from megamoe.backends import Launch
from megamoe.backends.cpu.experts import BoundLayer, ExpertGemms, Scratch
from megamoe.backends.cpu.heap import WIDE, Heap
from megamoe.backends.cpu.routed import Outgoing, RoutedRows
from megamoe.backends.cpu.signals import Signals
from megamoe.batch import Counters, MoeBatch, StageTimes
from megamoe.bundle import Deployment, RowFormat
from megamoe.layout import INFO_ERROR, INFO_FP8, FlagKind, HeapLayout
from megamoe.shape import MoeShape

Hook = Callable[[str], None]
"""Called with the name of a point in a launch; tests stall or kill a rank there."""


class Staging:
    """Private memory for one rank's rows on their way out: `rows` wide and `meta` int32, as the heap has them."""

    def __init__(self, layout: HeapLayout) -> None:
        self.rows = torch.empty((layout.capacity, layout.row_bytes // WIDE.itemsize), dtype=WIDE)
        self.meta = torch.zeros((layout.capacity, layout.meta_words), dtype=torch.int32)
        self.meta[:, 0] = torch.arange(layout.capacity, dtype=torch.int32)


@dataclass(frozen=True)
class RankContext:
    """What one rank keeps from call to call."""

    deployment: Deployment
    shape: MoeShape
    layout: HeapLayout
    heap: Heap
    signals: Signals
    gemms: ExpertGemms
    scratch: Scratch
    staging: Staging


class Call:
    """The sub-step under way. out: [n, hidden] bf16, receives the result. n is 0 for a refused call."""

    def __init__(
        self,
        context: RankContext,
        launch: Launch,
        layer: BoundLayer,
        batch: MoeBatch,
        out: torch.Tensor,
        hook: Hook | None,
    ) -> None:
        self.context, self.launch, self.layer = context, launch, layer
        self.batch, self.out, self.hook = batch, out, hook
        self.shape = context.shape
        self.num_ranks = context.shape.num_ranks
        self.rank = context.heap.rank
        self.signals = context.signals
        self.buffer = context.heap.buffers[launch.buffer_idx]
        self.capacity = launch.sub_step.runtime_capacity
        self.peers_in_turn = [(self.rank + 1 + step) % self.num_ranks for step in range(self.num_ranks)]
        """All ranks, the next one first and this one last, so that not all knock at the same one at once."""
        self.outgoing: Outgoing | None = None
        self.routed: RoutedRows | None = None
        self.owner_format = RowFormat.BF16
        """Format of the rows that this rank sends back."""
        self.bytes_sent = 0
        self._counts: dict[str, int] = {}
        self._times_s: dict[str, float] = {}
        self._started_s = self._lap_s = time.perf_counter()
        self._lap_wait_s = self.signals.wait_s

    def at(self, point: str) -> None:
        """A named point of the launch, for fault injection."""
        if self.hook is not None:
            self.hook(point)

    def count(self, name: str, amount: int = 1) -> None:
        self._counts[name] = self._counts.get(name, 0) + amount

    def post(self, dst_rank: int, kind: FlagKind, info: int = 0, *, ring: bool = False) -> None:
        """Post a flag with this rank's error bit and format bit where they belong."""
        if self.launch.refused:
            info |= INFO_ERROR
        if kind in (FlagKind.ROWS, FlagKind.RETURN) and self.owner_format is RowFormat.FP8:
            info |= INFO_FP8
        self.signals.post(dst_rank, kind, info, ring=ring)
        if dst_rank != self.rank:
            self.bytes_sent += 8

    def lap(self, stage: str) -> None:
        """Add the time since the last lap, waits excluded, to a stage."""
        now, waited = time.perf_counter(), self.signals.wait_s
        spent = now - self._lap_s - (waited - self._lap_wait_s)
        self._times_s[stage] = self._times_s.get(stage, 0.0) + spent
        self._lap_s, self._lap_wait_s = now, waited

    def counters(self) -> Counters:
        return Counters(bytes_sent=self.bytes_sent, **self._counts)

    def stage_times(self) -> StageTimes:
        times = {f"{stage}_us": seconds * 1e6 for stage, seconds in self._times_s.items()}
        total_us = (time.perf_counter() - self._started_s) * 1e6
        return StageTimes(**times, wait_us=self.signals.wait_s * 1e6, total_us=total_us)


class PathRun:
    """One sub-step on one path: its state between launches. STAGES names the launches, each a method."""

    STAGES: ClassVar[tuple[str, ...]] = ()

    def __init__(self, call: Call) -> None:
        self.call = call

    def launch(self, stage: str) -> None:
        """Enter once, counted."""
        self.call.count("launches")
        getattr(self, stage)()
