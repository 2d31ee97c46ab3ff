"""Python programs with pins of their own: installed once for given pins, their absence is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import python_tools
from tools.debian_tools import ToolError
from tools.python_tools import KNOWN, ROOT, provide


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replaces venv and pip by a pretence; returns what pip was called with."""
    called: list[list[str]] = []
    monkeypatch.setattr(python_tools, "KNOWN", {"x": ("x", "y")})
    monkeypatch.setattr(python_tools.venv, "create", lambda folder, **_: folder.mkdir())
    monkeypatch.setattr(python_tools, "run", lambda command, timeout_s: called.append(command))
    return called


def pins(folder: Path, text: str) -> Path:
    (folder / "x.txt").write_text(text)
    return folder


def test_installs_the_pins_once_and_again_when_they_change(
    installed: list[list[str]], tmp_path: Path
) -> None:
    tools = tmp_path / "tools"
    for text, num_installed in (("x==1\n", 1), ("x==1\n", 1), ("x==2\n", 2)):
        assert provide("x", tools, pins(tmp_path, text)) == {"x": tools / "x/bin/x", "y": tools / "x/bin/y"}
        assert len(installed) == num_installed
    assert installed[0][-3:] == ["--no-deps", "-r", str(tmp_path / "x.txt")]


def test_a_moved_environment_is_made_again(installed: list[list[str]], tmp_path: Path) -> None:
    provide("x", tmp_path / "old", pins(tmp_path, "x==1\n"))
    (tmp_path / "old").rename(tmp_path / "new")
    provide("x", tmp_path / "new", tmp_path)
    assert len(installed) == 2


def test_an_installation_that_failed_is_not_taken(
    installed: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(command: list[str], timeout_s: float) -> None:
        raise ToolError("pip: no such package")

    works = python_tools.run
    monkeypatch.setattr(python_tools, "run", fails)
    with pytest.raises(ToolError, match="no such package"):
        provide("x", tmp_path, pins(tmp_path, "x==1\n"))
    monkeypatch.setattr(python_tools, "run", works)
    provide("x", tmp_path, pins(tmp_path, "x==1\n"))
    assert len(installed) == 1


def test_unknown_tools_are_refused() -> None:
    with pytest.raises(ToolError, match="tool must be one of agentx-harness, aiperf, got 'odd'"):
        provide("odd")


def test_pins_name_every_package_exactly() -> None:
    for tool in KNOWN:
        lines = (ROOT / "constraints" / f"{tool}.txt").read_text().splitlines()
        assert all("==" in line for line in lines if not line.startswith("#"))
        assert any(line.startswith(f"{tool}==") for line in lines)
