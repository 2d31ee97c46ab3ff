"""`megamoe demo` and the signals it gets: a report where there was load, and nothing left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.e2e.harness import ROOT

Demo = subprocess.Popen[str]


@contextmanager
def demo(out: Path) -> Iterator[Demo]:
    """A demo that has no reason to end by itself soon; whatever happens here, its processes are gone afterwards."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("MEGAMOE_")} | {"PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "service.cli",
        "demo",
        "--launcher",
        "local",
        "--out",
        str(out),
        "--duration",
        "120",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, cwd=ROOT
    )
    try:
        yield process
    finally:
        for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
            child.kill()
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def wait_for(process: Demo, words: str) -> str:
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if words in line:
            return said
    raise AssertionError(f"the demo ended without {words!r}:\n{said}")


def end(process: Demo, number: int) -> tuple[int, str, list[psutil.Process]]:
    """(exit status, last words, who is left of all that it had started)."""
    family = psutil.Process(process.pid).children(recursive=True)
    assert family
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    _, left = psutil.wait_procs(family, timeout=5)
    return process.returncode, said, left


@pytest.mark.e2e
def test_sigterm_while_the_service_starts_stops_it(tmp_path: Path) -> None:
    with demo(tmp_path) as process:
        wait_for(process, "starting the service")
        log, deadline = tmp_path / "service.log", time.monotonic() + 60
        while "megamoe starts" not in log.read_text():  # before that it has nothing to stop
            assert time.monotonic() < deadline
            time.sleep(0.1)
        status, said, left = end(process, signal.SIGTERM)
    assert (status, left) == (128 + signal.SIGTERM, []), said
    assert "megamoe has stopped" in log.read_text()


@pytest.mark.e2e
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_under_load_still_leaves_a_report(tmp_path: Path, number: int, status: int) -> None:
    with demo(tmp_path) as process:
        wait_for(process, "warmup ")
        got, said, left = end(process, number)
    assert (got, left) == (status, []), said
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["run_cancelled"]
    assert report["steps"]["executed"] > 0
    assert "Traceback" not in said
    log = (tmp_path / "service.log").read_text()
    assert "megamoe has stopped" in log
    prefix = log.split("/dev/shm/")[1].split("-*")[0]
    assert not list(Path("/dev/shm").glob(prefix + "*"))
