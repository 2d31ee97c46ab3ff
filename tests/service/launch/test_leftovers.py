"""What killed services left in shared memory goes with the next start; what belongs to living ones stays."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megamoe import SharedSegment, unlink_all
from service.launch.leftovers import marked, remove_leftovers, with_janitor

ROOT = Path(__file__).resolve().parents[3]
SERVICE = """
import sys, time
from megamoe import SharedSegment
from service.launch.leftovers import marked
with marked(sys.argv[1]):
    SharedSegment.create(sys.argv[1] + "-7-ring-0-0", 4096)
    print("up", flush=True)
    time.sleep(60)
"""
JANITOR = (
    "from service.launch.leftovers import with_janitor\nwith marked(sys.argv[1]), with_janitor(sys.argv[1]):"
)


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
    assert files_of(name) == sorted([segment, f"megamoe-alive-{name}"])
    killed.kill()
    killed.wait(10)
    killed.stdout.close()
    assert segment in remove_leftovers()
    assert files_of(name) == []


def test_a_janitor_removes_the_memory_of_a_killed_supervisor(name: str) -> None:
    other = SharedSegment.create(f"{name}x-1-board", 4096)
    killed = subprocess.Popen(
        [sys.executable, "-c", SERVICE.replace("with marked(sys.argv[1]):", JANITOR), name],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert killed.stdout is not None
    with killed.stdout as said:
        assert said.readline() == "up\n"
    killed.kill()
    killed.wait(10)
    deadline = time.monotonic() + 10.0
    while files_of(name) != [other.name]:
        assert time.monotonic() < deadline, "nobody starts a service here: the janitor does it"
        time.sleep(0.05)
    other.close()
    other.unlink()


def test_a_janitor_does_not_hold_up_an_orderly_end(name: str) -> None:
    segment = SharedSegment.create(f"{name}-1-board", 4096)
    start = time.monotonic()
    with with_janitor(name):
        pass
    assert time.monotonic() - start < 0.9
    assert files_of(name) == [segment.name], "an orderly end is not its business"
    segment.close()
    segment.unlink()


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
