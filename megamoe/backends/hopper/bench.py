"""Timing: the expert GEMMs alone, and the whole layer over all ranks of a group in this process.

`python -m megamoe.backends.hopper.bench --ranks 1` prints one line a size with the floor and the fraction of it that is
reached, and writes JSON where asked. Each rank has an EP8 rank's experts and, at T tokens a rank, receives as many
routed rows as in EP8. --ranks 1 leaves out only NVLink; --ranks 2 on two GPUs has it; --ranks 8 on one GPU tests the
protocol under load, all ranks sharing the GPU. Everything is a captured graph.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path as FilePath

import torch

from megamoe.backends import Launch
from megamoe.backends.hopper import separate_queues
from megamoe.backends.hopper.board import plan_large_m
from megamoe.backends.hopper.buffers import (
    BoundLayer,
    RankBuffers,
    allocate_heap,
    control_words,
    packs_densely,
)
from megamoe.backends.hopper.floors import CALLS, REPEATS, busiest, floor_us, ranks_of, work_of
from megamoe.backends.hopper.kernels import Device, Kernels
from megamoe.backends.hopper.packing import PackedMatrix, pack_w2, pack_w13
from megamoe.backends.hopper.plan import GemmPlan, devices_of_ranks, plan_gemms, plan_small_m
from megamoe.backends.hopper.record import FIRST_STATUS, NUM_WORDS, Word
from megamoe.backends.hopper.served import reach_peers
from megamoe.batch import MoeBatch
from megamoe.bundle import Deployment, Path, RowFormat, plan_bundle
from megamoe.layout import plan_layout
from megamoe.path import SubStep
from megamoe.routing import route
from megamoe.shape import MoeShape, preset

SMALL_PATHS = (Path.SMALL_M, Path.FIXED_SLOT, Path.COMPACT)
LARGE_PATHS = (Path.LARGE_M, Path.COMPACT)
CAPACITIES = (512, 8192)
"""Of the groups that time decode and prefill."""
_PLANS = {Path.SMALL_M: plan_small_m, Path.LARGE_M: plan_large_m}


def random_packed(
    shape: MoeShape, device: torch.device, seed: int
) -> tuple[BoundLayer, tuple[torch.Tensor, ...]]:
    """Random codes and plausible scales, packed; and the canonical tensors (w13 codes, scales, w2 codes, scales)."""
    generator = torch.Generator(device=device).manual_seed(seed)
    experts, hidden, inter = shape.num_experts_per_rank, shape.hidden, shape.intermediate
    made = []
    for rows, columns in ((2 * inter, hidden), (hidden, inter)):
        codes = torch.randint(
            0, 256, (experts, rows, columns // 2), dtype=torch.uint8, device=device, generator=generator
        )
        # Codes have a standard deviation of 3: scales around 1 / (3 sqrt(K)) keep outputs near unit variance.
        scales = torch.randint(
            117, 121, (experts, rows, columns // 32), dtype=torch.uint8, device=device, generator=generator
        )
        made += [codes, scales]
    return BoundLayer(pack_w13(made[0], made[1]), pack_w2(made[2], made[3])), tuple(made)


def rolled(layer: BoundLayer) -> BoundLayer:
    """Another set of weights of the same kind: experts in another order, in memory of their own."""
    assert layer.w13 is not None
    assert layer.w2 is not None

    def roll(matrix: PackedMatrix) -> PackedMatrix:
        return replace(
            matrix,
            units=matrix.units.roll(1, 0).contiguous(),
            out_factor=matrix.out_factor.roll(1, 0).contiguous(),
        )

    return BoundLayer(roll(layer.w13), roll(layer.w2), layer.version + 1)


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


@dataclass(frozen=True)
class Timing:
    """One measured size. floor_us: the larger of weight bytes of the experts hit and arithmetic of the rows."""

    what: str
    path: str
    distribution: str
    tokens: int
    rows: int
    experts_hit: int
    us: float
    floor_us: float
    ranks_a_gpu: int = 1

    @property
    def fraction(self) -> float:
        return self.floor_us / self.us

    def line(self, shape: MoeShape) -> str:
        num_bytes, flops = (self.ranks_a_gpu * part for part in work_of(shape, self.rows, self.experts_hit))
        return (
            f"{self.what:22s} {self.path:10s} {self.distribution:18s} T={self.tokens:5d} rows={self.rows:6d} "
            f"hit={self.experts_hit:3d} {self.us:9.1f} us  floor {self.floor_us:8.1f}  {self.fraction:.3f}"
            f"  {num_bytes / self.us / 1e6:5.2f} TB/s {flops / self.us / 1e6:6.0f} TFLOP/s"
        )


def deployment_of(shape: MoeShape, capacity: int, row_format: RowFormat = RowFormat.BF16) -> Deployment:
    """What is timed for steps of up to `capacity` tokens a rank."""
    return Deployment(
        shape=shape,
        backend="hopper",
        max_tokens_per_rank=capacity,
        fixed_slot_max=min(capacity, CAPACITIES[0]),
        small_m_capacities=(min(capacity, CAPACITIES[0]),),
        large_m_capacity=capacity,
        large_m_min_tokens=min(capacity, 1024),
        combine_row_format=row_format,
    )


class GroupBench:
    """All ranks of a group in this process, with weights, and launches that can be captured.

    One rank: two weight sets in turn. More: one set each (together they do not fit any cache).
    """

    def __init__(self, shape: MoeShape, capacity: int, row_format: RowFormat = RowFormat.BF16) -> None:
        self.shape = shape
        self.bundle = plan_bundle(deployment_of(shape, capacity, row_format))
        layout = plan_layout(self.bundle, num_slots=1)
        numbers = devices_of_ranks(shape.num_ranks, torch.cuda.device_count())
        self.devices = [torch.device("cuda", number) for number in numbers]
        heaps = [allocate_heap(layout, device) for device in self.devices]
        addresses = [heap.data_ptr() for heap in heaps]
        self.ranks: list[RankBench] = []
        for rank, device in enumerate(self.devices):
            reach_peers(heaps, device)
            buffers = RankBuffers(layout, rank=rank, heap_addresses=addresses, device=device)
            sms = torch.cuda.get_device_properties(device).multi_processor_count
            kernels = Kernels(buffers, Device(sms, numbers.count(numbers[rank])), row_format)
            self.ranks.append(RankBench(heaps[rank], kernels))
        layers: dict[torch.device, BoundLayer] = {}
        for rank_bench, device in zip(self.ranks, self.devices, strict=True):
            with torch.cuda.device(device):
                if device not in layers:
                    layers[device], self.canonical = random_packed(shape, device, seed=1)
                    rank_bench.layers = [layers[device]]
                else:
                    layers[device] = rolled(layers[device])
                    rank_bench.layers = [layers[device]]
                if shape.num_ranks == 1:
                    rank_bench.layers.append(rolled(layers[device]))
        self._epoch = 0

    def take(self, routes: Sequence[tuple[torch.Tensor, torch.Tensor]], path: Path, num_calls: int) -> None:
        """Make these routes (ids, weights of every rank) with random rows the batch of the launches that follow, of
        which a captured graph will hold num_calls."""
        counts = tuple(len(ids) for ids, _ in routes)
        self.path = path
        self.counts = counts
        for rank, (rank_bench, device) in enumerate(zip(self.ranks, self.devices, strict=True)):
            generator = torch.Generator(device=device).manual_seed(rank)
            x = torch.randn(counts[rank], self.shape.hidden, device=device, generator=generator).bfloat16()
            ids, weights = routes[rank]
            rank_bench.batch = MoeBatch(x, ids.to(device), weights.to(device))
            rank_bench.out = torch.full_like(x, float("nan"))
            rank_bench.pinned = torch.zeros((num_calls, NUM_WORDS), dtype=torch.int64, pin_memory=True)
        self.new_epochs()

    def new_epochs(self) -> None:
        """Control blocks with epochs that no launch has had; nothing may be under way."""
        sub_step = SubStep(
            sub_step_idx=0,
            start_row=0,
            stop_row=max(self.counts),
            path=self.path,
            runtime_capacity=self.bundle.deployment.max_tokens_per_rank,
            num_rows_per_rank=self.counts,
        )
        for call in range(len(self.ranks[0].pinned)):
            self._epoch += 1
            launch = Launch(
                slot_idx=0,
                epoch=self._epoch,
                buffer_idx=self._epoch & 1,
                sub_step=sub_step,
                closing=False,
                refused=False,
                deadline_s=0.0,
            )
            for rank_bench in self.ranks:
                words = control_words(
                    rank_bench.kernels.buffers.layout, launch, rank_bench.batch, rank_bench.out, 1_000_000_000
                )
                rank_bench.pinned[call] = torch.tensor(words, dtype=torch.int64)

    def check(self) -> None:
        """Raises RuntimeError when the last launch gave up or left an output unwritten."""
        for device in set(self.devices):
            torch.cuda.synchronize(device)
        for rank, rank_bench in enumerate(self.ranks):
            control = rank_bench.kernels.buffers.control.tolist()
            if control[Word.FAILED] or bool(torch.isnan(rank_bench.out.float()).any()):
                status = control[FIRST_STATUS : FIRST_STATUS + 8]
                raise RuntimeError(f"rank {rank} failed or left outputs unwritten: status {status}")


class RankBench:
    """One rank of a GroupBench."""

    def __init__(self, heap: torch.Tensor, kernels: Kernels) -> None:
        self.heap = heap
        self.kernels = kernels
        self.layers: list[BoundLayer] = []
        self.batch = MoeBatch(torch.empty(0), torch.empty(0), torch.empty(0))
        self.out = torch.empty(0)
        self.pinned = torch.empty(0)

    def before_gemms(self, path: Path, gemms: GemmPlan, call: int = 0) -> None:
        compact = packs_densely(path)
        buffers = self.kernels.buffers
        buffers.control.copy_(self.pinned[call], non_blocking=True)
        if compact:
            self.kernels.prepare()
        self.kernels.dispatch(self.batch.num_rows, compact=compact, quantized=False)
        self.kernels.index(gemms, buffers.layout.capacity, compact=compact)
        self.kernels.expand()

    def layer(self, path: Path, gemms: GemmPlan, call: int) -> None:
        """One whole sub-step; weight sets take turns."""
        layer = self.layers[call % len(self.layers)]
        if path is Path.SMALL_M:
            self.kernels.buffers.control.copy_(self.pinned[call], non_blocking=True)
            self.kernels.small_m(layer, gemms)
            return
        if path is Path.LARGE_M:
            self.kernels.buffers.control.copy_(self.pinned[call], non_blocking=True)
            self.kernels.quantize(self.batch.num_rows)
            self.kernels.large_m(layer, gemms)
            return
        self.before_gemms(path, gemms, call)
        self.kernels.gemm1(layer, gemms)
        self.kernels.gemm2(layer, gemms)
        self.kernels.combine(self.batch.num_rows)


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
    floor = floor_us(shape, rows, shape.num_experts)
    out = []
    for name, functions, share in (("gemm1", first, 2 / 3), ("gemm2", second, 1 / 3), ("both", both, 1.0)):
        us = graph_us(functions) * (2 if name == "both" else 1)
        what = f"{name} m={rows_per_expert} {label(gemms)}"
        out.append(Timing(what, "-", "even", tokens, rows, shape.num_experts, us, share * floor))
    return out


def label(gemms: GemmPlan) -> str:
    return f"s{gemms.stream_max_rows}n{gemms.block_n}"


def bench_layer(
    group: GroupBench, tokens: int, path: Path, distribution: str = "uniform", gemms: GemmPlan | None = None
) -> Timing:
    """The whole layer, all ranks: control copy, dispatch with quantization, index, expand, GEMMs, combine.

    A captured graph a rank holds CALLS layer calls, so that ranks' uneven starts do not count; the time is the median
    of the slowest rank's. Rows and experts hit are those of the busiest rank; ranks that share a GPU share its floor.
    """
    shape = group.shape
    routes = route(shape, distribution, [tokens] * shape.num_ranks, seed=11)
    group.take(routes, path, CALLS)
    chosen = gemms or _PLANS.get(path, plan_gemms)(shape, tokens)
    graphs = []
    for rank in group.ranks:
        device = rank.kernels.buffers.device
        stream = torch.cuda.Stream(device)
        with torch.cuda.device(device):
            with torch.cuda.stream(stream):
                if path is Path.SMALL_M:
                    rank.kernels.warm_up((), {}, [chosen])
                elif path is Path.LARGE_M:
                    rank.kernels.warm_up((), {}, (), [chosen])
                else:
                    rank.kernels.warm_up([chosen], {path: [rank.kernels.buffers.layout.capacity]})
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for call in range(CALLS):
                    rank.layer(path, chosen, call)
        graphs.append((stream, graph))
    times = []
    for _ in range(REPEATS + 1):
        group.new_epochs()
        marks = []
        for stream, graph in graphs:
            with torch.cuda.device(stream.device), torch.cuda.stream(stream):
                start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record(stream)
                graph.replay()
                stop.record(stream)
            marks.append((start, stop))
        for _, stop in marks:
            stop.synchronize()
        times.append(max(start.elapsed_time(stop) for start, stop in marks) * 1e3 / CALLS)
    group.check()
    rows, hit = busiest(shape, [ids for ids, _ in routes])
    sharing = max(group.devices.count(device) for device in group.devices)
    floor = sharing * floor_us(shape, rows, hit)
    what = f"EP{shape.num_ranks} on {len(set(group.devices))} GPU {label(chosen)}"
    return Timing(
        what, str(path), distribution, tokens, rows, hit, statistics.median(times[1:]), floor, sharing
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="time the Hopper backend on this process's GPUs")
    parser.add_argument("--shape", default="deepseek-v4-pro")
    parser.add_argument(
        "--ranks", type=int, default=1, help="ranks of the group, each with an EP8 rank's experts"
    )
    parser.add_argument(
        "--tokens", type=int, nargs="*", default=[1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192]
    )
    parser.add_argument("--distributions", nargs="*", default=["uniform"])
    parser.add_argument("--json", type=FilePath)
    chosen = parser.parse_args(arguments)
    separate_queues()
    shape = ranks_of(preset(chosen.shape), chosen.ranks)
    timings = []
    for capacity in CAPACITIES:
        sizes = [t for t in chosen.tokens if (t <= CAPACITIES[0]) == (capacity == CAPACITIES[0])]
        if not sizes:
            continue
        group = GroupBench(shape, capacity)
        for tokens in sizes:
            for path in SMALL_PATHS if tokens <= 512 else LARGE_PATHS:
                for distribution in chosen.distributions:
                    timings.append(bench_layer(group, tokens, path, distribution))
                    print(timings[-1].line(shape), flush=True)
        del group
        torch.cuda.empty_cache()
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(t) | {"fraction": t.fraction} for t in timings], indent=1))


if __name__ == "__main__":
    main()
