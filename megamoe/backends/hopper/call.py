"""A sub-step under way: its tensors, its marks in time, and which kernels each stage launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from megamoe.backends import Launch
from megamoe.backends.hopper.buffers import BoundLayer, packs_densely
from megamoe.backends.hopper.kernels import Kernels
from megamoe.backends.hopper.plan import GemmPlan, next_power_of_2
from megamoe.backends.hopper.served import gemm_plan
from megamoe.backends.hopper.staging import Outgoing
from megamoe.batch import MoeBatch
from megamoe.bundle import Bundle, Path
from megamoe.path import SubStep

STAGES: dict[Path, tuple[str, ...]] = {
    Path.SMALL_M: ("small_m",),
    Path.FIXED_SLOT: ("dispatch", "gemm1", "gemm2", "combine"),
    Path.LARGE_M: ("quantize", "large_m"),
    Path.COMPACT: ("prepare", "dispatch", "gemm1", "gemm2", "combine"),
}

GRAPH_PATHS = (Path.SMALL_M, Path.FIXED_SLOT)
"""Decode: there the host's launches would cost as much as the kernels."""
COMPACT_GRAPH_ROWS = 512
"""compact is captured for up to so many rows a rank; above, its kernels take longer than their launches."""


@dataclass(frozen=True)
class Recipe:
    """What is launched for steps of a size on a path: grids and GEMMs. grid_rows: rows that grids are made for, a
    power of two, so that steps of nearly as many rows launch alike."""

    path: Path
    capacity: int
    grid_rows: int
    gemms: GemmPlan

    @property
    def captured(self) -> bool:
        """Whether its launches are worth a graph."""
        return self.path in GRAPH_PATHS or (
            self.path is Path.COMPACT and self.grid_rows <= COMPACT_GRAPH_ROWS
        )


class Recipes:
    """The recipes of a deployment, each made once."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._of_rows: dict[tuple[Path, int, int], Recipe] = {}
        self._made: dict[Recipe, Recipe] = {}

    def of(self, sub_step: SubStep) -> Recipe:
        """One and the same object for all sub-steps that launch alike."""
        rows = sub_step.max_rows
        key = (sub_step.path, sub_step.runtime_capacity, rows)
        found = self._of_rows.get(key)
        if found is None:
            gemms = gemm_plan(self._bundle, sub_step.path, rows)
            recipe = Recipe(sub_step.path, sub_step.runtime_capacity, next_power_of_2(rows), gemms)
            found = self._of_rows[key] = self._made.setdefault(recipe, recipe)
        return found


class GraphKey(NamedTuple):
    """What a captured graph of a sub-step depends on. version: of the slot's binding; recipe_id: id() of a Recipe."""

    slot_idx: int
    version: int
    recipe_id: int
    quantized: bool
    closing: bool


class Call:
    """The sub-step under way: its tensors are kept until its kernels have finished."""

    def __init__(
        self, launch: Launch, layer: BoundLayer, recipe: Recipe, batch: MoeBatch, result: Outgoing
    ) -> None:
        self.launch = launch
        self.layer = layer
        self.recipe = recipe
        self.batch = batch
        self.result = result
        self.num_launches = 0
        self.in_graph = False
        self.marks: list[tuple[str, torch.cuda.Event]] = []

    @property
    def quantized(self) -> bool:
        return self.batch.hidden_states_sf is not None

    @property
    def gemms(self) -> GemmPlan:
        """As this layer's weights allow."""
        return self.layer.gemms(self.recipe.gemms)

    @property
    def graph_key(self) -> GraphKey:
        launch = self.launch
        return GraphKey(launch.slot_idx, self.layer.version, id(self.recipe), self.quantized, launch.closing)

    @property
    def compact(self) -> bool:
        return packs_densely(self.recipe.path)

    def stage_us(self) -> dict[str, float]:
        """Between the marks, by field of StageTimes; waiting for peers is inside the stage that waits. Nothing for
        a graph or a path of one launch."""
        spent: dict[str, float] = {}
        for (_, before), (name, after) in pairwise(self.marks):
            field = "dispatch_us" if name == "prepare" else f"{name}_us"
            if name not in ("small_m", "large_m"):
                spent[field] = spent.get(field, 0.0) + before.elapsed_time(after) * 1e3
        return spent


def _small_m(kernels: Kernels, call: Call) -> None:
    kernels.small_m(call.layer, call.recipe.gemms)


def _quantize(kernels: Kernels, call: Call) -> None:
    kernels.quantize(call.recipe.grid_rows)


def _large_m(kernels: Kernels, call: Call) -> None:
    kernels.large_m(call.layer, call.recipe.gemms)


def _prepare(kernels: Kernels, call: Call) -> None:
    kernels.prepare()


def _dispatch(kernels: Kernels, call: Call) -> None:
    recipe = call.recipe
    kernels.dispatch(recipe.grid_rows, compact=call.compact, quantized=call.quantized)
    kernels.index(call.gemms, recipe.capacity, compact=call.compact)
    if call.layer.w13 is not None:
        kernels.expand(call.gemms)


def _gemm1(kernels: Kernels, call: Call) -> None:
    if call.layer.w13 is not None:
        kernels.gemm1(call.layer, call.gemms)


def _gemm2(kernels: Kernels, call: Call) -> None:
    if call.layer.w13 is None:
        kernels.identity()
    else:
        kernels.gemm2(call.layer, call.gemms)


def _combine(kernels: Kernels, call: Call) -> None:
    kernels.combine(call.recipe.grid_rows)


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
