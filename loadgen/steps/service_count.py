"""What the service itself counted during a run; a restart of its group begins a new count.

Counters live and die with the rank processes. Calls that a group made before it went down are counted by nobody any
more, so the comparison covers what was called since the last restart, and the report says so.
"""

from __future__ import annotations

from collections.abc import Callable

from loadgen.moe.scrape import Counters, scrape, scrape_settled
from loadgen.moe.tier import TierInfo
from loadgen.steps.records import RunRecord
from megamoe.errors import UnavailableError


class ServiceCount:
    """Reads the counters at both ends of a run. info: facts of the service as it is now; clock: the run's time."""

    def __init__(self, info: Callable[[], TierInfo], record: RunRecord, now: Callable[[], float]) -> None:
        self._info = info
        self._record = record
        self._now = now
        self._before: Counters | None = None
        self._not_counted = ""

    async def begin(self) -> None:
        """Note what has been counted so far."""
        urls = self._info().metrics_urls
        self._before = None
        if not urls:
            self._not_counted = "the service names no metrics addresses"
            return
        try:
            self._before, self._not_counted = await scrape(urls), ""
        except UnavailableError as error:
            self._not_counted = str(error)

    async def restarted(self) -> None:
        """The group is another one now: what its predecessor counted is gone."""
        self._record.mark_restart(self._now())
        await self.begin()

    async def end(self) -> tuple[Counters | None, str]:
        """What was counted since; None with the reason when it cannot be read."""
        if self._before is None:
            return None, self._not_counted
        since = self._record.since_restart()
        try:
            counted = await scrape_settled(
                self._info().metrics_urls, self._before, since.num_calls, since.num_sub_steps
            )
        except UnavailableError as error:
            return None, str(error)
        return counted, ""
