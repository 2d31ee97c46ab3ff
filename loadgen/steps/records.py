"""What a run leaves behind, as plain values: one record per request, one per step, and counts.

Times are clock seconds. A record is written once, when its request or step is over; figures are made of records in
`report`, never on the way.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import StrEnum

from loadgen.moe.tier import SubStepSeen


class RunPhase(StrEnum):
    """Primers and warm-up requests are kept out of the figures."""

    WARMUP = "warmup"
    PROFILE = "profile"


class Status(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    CONTEXT_OVERFLOW = "context_overflow"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request. emissions: clock time of every step that emitted tokens, ascending; start_s: when it was sent.

    theoretical_hit_blocks: leading blocks that an unlimited cache would hold, of num_blocks.
    num_verify_steps and num_accepted: decode steps it was in, and the tokens they accepted before any was cut off.
    """

    uid: str
    trace_id: str
    session_uid: str
    lane_idx: int
    stream_idx: int
    turn_idx: int
    phase: RunPhase
    is_primer: bool
    status: Status
    rank: int
    num_input: int
    num_output: int
    num_emitted: int
    num_cached: int
    num_blocks: int
    theoretical_hit_blocks: int
    num_verify_steps: int
    num_accepted: int
    start_s: float
    end_s: float
    emissions: tuple[float, ...] = ()
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """Time to the first token. Only for requests that emitted."""
        return self.emissions[0] - self.start_s

    @property
    def e2el_s(self) -> float:
        """Time to the last token. Only for requests that emitted."""
        return self.emissions[-1] - self.start_s


class PathTimes:
    """Latencies of one path's sub-steps in seconds, kept in flat arrays: an hour of layer calls is millions of them.

    client: round trip of the layer call as the caller saw it; a call that was cut into pieces is shared out by their
    service times. service: the slowest rank's own time in the replies. by_rank: each replying rank's own time.
    """

    def __init__(self) -> None:
        self.client = array("d")
        self.service = array("d")
        self.by_rank: dict[int, array[float]] = {}
        self.stages: dict[str, array[float]] = {}

    @property
    def num_steps(self) -> int:
        return len(self.client)

    def add(self, client_s: float, piece: SubStepSeen, times: int = 1) -> None:
        """Note a piece that was executed `times` times, each time alike."""
        self.client.extend((client_s,) * times)
        self.service.extend((piece.total_us * 1e-6,) * times)
        for rank, total_us in piece.total_us_per_rank.items():
            self.by_rank.setdefault(rank, array("d")).extend((total_us * 1e-6,) * times)
        for stage, took_us in piece.stages_us.items():
            self.stages.setdefault(stage, array("d")).extend((took_us * 1e-6,) * times)

    def extend(self, other: PathTimes) -> None:
        self.client.extend(other.client)
        self.service.extend(other.service)
        for rank, times in other.by_rank.items():
            self.by_rank.setdefault(rank, array("d")).extend(times)
        for stage, times in other.stages.items():
            self.stages.setdefault(stage, array("d")).extend(times)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One executed step, from agreement to its last layer.

    agree_s + moe_s (all layer calls) + attention_s (waited) + overhead_s (the generator's own) = end_s - start_s.
    Where micro-batches overlap, time counts once: as agreement, else as MoE time, else as attention.
    paths: those of the sub-steps of one layer, in order; empty when nothing was executed.
    """

    step_idx: int
    run_phase: RunPhase
    phase: str
    start_s: float
    end_s: float
    attention_s: float
    agree_s: float
    num_rows_per_rank: tuple[int, ...]
    num_requests: int
    num_tokens: int
    num_completed: int
    moe_s: float
    paths: tuple[str, ...]

    @property
    def max_rows(self) -> int:
        return max(self.num_rows_per_rank)

    @property
    def overhead_s(self) -> float:
        """The generator's own time: scheduling, slicing rows, keeping records. On a virtual clock nothing but rounding
        is left of the difference, in either direction."""
        return max(self.end_s - self.start_s - self.agree_s - self.moe_s - self.attention_s, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCount:
    """Layer calls as a service should have counted them. num_steps and by_rank: sub-steps, and each replying rank's
    own times, by path."""

    num_calls: int = 0
    num_calls_failed: int = 0
    num_steps: dict[str, int] = field(default_factory=dict)
    by_rank: dict[str, dict[int, array[float]]] = field(default_factory=dict)

    @property
    def num_sub_steps(self) -> int:
        return sum(self.num_steps.values())


@dataclass(slots=True, kw_only=True)
class RunRecord:
    """Everything that a run leaves. profile_start_s and profile_end_s bound the profile; 0 when it never began.

    restarts: when another incarnation of the service's group was leased, because the one before had gone down.
    """

    requests: list[RequestRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    times: dict[tuple[RunPhase, str], PathTimes] = field(default_factory=dict)
    num_failed_steps: int = 0
    num_retried_steps: int = 0
    num_calls: int = 0
    num_calls_failed: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    run_start_s: float = 0.0
    profile_start_s: float = 0.0
    profile_end_s: float = 0.0
    num_sessions: int = 0
    num_idle_skips: int = 0
    idle_skipped_s: float = 0.0
    cancelled: bool = False
    aborted: str = ""
    restarts: list[float] = field(default_factory=list)
    before_restart: CallCount = field(default_factory=CallCount)

    def mark_restart(self, now_s: float) -> None:
        """The service counts anew from here on."""
        self.restarts.append(now_s)
        self.before_restart = self._count()

    def since_restart(self) -> CallCount:
        """What the service should have counted since its last restart, or since the run began."""
        total, before = self._count(), self.before_restart
        return CallCount(
            num_calls=total.num_calls - before.num_calls,
            num_calls_failed=total.num_calls_failed - before.num_calls_failed,
            num_steps={path: num - before.num_steps.get(path, 0) for path, num in total.num_steps.items()},
            by_rank={
                path: {
                    rank: times[len(before.by_rank.get(path, {}).get(rank, ())) :]
                    for rank, times in ranks.items()
                }
                for path, ranks in total.by_rank.items()
            },
        )

    def _count(self) -> CallCount:
        paths = {path: self.path_times(path) for _, path in self.times}
        return CallCount(
            num_calls=self.num_calls,
            num_calls_failed=self.num_calls_failed,
            num_steps={path: times.num_steps for path, times in paths.items()},
            by_rank={path: times.by_rank for path, times in paths.items()},
        )

    def add_call(
        self, phase: RunPhase, round_trip_s: float, pieces: tuple[SubStepSeen, ...], times: int = 1
    ) -> None:
        """Note a successful layer call, or `times` calls that were all alike."""
        self.num_calls += times
        total_us = sum(piece.total_us for piece in pieces)
        for piece in pieces:
            share = piece.total_us / total_us if total_us > 0 else 1 / len(pieces)
            self.times.setdefault((phase, piece.path), PathTimes()).add(round_trip_s * share, piece, times)

    def path_times(self, path: str, *phases: RunPhase) -> PathTimes:
        """The times of a path over the given phases (default: the whole run)."""
        merged = PathTimes()
        for phase in phases or tuple(RunPhase):
            merged.extend(self.times.get((phase, path), PathTimes()))
        return merged
