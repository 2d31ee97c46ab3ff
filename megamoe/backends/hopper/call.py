"""A sub-step under way: its tensors, its marks in time, and which kernels each stage launches."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megamoe.backends import Launch
from megamoe.backends.hopper.buffers import BoundLayer, packs_densely
from megamoe.backends.hopper.kernels import Kernels
from megamoe.backends.hopper.plan import GemmPlan, next_power_of_2
from megamoe.batch import MoeBatch, StageTimes
from megamoe.bundle import Path

STAGES: dict[Path, tuple[str, ...]] = {
    Path.SMALL_M: ("small_m",),
    Path.FIXED_SLOT: ("dispatch", "gemm1", "gemm2", "combine"),
    Path.LARGE_M: ("quantize", "large_m"),
    Path.COMPACT: ("prepare", "dispatch", "gemm1", "gemm2", "combine"),
}

GRAPH_PATHS = (Path.SMALL_M, Path.FIXED_SLOT)
"""Decode: there the host's launches would cost as much as the kernels."""
GraphKey = tuple[int, int, Path, int, int, GemmPlan, bool]
"""Slot, version of its binding, path, capacity, rows of the bucket, GEMMs, whether rows come quantized."""


class Call:
    """The sub-step under way: its tensors are kept until its kernels have finished."""

    def __init__(
        self,
        launch: Launch,
        layer: BoundLayer,
        batch: MoeBatch,
        out: torch.Tensor,
        out_dev: torch.Tensor,
        gemms: GemmPlan,
    ) -> None:
        self.launch = launch
        self.layer = layer
        self.batch = batch
        self.out = out
        self.out_dev = out_dev
        self.gemms = gemms
        self.num_launches = 0
        self.in_graph = False
        self.marks: list[tuple[str, torch.cuda.Event]] = []

    @property
    def grid_rows(self) -> int:
        """Rows that grids are made for: a bucket, so that steps of nearly as many rows launch alike."""
        return next_power_of_2(self.launch.sub_step.max_rows)

    @property
    def graph_key(self) -> GraphKey | None:
        """What a captured graph of this sub-step depends on; None on paths whose launches cost nothing beside them."""
        sub_step = self.launch.sub_step
        if sub_step.path not in GRAPH_PATHS:
            return None
        quantized = self.batch.hidden_states_sf is not None
        slot = (self.launch.slot_idx, self.layer.version)
        return (*slot, sub_step.path, sub_step.runtime_capacity, self.grid_rows, self.gemms, quantized)

    @property
    def compact(self) -> bool:
        return packs_densely(self.launch.sub_step.path)

    def mark(self, stream: torch.cuda.Stream, name: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        self.marks.append((name, event))

    def times(self) -> StageTimes:
        """Between the marks; waiting for peers is inside the stage that waits. Of one launch or a graph, the
        total alone."""
        spent: dict[str, float] = {}
        for (_, before), (name, after) in zip(self.marks, self.marks[1:], strict=False):
            field = "dispatch_us" if name == "prepare" else f"{name}_us"
            if name not in ("end", "small_m", "large_m"):
                spent[field] = spent.get(field, 0.0) + before.elapsed_time(after) * 1e3
        total_us = self.marks[0][1].elapsed_time(self.marks[-1][1]) * 1e3
        return StageTimes(**spent, total_us=total_us)


def _small_m(kernels: Kernels, call: Call) -> None:
    kernels.small_m(call.layer, call.gemms)


def _quantize(kernels: Kernels, call: Call) -> None:
    kernels.quantize(call.grid_rows)


def _large_m(kernels: Kernels, call: Call) -> None:
    kernels.large_m(call.layer, call.gemms)


def _prepare(kernels: Kernels, call: Call) -> None:
    kernels.prepare()


def _dispatch(kernels: Kernels, call: Call) -> None:
    quantized = call.batch.hidden_states_sf is not None
    kernels.dispatch(call.grid_rows, compact=call.compact, quantized=quantized)
    kernels.index(call.gemms, call.launch.sub_step.runtime_capacity, compact=call.compact)
    if call.layer.w13 is not None:
        kernels.expand()


def _gemm1(kernels: Kernels, call: Call) -> None:
    if call.layer.w13 is not None:
        kernels.gemm1(call.layer, call.gemms)


def _gemm2(kernels: Kernels, call: Call) -> None:
    if call.layer.w13 is None:
        kernels.identity()
    else:
        kernels.gemm2(call.layer, call.gemms)


def _combine(kernels: Kernels, call: Call) -> None:
    kernels.combine(call.grid_rows)


LAUNCH: dict[str, Callable[[Kernels, Call], None]] = {
    "small_m": _small_m,
    "quantize": _quantize,
    "large_m": _large_m,
    "prepare": _prepare,
    "dispatch": _dispatch,
    "gemm1": _gemm1,
    "gemm2": _gemm2,
    "combine": _combine,
}
