"""Captured graphs of whole sub-steps, one per path, bucket of rows and binding of a layer.

A graph holds no epoch, row count or tensor address: kernels read those from the control block, which the graph's
first kernel takes from pinned memory. What it does hold are the addresses of a layer's weights; its key therefore has
the version of the binding, and a slot that is bound anew loses its graphs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megamoe.backends.hopper.call import GraphKey
from megamoe.backends.hopper.stream import RankStream


class StepGraphs:
    """Graphs of one rank, captured on its stream when first wanted."""

    def __init__(self, stream: RankStream) -> None:
        self._stream = stream
        self._graphs: dict[GraphKey, tuple[Callable[[], None], torch.cuda.CUDAGraph]] = {}

    def replay(self, key: GraphKey, launch: Callable[[], None]) -> None:
        """Queue the sub-step that `launch` would launch on the current stream. Its kernels must be loaded already."""
        found = self._graphs.get(key) or self._capture(key, launch)
        found[0]()

    def _capture(
        self, key: GraphKey, launch: Callable[[], None]
    ) -> tuple[Callable[[], None], torch.cuda.CUDAGraph]:
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph: that waits for the device, and so for kernels that may wait for this rank. Other
        # threads go on with work of theirs.
        with self._stream.current():
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
        self._graphs[key] = self._stream.launcher(graph.raw_cuda_graph_exec()), graph
        return self._graphs[key]

    def forget(self, slot_idx: int) -> None:
        """Drop the graphs of a slot, whose weights change."""
        self._graphs = {key: graph for key, graph in self._graphs.items() if key[0] != slot_idx}

    def clear(self) -> None:
        """Drop all of them."""
        self._graphs = {}

    def __len__(self) -> int:
        return len(self._graphs)
