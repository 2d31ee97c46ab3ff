"""What a person chooses about a run, what the AgentX scenario locks, and whether a run could be submitted.

Locked means: a run that changes it is refused, or with unsafe_override goes on and is marked as not valid, with the
reason. Scaling time or tokens for short runs on small machines is allowed and marked the same way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from loadgen.corpus.synth import MAX_SESSIONS
from megamoe.errors import ConfigError, must_be

AGENTX, UNIFORM, FIXED = "agentx", "uniform", "fixed"
SCENARIOS = (AGENTX, UNIFORM, FIXED)
MIN_DURATION_S = 900.0
"""Shortest profile that the public harness accepts for this workload; shorter runs are marked."""


@dataclass(frozen=True, kw_only=True)
class ScenarioConfig:
    """A run of a scenario; the defaults are those of AgentX. Times are recorded seconds unless a name says wall.

    concurrency: lanes = live session trees. duration_wall_s: length of the profile. warmup_requests: requests a lane
    after its primers, without delays. time_scale: wall seconds per recorded second, for delays and modelled attention
    time. token_scale: factor on prompt and output lengths. max_failed_share: above it the run is aborted.
    max_overflow_share: above it a submission is invalid. grace_wall_s: how long requests in flight at the end may
    take to finish. step_retries: how often a failed MoE step is tried again before its requests fail. ignore_eos: off,
    a request stops at a seeded length below the recorded one. fixed_schedule: turns are due at their recorded times
    instead of after the live completion of the turn before (and never before it). sweep: the concurrencies, by
    commas, of which this run is one.
    Raises ConfigError naming the field; for locked fields the sentence says how to go on.
    """

    scenario: str = AGENTX
    concurrency: int = 128
    duration_wall_s: float = 3600.0
    seed: int = 42
    num_traces: int = 393
    warmup_requests: int = 10
    start_min: float = 0.25
    start_max: float = 0.75
    tree_idle_cap_s: float = 300.0
    system_idle_cap_s: float = 10.0
    time_scale: float = 1.0
    token_scale: float = 1.0
    slice_s: float = 1.0
    max_failed_share: float = 0.10
    min_requests_to_abort: int = 20
    max_overflow_share: float = 0.01
    grace_wall_s: float = 30.0
    step_retries: int = 1
    streaming: bool = True
    ignore_eos: bool = True
    cache_bust: bool = True
    ignore_delays: bool = False
    fixed_schedule: bool = False
    request_rate: float = 0.0
    sweep: str = ""
    unsafe_override: bool = False

    def __post_init__(self) -> None:
        if self.scenario not in SCENARIOS:
            raise ConfigError(must_be("scenario", f"one of {', '.join(SCENARIOS)}", repr(self.scenario)))
        for name in (field.name for field in fields(self) if field.type == "float"):
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(must_be(name, "finite", getattr(self, name)))
        positive = ("duration_wall_s", "time_scale", "token_scale", "slice_s")
        for name in positive:
            if getattr(self, name) <= 0:
                raise ConfigError(must_be(name, "above 0", getattr(self, name)))
        for name in ("concurrency", "num_traces"):
            if not 1 <= getattr(self, name) <= MAX_SESSIONS:
                raise ConfigError(must_be(name, f"from 1 to {MAX_SESSIONS:,}", getattr(self, name)))
        for name in ("seed", "warmup_requests", "grace_wall_s", "step_retries", "request_rate"):
            if getattr(self, name) < 0:
                raise ConfigError(must_be(name, "at least 0", getattr(self, name)))
        if self.token_scale > 1 or self.time_scale > 1:
            raise ConfigError(
                must_be("time_scale and token_scale", "at most 1", (self.time_scale, self.token_scale))
            )
        if not 0 <= self.start_min <= self.start_max <= 1:
            raise ConfigError(
                must_be("start_min <= start_max", "in [0, 1]", (self.start_min, self.start_max))
            )
        if self.broken_locks and not self.unsafe_override:
            raise ConfigError(
                f"scenario {self.scenario} {'; '.join(self.broken_locks)}; --unsafe-override goes on with "
                "submission_valid=false"
            )

    @property
    def broken_locks(self) -> tuple[str, ...]:
        """What this run changes of what the scenario locks, one clause each. Only AgentX locks anything."""
        broken: list[str] = []
        if self.scenario != AGENTX:
            return ()
        if not self.streaming:
            broken.append("locks streaming on, got off")
        if not self.ignore_eos:
            broken.append("locks ignore_eos on, got off")
        if not self.cache_bust:
            broken.append("locks the cache-bust marker of a new lane on, got off")
        if self.ignore_delays:
            broken.append("forbids ignoring the recorded delays")
        if self.fixed_schedule:
            broken.append("forbids a fixed schedule")
        if self.sweep:
            broken.append(f"forbids a list of concurrencies, got {self.sweep}")
        if self.request_rate:
            broken.append(f"forbids a fixed request rate, got {self.request_rate:g} a second")
        return tuple(broken)

    @property
    def invalid_reasons(self) -> tuple[str, ...]:
        """Why a run with this configuration cannot be submitted, before it has begun."""
        reasons = [f"the scenario {clause}" for clause in self.broken_locks]
        if self.scenario != AGENTX:
            reasons.append(f"the scenario is {self.scenario}, not {AGENTX}")
        if self.unsafe_override:
            reasons.append("unsafe_override is set")
        if self.time_scale != 1.0:
            reasons.append(f"time_scale is {self.time_scale:g}, not 1")
        if self.token_scale != 1.0:
            reasons.append(f"token_scale is {self.token_scale:g}, not 1")
        if self.duration_wall_s < MIN_DURATION_S:
            reasons.append(f"duration is {self.duration_wall_s:g} s, below {MIN_DURATION_S:g} s")
        return tuple(reasons)

    def with_changes(self, **changes: object) -> ScenarioConfig:
        """A copy with the given fields changed; None means: as it was."""
        return replace(self, **{name: value for name, value in changes.items() if value is not None})  # type: ignore[arg-type]
