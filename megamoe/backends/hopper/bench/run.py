"""A whole run: this machine's rates, every path at every size and routing, baselines, report and plot."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path as FilePath

import torch
import triton

from megamoe.backends import DeviceBench, Say
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

GEMM_ROWS = (1, 8, 16, 32, 64, 128, 1024)
"""Rows of every expert at which the GEMMs are timed alone."""

_PRINT: Say = partial(print, flush=True)


def check_wanted(wanted: DeviceBench) -> None:
    """Raises ConfigError or InvalidArgumentError for what cannot be, before anything is measured."""
    if not wanted.tokens or min(wanted.tokens) < 1 or max(wanted.tokens) > CAPACITIES[-1]:
        raise InvalidArgumentError(must_be("tokens", f"from 1 to {CAPACITIES[-1]}", list(wanted.tokens)))
    unknown = [name for name in wanted.distributions if name not in DISTRIBUTIONS]
    if unknown or not wanted.distributions:
        raise InvalidArgumentError(must_be("distributions", f"of {', '.join(DISTRIBUTIONS)}", unknown))
    for file in (wanted.json, wanted.plot):
        if file and not file.absolute().parent.is_dir():
            raise InvalidArgumentError(must_be("json and plot", "files in a folder that is there", str(file)))
    if wanted.plot:
        check_plot()
    if wanted.triton_kernels:
        check_package(wanted.triton_kernels)


def run_bench(wanted: DeviceBench, say: Say = _PRINT) -> bool:
    """Measure and tell of everything as it comes; True if nothing failed. Files are written after every part."""
    check_wanted(wanted)
    separate_queues()
    shape = ranks_of(wanted.shape, wanted.num_ranks)
    devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    rates = measure_rates(devices[: wanted.num_ranks])
    timings: list[Timing] = []
    baselines: list[BaselineTiming] = []
    report = Report(_machine(), wanted.shape, wanted.num_ranks, rates, timings, baselines)
    say(report.title())
    if wanted.gemms:
        _gemms(wanted, rates, say)
    right = True
    for result in _layers(wanted, shape, rates):
        if isinstance(result, Timing):
            timings.append(result)
            say(str(result))
            # A run that is ended early leaves what it has.
            _keep(wanted, report, plot=False)
        else:
            right = False
            say(f"FAIL {result}")
    _keep(wanted, report)
    for baseline in _baselines(wanted, shape, len(devices), say):
        try:
            for timing in time_baseline(baseline):
                baselines.append(timing)
                say(f"{timing}, {report.ratio(timing):.2f} times the best path's")
        except PeerTimeoutError as error:
            right = False
            say(f"FAIL {error}")
        _keep(wanted, report)
    for line in ("", *report.markdown()):
        say(line)
    return right


def _keep(wanted: DeviceBench, report: Report, *, plot: bool = True) -> None:
    if wanted.json:
        report.write(wanted.json)
    if plot and wanted.plot and report.timings:
        draw(report, wanted.plot)


def _layers(wanted: DeviceBench, shape: MoeShape, rates: Rates) -> Iterator[Timing | RuntimeError]:
    """Every size on every path that serves it, or what went wrong there."""
    for capacity in CAPACITIES:
        sizes = [t for t in wanted.tokens if (t <= CAPACITIES[0]) == (capacity == CAPACITIES[0])]
        if not sizes:
            continue
        group = GroupBench(shape, capacity, rates=rates)
        for distribution in wanted.distributions:
            for tokens in sizes:
                for path in paths_at(tokens):
                    if wanted.paths is not None and path not in wanted.paths:
                        continue
                    try:
                        yield bench_layer(group, tokens, path, distribution)
                    except RuntimeError as error:
                        yield RuntimeError(f"{path} {distribution} T={tokens}: {error}")
        del group
        torch.cuda.empty_cache()


def _gemms(wanted: DeviceBench, rates: Rates, say: Say) -> None:
    one_rank = ranks_of(wanted.shape, 1)
    group = GroupBench(one_rank, CAPACITIES[-1], rates=rates)
    for rows in GEMM_ROWS:
        tokens = rows * one_rank.num_experts // one_rank.num_topk
        for timing in bench_gemms(group, rows, plan_gemms(one_rank, tokens)):
            say(str(timing))
    del group
    torch.cuda.empty_cache()


def _baselines(wanted: DeviceBench, shape: MoeShape, num_devices: int, say: Say) -> list[BaselineConfig]:
    """Those that this machine can run."""
    if not wanted.baselines:
        return []
    if num_devices < shape.num_ranks:
        say(f"no baselines: they need a GPU a rank, {shape.num_ranks} (got: {num_devices})")
        return []
    folders: list[FilePath | None] = [None]
    if wanted.triton_kernels:
        folders.append(wanted.triton_kernels)
    return [
        BaselineConfig(
            shape=shape, tokens=wanted.tokens, distributions=wanted.distributions, triton_kernels=folder
        )
        for folder in folders
    ]


def _machine() -> dict[str, str | int]:
    return {
        "GPU": torch.cuda.get_device_name(0),
        "GPUs": torch.cuda.device_count(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 1 if something failed."""
    parser = argparse.ArgumentParser(description="time the Hopper backend on this machine's GPUs")
    parser.add_argument("--shape", type=preset, default="deepseek-v4-pro")
    parser.add_argument(
        "--ranks", type=int, default=1, help="ranks of the group, each with an EP8 rank's experts"
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=DeviceBench.tokens)
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
    wanted = DeviceBench(
        shape=chosen.shape,
        num_ranks=chosen.ranks,
        tokens=tuple(chosen.tokens),
        distributions=tuple(chosen.distributions),
        paths=chosen.paths,
        baselines=not chosen.no_baselines,
        triton_kernels=chosen.triton_kernels,
        gemms=chosen.gemms,
        json=chosen.json,
        plot=chosen.plot,
    )
    return 0 if run_bench(wanted) else 1
