"""Captured graphs of whole sub-steps, one per path, bucket of rows and binding of a layer.

A graph holds no epoch, row count or tensor address: kernels read those from the control block, which the graph's
first node copies from pinned memory. What it does hold are the addresses of a layer's weights; its key therefore has
the version of the binding, and a slot that is bound anew loses its graphs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megamoe.backends.hopper.call import GraphKey


class StepGraphs:
    """Graphs of one rank, captured on its stream when first wanted."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}

    def replay(self, key: GraphKey, launch: Callable[[], None]) -> None:
        """Queue the sub-step that `launch` would launch on the stream. Its kernels must be loaded already."""
        if key not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            # Not torch.cuda.graph: that waits for the device, and so for kernels that may wait for this rank. Other
            # threads go on with work of theirs.
            with torch.cuda.stream(self._stream):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    launch()
                finally:
                    graph.capture_end()
            self._graphs[key] = graph
        with torch.cuda.stream(self._stream):
            self._graphs[key].replay()

    def forget(self, slot_idx: int) -> None:
        """Drop the graphs of a slot, whose weights change."""
        self._graphs = {key: graph for key, graph in self._graphs.items() if key[0] != slot_idx}

    def __len__(self) -> int:
        return len(self._graphs)
