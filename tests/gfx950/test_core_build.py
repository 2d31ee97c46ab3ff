"""The emulator's core as a file: compilers that fail or are not there, folders and files that are no good."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megamoe.backends.gfx950.emulator.build import build
from megamoe.backends.gfx950.emulator.errors import ToolchainError
from megamoe.backends.gfx950.emulator.native import open_core


def compiler(folder: Path) -> list[str]:
    """One that gives the core that is there already, whatever it is asked for."""
    script = folder / "cc"
    script.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ncp "{build()}" "$2"\n')
    script.chmod(0o755)
    return [str(script)]


@pytest.mark.parametrize(
    ("command", "match"),
    [
        (["/bin/false"], "compiling the gfx950 emulator must succeed, got: exit status 1"),
        (["/nowhere/cc"], "the C compiler /nowhere/cc must start, got .*No such file"),
        (["/bin/sh", "-c", "kill -9 $$"], "must succeed, got: exit status -9"),
    ],
)
def test_a_compiler_that_fails_is_named(tmp_path: Path, command: list[str], match: str) -> None:
    with pytest.raises(ToolchainError, match=match):
        build(command, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ToolchainError, match=f"folder {file} must be one that can be written"):
        build(["cc"], file)


def test_two_builds_at_once_give_one_file(tmp_path: Path) -> None:
    command, folder = compiler(tmp_path), tmp_path / "cache"
    with ThreadPoolExecutor(4) as pool:
        (path,) = set(pool.map(lambda _: build(command, folder), range(4)))
    assert list(folder.iterdir()) == [path]
    assert path.read_bytes() == build().read_bytes()


@pytest.mark.parametrize("damaged", [b"", b"\x7fELF", b"text"])
def test_a_damaged_file_is_built_again(tmp_path: Path, damaged: bytes) -> None:
    command, folder = compiler(tmp_path), tmp_path / "cache"
    path = build(command, folder)
    path.write_bytes(damaged)
    assert open_core(lambda: build(command, folder)).emu_num_ops() > 500
    assert path.read_bytes() == build().read_bytes()
