"""Captured graphs go with the binding they were captured for."""

from __future__ import annotations

from typing import Any

from megamoe import Path
from megamoe.backends.hopper.graphs import StepGraphs
from megamoe.backends.hopper.plan import GemmPlan


def test_a_slot_that_is_bound_anew_loses_its_graphs_and_no_others() -> None:
    stream: Any = None  # nothing is captured here
    graph: Any = object()
    graphs = StepGraphs(stream)
    gemms = GemmPlan(stream_max_rows=32, block_n=64)
    keys = [
        (slot, 0, path, 64, 8, gemms, False) for slot in (0, 1) for path in (Path.SMALL_M, Path.FIXED_SLOT)
    ]
    graphs._graphs = dict.fromkeys(keys, graph)
    graphs.forget(0)
    assert list(graphs._graphs) == keys[2:]
    assert len(graphs) == 2
