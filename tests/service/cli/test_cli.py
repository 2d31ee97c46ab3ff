"""The command line: every setting is an option; plan prints sizes before anything exists; doctor says what is wrong."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from megamoe import Bundle, plan_layout
from megamoe.backends import hopper
from megamoe.errors import ConfigError
from service.cli.doctor import findings
from service.cli.main import app
from service.config import ServiceConfig, load_config
from service.launch.memory import shm_bytes

runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"})


def run(*arguments: str) -> tuple[int, str]:
    result = runner.invoke(app, arguments)
    return result.exit_code, result.output


@pytest.mark.parametrize("command", ["serve", "plan", "doctor"])
def test_every_setting_is_an_option(command: str) -> None:
    status, text = run(command, "--help")
    assert status == 0
    for name in ServiceConfig.model_fields:
        assert "--" + name.replace("_", "-")[:20] in text, name
    assert "--config" in text


def test_plan_prints_paths_regions_and_the_verdict() -> None:
    status, text = run("plan")
    layout = plan_layout(load_config(env=False).bundle)
    assert status == 0
    for word in (
        "small_m",
        "16, 32",
        "fixed_slot",
        "large_m",
        "compact",
        "payload_rows0",
        str(layout.num_bytes),
    ):
        assert word in text, word
    assert "it fits" in text
    assert before_and_after_shared_memory() == 0


def before_and_after_shared_memory() -> int:
    before = len(list(Path("/dev/shm").glob("megamoe-plan*")))
    run("plan", "--profile", "emulated")
    return len(list(Path("/dev/shm").glob("megamoe-plan*"))) - before


def test_plan_says_why_a_path_is_not_built_and_what_does_not_fit() -> None:
    status, text = run("plan", "--backend", "gfx950", "--profile", "demo")
    assert "on gfx950 hidden must be 7168, got 256" in " ".join(text.split())
    assert status == 0
    status, text = run(
        "plan", "--backend", "gfx950", "--profile", "deepseek-v4-pro-ep8", "--num-compute-units", "128"
    )
    assert "on gfx950 num_compute_units must be 256, got 128" in " ".join(text.split())
    status, text = run("plan", "--profile", "deepseek-v4-pro-ep8", "--max-step-rows", "2000000")
    assert "it does NOT fit" in text
    assert status == 1


def test_ring_memory_is_part_of_the_plan() -> None:
    small = shm_bytes(load_config(env=False))
    large = shm_bytes(load_config(overrides={"max_step_rows": 8192}, env=False))
    assert large["request rings"] > 2 * small["request rings"]
    assert large["heaps"] == small["heaps"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["plan", "--profile", "huge"], "profile must be one of"),
        (["plan", "--small-m-capacities", "a,b"], "small_m_capacities must be numbers with commas between"),
        (["plan", "--shape", "{hidden"], "shape must be a preset or a JSON table"),
        (["plan", "--max-tokens-per-rank", "100"], "max_tokens_per_rank must be a power of two"),
        (["serve", "--launcher", "slurm"], "launcher"),
        (["plan", "-c", "/no/such.yaml"], "config file must be a readable file"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_settings_are_one_line_and_status_2(arguments: list[str], sentence: str) -> None:
    status, text = run(*arguments)
    assert status == 2
    assert sentence in " ".join(text.split())
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["drain", "127.0.0.1:99999"], "address of the front must be host:port, got '127.0.0.1:99999'"),
        (["drain", "somewhere"], "address of the front must be host:port, got 'somewhere'"),
        (["set-path", "::::", "small_m"], "address of the front must be host:port, got '::::'"),
        (["bench-calls", "--front", ":50051"], "address of the front must be host:port, got ':50051'"),
        (["bench-calls", "--rows", "0"], "rows must be numbers from 1 to"),
        (["bench-calls", "--phase", "idle"], "phase must be decode or prefill, got 'idle'"),
        (["bench-calls", "--spin-us", "inf"], "spin_us must be from 0 to 1e+06, got inf"),
        (["bench-calls", "--device", "gpu7"], "device must be cpu or a GPU, as cuda:0, got 'gpu7'"),
        (["demo", "--launcher", "slurm"], "launcher must be ray or local, got 'slurm'"),
        (["demo", "--duration", "nan"], "duration must be above 0 and at most 86400 s, got nan"),
        (["demo", "--out", "/proc/x"], "out must be a folder that can be written, got [Errno 2]"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_told_before_anything_is_started_or_asked(
    arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("nothing may be started")

    monkeypatch.setattr(subprocess, "Popen", started)
    began = time.monotonic()
    status, text = run(*arguments)
    assert (status, text.startswith(sentence)) == (1, True), text
    assert time.monotonic() - began < 5.0, "it waited for a service"


def test_a_backend_that_cannot_start_here_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reason = "backend hopper needs a CUDA build of torch and a GPU"
    settings = (
        "--backend",
        "hopper",
        "--no-small-m-enabled",
        "--no-large-m-enabled",
        "--port",
        "0",
        "--http-port",
        "0",
    )
    status, text = run("doctor", *settings)
    assert (status, f"no  {reason}" in text, "1 of" in text) == (1, True, True), text
    status, text = run("plan", *settings)
    assert (status, f"on this machine it cannot start: {reason}" in text) == (0, True), text
    status, text = run("serve", *settings)
    assert (status, reason in text, "starts" in text) == (2, True, False), text


def test_what_a_backend_lacks_is_printed_to_the_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Square brackets are no markup."""

    def check(bundle: Bundle) -> None:
        raise ConfigError("install megamoe[hopper]")

    monkeypatch.setattr(hopper, "check", check)
    for command in ("doctor", "plan"):
        assert "install megamoe[hopper]" in run(command, "--backend", "hopper")[1]


