"""Tools come unpacked, once, and their absence is an error with a reason: never a quiet skip."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools import debian_tools
from tools.debian_tools import DebianTool, ToolError, provide


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replaces every command by a pretence that apt works; returns what was called."""
    called: list[list[str]] = []

    def run(command: list[str], cwd: Path | None = None, timeout_s: float = 0) -> None:
        called.append(list(command))
        if "download" in command:
            assert cwd is not None
            (cwd / "x.deb").write_text("")
        if command[:2] == ["dpkg-deb", "-x"]:
            program = Path(command[3]) / "usr/bin/x"
            program.parent.mkdir(parents=True)
            program.write_text("")

    monkeypatch.setattr(debian_tools, "run", run)
    monkeypatch.setattr(debian_tools, "KNOWN", {"x": DebianTool(("x",), ("usr/bin/x",))})
    monkeypatch.setattr(
        debian_tools.shutil, "which", lambda name: None if name == "x" else f"/usr/bin/{name}"
    )
    return called


def test_unpacks_once_and_is_cached_by_its_stamp(commands: list[list[str]], tmp_path: Path) -> None:
    path = provide("x", tmp_path)["x"]
    assert path == tmp_path / "x/usr/bin/x"
    assert path.exists()
    num_commands = len(commands)
    assert provide("x", tmp_path)["x"] == path
    assert len(commands) == num_commands


def test_another_list_of_packages_unpacks_again(
    commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provide("x", tmp_path)
    num_commands = len(commands)
    monkeypatch.setattr(debian_tools, "KNOWN", {"x": DebianTool(("x", "libx"), ("usr/bin/x",))})
    provide("x", tmp_path)
    assert len(commands) > num_commands


def test_a_half_made_folder_is_not_taken(commands: list[list[str]], tmp_path: Path) -> None:
    (tmp_path / "x/usr/bin").mkdir(parents=True)
    (tmp_path / "x/usr/bin/x").write_text("half")
    assert provide("x", tmp_path)["x"].read_text() == ""


def test_lists_are_fetched_when_apt_knows_nothing(
    commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = debian_tools.run
    updated: list[bool] = []

    def run(command: list[str], cwd: Path | None = None, timeout_s: float = 0) -> None:
        if "update" in command:
            assert f"Dir::State::lists={tmp_path / 'apt/lists'}" in command
            updated.append(True)
        if "download" in command and not updated:
            raise ToolError("E: Unable to locate package x")
        works(command, cwd, timeout_s)

    monkeypatch.setattr(debian_tools, "run", run)
    assert provide("x", tmp_path)["x"].exists()
    assert updated


def test_no_apt_at_all_says_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debian_tools.shutil, "which", lambda name: None)
    with pytest.raises(ToolError, match="promtool must be on PATH, or apt-get must be there"):
        provide("prometheus", tmp_path)


def test_a_failing_command_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="exit status 3: no such thing"):
        debian_tools.run(["sh", "-c", "echo no such thing >&2; exit 3"])


def test_unknown_tool_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="tool must be one of chromium, prometheus, got 'vim'"):
        provide("vim", tmp_path)


def test_a_closure_brings_what_apt_would_install_and_a_script_that_finds_it(
    commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretends = debian_tools.run

    def run(command: list[str], cwd: Path | None = None, timeout_s: float = 0) -> str:
        pretends(command, cwd, timeout_s)
        if command[:2] == ["dpkg-deb", "-x"]:
            library = Path(command[3]) / "usr/lib/arch-linux-gnu/libx.so.1"
            library.parent.mkdir(parents=True)
            library.write_text("")
            (Path(command[3]) / "usr/bin/x").write_text('#!/bin/sh\necho "$1 $LD_LIBRARY_PATH"\n')
            (Path(command[3]) / "usr/bin/x").chmod(0o755)
        return "Inst libx1 (1.0)\nInst x (2.0)\nConf x (2.0)\n" if "-s" in command else ""

    monkeypatch.setattr(debian_tools, "run", run)
    monkeypatch.setattr(debian_tools, "KNOWN", {"x": DebianTool(("x",), ("usr/bin/x",), closure=True)})
    script = provide("x", tmp_path)["x"]
    assert next(command for command in commands if "download" in command)[-2:] == ["libx1", "x"]
    said = subprocess.run([script, "hello"], capture_output=True, text=True, timeout=30, check=True).stdout
    assert said.split() == ["hello", str(tmp_path / "x/usr/lib/arch-linux-gnu")]


def test_the_real_prometheus_is_there_and_runs() -> None:
    for name, path in provide("prometheus").items():
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, done.stderr
        assert f"{name}, version" in done.stdout + done.stderr
