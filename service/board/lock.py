"""The board's lock: one holder in the group, for the few microseconds in which something is decided for all ranks.

flock on the segment's file, which the kernel releases when a process dies, under a lock of this process's threads:
about 1.2 us uncontended on the 2-core reference machine. A lock that stays taken is an UnavailableError naming who has
it.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time

from megamoe import SharedSegment
from megamoe.errors import UnavailableError
from service.board import layout

_SPINS = 50
_TIMEOUT_S = 5.0
_TRY = fcntl.LOCK_EX | fcntl.LOCK_NB
_OWNER = layout.LOCK_OWNER_AT // 8


class BoardLock:
    """`with lock:` of one process; safe from any of its threads, not reentrant."""

    __slots__ = ("_fd", "_threads", "_words", "_writer_id")

    def __init__(self, segment: SharedSegment, words: memoryview, writer_id: int) -> None:
        """words: the segment's as u64."""
        self._fd = os.open(segment.path, os.O_RDWR)
        self._threads = threading.Lock()
        self._words = words
        self._writer_id = writer_id

    def __enter__(self) -> None:
        self._threads.acquire()
        try:
            try:
                fcntl.flock(self._fd, _TRY)
            except BlockingIOError:
                self._wait()
            self._words[_OWNER] = self._writer_id
        except BaseException:
            self._threads.release()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._threads.release()

    def _wait(self) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        spins = 0
        while True:
            if spins < _SPINS:
                spins += 1
                os.sched_yield()
            elif time.monotonic() > deadline:
                owner = self._words[_OWNER]
                who = f"rank {owner}" if owner < layout.MAX_RANKS else "the supervisor"
                raise UnavailableError(
                    f"the group's board must be free within {_TIMEOUT_S} s, got held by {who}"
                )
            else:
                time.sleep(0.0002)
            try:
                return fcntl.flock(self._fd, _TRY)
            except BlockingIOError:
                pass

    def close(self) -> None:
        """Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
