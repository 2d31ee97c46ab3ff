"""`megamoe bench | selftest | compile --backend hopper`: what they print comes from the backend, line by line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import typer

from megamoe import (
    DISTRIBUTIONS,
    DeviceBench,
    DeviceSelftest,
    bench_device,
    check_backend,
    compile_ahead,
    preset,
    selftest_device,
)
from megamoe.errors import InvalidArgumentError, must_be
from service.cli.bench import numbers_of, paths_of
from service.config import ServiceConfig

_BENCH_SHAPE = "deepseek-v4-pro"


@dataclass(frozen=True, kw_only=True)
class Files:
    """What a bench writes, and where it finds the second baseline's files."""

    json: Path | None
    plot: Path | None
    triton_kernels: Path | None


def bench(
    config: ServiceConfig,
    sizes: str,
    paths: str,
    distribution: str,
    files: Files,
    *,
    baselines: bool,
    gemms: bool,
) -> bool:
    """True if nothing failed. Raises ConfigError, InvalidArgumentError."""
    check_backend(config.bundle)
    # The demo's dimensions, which a configuration has by default, are nothing to time a GPU with.
    shape = preset(_BENCH_SHAPE) if config.shape == "demo" else config.moe_shape
    wanted = DeviceBench(
        shape=shape,
        num_ranks=config.num_ranks or torch.cuda.device_count(),
        tokens=numbers_of(sizes) if sizes else DeviceBench.tokens,
        distributions=tuple(distribution.split(",")) if distribution not in ("", "all") else DISTRIBUTIONS,
        paths=paths_of(paths),
        baselines=baselines,
        triton_kernels=files.triton_kernels,
        gemms=gemms,
        json=files.json,
        plot=files.plot,
    )
    return bench_device(config.backend, wanted, typer.echo)


def selftest(config: ServiceConfig, *, fast: bool, num_soak_steps: int) -> bool:
    """All ranks in one process, then kernels for the processes of what follows. Raises ConfigError."""
    check_backend(config.bundle)
    wanted = DeviceSelftest(num_ranks=config.moe_shape.num_ranks, fast=fast, num_soak_steps=num_soak_steps)
    right = selftest_device(config.backend, wanted, typer.echo)
    if not fast:
        compile_ahead(config.bundle, typer.echo)
    return right


def compile_kernels(config: ServiceConfig, *, out: Path | None, check: bool) -> None:
    """Needs no GPU. Raises ConfigError, InvalidArgumentError for what a folder of kernels is needed for."""
    for name, value in (("out", out), ("check", check)):
        if value:
            raise InvalidArgumentError(
                must_be(name, "left out: hopper's kernels go into Triton's cache", value)
            )
    compile_ahead(config.bundle, typer.echo)


def refuse_elsewhere(config: ServiceConfig, **given: object) -> None:
    """Raises InvalidArgumentError for an option of hopper alone."""
    for name, value in given.items():
        if value:
            raise InvalidArgumentError(must_be(name, "left out with any backend but hopper", str(value)))
