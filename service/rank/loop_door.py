"""What co-located callers need of a rank's step loop, from any thread: rings read, memory opened, closed and pinned.

Owns the jobs that only the thread of the runtime may do: it does them between two layer calls.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from megamoe import MemoryHandle, MemoryKind, OpenMemory
from megamoe.errors import HeapError, UnavailableError
from service.rank.runtime_like import RuntimeLike
from service.rank.state import RankState
from service.ring.bell import Bell
from service.ring.consumer import RingConsumer

log = logging.getLogger(__name__)


class LoopDoor:
    """See the module. state: under `lock`. bell: wakes the loop."""

    def __init__(
        self, rank: int, runtime: RuntimeLike, state: RankState, lock: threading.Lock, bell: Bell
    ) -> None:
        self._rank = rank
        self._runtime = runtime
        self._state = state
        self._lock = lock
        self._bell = bell
        self._is_shut = False

    def shut(self) -> None:
        """The loop ends: jobs that come from now on are refused. Under the lock, before the last `run_jobs`."""
        self._is_shut = True

    @property
    def memory_kinds(self) -> tuple[MemoryKind, ...]:
        """Kinds of memory that callers may lend."""
        return self._runtime.memory_kinds

    def open_memory(self, handle: MemoryHandle) -> OpenMemory:
        """See Runtime.open_memory. On the thread that owns the runtime."""
        return self._runtime.open_memory(handle)

    def pin(self, ring: RingConsumer) -> None:
        """Let the device reach the rows of a ring where they lie, until it is closed. On the runtime's thread."""
        with contextlib.ExitStack() as pinned:
            try:
                for memory in ring.memories:
                    pinned.callback(self._runtime.pin(memory))
            except HeapError as error:
                text = "rank %d: rows of a ring are copied on their way to the device: %s"
                log.warning(text, self._rank, error)
                return
            ring.on_close = pinned.pop_all().close

    def with_lock(self) -> threading.Lock:
        """Hold the state still: for a few microseconds."""
        return self._lock

    def check_lease(self, serial: int) -> None:
        """Raise StaleCallError unless the lease is in force; its holder was heard of."""
        with self._lock:
            self._state.plans.check_lease(serial, time.monotonic())

    def attach(self, ring: RingConsumer) -> None:
        """Read this ring too. Under the lock."""
        self._state.attach(ring)

    def retire(self, ring: RingConsumer, on_closed: Callable[[], None]) -> None:
        """Finish what this ring's caller announced, then close it."""
        with self._lock:
            self._state.retire(ring, on_closed)
        self._bell(True)

    def on_device(self, job: Callable[[], None]) -> Future[None]:
        """Run a job on the thread that owns the runtime, between two layer calls."""
        done: Future[None] = Future()
        with self._lock:
            if self._is_shut:
                done.set_exception(UnavailableError(f"rank {self._rank} stops"))
            else:
                self._state.jobs.append(partial(_run, job, done))
        self._bell(True)
        return done

    def close_memory(self, memory: OpenMemory, done: Future[None]) -> None:
        """Close it on the thread that owns the runtime. Under the lock."""
        self._state.jobs.append(partial(_run, memory.close, done))
        self._bell(True)

    def run_jobs(self) -> None:
        """On the device thread, not under the lock: opening memory can take long, and jobs take the lock themselves."""
        with self._lock:
            jobs, self._state.jobs = self._state.jobs, []
        for job in jobs:
            job()


def _run(job: Callable[[], None], done: Future[None]) -> None:
    """A job whose outcome is `done`'s; whoever waited for it may have given up."""
    if not done.set_running_or_notify_cancel():
        return
    try:
        job()
    except Exception as error:
        done.set_exception(error)
    else:
        done.set_result(None)
