"""The whole layer: all ranks of a group, as captured graphs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import lru_cache

import torch

from megamoe.backends.hopper.bench.group import GroupBench
from megamoe.backends.hopper.bench.timing import Timing, achieved, label
from megamoe.backends.hopper.floors import CALLS, REPEATS, busiest
from megamoe.backends.hopper.plan import GemmPlan
from megamoe.backends.hopper.served import gemm_plan
from megamoe.bundle import Path
from megamoe.routing import route
from megamoe.shape import MoeShape

SMALL_PATHS = (Path.SMALL_M, Path.FIXED_SLOT, Path.COMPACT)
LARGE_PATHS = (Path.LARGE_M, Path.COMPACT)
LARGEST_SMALL = 512
"""Tokens a rank up to which the decode paths are timed; above, large_m."""

_GATE_CYCLES = 1_000_000
"""Half a millisecond, in which the host starts all ranks' graphs."""


def paths_at(tokens: int) -> tuple[Path, ...]:
    """What is timed at a size."""
    return SMALL_PATHS if tokens <= LARGEST_SMALL else LARGE_PATHS


@lru_cache(maxsize=2)
def routes_at(
    shape: MoeShape, distribution: str, tokens: int
) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """(ids, weights) of every rank; the same in every process and run."""
    return tuple(route(shape, distribution, [tokens] * shape.num_ranks, seed=11))


def bench_layer(
    group: GroupBench, tokens: int, path: Path, distribution: str = "uniform", gemms: GemmPlan | None = None
) -> Timing:
    """The whole layer, all ranks: request, dispatch with quantization, index, expand, GEMMs, combine, status.

    A captured graph a rank holds CALLS layer calls; all ranks' begin when one event has come, so that the host's order
    of starting them does not count. The time is the median of the slowest rank's. Rows and experts hit are those of
    the busiest rank; ranks that share a GPU share its floor. gemms: None = what is served.
    """
    shape = group.shape
    routes = routes_at(shape, distribution, tokens)
    group.take(routes, path, CALLS)
    chosen = gemms or gemm_plan(group.bundle, path, tokens)
    us = statistics.median(_replay(group, _capture(group, path, chosen)))
    group.check()
    rows, hit = busiest(shape, [ids for ids, _ in routes], group.rates)
    floor = group.ranks_a_gpu * group.rates.floor_us(shape, rows, hit)
    what = f"EP{shape.num_ranks} on {len(set(group.devices))} GPU {label(chosen)}"
    speed = achieved(shape, rows, hit, us, group.ranks_a_gpu)
    return Timing(what, str(path), distribution, tokens, rows, hit, us, floor, *speed)


Captured = tuple[torch.cuda.Stream, torch.cuda.CUDAGraph]


def _capture(group: GroupBench, path: Path, gemms: GemmPlan) -> list[Captured]:
    """CALLS layer calls a rank, every kernel of theirs compiled and loaded before."""
    graphs = []
    for rank in group.ranks:
        device = rank.kernels.buffers.device
        stream = torch.cuda.Stream(device)
        with torch.cuda.device(device):
            with torch.cuda.stream(stream):
                if path is Path.SMALL_M:
                    rank.kernels.warm_up((), {}, [gemms])
                elif path is Path.LARGE_M:
                    rank.kernels.warm_up((), {}, (), [gemms])
                else:
                    rank.kernels.warm_up([gemms], {path: [rank.kernels.buffers.layout.capacity]})
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for call in range(CALLS):
                    rank.layer(path, gemms, call)
        graphs.append((stream, graph))
    return graphs


def _replay(group: GroupBench, graphs: Sequence[Captured]) -> list[float]:
    """Microseconds of a layer call on the slowest rank, replay by replay; the first is left out."""
    times = []
    for _ in range(REPEATS + 1):
        group.new_epochs()
        gate = torch.cuda.Event()
        with torch.cuda.device(graphs[0][0].device), torch.cuda.stream(graphs[0][0]):
            torch.cuda._sleep(_GATE_CYCLES)
            gate.record()
        marks = []
        for stream, graph in graphs:
            with torch.cuda.device(stream.device), torch.cuda.stream(stream):
                stream.wait_event(gate)
                start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record(stream)
                graph.replay()
                stop.record(stream)
            marks.append((start, stop))
        for _, stop in marks:
            stop.synchronize()
        times.append(max(start.elapsed_time(stop) for start, stop in marks) * 1e3 / CALLS)
    return times[1:]
