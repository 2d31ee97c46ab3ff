"""Kernels have the same key in Triton's cache in every process, whatever it launched before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from importlib import import_module
device = "megamoe.backends.hopper.device."
for name in sys.argv[1:]:
    import_module(device + name)
from megamoe.backends.hopper.keys import settle_keys
settle_keys()
for name in ("combine", "small_m", "large_m", "gemm1"):
    module = import_module(device + name)
    print([value.cache_key for _, value in sorted(vars(module).items()) if hasattr(value, "cache_key")])
"""


def keys(*first: str) -> str:
    command = [sys.executable, "-c", SCRIPT, *first]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, cwd=ROOT).stdout


@pytest.fixture(scope="module")
def usual() -> str:
    return keys()


@pytest.mark.parametrize("first", [("large_m", "combine"), ("combine", "small_m")], ids=" ".join)
def test_keys_do_not_depend_on_what_came_first(usual: str, first: tuple[str, ...]) -> None:
    assert keys(*first) == usual
    assert usual.count("\n") == 4
    assert usual.count("'") > 40


def test_keys_are_settled_before_a_rank_can_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    from megamoe.backends.hopper import launches

    asked: list[bool] = []
    monkeypatch.setattr(launches, "settle_keys", lambda: asked.append(True))
    with pytest.raises(AttributeError):
        launches.Launches(None, None, None)  # type: ignore[arg-type]
    assert asked == [True]
