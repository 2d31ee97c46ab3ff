"""The expert GEMMs alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch

from megamoe.backends.hopper.bench.group import GroupBench
from megamoe.backends.hopper.bench.timing import Timing, achieved, label
from megamoe.backends.hopper.plan import GemmPlan
from megamoe.bundle import Path
from megamoe.shape import MoeShape


def graph_us(functions: Sequence[Callable[[], None]], *, repeats: int = 9, per_graph: int = 4) -> float:
    """Median microseconds of one call, the functions taking turns in one captured graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for function in functions:
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(per_graph):
            for function in functions:
                function()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / (per_graph * len(functions)))
    return float(statistics.median(times))


def balanced_ids(shape: MoeShape, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Routes that give every expert of the rank the same number of rows (tokens * top-k a multiple of experts)."""
    flat = torch.arange(tokens * shape.num_topk) % shape.num_experts
    ids = flat.view(tokens, shape.num_topk).to(torch.int32)
    return ids, torch.full(ids.shape, 1 / shape.num_topk)


def bench_gemms(group: GroupBench, rows_per_expert: int, gemms: GemmPlan) -> list[Timing]:
    """GEMM1, GEMM2 and both of a one-rank group, every expert with the same number of rows."""
    shape, rank = group.shape, group.ranks[0]
    tokens = rows_per_expert * shape.num_experts // shape.num_topk
    group.take([balanced_ids(shape, tokens)], Path.FIXED_SLOT, 1)
    rank.before_gemms(Path.FIXED_SLOT, gemms)
    rank.kernels.gemm1(rank.layers[0], gemms)
    torch.cuda.synchronize()
    rows = tokens * shape.num_topk
    first = [partial(rank.kernels.gemm1, layer, gemms) for layer in rank.layers]
    second = [partial(rank.kernels.gemm2, layer, gemms) for layer in rank.layers]
    both = [stage for pair in zip(first, second, strict=True) for stage in pair]
    floor = group.rates.floor_us(shape, rows, shape.num_experts)
    out = []
    for name, functions, share in (("gemm1", first, 2 / 3), ("gemm2", second, 1 / 3), ("both", both, 1.0)):
        us = graph_us(functions) * (2 if name == "both" else 1)
        what = f"{name} m={rows_per_expert} {label(gemms)}"
        speed = [share * rate for rate in achieved(shape, rows, shape.num_experts, us)]
        out.append(Timing(what, "-", "even", tokens, rows, shape.num_experts, us, share * floor, *speed))
    return out
