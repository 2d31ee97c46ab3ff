"""One live session tree: which turn may start when, given how its earlier turns went LIVE.

A turn starts its recorded gap after the live completion of the turn before it in its stream, and not before the
sub-agents that it joins have finished. Sub-agents start when their spawning turn starts or completes live. Nothing
here knows the service; the driver asks for due turns and reports starts and completions. Gaps are kept in recorded
seconds and scaled when asked.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np

from loadgen.trace.trace import Stream, Trace, TraceRequest, streams_of


@dataclass(frozen=True, slots=True)
class Turn:
    """One request to send: its place in the session and what it asks for."""

    stream_idx: int
    turn_idx: int
    request: TraceRequest


@dataclass(slots=True)
class _Pending:
    """A turn whose predecessors are done: due `delay_s` recorded seconds after clock time `ready_at`."""

    ready_at: float
    delay_s: float


def start_point(trace: Trace, seed: int, lane_idx: int, low: float, high: float) -> float:
    """Recorded time at which a lane enters a session: uniform in [low, high] of its span.

    Seeded by the first 8 bytes (big-endian) of sha256("seed:trace:lane"), as the public harness does.
    """
    digest = hashlib.sha256(f"{seed}:{trace.id}:{lane_idx}".encode()).digest()
    rng = np.random.default_rng(int.from_bytes(digest[:8], "big"))
    start, end = trace.span
    return start + float(rng.uniform(low, high)) * (end - start)


class LiveSession:
    """A session tree on a lane. uid names this run of the trace; `now` is clock time throughout.

    start_t: recorded time at which it is entered (None = from its first turn). fixed_schedule: turns are due at their
    recorded times, counted from the entry, instead of a gap after the turn before.
    """

    def __init__(
        self,
        trace: Trace,
        uid: str,
        now: float,
        *,
        start_t: float | None = None,
        time_scale: float = 1.0,
        tree_idle_cap_s: float = math.inf,
        without_delays: bool = False,
        fixed_schedule: bool = False,
    ) -> None:
        self.trace = trace
        self.uid = uid
        self.streams: tuple[Stream, ...] = streams_of(trace)
        self.without_delays = without_delays
        self._time_scale = time_scale
        self._idle_cap_s = tree_idle_cap_s
        self._next_turn = [0] * len(self.streams)
        self._in_flight: set[int] = set()
        self._spawned = [stream.stream_idx == 0 for stream in self.streams]
        self._pending: dict[int, _Pending] = {}
        self._main_ready: tuple[float, float] | None = None
        entered_t = trace.span[0] if start_t is None else start_t
        self._schedule = (now, entered_t) if fixed_schedule else None
        if start_t is None:
            self._next_turn[0] = 0
            self._main_is_ready(now, 0.0)
            self._spawn_children(-1, now, in_flight=False)
        else:
            self._enter(start_t, now)
        self._cap_idle(now)

    # ------------------------------------------------------------ entering in the middle

    def _enter(self, start_t: float, now: float) -> None:
        main = self.streams[0]
        position = [_first_at(stream.turns, start_t) for stream in self.streams]
        if all(at == len(stream.turns) for at, stream in zip(position, self.streams)):
            position[0] = len(main.turns) - 1  # the start fell into the last call: that call is what is left
        self._next_turn = position
        for stream in self.streams[1:]:
            idx = stream.stream_idx
            over = position[idx] == len(stream.turns)
            self._spawned[idx] = over or stream.spawn_turn_idx < position[0]
            if self._spawned[idx] and not over:
                self._pending[idx] = _Pending(now, max(stream.turns[position[idx]].t - start_t, 0.0))
        if position[0] < len(main.turns):
            self._main_is_ready(now, max(main.turns[position[0]].t - start_t, 0.0))

    def primers(self) -> list[Turn]:
        """The last turn before the start point of every stream that is alive there: what the caches would hold."""
        turns = []
        for stream in self.streams:
            idx = stream.stream_idx
            if self._spawned[idx] and 0 < self._next_turn[idx] < len(stream.turns):
                turn_idx = self._next_turn[idx] - 1
                turns.append(Turn(idx, turn_idx, stream.turns[turn_idx]))
        return turns

    # ------------------------------------------------------------ what the driver asks

    def due_at(self) -> float:
        """Clock time of the next turn that may start; inf when none is pending."""
        return min((self._due(pending) for pending in self._pending.values()), default=math.inf)

    def take_due(self, now: float) -> Turn | None:
        """Start the earliest turn that is due, or return None. The caller sends it."""
        if not self._pending:
            return None
        idx = min(self._pending, key=lambda stream_idx: (self._due(self._pending[stream_idx]), stream_idx))
        if self._due(self._pending[idx]) > now:
            return None
        del self._pending[idx]
        turn_idx = self._next_turn[idx]
        self._next_turn[idx] += 1
        self._in_flight.add(idx)
        if idx == 0:
            self._spawn_children(turn_idx, now, in_flight=True)
        return Turn(idx, turn_idx, self.streams[idx].turns[turn_idx])

    def complete(self, stream_idx: int, now: float) -> None:
        """The turn in flight of a stream is over (completed or failed)."""
        self._in_flight.remove(stream_idx)
        stream = self.streams[stream_idx]
        next_idx = self._next_turn[stream_idx]
        if stream_idx == 0:
            self._spawn_children(next_idx - 1, now, in_flight=False)
            if next_idx < len(stream.turns):
                self._main_is_ready(now, self._delay_s(stream, next_idx, now))
        elif next_idx < len(stream.turns):
            self._pending[stream_idx] = _Pending(now, self._delay_s(stream, next_idx, now))
        self._release_gate(now)
        self._cap_idle(now)

    @property
    def drained(self) -> bool:
        """The main agent and every sub-agent are done: the lane is free."""
        return not self._in_flight and not self._pending and self._main_ready is None

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def begin_profile(self, now: float) -> None:
        """Delays count again, in full, from `now` (the end of warm-up); a fixed schedule goes on from the next turn."""
        self.without_delays = False
        if self._schedule is not None:
            streams = [self.streams[idx] for idx in (*self._pending, *([0] if self._main_ready else []))]
            coming = [stream.turns[self._next_turn[stream.stream_idx]].t for stream in streams]
            self._schedule = (now, min(coming, default=self._schedule[1]))
            for idx, pending in self._pending.items():
                pending.delay_s = self._delay_s(self.streams[idx], self._next_turn[idx], now)
            if self._main_ready is not None:
                self._main_ready = (now, self._delay_s(self.streams[0], self._next_turn[0], now))
        for pending in self._pending.values():
            pending.ready_at = now
        if self._main_ready is not None:
            self._main_ready = (now, self._main_ready[1])
        self._cap_idle(now)

    def shift(self, seconds: float) -> None:
        """Everything pending becomes due `seconds` of clock time earlier."""
        for pending in self._pending.values():
            pending.ready_at -= seconds
        if self._schedule is not None:
            self._schedule = (self._schedule[0] - seconds, self._schedule[1])

    # ------------------------------------------------------------ inside

    def _due(self, pending: _Pending) -> float:
        return pending.ready_at + (0.0 if self.without_delays else pending.delay_s * self._time_scale)

    def _delay_s(self, stream: Stream, turn_idx: int, now: float) -> float:
        """Recorded seconds from `now`, when a stream may go on, to its turn."""
        if self._schedule is None:
            return stream.gaps_s[turn_idx]
        began, entered_t = self._schedule
        return max(stream.turns[turn_idx].t - entered_t - (now - began) / self._time_scale, 0.0)

    def _main_is_ready(self, now: float, gap_s: float) -> None:
        self._main_ready = (now, gap_s)
        self._release_gate(now)

    def _release_gate(self, now: float) -> None:
        """Make the next main turn pending once the sub-agents that it joins are done."""
        if self._main_ready is None:
            return
        next_idx = self._next_turn[0]
        for stream in self.streams[1:]:
            idx = stream.stream_idx
            if stream.join_turn_idx == next_idx and not self._stream_done(idx):
                return
        ready_at, gap_s = self._main_ready
        self._main_ready = None
        waited_s = (now - ready_at) / self._time_scale
        self._pending[0] = _Pending(now, max(gap_s - waited_s, 0.0))

    def _stream_done(self, idx: int) -> bool:
        stream = self.streams[idx]
        return self._spawned[idx] and self._next_turn[idx] == len(stream.turns) and idx not in self._in_flight

    def _spawn_children(self, main_turn_idx: int, now: float, *, in_flight: bool) -> None:
        for stream in self.streams[1:]:
            idx = stream.stream_idx
            if (
                stream.spawn_turn_idx == main_turn_idx
                and stream.spawn_in_flight == in_flight
                and not self._spawned[idx]
            ):
                self._spawned[idx] = True
                self._pending[idx] = _Pending(now, self._delay_s(stream, 0, now))

    def _cap_idle(self, now: float) -> None:
        """With nothing in flight the tree waits at most its idle cap: the excess is taken off everything pending."""
        if self._in_flight or not self._pending or self._schedule is not None:
            return
        excess = self.due_at() - (now + self._idle_cap_s * self._time_scale)
        if excess > 0:
            self.shift(excess)


def stopped_length(num_output: int, seed: int, uid: str) -> int:
    """Output of a request that may stop before its recorded length: uniform from 1 to it, seeded by the request."""
    digest = hashlib.sha256(f"{seed}:eos:{uid}".encode()).digest()
    return 1 + int.from_bytes(digest[:8], "big") % num_output


def _first_at(turns: tuple[TraceRequest, ...], t: float) -> int:
    """Index of the first turn recorded at or after t; len(turns) when there is none."""
    return next((idx for idx, turn in enumerate(turns) if turn.t >= t), len(turns))
