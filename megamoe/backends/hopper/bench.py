"""Timing on one GPU: the expert GEMMs alone, and the whole layer of one rank with the rows that EP8 would send it.

`python -m megamoe.backends.hopper.bench` prints one line a size with the floor and the fraction of it that is
reached, and writes JSON where asked. One rank with all its experts and top-6 of T tokens receives as many routed rows
as each rank of EP8 does with T tokens a rank; what is missing is NVLink. Everything is a captured graph; weights
rotate between sets that do not fit the L2 cache together.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path as FilePath

import torch

from megamoe.backends import Launch
from megamoe.backends.hopper.buffers import BoundLayer, control_words, counts_before_payload
from megamoe.backends.hopper.kernels import Device, Kernels
from megamoe.backends.hopper.lockstep import Lockstep
from megamoe.backends.hopper.packing import PackedMatrix, pack_w2, pack_w13
from megamoe.backends.hopper.plan import GemmPlan, plan_gemms
from megamoe.batch import MoeBatch
from megamoe.bundle import Deployment, Path, RowFormat, plan_bundle
from megamoe.path import SubStep
from megamoe.routing import route_rank
from megamoe.shape import MoeShape, preset

HBM_BYTES_PER_S = 4.3e12
"""Device-to-device copy, H200."""
BF16_FLOPS_PER_S = 671e12
"""bf16 8192^3 matmul on random data, H200 (reference table)."""


def one_rank_of(shape: MoeShape, num_ranks: int = 8) -> MoeShape:
    """One rank of `shape` as a group of its own: the same experts a rank, top-k, and dimensions."""
    return replace(
        shape, num_experts=shape.num_experts // num_ranks, num_ranks=1, name=f"{shape.name}-one-rank"
    )


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

    @property
    def fraction(self) -> float:
        return self.floor_us / self.us

    def line(self, shape: MoeShape) -> str:
        num_bytes, flops = work_of(shape, self.rows, self.experts_hit)
        return (
            f"{self.what:22s} {self.path:10s} {self.distribution:18s} T={self.tokens:5d} rows={self.rows:6d} "
            f"hit={self.experts_hit:3d} {self.us:9.1f} us  floor {self.floor_us:8.1f}  {self.fraction:.3f}"
            f"  {num_bytes / self.us / 1e6:5.2f} TB/s {flops / self.us / 1e6:6.0f} TFLOP/s"
        )


def work_of(shape: MoeShape, rows: int, experts_hit: int) -> tuple[float, float]:
    """(weight bytes, floating-point operations) of a layer on one rank."""
    weights = 3.0 * shape.hidden * shape.intermediate
    return experts_hit * weights * (0.5 + 1 / 32), 2.0 * rows * weights


def floor_us(shape: MoeShape, rows: int, experts_hit: int) -> float:
    num_bytes, flops = work_of(shape, rows, experts_hit)
    return 1e6 * max(num_bytes / HBM_BYTES_PER_S, flops / BF16_FLOPS_PER_S)


class OneRank:
    """A rank that is a whole group, with two weight sets, and launches that can be captured."""

    def __init__(self, shape: MoeShape, capacity: int, row_format: RowFormat = RowFormat.BF16) -> None:
        self.shape = shape
        self.device = torch.device("cuda")
        bundle = plan_bundle(
            Deployment(
                shape=shape,
                backend="hopper",
                max_tokens_per_rank=capacity,
                fixed_slot_max=capacity,
                combine_row_format=row_format,
            )
        )
        self.lockstep = Lockstep(bundle, self.device)
        self.buffers = self.lockstep.group.ranks[0]
        num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.kernels = Kernels(self.buffers, Device(num_sms), row_format)
        self.canonical: tuple[torch.Tensor, ...]
        layer, self.canonical = random_packed(shape, self.device, 1)
        self.layers = [layer, rolled(layer)]
        self._pinned = torch.zeros(64, dtype=torch.int64, pin_memory=True)
        self.batch: MoeBatch | None = None
        self.out = torch.empty(0)

    def take(self, ids: torch.Tensor, weights: torch.Tensor, path: Path, seed: int = 0) -> None:
        """Make these rows the batch of the launches that follow."""
        tokens = len(ids)
        generator = torch.Generator(device=self.device).manual_seed(seed)
        x = torch.randn(tokens, self.shape.hidden, device=self.device, generator=generator).bfloat16()
        self.batch = MoeBatch(x, ids.to(self.device), weights.to(self.device))
        self.out = torch.full((tokens, self.shape.hidden), float("nan"), device=self.device).bfloat16()
        sub_step = SubStep(
            sub_step_idx=0,
            start_row=0,
            stop_row=tokens,
            path=path,
            runtime_capacity=self.buffers.layout.capacity,
            num_rows_per_rank=(tokens,),
        )
        launch = Launch(
            slot_idx=0, epoch=7, buffer_idx=1, sub_step=sub_step, closing=False, refused=False, deadline_s=0.0
        )
        words = control_words(self.buffers.layout, launch, self.batch, self.out, 1_000_000_000)
        self._pinned.copy_(torch.tensor(words, dtype=torch.int64))
        torch.cuda.synchronize()

    def before_gemms(self, path: Path, gemms: GemmPlan) -> None:
        compact = counts_before_payload(path)
        self.buffers.control.copy_(self._pinned, non_blocking=True)
        if compact:
            self.kernels.prepare()
        self.kernels.dispatch(compact=compact, quantized=False)
        self.kernels.index(gemms, self.buffers.layout.capacity, compact=compact)
        self.kernels.expand()

    def layer(self, path: Path, gemms: GemmPlan, which: int) -> None:
        """One whole sub-step with weight set `which`."""
        self.before_gemms(path, gemms)
        self.kernels.gemm1(self.layers[which], gemms)
        self.kernels.gemm2(self.layers[which], gemms)
        self.kernels.combine()

    def check(self) -> None:
        """Raises RuntimeError when the last launch gave up or left an output unwritten."""
        torch.cuda.synchronize()
        control = self.buffers.control.tolist()
        if control[32] or bool(torch.isnan(self.out.float()).any()):
            raise RuntimeError(f"launch failed or left outputs unwritten: status {control[32:40]}")


def balanced_ids(shape: MoeShape, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Routes that give every expert of the rank the same number of rows (tokens * top-k a multiple of experts)."""
    flat = torch.arange(tokens * shape.num_topk) % shape.num_experts
    ids = flat.view(tokens, shape.num_topk).to(torch.int32)
    return ids, torch.full(ids.shape, 1 / shape.num_topk)


