"""Kernels compiled into a folder to ship: all of them, checked, and loaded where there is no FlyDSL."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from megamoe.backends.gfx950 import build, compile_ahead
from megamoe.backends.gfx950.lockstep import emulated, shape_of
from megamoe.bundle import plan_bundle
from megamoe.errors import ConfigError
from service.cli.main import app

# The emulated profile at a shape whose kernels compile in no time.
SETTINGS = [
    "--profile", "emulated", "--max-tokens-per-rank", "8", "--small-m-capacities", "", "--no-small-m-enabled",
    "--no-large-m-enabled",
]  # fmt: skip

WAIT, WAIT_FOR_LESS = b"\x70\x0f\x8c\xbf", b"\x71\x0f\x8c\xbf"
"""`s_waitcnt vmcnt(0)` and `vmcnt(1)`."""


def megamoe(*arguments: str) -> tuple[int, str]:
    """The exit status and output of a command."""
    done = CliRunner().invoke(app, [*arguments], env={"COLUMNS": "200"})
    return done.exit_code, done.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out: Path = tmp_path_factory.mktemp("kernels")
    status, text = megamoe("compile", *SETTINGS, "--out", str(out), "--jobs", "1")
    assert status == 0, text
    return out


def copy_of(folder: Path, to: Path) -> Path:
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def test_a_folder_has_every_kernel_and_says_so(folder: Path) -> None:
    entries = build.manifest(folder)
    assert {path.name for path in folder.iterdir()} == {*entries, build.MANIFEST}
    assert all(one["spills"] == 0 for one in entries.values())
    assert megamoe("compile", *SETTINGS, "--out", str(folder), "--check") == (
        0,
        f"{folder} has every kernel\n",
    )
    status, text = megamoe("compile", *SETTINGS, "--out", str(folder))
    assert status == 0
    assert text.count(" there ") == len(entries)


def test_check_names_each_kernel_that_a_folder_lacks(folder: Path, tmp_path: Path) -> None:
    copy_of(folder, tmp_path)
    for path in tmp_path.glob("gemm*"):
        path.unlink()
    (damaged,) = tmp_path.glob("prepare-*")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    status, text = megamoe("compile", *SETTINGS, "--out", str(tmp_path), "--check")
    assert status == 1
    assert [line.split()[1] for line in text.splitlines() if line.startswith("missing: ")] == [
        "gemm1", "gemm2", "prepare",
    ]  # fmt: skip
    assert "sha256 of" in text
    assert f"{tmp_path} lacks 3 kernels" in text
    assert megamoe("compile", *SETTINGS, "--out", str(tmp_path), "--jobs", "1")[0] == 0
    assert megamoe("compile", *SETTINGS, "--out", str(tmp_path), "--check")[0] == 0


def test_a_kernel_with_another_bit_is_compiled_anew(folder: Path, tmp_path: Path) -> None:
    """It decodes as well as before: its digest alone says that it is not what was compiled."""
    (altered,) = copy_of(folder, tmp_path).glob("combine-*")
    whole = altered.read_bytes()
    assert WAIT in whole
    altered.write_bytes(whole.replace(WAIT, WAIT_FOR_LESS, 1))
    status, text = megamoe("compile", *SETTINGS, "--out", str(tmp_path), "--check")
    assert (status, text.count("sha256 of")) == (1, 1)
    assert megamoe("compile", *SETTINGS, "--out", str(tmp_path), "--jobs", "1")[0] == 0
    assert altered.read_bytes() == whole
    assert megamoe("compile", *SETTINGS, "--out", str(tmp_path), "--check")[0] == 0


def test_a_folder_serves_several_deployments(folder: Path, tmp_path: Path) -> None:
    copy_of(folder, tmp_path)
    other = [*SETTINGS, "--combine-row-format", "fp8"]
    status, text = megamoe("compile", *other, "--out", str(tmp_path), "--check")
    assert (status, text.count("missing: gemm2")) == (1, 1)
    assert megamoe("compile", *other, "--out", str(tmp_path), "--jobs", "1")[0] == 0
    for settings in (SETTINGS, other):
        assert megamoe("compile", *settings, "--out", str(tmp_path), "--check")[0] == 0


def test_a_compilation_that_was_killed_goes_on_where_it_stopped(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "service.cli", "compile", *SETTINGS, "--out", str(tmp_path)]
    process = subprocess.Popen([*command, "--jobs", "2"], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    while not list(tmp_path.glob("*.hsaco")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    assert process.wait(20) == -signal.SIGKILL
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.hsaco")}
    assert megamoe("compile", *SETTINGS, "--out", str(tmp_path), "--check")[0] == 1
    assert megamoe("compile", *SETTINGS, "--out", str(tmp_path), "--jobs", "1")[0] == 0
    assert all(path.stat().st_mtime_ns == time_ns for path, time_ns in kept.items())


EMPTY = '{"target": "gfx950", "kernels": []}'
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda path: path.unlink(), "the manifest of a folder that .* has filled, got FileNotFoundError"),
    "no JSON": (lambda path: path.write_text("{"), "has filled, got JSONDecodeError"),
    "no text": (lambda path: path.write_bytes(b"\xff\xfe"), "has filled, got UnicodeDecodeError"),
    "a list": (lambda path: path.write_text("[]"), "has filled, got TypeError"),
    "no kernels": (lambda path: path.write_text('{"target": "gfx950"}'), "has filled, got KeyError"),
    "null kernels": (lambda path: path.write_text('{"target": "gfx950", "kernels": null}'), "got TypeError"),
    "no digest": (lambda path: path.write_text('{"kernels": [{"file": "a"}]}'), "got KeyError: 'sha256'"),
    "another target": (lambda path: path.write_text(EMPTY.replace("950", "942")), "must be gfx950, got 'gfx942'"),
    "none of it": (lambda path: path.write_text(EMPTY), "with close abort=1 num_ranks=8"),
}  # fmt: skip


def test_check_says_once_that_a_manifest_is_damaged(folder: Path, tmp_path: Path) -> None:
    (copy_of(folder, tmp_path) / build.MANIFEST).write_text("{")
    status, text = megamoe("compile", *SETTINGS, "--out", str(tmp_path), "--check")
    assert (status, text.count("JSONDecodeError")) == (1, 1)
    assert "missing: " not in text


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_manifest_is_named(folder: Path, tmp_path: Path, name: str) -> None:
    damage, match = DAMAGES[name]
    damage(copy_of(folder, tmp_path) / build.MANIFEST)
    with pytest.raises(ConfigError, match=match):
        build.shipped(build.KernelSpec.of("close", ABORT=1, NUM_RANKS=8), tmp_path)


def test_ranks_load_shipped_kernels_without_flydsl(tmp_path: Path) -> None:
    """All paths and a binding, in a process that cannot import FlyDSL."""
    shape = shape_of(64, 64, num_experts=8, num_topk=2, num_ranks=2)
    list(compile_ahead.compile_kernels(plan_bundle(emulated(shape)), tmp_path, num_jobs=1))
    program = f"""