def test_lists_and_tables_on_the_command_line() -> None:
    table = '{"hidden": 64, "intermediate": 32, "num_experts": 16, "num_topk": 2, "name": "mine"}'
    status, text = run("plan", "--shape", table, "--small-m-capacities", "4,8", "--no-large-m-enabled")
    assert status == 0, text
    assert "shape mine: hidden 64" in text
    assert "4, 8" in text


def test_doctor_names_a_taken_port() -> None:
    assert all(f.ok for f in findings(load_config(overrides={"port": 0, "http_port": 0}, env=False)))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, text = run("doctor", "--port", str(port), "--http-port", "0")
        assert status == 1
        assert f"taken: [{port}]" in text


def test_bench_prints_a_line_per_path_and_size() -> None:
    table = (
        '{"hidden": 64, "intermediate": 32, "num_experts": 16, "num_topk": 2, "num_ranks": 2, "name": "tiny"}'
    )
    status, text = run(
        "bench", "--shape", table, "--sizes", "2,8", "--paths", "compact,small_m", "--calls", "3"
    )
    assert status == 0, text
    lines = [line.split("│") for line in text.splitlines() if "│" in line]
    cells = [(line[1].strip(), line[2].strip()) for line in lines if len(line) > 3]
    wanted = {("compact", "2"), ("small_m", "2"), ("compact", "8"), ("small_m", "8")}
    assert wanted <= set(cells)
    assert all(float(line[3]) > 0 for line in lines if line[1].strip() in ("compact", "small_m"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--sizes", "x"], "sizes must be numbers from 1 to 8192 with commas between, got 'x'"),
        (["--sizes", "0"], "sizes must be"),
        (["--sizes", "8193"], "sizes must be"),
        (["--paths", "fast"], "paths must be"),
        (["--distribution", "odd"], "distribution must be one of uniform, "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bench_refuses_what_cannot_be(arguments: list[str], sentence: str) -> None:
    status, text = run("bench", *arguments)
    assert status == 1
    assert text.startswith(sentence), "nothing is printed or measured before"
