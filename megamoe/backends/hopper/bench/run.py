"""A whole run: this machine's rates, every path at every size and routing, baselines, report and plot."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path as FilePath

import torch
import triton

from megamoe.backends import DeviceBench, Say
from megamoe.backends.hopper import check_gpu
from megamoe.backends.hopper.baseline.mxfp4 import check_package
from megamoe.backends.hopper.baseline.ranks import BaselineConfig, time_baseline
from megamoe.backends.hopper.bench.gemms import bench_gemms
from megamoe.backends.hopper.bench.group import CAPACITIES, GroupBench
from megamoe.backends.hopper.bench.layer import bench_layer, paths_at
from megamoe.backends.hopper.bench.plot import check_plot, draw
from megamoe.backends.hopper.bench.report import Report
from megamoe.backends.hopper.bench.timing import Timing
from megamoe.backends.hopper.floors import measure_rates, ranks_of
from megamoe.backends.hopper.served import gemm_plan
from megamoe.bundle import Path
from megamoe.errors import InvalidArgumentError, PeerTimeoutError, must_be
from megamoe.routing import DISTRIBUTIONS
from megamoe.shape import MoeShape, preset

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
    if wanted.gemms and wanted.num_ranks != 1:
        raise InvalidArgumentError(
            must_be("ranks with gemms", "1: GEMMs alone are of one rank", wanted.num_ranks)
        )
    if wanted.plot:
        check_plot()
    if wanted.triton_kernels:
        check_package(wanted.triton_kernels)


def run_bench(wanted: DeviceBench, say: Say = _PRINT) -> bool:
    """Measure and tell of everything as it comes; True if nothing failed. Files are written after every part."""
    check_wanted(wanted)
    check_gpu()
    shape = ranks_of(wanted.shape, wanted.num_ranks)
    devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    rates = measure_rates(devices[: wanted.num_ranks])
    report = Report(_machine(), wanted.shape, wanted.num_ranks, rates, [], [])
    say(report.title())
    right = True
    for least, capacity in zip((0, *CAPACITIES), CAPACITIES):
        if sizes := [tokens for tokens in wanted.tokens if least < tokens <= capacity]:
            right &= _time_group(wanted, GroupBench(shape, capacity, rates=rates), sizes, report, say)
            torch.cuda.empty_cache()
    _keep(wanted, report)
    for baseline in _baselines(wanted, shape, len(devices), say):
        try:
            for timing in time_baseline(baseline):
                report.baselines.append(timing)
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


def _time_group(
    wanted: DeviceBench, group: GroupBench, sizes: Sequence[int], report: Report, say: Say
) -> bool:
    """Add what is measured to the report; True if nothing failed."""
    right = True
    for result in _layers(wanted, group, sizes):
        if isinstance(result, Timing):
            report.timings.append(result)
            say(str(result))
            # A run that is ended early leaves what it has.
            _keep(wanted, report, plot=False)
        else:
            right = False
            say(f"FAIL {result}")
    for timing in _gemms(group, sizes) if wanted.gemms else ():
        say(str(timing))
    return right


def _layers(wanted: DeviceBench, group: GroupBench, sizes: Sequence[int]) -> Iterator[Timing | RuntimeError]:
    """Every size on every path that serves it, or what went wrong there."""
    for distribution in wanted.distributions:
        for tokens in sizes:
            for path in paths_at(tokens):
                if wanted.paths is not None and path not in wanted.paths:
                    continue
                try:
                    yield bench_layer(group, tokens, path, distribution)
                except RuntimeError as error:
                    yield RuntimeError(f"{path} {distribution} T={tokens}: {error}")


def _gemms(group: GroupBench, sizes: Sequence[int]) -> Iterator[Timing]:
    """Every expert with as many rows as it gets at each size on average."""
    shape = group.shape
    for tokens in sizes:
        if tokens * shape.num_topk % shape.num_experts == 0:
            rows = tokens * shape.num_topk // shape.num_experts
            yield from bench_gemms(group, rows, gemm_plan(group.bundle, Path.COMPACT, tokens))


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
    parser.add_argument("--gemms", action="store_true", help="the expert GEMMs alone as well, of one rank")
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
