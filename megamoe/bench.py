"""Latency and throughput of every built path, next to plain torch measured in the same run.

`run_bench` starts one process a rank, drives layer calls back to back on each path and size, and times plain torch in
the calling process while the ranks sleep: one process, as many threads as asked for, fp32 matmuls per expert on
weights dequantized beforehand, no activation quantization (index_select, two matmuls, SwiGLU, index_add). Latency of
a call is the interval between two calls' ends on the slowest rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing.connection import Connection

import torch

from megamoe.batch import MoeBatch
from megamoe.bundle import Deployment, Path, plan_bundle
from megamoe.errors import InvalidArgumentError, must_be
from megamoe.path import PathPolicy
from megamoe.rank_processes import RankProcesses
from megamoe.routing import route_rank
from megamoe.runtime import Runtime
from megamoe.shape import MoeShape
from megamoe.step import Phase, PlanId, StepPlan
from megamoe.weights import random_layer_weights

_SEED = 1
_CALL_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """deployment: shape, backend and capacities. sizes: tokens a rank. paths: None = all that are built.

    distribution: of the routing. num_warmup, num_calls: layer calls a cell. num_threads: of plain torch.
    """

    deployment: Deployment
    sizes: tuple[int, ...] = (1, 16, 64, 256)
    paths: tuple[Path, ...] | None = None
    distribution: str = "uniform"
    num_warmup: int = 3
    num_calls: int = 15
    num_threads: int = 2


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """One cell. rows_per_s: tokens of all ranks a second. torch_ratio: plain torch's time over ours, of medians."""

    path: Path
    tokens_per_rank: int
    p50_ms: float
    p90_ms: float
    rows_per_s: float
    torch_p50_ms: float
    torch_ratio: float
    stage_ms: dict[str, float]
    """Mean over ranks of each stage's median time; wait_ms is time asleep."""


def run_bench(config: BenchConfig) -> Iterator[BenchResult]:
    """Yield a result per path and size, as they are measured. Raises InvalidArgumentError when no path is left."""
    bundle = plan_bundle(config.deployment)
    wanted = config.paths or tuple(path for path in Path if bundle.capacities(path))
    cells = [
        (path, size)
        for size in config.sizes
        for path in wanted
        if bundle.capacities(path) and size <= bundle.capacities(path)[-1]
    ]
    if not cells:
        built = ", ".join(f"{spec.path} {spec.capacity}" for spec in bundle.runtimes)
        raise InvalidArgumentError(
            must_be("paths and sizes", f"within what is built ({built})", config.sizes)
        )
    with RankProcesses(config.deployment, _serve, name="bench") as ranks:
        plain = _PlainTorch(config)
        torch_ms: dict[int, float] = {}
        for path, size in cells:
            if size not in torch_ms:
                torch_ms[size] = plain.median_ms(size)
            measured = ranks.ask((config, path, size), _CALL_TIMEOUT_S + 30.0)
            yield _result(path, size, measured, torch_ms[size], config)


def format_results(results: Sequence[BenchResult]) -> str:
    """A table, a line per cell."""
    lines = [
        f"{'path':<11}{'tokens/rank':>12}{'p50 ms':>10}{'p90 ms':>10}{'rows/s':>12}{'torch ms':>10}{'ratio':>8}"
    ]
    lines += [
        f"{r.path:<11}{r.tokens_per_rank:>12}{r.p50_ms:>10.2f}{r.p90_ms:>10.2f}{r.rows_per_s:>12.0f}"
        f"{r.torch_p50_ms:>10.2f}{r.torch_ratio:>8.2f}"
        for r in results
    ]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------- our side

Measured = tuple[list[float], dict[str, float]]
"""Ends of the timed calls (time.monotonic), and median microseconds by stage, of one rank."""


def _result(
    path: Path, size: int, measured: Sequence[Measured], torch_ms: float, config: BenchConfig
) -> BenchResult:
    ends = [max(times) for times in zip(*(ends for ends, _ in measured), strict=True)]
    intervals = sorted(1e3 * (after - before) for before, after in pairwise(ends))
    p50 = statistics.median(intervals)
    stages = measured[0][1]
    return BenchResult(
        path=path,
        tokens_per_rank=size,
        p50_ms=p50,
        p90_ms=intervals[min(int(0.9 * len(intervals)), len(intervals) - 1)],
        rows_per_s=1e3 * size * config.deployment.shape.num_ranks / p50,
        torch_p50_ms=torch_ms,
        torch_ratio=torch_ms / p50,
        stage_ms={
            stage: statistics.mean(rank_stages[stage] for _, rank_stages in measured) / 1e3
            for stage in stages
        },
    )


def _serve(pipe: Connection, deployment: Deployment, rank: int, group_name: str) -> None:
    """One rank: open, bind, then measure what is asked for until the pipe closes."""
    with Runtime.open(deployment, rank=rank, group_name=group_name, num_slots=1, timeout_s=120.0) as runtime:
        shape = deployment.shape
        runtime.bind_layer(0, random_layer_weights(shape, seed=_SEED, rank=rank))
        for path in Path:
            runtime.stage_policy(_policy(path))
        pipe.send(([], {}))
        while True:
            try:
                config, path, size = pipe.recv()
            except EOFError:
                return
            pipe.send(_measure(runtime, config, path, size))


