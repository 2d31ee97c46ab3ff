"""Settings of every test: Hypothesis without deadlines (the cores are shared) and with a fixed seed in CI.

Tools that tests need are provided before the first test: on a fresh machine that takes minutes, which must not count
as a test that hangs.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import settings

import service  # noqa: F401  (before any test imports grpc)
from tools import debian_tools, python_tools

GPU_TESTS = Path(__file__).parent / "gpu"

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-launcher",
        action="store_true",
        help="run end-to-end tests marked one_launcher with both launchers all the same",
    )
    parser.addoption(
        "--triton-kernels", help="folder of that package, for the test of the baseline made of it"
    )
    parser.addoption(
        "--backend",
        choices=["cpu", "hopper"],
        default="cpu",
        help="hopper: on a machine with GPUs, tests/gpu and the end-to-end tests marked any_backend",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """tests/gpu needs a GPU, and is collected only where one is said to be there."""
    inside = GPU_TESTS in (collection_path, *collection_path.parents)
    return True if inside and config.option.backend == "cpu" else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Provide what the chosen tests name with `needs_tool`; who fails to get one says so again in its test."""
    if session.config.option.collectonly:
        return
    names = {mark.args[0] for item in session.items for mark in item.iter_markers("needs_tool")}
    for name in sorted(names):
        module = python_tools if name in python_tools.KNOWN else debian_tools
        with contextlib.suppress(debian_tools.ToolError):
            module.provide(name)
