"""The run for eight GPUs, with a stand-in for python that plays its parts: which run, what is left, how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "run_ep8.sh"
STAND_IN = """#!/usr/bin/env bash
# Notes what it was asked to run, writes the file that a bench would, fails where FAIL and sleeps where SLEEP is named.
[ "$*" = "-m megamoe.backends.hopper" ] && exit 0
echo "$$ $*" >> "$NOTES"
while [ $# -gt 0 ]; do
  [ "$1" = --json ] && echo '{}' > "$2"
  [ "$1" = "$SLEEP" ] && { sleep 50 & wait; }
  [ "$1" = "$FAIL" ] && exit 3
  shift
done
exit 0
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts the script with some options, from tmp_path; parts are noted in its file `notes`."""
    stand_in = tmp_path / "an interpreter"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    env = os.environ | {"PYTHON": str(stand_in), "NOTES": str(tmp_path / "notes")}

    def run(*options: str, fail: str = "", sleep: str = "") -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(SCRIPT), *options],
            env=env | {"FAIL": fail, "SLEEP": sleep},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return run


def parts(folder: Path) -> list[str]:
    lines = (folder / "notes").read_text().splitlines()
    return [line.split()[2].removeprefix("megamoe.backends.hopper.") for line in lines]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--what"], "option must be a known one, got --what"),
        (["--ranks"], "--ranks must have a value, got none"),
        (["--ranks", "3"], "--ranks must be 1, 2, 4 or 8, got 3"),
        (["--out", ""], "--out must have a value, got none"),
        (["--parts", "bench skews"], "--parts must be of compile selftest bench skew agentx, got skews"),
    ],
)
def test_what_it_does_not_take_is_named(start: Start, tmp_path: Path, options: list[str], said: str) -> None:
    out, err = (running := start(*options)).communicate(timeout=20)
    assert (running.returncode, out) == (2, "")
    assert err.startswith(said)
    assert "--ranks N" in err
    assert not (tmp_path / "notes").exists()


def test_a_folder_that_cannot_be_made_is_named(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    out, err = (running := start("--out", "file")).communicate(timeout=20)
    assert (running.returncode, out, err.count("\n")) == (1, "", 1), err


@pytest.mark.parametrize(
    ("fail", "status", "said"),
    [
        ("none", 0, "failed: nothing"),
        ("megamoe.backends.hopper.selftest", 1, "failed: selftest(3)"),
        ("megamoe.backends.hopper.bench.tables", 1, "failed: tables-bench(3) tables-skew(3)"),
    ],
)
def test_it_goes_on_after_a_part_that_fails(
    start: Start, tmp_path: Path, fail: str, status: int, said: str
) -> None:
    folder = tmp_path / "of" / "mine"
    folder.mkdir(parents=True)
    (folder / "bench.json").write_text("of an earlier run")
    (folder / "notes.md").write_text("of somebody else")
    options = ["--ranks", "2", "--out", "of/mine"]
    out, err = (running := start(*options, fail=fail)).communicate(timeout=60)
    assert (running.returncode, out.splitlines()[-1].endswith(said)) == (status, True), out + err
    modules = ["compile_ahead", "service.cli", "selftest", "bench", "bench", "service.cli"]
    assert parts(tmp_path) == [*modules, "bench.tables", "bench.tables"]
    assert (folder / "bench.json").read_text() == "{}\n"
    (tmp_path / "notes").unlink()
    out, err = (running := start(*options, "--parts", "agentx")).communicate(timeout=60)
    assert running.returncode == 0, out + err
    assert "-m service.cli demo --launcher local" in (tmp_path / "notes").read_text()
    assert parts(tmp_path) == ["service.cli"], "one part, and no report of another run"
    assert (folder / "notes.md").read_text() == "of somebody else"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_ends_the_part_that_runs_and_tells_of_those_before(
    start: Start, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    running = start("--out", "out", sleep="megamoe.backends.hopper.selftest")
    deadline = time.monotonic() + 20.0
    while not (tmp_path / "notes").exists() or "selftest" not in parts(tmp_path):
        assert time.monotonic() < deadline, "the part does not begin"
        time.sleep(0.05)
    os.kill(running.pid, number)
    out, err = running.communicate(timeout=20)
    assert running.returncode == status, out + err
    assert out.splitlines()[-2] == "== interrupted"
    assert out.splitlines()[-1].endswith(f"failed: selftest({status})")
    assert parts(tmp_path) == ["compile_ahead", "service.cli", "selftest"]
    for line in (tmp_path / "notes").read_text().splitlines():
        with pytest.raises(ProcessLookupError):
            os.kill(int(line.split()[0]), 0)