def _policy(path: Path) -> PathPolicy:
    """Leaves `path` as the first choice of a prefill step; versions follow the order of Path."""
    return PathPolicy(
        version=1 + list(Path).index(path),
        small_m_enabled=path is Path.SMALL_M,
        fixed_slot_enabled=path is Path.FIXED_SLOT,
        large_m_enabled=path is Path.LARGE_M,
        large_m_min_tokens=1,
    )


def _measure(runtime: Runtime, config: BenchConfig, path: Path, size: int) -> Measured:
    shape = config.deployment.shape
    plan = StepPlan(
        plan_id=PlanId(0, size),
        num_rows_per_rank=(size,) * shape.num_ranks,
        phase=Phase.PREFILL,
        dtype="bfloat16",
        weights_version=0,
        placement_version=0,
        policy_version=_policy(path).version,
    )
    batch = _batch(shape, config.distribution, size, runtime.rank)
    out = torch.empty((size, shape.hidden), dtype=torch.bfloat16)
    ends: list[float] = []
    times: list[dict[str, float]] = []
    for _ in range(config.num_warmup + config.num_calls + 1):
        done = runtime.forward(batch, plan, 0, out=out, timeout_s=_CALL_TIMEOUT_S)
        ends.append(time.monotonic())
        report = done.sub_steps[0].times
        times.append({stage: getattr(report, f"{stage}_us") for stage in report.stages()})
    kept = times[config.num_warmup + 1 :]
    return ends[config.num_warmup :], {
        stage: statistics.median(call[stage] for call in kept) for stage in kept[0]
    }


def _batch(shape: MoeShape, distribution: str, size: int, rank: int) -> MoeBatch:
    ids, weights = route_rank(shape, distribution, size, seed=_SEED, rank=rank)
    rows = torch.randn(size, shape.hidden, generator=torch.Generator().manual_seed(rank)).bfloat16()
    return MoeBatch.of(shape, rows, ids, weights)


# ------------------------------------------------------------------------------------------------- plain torch


class _PlainTorch:
    """The layer as plain torch would run it in one process; dense weights of all experts are kept."""

    def __init__(self, config: BenchConfig) -> None:
        self._config = config
        shape = config.deployment.shape
        self._w13, self._w2 = [], []
        for rank in range(shape.num_ranks):
            w13, w2 = random_layer_weights(shape, seed=_SEED, rank=rank).dequantized()
            self._w13 += [dense.T.contiguous() for dense in w13]
            self._w2 += [dense.T.contiguous() for dense in w2]

    def median_ms(self, size: int) -> float:
        config = self._config
        shape = config.deployment.shape
        batches = [_batch(shape, config.distribution, size, rank) for rank in range(shape.num_ranks)]
        x = torch.cat([batch.hidden_states for batch in batches])
        ids = torch.cat([batch.topk_ids for batch in batches])
        weights = torch.cat([batch.topk_weights for batch in batches])
        return 1e3 * _median_s(
            lambda: self._layer(x, ids, weights), config.num_warmup, config.num_calls, config.num_threads
        )

    def _layer(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        shape = self._config.deployment.shape
        x = rows.float()
        out = torch.zeros_like(x)
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        stops = torch.bincount(flat, minlength=shape.num_experts).cumsum(0).tolist()
        start = 0
        for expert, stop in enumerate(stops):
            if stop > start:
                routed = order[start:stop]
                tokens = routed // shape.num_topk
                gate, up = (x.index_select(0, tokens) @ self._w13[expert]).chunk(2, dim=-1)
                if shape.swiglu_limit:
                    gate, up = (
                        gate.clamp(max=shape.swiglu_limit),
                        up.clamp(-shape.swiglu_limit, shape.swiglu_limit),
                    )
                y = (torch.nn.functional.silu(gate) * up) @ self._w2[expert]
                out.index_add_(0, tokens, y * weights.flatten()[routed, None])
            start = stop
        return out.bfloat16()


def _median_s(action: Callable[[], object], num_warmup: int, num_calls: int, num_threads: int) -> float:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        times = []
        for _ in range(num_warmup + num_calls):
            started = time.perf_counter()
            action()
            times.append(time.perf_counter() - started)
        return statistics.median(times[num_warmup:])
    finally:
        torch.set_num_threads(before)


def bench_deployment(shape: MoeShape, *, max_tokens_per_rank: int = 512, backend: str = "cpu") -> Deployment:
    """All four paths at one capacity, so that every size can be measured on each."""
    deployment = Deployment(
        shape=shape,
        backend=backend,
        max_tokens_per_rank=max_tokens_per_rank,
        fixed_slot_max=max_tokens_per_rank,
        small_m_capacities=(max_tokens_per_rank,),
        large_m_capacity=max_tokens_per_rank,
        large_m_min_tokens=1,
    )
    return replace(deployment, small_m_enabled=True, large_m_enabled=True)