def bench_gemms(rank: OneRank, rows_per_expert: int, gemms: GemmPlan) -> list[Timing]:
    """GEMM1, GEMM2 and both, every expert with the same number of rows."""
    shape = rank.shape
    tokens = rows_per_expert * shape.num_experts // shape.num_topk
    rank.take(*balanced_ids(shape, tokens), Path.FIXED_SLOT)
    rank.before_gemms(Path.FIXED_SLOT, gemms)
    rank.kernels.gemm1(rank.layers[0], gemms)
    torch.cuda.synchronize()
    rows = tokens * shape.num_topk
    stages: dict[str, list[Callable[[], None]]] = {
        "gemm1": [lambda i=i: rank.kernels.gemm1(rank.layers[i], gemms) for i in range(2)],  # type: ignore[misc]
        "gemm2": [lambda i=i: rank.kernels.gemm2(rank.layers[i], gemms) for i in range(2)],  # type: ignore[misc]
    }
    out = []
    for name, functions in stages.items():
        share = 2 / 3 if name == "gemm1" else 1 / 3
        floor = share * floor_us(shape, rows, shape.num_experts)
        us = graph_us(functions)
        out.append(
            Timing(
                f"{name} m={rows_per_expert} {label(gemms)}",
                "-",
                "even",
                tokens,
                rows,
                shape.num_experts,
                us,
                floor,
            )
        )
    both = [f for pair in zip(stages["gemm1"], stages["gemm2"], strict=True) for f in pair]
    us = 2 * graph_us(both)
    floor = floor_us(shape, rows, shape.num_experts)
    out.append(
        Timing(
            f"both m={rows_per_expert} {label(gemms)}",
            "-",
            "even",
            tokens,
            rows,
            shape.num_experts,
            us,
            floor,
        )
    )
    return out


def label(gemms: GemmPlan) -> str:
    return f"s{gemms.stream_max_rows}n{gemms.block_n}"


def bench_layer(
    rank: OneRank, tokens: int, path: Path, distribution: str = "uniform", gemms: GemmPlan | None = None
) -> Timing:
    """The whole layer: control copy, dispatch with quantization, index, expand, GEMMs with SwiGLU, combine."""
    shape = rank.shape
    ids, weights = route_rank(shape, distribution, tokens, seed=11, rank=0)
    rank.take(ids, weights, path)
    chosen = gemms or plan_gemms(shape, tokens)
    us = graph_us([lambda: rank.layer(path, chosen, 0), lambda: rank.layer(path, chosen, 1)])
    rank.check()
    hit = int(ids.unique().numel())
    rows = ids.numel()
    return Timing(
        f"layer {label(chosen)}", str(path), distribution, tokens, rows, hit, us, floor_us(shape, rows, hit)
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--shape", default="deepseek-v4-pro")
    parser.add_argument(
        "--tokens", type=int, nargs="*", default=[1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192]
    )
    parser.add_argument("--distributions", nargs="*", default=["uniform"])
    parser.add_argument("--json", type=FilePath)
    chosen = parser.parse_args(arguments)
    shape = one_rank_of(preset(chosen.shape))
    timings = []
    for capacity in sorted({512 if tokens <= 512 else 8192 for tokens in chosen.tokens}):
        rank = OneRank(shape, capacity)
        for tokens in chosen.tokens:
            if (tokens <= 512) != (capacity == 512):
                continue
            for path in (Path.FIXED_SLOT, Path.COMPACT) if tokens <= 512 else (Path.COMPACT,):
                for distribution in chosen.distributions:
                    timings.append(bench_layer(rank, tokens, path, distribution))
                    print(timings[-1].line(shape), flush=True)
        del rank
        torch.cuda.empty_cache()
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(t) | {"fraction": t.fraction} for t in timings], indent=1))


if __name__ == "__main__":
    main()
