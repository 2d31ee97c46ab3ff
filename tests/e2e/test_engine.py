"""`loadgen engine` as a user runs it, driven by the public client `aiperf`, without a network."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import ROOT, ServiceProcess
from tests.loadgen.report.test_report_schema import REPORT
from tools.python_tools import provide

NUM_REQUESTS = 24
CONCURRENCY = 6
NUM_INPUT = 600
NUM_OUTPUT = 40
ENGINE = (sys.executable, "-m", "loadgen.cli", "engine")
LOCAL = {"PYTHONPATH": str(ROOT), "COLUMNS": "160"}
# Counting tokens, drawing prompts and reading defaults must not ask anybody.
OFFLINE = {
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "HTTP_PROXY": "",
    "NO_PROXY": "127.0.0.1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


@pytest.fixture(scope="module")
def aiperf() -> Path:
    return provide("aiperf")["aiperf"]


def run_aiperf(aiperf: Path, url: str, folder: Path) -> dict[str, Any]:
    """A small profile; returns its exported metrics."""
    command = [
        str(aiperf), "profile", "--model", "demo", "--url", url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", str(folder / "tokenizer"), "--concurrency", str(CONCURRENCY),
        "--request-count", str(NUM_REQUESTS), "--isl", str(NUM_INPUT), "--osl", str(NUM_OUTPUT),
        "--extra-inputs", "ignore_eos:true", "--random-seed", "1", "--ui", "none",
        "--artifact-dir", str(folder / "aiperf"),
    ]  # fmt: skip
    done = subprocess.run(
        command,
        env=os.environ | OFFLINE,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    metrics: dict[str, Any] = json.loads((folder / "aiperf" / "profile_export_aiperf.json").read_text())
    return metrics


@contextlib.contextmanager
def serving(service: ServiceProcess, folder: Path) -> Iterator[str]:
    """`loadgen engine` as a process; gives host:port. It ends with Ctrl-C and must end well."""
    log = folder / "engine.log"
    command = [*ENGINE, "--target", service.front, "--port", "0", "--out", str(folder)]
    with log.open("w") as sink:
        process = subprocess.Popen(
            command, env=os.environ | LOCAL, cwd=ROOT, stdout=sink, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + 60
        while not (address := re.search(r"http://([\d.]+:\d+)/v1", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield address[1]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


# Who started the ranks is nothing that a client of the engine could see: once is enough.
@pytest.mark.one_launcher("local")
@pytest.mark.needs_tool("aiperf")
def test_aiperf_drives_the_engine_without_errors(
    running_service: ServiceProcess, aiperf: Path, tmp_path: Path
) -> None:
    subprocess.run(
        [*ENGINE, "--write-tokenizer", str(tmp_path / "tokenizer")], env=os.environ | LOCAL, check=True
    )
    with serving(running_service, tmp_path) as address:
        metrics = run_aiperf(aiperf, address, tmp_path)

    assert metrics["error_summary"] == []
    assert metrics["request_error_rate"]["avg"] == 0
    assert metrics["request_count"]["avg"] == NUM_REQUESTS
    # aiperf counts tokens itself, with the engine's tokenizer.
    assert metrics["input_sequence_length"]["avg"] == NUM_INPUT
    assert metrics["output_sequence_length"]["avg"] == NUM_OUTPUT

    assert (tmp_path / "report.html").exists()
    report = json.loads((tmp_path / "report.json").read_text())
    assert list(REPORT.iter_errors(report)) == []
    assert report["scenario"] == "engine"
    assert report["submission_valid"] is False
    assert report["service_steps_match"] is True
    assert report["requests"] == {
        "completed": NUM_REQUESTS,
        "failed": 0,
        "cancelled": 0,
        "context_overflow": 0,
    }
    assert report["calls"] == report["steps"]["executed"] * report["layers"]
    assert report["accept_length"] == pytest.approx(3.77, abs=0.15)
    # Both sides saw the same requests: the client's times are the engine's plus HTTP on one machine.
    for ours, theirs in (
        ("ttft", "time_to_first_token"),
        ("itl", "inter_token_latency"),
        ("e2el", "request_latency"),
    ):
        seconds = metrics[theirs]["p50"] / 1e3
        assert report[ours]["p50"] * 0.95 <= seconds <= report[ours]["p50"] * 1.25 + 0.02, ours
