"""What is compiled ahead covers all paths of a deployment, and scripts say what they lack."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from megamoe import Path, RowFormat, plan_bundle
from megamoe.backends.hopper import compile_ahead, served
from megamoe.backends.hopper.bench.group import CAPACITIES, deployment_of
from megamoe.backends.hopper.floors import ranks_of
from megamoe.backends.hopper.selftest import cases as selftest
from megamoe.shape import preset


@pytest.mark.parametrize("row_format", [RowFormat.BF16, RowFormat.FP8])
def test_every_plan_of_every_path_has_a_job(row_format: RowFormat) -> None:
    v4_pro = ranks_of(preset("deepseek-v4-pro"), 8)
    deployments = [deployment_of(v4_pro, capacity, row_format) for capacity in CAPACITIES]
    deployments += [
        selftest.deployment_of(shape, row_format) for shape in (selftest.SHAPE, selftest.ODD_SHAPE)
    ]
    for deployment in deployments:
        jobs = [(job.path, job.small_m_idx) for job in compile_ahead.jobs_of(deployment, 8)]
        small_m = served.gemm_plans(plan_bundle(deployment), Path.SMALL_M)
        large_m = [(Path.LARGE_M, 0)] if plan_bundle(deployment).capacities(Path.LARGE_M) else []
        wanted = [(Path.COMPACT, 0), *large_m, *((Path.SMALL_M, number) for number in range(len(small_m)))]
        assert jobs == wanted


def test_kernels_depend_on_how_many_ranks_share_a_gpu() -> None:
    deployment = selftest.deployment_of(selftest.SHAPE, RowFormat.BF16)
    shared = {
        devices: compile_ahead.jobs_of(deployment, devices)[0].num_virtual_ranks for devices in (1, 2, 8)
    }
    assert shared == {1: 8, 2: 4, 8: 1}


@pytest.mark.parametrize("script", ["", ".bench", ".baseline", ".bench.tables missing.json"])
def test_scripts_say_what_they_lack_in_one_sentence(script: str) -> None:
    command = [sys.executable, "-m", *f"megamoe.backends.hopper{script}".split()]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    said = subprocess.run(command, env=env, check=False, capture_output=True, text=True, timeout=60)
    assert (said.returncode, said.stdout, said.stderr.count("\n")) == (1, "", 1), said.stderr
    lacks = "missing.json" if "tables" in script else "backend hopper needs a CUDA build of torch and a GPU"
    assert lacks in said.stderr


WITHOUT_TRITON = """
import runpy, sys
sys.modules["triton"] = None
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    "script", ["bench", "baseline", "selftest", "compile_ahead", "bench.tables missing.json"]
)
def test_scripts_without_triton_say_so_too(script: str) -> None:
    command = [sys.executable, "-c", WITHOUT_TRITON, *f"megamoe.backends.hopper.{script}".split()]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    said = subprocess.run(command, env=env, check=False, capture_output=True, text=True, timeout=60)
    assert (said.returncode, said.stdout, said.stderr.count("\n")) == (1, "", 1), said.stderr
    # Tables of an old run need none.
    lacks = "missing.json" if "tables" in script else "needs the package triton: install megamoe[hopper]"
    assert lacks in said.stderr


def test_what_is_compiled_is_what_the_commands_open(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[compile_ahead.Job] = []
    monkeypatch.setattr(compile_ahead, "compile_all", jobs.extend)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    wanted = compile_ahead.selftest_deployments(4, [RowFormat.BF16, RowFormat.FP8], odd=True)
    names = ["hopper-selftest", "hopper-odd", "hopper-few-experts"] * 2
    assert [(d.shape.num_ranks, d.shape.name) for d in wanted] == [(4, name) for name in names]
    said: list[str] = []
    v4_pro = preset("deepseek-v4-pro")
    both = [*wanted, *compile_ahead.bench_deployments(v4_pro, 2, [RowFormat.BF16])]
    compile_ahead.compile_for(both, said.append)
    assert {job.deployment for job in jobs} == set(both)
    assert {job.num_virtual_ranks for job in jobs} == {1}, "on a machine without a GPU, for one a rank"
    assert said == ["compiled for 8 deployments in 0 s"]
    jobs.clear()
    compile_ahead.compile_for(wanted, said.append, 2)
    assert {job.num_virtual_ranks for job in jobs} == {2}
