"""What killed services left in shared memory goes with the next start; what belongs to living ones stays."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megamoe import SharedSegment, unlink_all
from service.leftovers import marked, remove_leftovers

ROOT = Path(__file__).resolve().parents[2]
SERVICE = """
import sys, time
from megamoe import SharedSegment
from service.leftovers import marked
with marked(sys.argv[1]):
    SharedSegment.create(sys.argv[1] + "-7-ring-0-0", 4096)
    print("up", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def name() -> Iterator[str]:
    made = f"megamoe-{secrets.token_hex(4)}"
    yield made
    unlink_all(made)
    unlink_all(f"megamoe-alive-{made}")


def files_of(name: str) -> list[str]:
    return sorted(path.name for path in Path("/dev/shm").glob(f"*{name}*"))


def test_a_killed_service_leaves_what_the_next_one_removes(name: str) -> None:
    killed = subprocess.Popen(
        [sys.executable, "-c", SERVICE, name],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert killed.stdout is not None
    assert killed.stdout.readline() == "up\n"
    segment = f"{name}-7-ring-0-0"
    assert segment not in remove_leftovers(), "it lives"
    assert files_of(name) == [segment, f"megamoe-alive-{name}"]
    killed.kill()
    killed.wait(10)
    killed.stdout.close()
    assert segment in remove_leftovers()
    assert files_of(name) == []


def test_a_service_that_ends_takes_its_mark_along(name: str) -> None:
    with marked(name):
        segment = SharedSegment.create(f"{name}-1-board", 4096)
        assert segment.name not in remove_leftovers()
        assert len(files_of(name)) == 2
        segment.close()
        segment.unlink()
    assert files_of(name) == []


def test_memory_without_a_mark_is_not_touched(name: str) -> None:
    segment = SharedSegment.create(f"{name}-1-board", 4096)
    remove_leftovers()
    assert files_of(name) == [segment.name]
    segment.close()
