"""`megamoe selftest` and `megamoe bench` on a machine with GPUs: kernels compiled on all cores first, then the run."""

from __future__ import annotations

import torch

from megamoe.backends import DeviceBench, DeviceSelftest, Say
from megamoe.backends.hopper import check_gpu
from megamoe.backends.hopper.bench.run import check_wanted, run_bench
from megamoe.backends.hopper.compile_ahead import bench_deployments, compile_for, selftest_deployments
from megamoe.backends.hopper.selftest.cases import SHAPE
from megamoe.backends.hopper.selftest.oracle import Checks
from megamoe.backends.hopper.selftest.run import ROW_FORMATS, SHAPES, run
from megamoe.bundle import RowFormat
from megamoe.errors import ConfigError, must_be

NUM_RANKS = (1, 2, 4, 8)


def check_machine(num_ranks: int) -> None:
    """Raises ConfigError: no GPU of the right kind, a number of ranks that no group has."""
    check_gpu()
    if num_ranks not in NUM_RANKS:
        raise ConfigError(must_be("ranks", f"one of {', '.join(map(str, NUM_RANKS))}", num_ranks))


def selftest(wanted: DeviceSelftest, say: Say) -> bool:
    """All ranks in threads of this process; True if every check is right."""
    check_machine(wanted.num_ranks)
    row_formats = (RowFormat.BF16,) if wanted.fast else ROW_FORMATS
    compile_for(selftest_deployments(wanted.num_ranks, row_formats, odd=not wanted.fast), say)
    checks = Checks(say)
    run(
        checks,
        num_ranks=wanted.num_ranks,
        shapes=(SHAPE,) if wanted.fast else tuple(SHAPES.values()),
        row_formats=row_formats,
        num_soak_steps=wanted.num_soak_steps,
    )
    say(
        f"{wanted.num_ranks} ranks on {min(wanted.num_ranks, torch.cuda.device_count())} GPUs: {checks.summary()}"
    )
    return not checks.num_failed


def bench(wanted: DeviceBench, say: Say) -> bool:
    """True if nothing failed."""
    check_machine(wanted.num_ranks)
    check_wanted(wanted)
    compile_for(bench_deployments(wanted.shape, wanted.num_ranks, (RowFormat.BF16,)), say)
    return run_bench(wanted, say)
