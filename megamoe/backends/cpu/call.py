"""One sub-step on one rank: what its stages share, count and time. Made by the backend, filled in by a path."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from megamoe.backends import Launch
from megamoe.backends.cpu.experts import BoundLayer, ExpertGemms, Scratch
from megamoe.backends.cpu.heap import BufferView, Heap
from megamoe.backends.cpu.routed import Outgoing, RoutedRows
from megamoe.backends.cpu.signals import INFO_ERROR, INFO_FP8, Signals
from megamoe.batch import Counters, MoeBatch, StageTimes
from megamoe.bundle import Deployment, RowFormat
from megamoe.layout import FlagKind, HeapLayout

Hook = Callable[[str], None]
"""Called with the name of a point in a launch; tests stall or kill a rank there."""


@dataclass(frozen=True)
class RankContext:
    """What one rank keeps from call to call."""

    deployment: Deployment
    layout: HeapLayout
    heap: Heap
    signals: Signals
    gemms: ExpertGemms
    scratch: Scratch


@dataclass
class Call:
    """The sub-step under way. out: [n, hidden] bf16, receives the result. n is 0 for a refused call."""

    rank_context: RankContext
    launch: Launch
    layer: BoundLayer
    batch: MoeBatch
    out: torch.Tensor
    hook: Hook | None
    counts: dict[str, int] = field(default_factory=dict)
    times_s: dict[str, float] = field(default_factory=dict)
    started_s: float = field(default_factory=time.perf_counter)
    outgoing: Outgoing | None = None
    routed: RoutedRows | None = None
    owner_format: RowFormat = RowFormat.BF16
    """Format of the rows that this rank sends back."""

    @property
    def rank(self) -> int:
        return self.rank_context.heap.rank

    @property
    def num_ranks(self) -> int:
        return self.rank_context.layout.num_ranks

    @property
    def signals(self) -> Signals:
        return self.rank_context.signals

    @property
    def capacity(self) -> int:
        return self.launch.sub_step.runtime_capacity

    @property
    def own_buffer(self) -> BufferView:
        return self.buffer_of(self.rank)

    def buffer_of(self, rank: int) -> BufferView:
        return self.rank_context.heap.ranks[rank].buffers[self.launch.buffer_idx]

    def peers_in_turn(self) -> list[int]:
        """All ranks, the next one first and this one last, so that not all write to the same one at once."""
        return [(self.rank + 1 + step) % self.num_ranks for step in range(self.num_ranks)]

    def at(self, point: str) -> None:
        """A named point of the launch, for fault injection."""
        if self.hook is not None:
            self.hook(point)

    def count(self, name: str, amount: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + amount

    def count_sent(self, dst_rank: int, num_bytes: int) -> None:
        if dst_rank != self.rank:
            self.counts["bytes_sent"] = self.counts.get("bytes_sent", 0) + num_bytes

    def post(self, dst_rank: int, kind: FlagKind, info: int = 0, *, ring: bool = False) -> None:
        """Post a flag with this rank's error bit and format bit where they belong."""
        if self.launch.refused:
            info |= INFO_ERROR
        if kind is FlagKind.RETURN and self.owner_format is RowFormat.FP8:
            info |= INFO_FP8
        self.signals.post(dst_rank, kind, info, ring=ring)
        self.count_sent(dst_rank, 8)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time of the block, waits excluded, to a stage."""
        started, waited = time.perf_counter(), self.signals.wait_s
        try:
            yield
        finally:
            spent = time.perf_counter() - started - (self.signals.wait_s - waited)
            self.times_s[stage] = self.times_s.get(stage, 0.0) + spent

    def counters(self) -> Counters:
        return Counters(**self.counts)

    def stage_times(self) -> StageTimes:
        times = {f"{stage}_us": seconds * 1e6 for stage, seconds in self.times_s.items()}
        total_us = (time.perf_counter() - self.started_s) * 1e6
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
