"""Compile kernels ahead of time, all at once and without a GPU, into Triton's cache.

`python -m megamoe.backends.hopper.compile_ahead --for selftest bench --ranks 8`, and `megamoe compile` for a
deployment, do on all cores what opening a group would do kernel after kernel. A kernel is compiled by the call that
launches it, on tensors without memory, with launching left out: nothing here can go out of step with the launches.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from megamoe.backends.hopper import check_triton, exit_status
from megamoe.backends.hopper.plan import devices_of_ranks
from megamoe.backends.hopper.served import gemm_plans
from megamoe.bundle import Deployment, Path, RowFormat, plan_bundle
from megamoe.shape import MoeShape, preset

_NUM_SMS = 132
_CAPABILITY = 90
_NUM_C_COMPILERS = 4


@dataclass(frozen=True)
class Job:
    """One process's share of a deployment's kernels. path: COMPACT stands for all of the staged ones; small_m_idx: the
    number of a plan of small_m, which take longest."""

    deployment: Deployment
    num_virtual_ranks: int
    path: Path
    small_m_idx: int = 0


class _Target:
    """Stands in for Triton's driver."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", _CAPABILITY, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


@contextmanager
def only_compiling() -> Iterator[None]:
    """In here a launch compiles its kernel for sm_90 and launches nothing. For processes that do nothing else: Triton
    keeps the stand-in for its driver."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any = None, warmup: bool = False, **options: Any) -> Any:
        compiled = launch(self, *args, grid=grid, warmup=True, **options)
        launchers.append(pool.submit(_compile_launcher, compiled))
        return compiled

    launchers: list[Future[None]] = []
    driver.set_active(_Target())
    JITFunction.run = compile_only
    try:
        # The C compiler is a process of its own, which need not be waited for before the next kernel.
        with ThreadPoolExecutor(_NUM_C_COMPILERS) as pool:
            yield
        for launcher in launchers:
            launcher.result()
    finally:
        JITFunction.run = launch


def _compile_launcher(compiled: Any) -> None:
    """What a kernel is called through is C, and takes the C compiler a second. It is linked with the driver: on a
    machine without one this is left to the first call."""
    from triton.backends.nvidia.driver import CudaLauncher

    with suppress(AssertionError):
        CudaLauncher(compiled.src, compiled.metadata)


def compile_job(job: Job) -> float:
    """Compile a job's kernels into Triton's cache. Returns the seconds that it took."""
    from megamoe.backends.hopper.buffers import RankBuffers
    from megamoe.backends.hopper.kernels import Device, Kernels
    from megamoe.layout import plan_layout

    started = time.monotonic()
    bundle = plan_bundle(job.deployment)
    layout = plan_layout(bundle, num_slots=1)
    buffers = RankBuffers(layout, rank=0, heap_addresses=[0] * layout.num_ranks, device=torch.device("meta"))
    device = Device(_NUM_SMS, job.num_virtual_ranks)
    kernels = Kernels(buffers, device, job.deployment.combine_row_format)
    staged = {path: bundle.capacities(path) for path in (Path.COMPACT, Path.FIXED_SLOT)}
    with only_compiling():
        if job.path is Path.COMPACT:
            kernels.warm_up(gemm_plans(bundle, Path.COMPACT), staged)
        elif job.path is Path.LARGE_M:
            kernels.warm_up((), {}, (), gemm_plans(bundle, Path.LARGE_M))
        else:
            kernels.warm_up((), {}, [gemm_plans(bundle, Path.SMALL_M)[job.small_m_idx]])
    return time.monotonic() - started


def jobs_of(deployment: Deployment, num_devices: int) -> list[Job]:
    """All kernels of a deployment whose ranks share num_devices GPUs, in parts that take about as long."""
    bundle = plan_bundle(deployment)
    ranks_a_gpu = devices_of_ranks(deployment.shape.num_ranks, num_devices).count(0)
    jobs = [Job(deployment, ranks_a_gpu, Path.COMPACT)]
    if bundle.capacities(Path.LARGE_M):
        jobs.append(Job(deployment, ranks_a_gpu, Path.LARGE_M))
    numbers = range(len(gemm_plans(bundle, Path.SMALL_M)))
    return jobs + [Job(deployment, ranks_a_gpu, Path.SMALL_M, number) for number in numbers]


def compile_all(jobs: Sequence[Job]) -> None:
    """On all cores; raises the first error of a job, ConfigError where Triton does not fit."""
    check_triton()
    # Spawned: nothing of this process's threads, and no CUDA context, goes along.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(jobs), os.cpu_count() or 1), mp_context=context) as pool:
        list(pool.map(compile_job, jobs))


def compile_for(deployments: Sequence[Deployment], say: Callable[[str], None], num_devices: int = 0) -> None:
    """Compile for deployments whose ranks share num_devices GPUs, and tell of it.

    num_devices: 0 = as many as this machine has; where it has none, one a rank.
    """
    num_devices = num_devices or torch.cuda.device_count()
    jobs = [
        job
        for deployment in deployments
        for job in jobs_of(deployment, num_devices or deployment.shape.num_ranks)
    ]
    started = time.monotonic()
    compile_all(jobs)
    say(f"compiled for {len(deployments)} deployments in {time.monotonic() - started:.0f} s")


def selftest_deployments(num_ranks: int, row_formats: Sequence[RowFormat], *, odd: bool) -> list[Deployment]:
    """What the selftest opens. odd: its other shapes as well."""
    from megamoe.backends.hopper.selftest import cases

    shapes = [shape.with_ranks(num_ranks) for shape in (cases.SHAPES if odd else (cases.SHAPE,))]
    return [cases.deployment_of(shape, row_format) for row_format in row_formats for shape in shapes]


def bench_deployments(shape: MoeShape, num_ranks: int, row_formats: Sequence[RowFormat]) -> list[Deployment]:
    """What the bench opens. shape: of the whole deployment."""
    from megamoe.backends.hopper.bench.group import CAPACITIES, deployment_of
    from megamoe.backends.hopper.floors import ranks_of

    group = ranks_of(shape, num_ranks)
    return [
        deployment_of(group, capacity, row_format) for row_format in row_formats for capacity in CAPACITIES
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="compile the Hopper backend's kernels, without a GPU")
    parser.add_argument("--for", dest="uses", nargs="+", choices=["selftest", "bench"], default=["bench"])
    parser.add_argument("--shape", default="deepseek-v4-pro", help="of the bench")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument(
        "--devices",
        type=int,
        default=0,
        help="GPUs that the ranks will share; 0 = this machine's, or one a rank",
    )
    parser.add_argument("--row-formats", nargs="+", type=RowFormat, default=[RowFormat.BF16])
    chosen = parser.parse_args(arguments)
    deployments: list[Deployment] = []
    if "selftest" in chosen.uses:
        deployments += selftest_deployments(chosen.ranks, chosen.row_formats, odd=True)
    if "bench" in chosen.uses:
        deployments += bench_deployments(preset(chosen.shape), chosen.ranks, chosen.row_formats)
    compile_for(deployments, print, chosen.devices)


if __name__ == "__main__":
    sys.exit(exit_status(main))
