"""`megamoe bench | selftest | compile --backend hopper`: what is asked of the backend, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megamoe import DISTRIBUTIONS, DeviceBench, DeviceSelftest, preset
from megamoe import Path as MoePath
from megamoe.backends import hopper
from tests.service.cli.test_cli import run

Say = Callable[[str], None]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the backend was asked for, on a machine with two GPUs; it says a line and fails where `tokens` has a 3."""
    calls: list[Any] = []

    def tool(wanted: Any, say: Say) -> bool:
        calls.append(wanted)
        say("a line")
        return not (isinstance(wanted, DeviceBench) and 3 in wanted.tokens)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(hopper, "check", lambda bundle: None)
    for name in ("bench_device", "selftest_device"):
        monkeypatch.setattr(hopper, name, tool)
    monkeypatch.setattr(hopper, "compile_for", lambda bundle, say: calls.append(bundle) or say("compiled"))
    return calls


def test_bench_times_everything_at_full_size_by_default(asked: list[Any]) -> None:
    assert run("bench", "--backend", "hopper") == (0, "a line\n")
    assert asked == [DeviceBench(shape=preset("deepseek-v4-pro"), num_ranks=2)]
    assert asked[0].distributions == DISTRIBUTIONS
    assert asked[0].tokens[-1] == 8192


def test_bench_takes_a_part(asked: list[Any], tmp_path: Path) -> None:
    options = ["--ranks", "8", "--sizes", "64,1", "--paths", "compact", "--distribution", "uniform,zipf"]
    files = ["--json", f"{tmp_path}/a.json", "--plot", f"{tmp_path}/a.png", "--triton-kernels", f"{tmp_path}"]
    shape = ["--shape", "kimi-k2", "--no-baselines", "--gemms"]
    assert run("bench", "--backend", "hopper", *options, *files, *shape)[0] == 0
    assert asked == [
        DeviceBench(
            shape=preset("kimi-k2"),
            num_ranks=8,
            tokens=(1, 64),
            distributions=("uniform", "zipf"),
            paths=(MoePath.COMPACT,),
            baselines=False,
            triton_kernels=tmp_path,
            gemms=True,
            json=tmp_path / "a.json",
            plot=tmp_path / "a.png",
        )
    ]
    assert run("bench", "--backend", "hopper", "--sizes", "3")[0] == 1, "a run in which something failed"


def test_selftest_asks_for_all_ranks(asked: list[Any]) -> None:
    assert run("selftest", "--backend", "hopper", "--ranks", "4", "--fast", "--soak", "7") == (0, "a line\n")
    assert asked == [DeviceSelftest(num_ranks=4, fast=True, num_soak_steps=7)]


def test_compile_is_of_the_deployment(asked: list[Any]) -> None:
    assert run("compile", "--backend", "hopper", "--ranks", "2") == (0, "compiled\n")
    assert asked[0].deployment.shape.num_ranks == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["bench", "--json", "a.json"], "json must be left out with any backend but hopper, got a.json"),
        (["bench", "--gemms"], "gemms must be left out"),
        (["selftest", "--fast"], "fast must be left out"),
        (["compile"], "out must be a folder to fill, got none"),
        (["compile", "--backend", "hopper", "--out", "k"], "out must be left out: hopper's kernels go into"),
        (["compile", "--backend", "hopper", "--check"], "check must be left out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_of_one_backend_are_refused_with_another(arguments: list[str], sentence: str) -> None:
    status, text = run(*arguments)
    assert (status, text.startswith(sentence)) == (1, True), text


@pytest.mark.parametrize("command", ["bench", "selftest"])
def test_without_a_gpu_nothing_starts(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And CUDA is not asked before it is told how many queues ranks need: eight on one GPU wait for each other."""
    queues = []

    def is_available() -> bool:
        queues.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
        return False

    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    status, text = run(command, "--backend", "hopper")
    assert queues == ["32"]
    assert (status, text) == (
        1,
        "backend hopper needs a CUDA build of torch and a GPU (got: no CUDA device)\n",
    )
