"""A whole run: this machine's rates, every path at every size and routing, baselines, report and plot."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path as FilePath

import torch
import triton

from megamoe.backends.hopper import separate_queues
from megamoe.backends.hopper.baseline.mxfp4 import check_package
from megamoe.backends.hopper.baseline.ranks import BaselineConfig, time_baseline
from megamoe.backends.hopper.bench.gemms import bench_gemms
from megamoe.backends.hopper.bench.group import CAPACITIES, GroupBench
from megamoe.backends.hopper.bench.layer import bench_layer, paths_at
from megamoe.backends.hopper.bench.plot import check_plot, draw
from megamoe.backends.hopper.bench.report import Report
from megamoe.backends.hopper.bench.timing import BaselineTiming, Timing
from megamoe.backends.hopper.floors import Rates, measure_rates, ranks_of
from megamoe.backends.hopper.plan import plan_gemms
from megamoe.bundle import Path
from megamoe.errors import InvalidArgumentError, PeerTimeoutError, must_be
from megamoe.routing import DISTRIBUTIONS
from megamoe.shape import MoeShape, preset

SIZES = tuple(1 << power for power in range(14))
"""Tokens a rank, 1 to 8192."""
GEMM_ROWS = (1, 8, 16, 32, 64, 128, 1024)
"""Rows of every expert at which the GEMMs are timed alone."""

Say = Callable[[str], None]
_PRINT: Say = partial(print, flush=True)


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What to time. shape: preset of the layer's dimensions. num_ranks: each with an EP8 rank's experts.

    paths: None = all that serve a size. baselines: those of torch and, where triton_kernels names the folder of its
    files, of that package. gemms: the expert GEMMs alone as well. json, plot: files to write.
    """

    shape: str = "deepseek-v4-pro"
    num_ranks: int = 1
    tokens: Sequence[int] = SIZES
    distributions: Sequence[str] = DISTRIBUTIONS
    paths: Sequence[Path] | None = None
    baselines: bool = True
    triton_kernels: FilePath | None = None
    gemms: bool = False
    json: FilePath | None = None
    plot: FilePath | None = None

    def check(self) -> None:
        """Raises ConfigError or InvalidArgumentError for what cannot be, before anything is measured."""
        preset(self.shape)
        if not self.tokens or min(self.tokens) < 1 or max(self.tokens) > CAPACITIES[-1]:
            raise InvalidArgumentError(must_be("tokens", f"from 1 to {CAPACITIES[-1]}", list(self.tokens)))
        unknown = [name for name in self.distributions if name not in DISTRIBUTIONS]
        if unknown or not self.distributions:
            raise InvalidArgumentError(must_be("distributions", f"of {', '.join(DISTRIBUTIONS)}", unknown))
        for file in (self.json, self.plot):
            if file and not file.absolute().parent.is_dir():
                raise InvalidArgumentError(
                    must_be("json and plot", "files in a folder that is there", str(file))
                )
        if self.plot:
            check_plot()
        if self.triton_kernels:
            check_package(self.triton_kernels)


def run_bench(config: BenchConfig, say: Say = _PRINT) -> bool:
    """Measure and tell of everything as it comes; True if no baseline failed."""
    config.check()
    separate_queues()
    shape = ranks_of(preset(config.shape), config.num_ranks)
    devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    rates = measure_rates(devices[: config.num_ranks])
    machine = _machine()
    say(f"{', '.join(f'{name} {value}' for name, value in machine.items())}; {rates}")
    if config.gemms:
        _gemms(config, rates, say)
    timings = _layers(config, shape, rates, say)
    baselines: list[BaselineTiming] = []
    report = Report(machine, config.shape, config.num_ranks, rates, timings, baselines)
    failed = False
    for baseline in _baselines(config, shape, len(devices), say):
        try:
            for timing in time_baseline(baseline):
                baselines.append(timing)
                say(
                    f"{timing.name:14s} {timing.distribution:18s} T={timing.tokens:5d} {timing.us:9.1f} us, "
                    f"{report.ratio(timing):.2f} times the best path's"
                )
        except PeerTimeoutError as error:
            say(f"FAIL {error}")
            failed = True
    if config.json:
        report.write(config.json)
    if config.plot:
        draw(report, config.plot)
    for line in ("", *report.markdown()):
        say(line)
    return not failed


def _layers(config: BenchConfig, shape: MoeShape, rates: Rates, say: Say) -> list[Timing]:
    timings: list[Timing] = []
    for capacity in CAPACITIES:
        sizes = [t for t in config.tokens if (t <= CAPACITIES[0]) == (capacity == CAPACITIES[0])]
        if not sizes:
            continue
        group = GroupBench(shape, capacity, rates=rates)
        for distribution in config.distributions:
            for tokens in sizes:
                for path in paths_at(tokens):
                    if config.paths is None or path in config.paths:
                        timings.append(bench_layer(group, tokens, path, distribution))
                        say(str(timings[-1]))
        del group
        torch.cuda.empty_cache()
    return timings


def _gemms(config: BenchConfig, rates: Rates, say: Say) -> None:
    one_rank = ranks_of(preset(config.shape), 1)
    group = GroupBench(one_rank, CAPACITIES[-1], rates=rates)
    for rows in GEMM_ROWS:
        tokens = rows * one_rank.num_experts // one_rank.num_topk
        for timing in bench_gemms(group, rows, plan_gemms(one_rank, tokens)):
            say(str(timing))
    del group
    torch.cuda.empty_cache()


def _baselines(config: BenchConfig, shape: MoeShape, num_devices: int, say: Say) -> list[BaselineConfig]:
    """Those that this machine can run."""
    if not config.baselines:
        return []
    if num_devices < shape.num_ranks:
        say(f"no baselines: they need a GPU a rank, {shape.num_ranks} (got: {num_devices})")
        return []
    wanted: list[FilePath | None] = [None]
    if config.triton_kernels:
        wanted.append(config.triton_kernels)
    return [
        BaselineConfig(
            shape=shape, tokens=config.tokens, distributions=config.distributions, triton_kernels=folder
        )
        for folder in wanted
    ]


def _machine() -> dict[str, str | int]:
    return {
        "GPU": torch.cuda.get_device_name(0),
        "GPUs": torch.cuda.device_count(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 1 if a baseline failed."""
    parser = argparse.ArgumentParser(description="time the Hopper backend on this machine's GPUs")
    parser.add_argument("--shape", default=BenchConfig.shape)
    parser.add_argument(
        "--ranks", type=int, default=1, help="ranks of the group, each with an EP8 rank's experts"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=SIZES)
    parser.add_argument("--distributions", nargs="+", default=["uniform"], choices=DISTRIBUTIONS)
    parser.add_argument("--paths", nargs="+", type=Path, choices=list(Path))
    parser.add_argument("--no-baselines", action="store_true")
    parser.add_argument(
        "--triton-kernels", type=FilePath, help="folder of that package, for a second baseline"
    )
    parser.add_argument("--gemms", action="store_true", help="the expert GEMMs alone as well")
    parser.add_argument("--json", type=FilePath)
    parser.add_argument("--plot", type=FilePath, help="png, svg or pdf; needs matplotlib")
    chosen = parser.parse_args(arguments)
    done = run_bench(
        BenchConfig(
            shape=chosen.shape,
            num_ranks=chosen.ranks,
            tokens=chosen.tokens,
            distributions=chosen.distributions,
            paths=chosen.paths,
            baselines=not chosen.no_baselines,
            triton_kernels=chosen.triton_kernels,
            gemms=chosen.gemms,
            json=chosen.json,
            plot=chosen.plot,
        )
    )
    return 0 if done else 1
