"""The clock that a replay runs on: injected, so that the same driver runs live and in virtual time.

All times are seconds on a monotonic axis whose zero means nothing. A virtual clock moves only when somebody waits
on it, so an hour of replay takes as long as its arithmetic.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """What the driver needs: the time, and a way to let it pass."""

    def now(self) -> float: ...

    async def sleep_until(self, deadline: float) -> None:
        """Return at `deadline` or later; at once when it has passed."""


class RealClock:
    """Wall time of this machine."""

    def now(self) -> float:
        return time.perf_counter()

    async def sleep_until(self, deadline: float) -> None:
        delay = deadline - time.perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)


YIELD_EVERY_S = 0.05
"""Wall seconds after which a jump on a virtual clock lets other tasks (display, signals) run."""


class VirtualClock:
    """Time that passes by waiting: sleep_until jumps. Never goes backwards."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._yielded = time.monotonic()

    def now(self) -> float:
        return self._now

    async def sleep_until(self, deadline: float) -> None:
        self._now = max(self._now, deadline)
        if time.monotonic() - self._yielded > YIELD_EVERY_S:
            await asyncio.sleep(0)
            self._yielded = time.monotonic()

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass, for whoever simulates work without awaiting."""
        if seconds < 0:
            raise ValueError(f"seconds must be at least 0, got {seconds}")
        self._now += seconds
