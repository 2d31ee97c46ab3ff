"""The closed loop: N lanes, each with one live session tree, and the turns that are due on them.

A lane takes the next trace when its whole tree has drained. Lanes enter their first session in the middle; later ones
start at the first turn. Owns the order of traces, the warm-up budget of a lane, and the idle cap of the system.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from loadgen.replay.session import LiveSession, Turn, start_point
from loadgen.scenario.scenario import ScenarioConfig
from loadgen.trace.trace import TraceSource, scale_tokens


@dataclass(slots=True, eq=False)
class Lane:
    """One slot of the concurrency. budget: warm-up requests that it may still send; inf in the profile."""

    lane_idx: int
    session: LiveSession
    budget: float
    version: int = 0


class Lanes:
    """All lanes of a run. `now` is clock time. Nothing is sent from here: the driver takes due turns."""

    def __init__(self, traces: TraceSource, config: ScenarioConfig, now: float) -> None:
        self.config = config
        self.num_sessions = 0
        self.num_idle_skips = 0
        self.idle_skipped_s = 0.0
        self._traces = traces
        self._deck: list[int] = []
        self._passes: Counter[str] = Counter()
        self._due: list[tuple[float, int, int]] = []
        self._warming = True
        self.lanes: list[Lane] = []
        for lane_idx in range(config.concurrency):
            session = self._next_session(now, lane_idx, first=True)
            self.lanes.append(Lane(lane_idx, session, config.warmup_requests))
        for lane in self.lanes:
            self._touch(lane)

    @property
    def num_live(self) -> int:
        """Session trees with something still to do; never more than the concurrency."""
        return sum(not lane.session.drained for lane in self.lanes)

    def due_at(self) -> float:
        """Clock time of the next turn that may be sent; inf when there is none."""
        self._skim()
        return self._due[0][0] if self._due else math.inf

    def take_due(self, now: float) -> tuple[Lane, Turn] | None:
        """The earliest due turn, now in flight, with its lane; None when none is due."""
        if self.due_at() > now:
            return None
        lane = self.lanes[self._due[0][1]]
        turn = lane.session.take_due(now)
        if turn is None:
            raise AssertionError(f"lane {lane.lane_idx} was due and has no turn: this is a bug")
        lane.budget -= 1
        self._touch(lane)
        return lane, turn

    def complete(self, lane: Lane, stream_idx: int, now: float, *, refill: bool) -> str | None:
        """A turn is over. Returns the uid of the session if its tree has drained; the lane then takes the next one
        unless refill is False."""
        session = lane.session
        session.complete(stream_idx, now)
        drained = session.uid if session.drained else None
        if drained and refill:
            lane.session = self._next_session(now, lane.lane_idx, first=False)
        self._touch(lane)
        return drained

    def begin_profile(self, now: float) -> None:
        """Warm-up is over: delays count in full from now, less what all lanes would wait together."""
        self._warming = False
        for lane in self.lanes:
            lane.budget = math.inf
            lane.session.without_delays = self.config.ignore_delays
            lane.session.begin_profile(now)
            self._touch(lane)
        wait = self.due_at() - now
        if 0 < wait < math.inf:
            self._shift(wait)

    def cap_idle(self, idle_since: float) -> None:
        """Nothing is in flight anywhere since `idle_since`: what is due later than the system's cap moves up."""
        if self.config.fixed_schedule:
            return
        excess = self.due_at() - idle_since - self.config.system_idle_cap_s * self.config.time_scale
        if 0 < excess < math.inf:
            self.num_idle_skips += 1
            self.idle_skipped_s += excess
            self._shift(excess)

    # ------------------------------------------------------------ inside

    def _shift(self, seconds: float) -> None:
        for lane in self.lanes:
            lane.session.shift(seconds)
            self._touch(lane)

    def _touch(self, lane: Lane) -> None:
        """The lane's next due time may have changed."""
        lane.version += 1
        due = lane.session.due_at()
        if due < math.inf and lane.budget > 0:
            heapq.heappush(self._due, (due, lane.lane_idx, lane.version))

    def _skim(self) -> None:
        """Drop entries that a later touch has overtaken."""
        while self._due and self.lanes[self._due[0][1]].version != self._due[0][2]:
            heapq.heappop(self._due)

    def _next_session(self, now: float, lane_idx: int, *, first: bool) -> LiveSession:
        config = self.config
        trace = self._traces[self._next_trace_idx()]
        start_t = (
            start_point(trace, config.seed, lane_idx, config.start_min, config.start_max) if first else None
        )
        self._passes[trace.id] += 1
        self.num_sessions += 1
        uid = f"{trace.id}#{self._passes[trace.id]}"
        return LiveSession(
            scale_tokens(trace, config.token_scale),
            uid,
            now,
            start_t=start_t,
            time_scale=config.time_scale,
            tree_idle_cap_s=config.tree_idle_cap_s,
            without_delays=self._warming or config.ignore_delays,
            fixed_schedule=config.fixed_schedule,
        )

    def _next_trace_idx(self) -> int:
        """Traces in a seeded order, each once before any comes again."""
        if not self._deck:
            round_idx = self.num_sessions // len(self._traces)
            digest = hashlib.sha256(f"{self.config.seed}:deck:{round_idx}".encode()).digest()
            rng = np.random.default_rng(int.from_bytes(digest[:8], "big"))
            self._deck = rng.permutation(len(self._traces)).tolist()
        return self._deck.pop()
