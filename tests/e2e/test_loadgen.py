"""`loadgen --scenario agentx` as a user runs it, against the running service."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from service.client import AsyncFront, Front
from tests.e2e.harness import ROOT, ServiceProcess, scrape

SHORT = ("--concurrency", "6", "--warmup-requests", "1", "--token-scale", "0.004", "--grace-period", "3")
PATHS = ("small_m", "fixed_slot", "large_m", "compact")


class LoadGenerator:
    """The command as a process; its lines can be waited for."""

    def __init__(self, service: ServiceProcess, out: Path, *options: str) -> None:
        self.out = out
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "loadgen.cli",
                "--target",
                service.front,
                "--out",
                str(out),
                *SHORT,
                *options,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "160"},
            cwd=ROOT,
        )
        self.lines: list[str] = []
        self._queue: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.lines.append(line.rstrip())
                self._queue.put(line)

    def wait_for(self, pattern: str, timeout_s: float) -> None:
        """Until it prints a line that begins like this."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                if re.match(pattern, self._queue.get(timeout=0.2)):
                    return
            except queue.Empty:
                assert self.process.poll() is None, self.text
        raise AssertionError(f"no line {pattern!r} within {timeout_s} s:\n{self.text}")

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def end(self, timeout_s: float = 120.0) -> tuple[int, dict[str, Any]]:
        """(exit status, report)."""
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the load generator did not end:\n{self.text}") from None
        self._reader.join(5)
        assert (self.out / "report.json").exists(), self.text
        return status, json.loads((self.out / "report.json").read_text())


# Who started the ranks is nothing that a load generator could see: once is enough for most of these.
one_launcher = pytest.mark.parametrize("launcher", ["local"], indirect=True, scope="session")


def counted(addresses: tuple[str, ...]) -> tuple[float, dict[str, float]]:
    """(layer calls of the group, sub-steps by path) on rank 0's page."""
    samples = scrape(addresses[:1])
    calls = sum(value for (name, _), value in samples.items() if name == "megamoe_group_layer_calls_total")
    paths = dict.fromkeys(PATHS, 0.0)
    for (name, labels), value in samples.items():
        if name == "megamoe_sub_steps_total":
            paths[dict(labels)["path"]] += value
    return calls, paths


def test_a_run_reports_what_the_service_counted(running_service: ServiceProcess, tmp_path: Path) -> None:
    with Front(running_service.front) as front:
        info = front.info()
    calls_before, paths_before = counted(info.metrics_addresses)
    status, report = (generator := LoadGenerator(running_service, tmp_path, "--duration", "6")).end()
    assert status == 0, generator.text
    calls, paths = counted(info.metrics_addresses)
    assert report["calls"] == calls - calls_before == report["layers"] * report["steps"]["executed"] > 0
    assert report["layers"] == info.num_layers
    for path in PATHS:
        assert report["paths"][path]["num_steps"] == paths[path] - paths_before[path]
    assert report["service_steps_match"] is True
    assert report["requests"]["completed"] > 10
    assert 0 <= report["generator"]["overhead_share_of_answer_time"] < 0.10  # it never holds the service up
    assert report["requests"]["failed"] == 0
    for path in ("small_m", "large_m"):
        latency = report["paths"][path]["latency_ms"]
        assert (
            0
            < report["paths"][path]["service_ms"]["p50"]
            <= latency["p50"]
            <= latency["p90"]
            <= latency["p99"]
        )
    for name in ("ttft", "itl", "tpot", "e2el", "step_interval", "intvty", "e2e_norm_intvty"):
        points = report[name]
        assert points["p50"] > 0, name
    assert report["itl"]["p90"] == pytest.approx(1 / report["p90_intvty"])
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert (
        sum(line["phase"] == "profile" and line["status"] == "completed" for line in lines)
        == (report["requests"]["completed"])
    )
    assert "count the same steps: yes" in generator.text


@one_launcher
def test_micro_batches_and_draft_passes_are_served_too(
    running_service: ServiceProcess, tmp_path: Path
) -> None:
    """Two plans in flight at once, and the draft model's passes: more calls than layers times steps, all counted."""
    options = ("--duration", "5", "--micro-batches", "2", "--draft-moe-layers", "1")
    status, report = (generator := LoadGenerator(running_service, tmp_path, *options)).end()
    assert status == 0, generator.text
    assert report["requests"]["failed"] == 0
    assert report["requests"]["completed"] > 5
    assert report["service_steps_match"] is True
    assert report["steps"]["retried"] == 0
    executed = report["steps"]["executed"]
    passes = (report["calls"] - report["layers"] * executed) / executed
    assert passes > 1.0  # a second micro-batch is another call a layer, and every draft is one


@one_launcher
def test_ctrl_c_leaves_a_report_and_the_lease(running_service: ServiceProcess, tmp_path: Path) -> None:
    generator = LoadGenerator(running_service, tmp_path / "first", "--duration", "600")
    generator.wait_for(r"profile .*, (?![01] )\d+ in flight", 90)
    generator.process.send_signal(signal.SIGINT)
    status, report = generator.end(30)
    assert status == 130, generator.text
    assert report["run_cancelled"] is True
    assert report["service_steps_match"] is True
    assert report["request_accounting"]["profile"]["cancelled"] > 0
    status, report = LoadGenerator(running_service, tmp_path / "second", "--duration", "1").end()
    assert status == 0, "the lease must be free at once"
    assert report["service_steps_match"] is True


async def test_a_service_that_refuses_fails_the_run(running_service: ServiceProcess, tmp_path: Path) -> None:
    generator = LoadGenerator(running_service, tmp_path, "--duration", "600")
    generator.wait_for("profile", 90)
    async with AsyncFront(running_service.front) as front:
        await front.drain()
        try:
            status, report = generator.end(60)
        finally:
            await front.drain(resume=True)
            await front.wait_ready(10)
    assert status == 1, generator.text
    assert report["requests"]["failed"] > 0
    assert "requests failed" in report["run_aborted"]
    assert any(error.startswith("draining: ") for error in report["errors"])
    assert "draining" in generator.text


@one_launcher
def test_fixed_rows_with_drifting_routes(running_service: ServiceProcess, tmp_path: Path) -> None:
    options = ("--scenario", "fixed", "--rows", "24", "--routing", "drift", "--duration", "3")
    status, report = (generator := LoadGenerator(running_service, tmp_path, *options)).end()
    assert status == 0, generator.text
    assert report["service_steps_match"] is True
    assert report["routing"] == "drift"
    steady = report["profile"]["paths"]["small_m"]["num_steps"]
    assert steady > 4 * report["layers"]
    assert report["requests"]["failed"] == report["requests"]["completed"] == 0
    rows = [row for row in report["request_accounting"]["profile"].items() if row[0] == "cancelled"]
    assert rows == [("cancelled", 24 * report["service"]["num_ranks"])]
