"""Permit or refuse at once: by agreed numbers when a plan is agreed, and by a bounded gate before the rings.

Overload is never found in the middle of a plan. Every intent carries how loaded its rank is; `admit` is a pure
function of those numbers, so that all ranks admit a plan or all refuse it. The `Gate` is for a process that lets
many callers in (the front): a number of requests in flight, above which the next one is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from megamoe import Deployment
from megamoe.errors import DrainingError, InvalidArgumentError, OverloadedError, must_be


@dataclass(frozen=True, kw_only=True)
class RankLoad:
    """How loaded a rank is when it brings an intent: numbers that its entry on the board carries.

    queued_calls: layer calls that wait for their turn in the total order.
    open_rows: agreed maxima of its open plans of other micro-batches, summed.
    """

    queued_calls: int = 0
    open_rows: int = 0


@dataclass(frozen=True, kw_only=True)
class AdmissionLimits:
    """Above these a plan is refused on all ranks. Settings of the service."""

    max_queued_calls: int
    max_open_rows: int

    def __post_init__(self) -> None:
        for name in ("max_queued_calls", "max_open_rows"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(must_be(name, "at least 1", getattr(self, name)))

    @classmethod
    def of(cls, deployment: Deployment, *, max_micro_batches: int) -> AdmissionLimits:
        """As much as the rings hold: two calls of max_step_rows, or one step of max_tokens_per_rank a micro-batch."""
        rows = max(2 * deployment.step_rows_limit, max_micro_batches * deployment.max_tokens_per_rank)
        return cls(max_queued_calls=8 * max_micro_batches, max_open_rows=rows)


def admit(loads: Sequence[RankLoad], max_rows: int, limits: AdmissionLimits) -> None:
    """Raise OverloadedError if a plan of max_rows (agreed maximum) must wait; loads in rank order.

    A group that has nothing open admits any plan that fits a step: else it could never run.
    """
    for rank, load in enumerate(loads):
        if load.queued_calls > limits.max_queued_calls:
            raise OverloadedError(
                must_be(
                    f"layer calls queued on rank {rank}",
                    f"at most max_queued_calls = {limits.max_queued_calls}",
                    load.queued_calls,
                )
            )
        if load.open_rows and load.open_rows + max_rows > limits.max_open_rows:
            raise OverloadedError(
                must_be(
                    f"rows of open plans on rank {rank} and of this one",
                    f"at most max_open_rows = {limits.max_open_rows}",
                    load.open_rows + max_rows,
                )
            )


class Gate:
    """At most max_in_flight requests at a time; the next is refused, not queued. Thread-safe.

    `with gate:` holds a place. After `drain()` every new request gets DrainingError; those inside finish.
    """

    def __init__(self, max_in_flight: int, *, setting: str = "max_in_flight") -> None:
        if max_in_flight < 1:
            raise InvalidArgumentError(must_be(setting, "at least 1", max_in_flight))
        self.max_in_flight = max_in_flight
        self._setting = setting
        self._lock = threading.Lock()
        self._in_flight = 0
        self._draining = False

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def drain(self, draining: bool = True) -> None:
        """From now on refuse (or, with False, permit again)."""
        self._draining = draining

    def __enter__(self) -> Gate:
        with self._lock:
            if self._draining:
                raise DrainingError("the service is draining: no new steps are taken")
            if self._in_flight >= self.max_in_flight:
                raise OverloadedError(
                    must_be(
                        "requests in flight", f"at most {self._setting} = {self.max_in_flight}", "one more"
                    )
                )
            self._in_flight += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._in_flight -= 1
