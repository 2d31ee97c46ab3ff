"""Segments that are really there, and words that processes sleep on."""

from __future__ import annotations

import multiprocessing
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from megamoe import SharedSegment, shm_free_bytes, unlink_all
from megamoe.errors import HeapError, InvalidArgumentError

PREFIX = f"megamoe-test-shm-{os.getpid()}"


@pytest.fixture
def segment() -> Iterator[SharedSegment]:
    made = SharedSegment.create(f"{PREFIX}-a", 10_000)
    yield made
    made.close()
    made.unlink()


def test_two_mappings_share_bytes(segment: SharedSegment) -> None:
    other = SharedSegment.attach(segment.name)
    segment.tensor(64, (2, 3), torch.float32).fill_(1.5)
    assert torch.equal(other.tensor(64, (2, 3), torch.float32), torch.full((2, 3), 1.5))
    assert other.num_bytes >= 10_000
    other.close()
    assert os.path.exists(f"/dev/shm/{segment.name}"), "closing an attachment removes nothing"


def test_views_outside_are_refused(segment: SharedSegment) -> None:
    for offset, shape in ((-4, (1,)), (segment.num_bytes, (1,)), (0, (2**33,))):
        with pytest.raises(InvalidArgumentError, match="inside its"):
            segment.tensor(offset, shape, torch.float32)
    with pytest.raises(InvalidArgumentError, match="multiple of 4"):
        segment.word(6)


def test_a_full_dev_shm_is_an_error_and_leaves_nothing() -> None:
    name = f"{PREFIX}-big"
    with pytest.raises(HeapError, match=f"{name} must be at least") as caught:
        SharedSegment.create(name, shm_free_bytes() + 2**40)
    assert "bytes" in str(caught.value)
    assert not os.path.exists(f"/dev/shm/{name}")


def test_names(segment: SharedSegment) -> None:
    with pytest.raises(HeapError, match="exists already"):
        SharedSegment.create(segment.name, 1)
    with pytest.raises(HeapError, match=r"not there after 0\.02 s"):
        SharedSegment.attach(f"{PREFIX}-none", timeout_s=0.02)
    for name in ("other", "megamoe-a/../../etc"):
        with pytest.raises(InvalidArgumentError, match="segment name"):
            SharedSegment.create(name, 1)
    with pytest.raises(InvalidArgumentError, match="prefix"):
        unlink_all("")
    assert unlink_all(PREFIX) == [segment.name]


def test_exit_of_an_attached_process_keeps_the_memory(segment: SharedSegment) -> None:
    """Python's own SharedMemory would unlink it (resource tracker, before 3.13)."""
    code = f"from megamoe import SharedSegment; SharedSegment.attach({segment.name!r}).buf[0] = 7"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert segment.buf[0] == 7
    assert os.path.exists(f"/dev/shm/{segment.name}")


def _answer(name: str) -> None:
    other = SharedSegment.attach(name)
    ask, reply = other.word(0), other.word(64)
    for value in range(50):
        assert ask.wait_while(value, 20.0), f"nobody asked {value + 1}"
        reply.store(value + 1)
        reply.wake_all()


def test_ping_pong_between_processes(segment: SharedSegment) -> None:
    peer = multiprocessing.get_context("spawn").Process(target=_answer, args=(segment.name,))
    peer.start()
    ask, reply = segment.word(0), segment.word(64)
    for value in range(50):
        ask.store(value + 1)
        ask.wake_all()
        assert reply.wait_while(value, 20.0), f"no answer to {value + 1}"
        assert reply.load() == value + 1
    peer.join(20.0)
    assert peer.exitcode == 0


def test_wait_times_out_asleep(segment: SharedSegment) -> None:
    word = segment.word(128)
    before = resource.getrusage(resource.RUSAGE_THREAD)
    start = time.monotonic()
    assert word.wait_while(0, 0.3) is False
    waited_s = time.monotonic() - start
    after = resource.getrusage(resource.RUSAGE_THREAD)
    assert 0.29 <= waited_s < 5.0
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 0.1, "it must not spin"


def test_equality_only_over_the_wrap(segment: SharedSegment) -> None:
    word = segment.word(192)
    word.store(2**32 - 1)
    assert word.load() == 2**32 - 1
    woken: list[bool] = []
    waiter = threading.Thread(target=lambda: woken.append(word.wait_while(2**32 - 1, 20.0)))
    waiter.start()
    word.store(2**32)
    word.wake_all()
    waiter.join(20.0)
    assert woken == [True]
    assert word.load() == 0
    assert word.wait_while(-1, 0.0), "values are taken modulo 2^32"
