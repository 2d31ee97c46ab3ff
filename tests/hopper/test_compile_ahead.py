"""What is compiled ahead covers all paths of a deployment, and the eight-GPU run says what it takes."""

from __future__ import annotations

import subprocess
from pathlib import Path as FilePath

import pytest

from megamoe import Path, RowFormat, plan_bundle
from megamoe.backends.hopper import bench, compile_ahead, served
from megamoe.backends.hopper.floors import ranks_of
from megamoe.backends.hopper.selftest import cases as selftest
from megamoe.shape import preset

SCRIPT = FilePath(__file__).parents[2] / "tools" / "run_ep8.sh"


@pytest.mark.parametrize("row_format", [RowFormat.BF16, RowFormat.FP8])
def test_every_plan_of_every_path_has_a_job(row_format: RowFormat) -> None:
    v4_pro = ranks_of(preset("deepseek-v4-pro"), 8)
    deployments = [bench.deployment_of(v4_pro, capacity, row_format) for capacity in bench.CAPACITIES]
    deployments += [
        selftest.deployment_of(shape, row_format) for shape in (selftest.SHAPE, selftest.ODD_SHAPE)
    ]
    for deployment in deployments:
        parts = [job.part for job in compile_ahead.jobs_of(deployment, 8)]
        small_m = served.gemm_plans(plan_bundle(deployment), Path.SMALL_M)
        assert {"staged", "large_m", *range(len(small_m))} <= set(parts)


def test_kernels_depend_on_how_many_ranks_share_a_gpu() -> None:
    deployment = selftest.deployment_of(selftest.SHAPE, RowFormat.BF16)
    shared = {
        devices: compile_ahead.jobs_of(deployment, devices)[0].num_virtual_ranks for devices in (1, 2, 8)
    }
    assert shared == {1: 8, 2: 4, 8: 1}


def test_the_eight_gpu_run_names_its_options() -> None:
    said = subprocess.run(
        ["bash", str(SCRIPT), "--what"], check=False, capture_output=True, text=True, timeout=20
    )
    assert said.returncode == 2
    assert "--ranks N" in said.stderr