import sys
sys.modules["flydsl"] = None
from megamoe.backends.gfx950.lockstep import Ranks, batches_of, emulated, shape_of
from megamoe.bundle import Path
shape = shape_of(64, 64, num_experts=8, num_topk=2, num_ranks=2)
with Ranks(emulated(shape, gfx950_kernels={str(tmp_path)!r})) as ranks:
    ranks.bind()
    for epoch, path in enumerate(Path):
        outs, _ = ranks.run(path, batches_of(shape, [2, 3]), epoch=epoch)
        print(float(outs[1].float().norm()) > 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False
    )  # fmt: skip
    assert done.stdout.split() == ["True"] * 4, done.stderr


def test_a_backend_that_compiles_at_first_use_has_nothing_to_ship(tmp_path: Path) -> None:
    from megamoe import Deployment, compile_kernels, preset

    bundle = plan_bundle(Deployment(shape=preset("demo"), backend="hopper"))
    with pytest.raises(ConfigError, match="backend must be one with compile_kernels, got 'hopper'"):
        list(compile_kernels(bundle, tmp_path))


def test_an_unknown_profile_is_refused(tmp_path: Path) -> None:
    status, text = megamoe("compile", "--profile", "deepseek-v5", "--out", str(tmp_path))
    assert (status, list(tmp_path.iterdir())) == (2, [])
    assert "profile" in text
    assert "deepseek-v4-pro-ep8" in text


def test_doctor_looks_at_what_this_backend_needs(folder: Path) -> None:
    _, text = megamoe("doctor", *SETTINGS, "--gfx950-kernels", str(folder), "--launcher", "local")
    assert "C compiler of the emulator" in text
    assert f"kernels of {folder}: all that are needed" in text
    status, text = megamoe("doctor", "--profile", "deepseek-v4-pro-ep8", "--backend", "gfx950")
    assert status == 1
    assert "needs a ROCm build of torch and an MI355X" in text
    assert f"flydsl {build.FLYDSL}" in text
    _, text = megamoe("doctor", *SETTINGS, "--combine-row-format", "fp8", "--gfx950-kernels", str(folder))
    assert text.count("no  gemm2") == 1
