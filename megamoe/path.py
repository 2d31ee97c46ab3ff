"""Path choice: a pure function of agreed numbers, so that ranks never split.

`choose_path` takes the agreed plan, the bundle that every rank built alike and the agreed policy; a rank's own
count is not among its inputs. A step larger than the largest capacity is cut into sub-steps, each with its own
choice by its own agreed maximum.
"""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.bundle import Bundle, Deployment, Path
from megamoe.errors import ConfigError, InvalidArgumentError, must_be
from megamoe.step import Phase, StepPlan


@dataclass(frozen=True, kw_only=True)
class PathPolicy:
    """Which built paths may serve. `version` is agreed: a new policy takes effect at one step on all ranks.

    compact cannot be switched off: it is what everything else falls back to.
    """

    version: int = 0
    small_m_enabled: bool = False
    fixed_slot_enabled: bool = True
    large_m_enabled: bool = False
    large_m_min_tokens: int = 1024

    @classmethod
    def of(cls, deployment: Deployment) -> PathPolicy:
        """The starting policy (version 0) of a deployment."""
        return cls(
            small_m_enabled=deployment.small_m_enabled,
            large_m_enabled=deployment.large_m_enabled,
            large_m_min_tokens=deployment.large_m_min_tokens,
        )

    def allows(self, path: Path) -> bool:
        return {
            Path.SMALL_M: self.small_m_enabled,
            Path.FIXED_SLOT: self.fixed_slot_enabled,
            Path.LARGE_M: self.large_m_enabled,
            Path.COMPACT: True,
        }[path]

    def with_path(self, path: Path, enabled: bool) -> PathPolicy:
        """The next version with `path` switched. Raises ConfigError for compact."""
        if path is Path.COMPACT:
            raise ConfigError(
                "path must be small_m, fixed_slot or large_m, got compact: it can never be switched off"
            )
        switches = {
            "small_m_enabled": self.small_m_enabled,
            "fixed_slot_enabled": self.fixed_slot_enabled,
            "large_m_enabled": self.large_m_enabled,
        }
        switches[f"{path}_enabled"] = enabled
        return PathPolicy(
            version=self.version + 1,
            large_m_min_tokens=self.large_m_min_tokens,
            **switches,
        )


MAX_STAGED_POLICIES = 1024
"""Policies that a rank remembers. Older ones no plan can name but one that stayed open through as many changes: who
changes a policy waits until all ranks have staged it, so that the versions that ranks bring are close together."""


class StagedPolicies:
    """The policies that a rank has staged, by version: the newest is what it brings, older ones may still be agreed."""

    def __init__(self, first: PathPolicy) -> None:
        self._by_version = {first.version: first}
        self.newest = first

    def stage(self, policy: PathPolicy) -> None:
        """Add a newer policy. The same one twice is no error.

        Raises ConfigError when the version is known with other contents or is older than the newest.
        """
        if self._by_version.get(policy.version) == policy:
            return
        newest = self.newest.version
        if policy.version <= newest:
            raise ConfigError(must_be("policy.version", f"above the staged {newest}", policy.version))
        self._by_version[policy.version] = self.newest = policy
        if len(self._by_version) > MAX_STAGED_POLICIES:
            del self._by_version[min(self._by_version)]

    def of(self, version: int) -> PathPolicy:
        """The policy of an agreed version. Raises ConfigError if this rank has none such."""
        try:
            return self._by_version[version]
        except KeyError:
            known = ", ".join(map(str, sorted(self._by_version)[-8:]))
            raise ConfigError(
                must_be("policy_version of the plan", f"one staged here ({known})", version)
            ) from None

    def __contains__(self, policy: PathPolicy) -> bool:
        return self._by_version.get(policy.version) == policy


@dataclass(frozen=True, kw_only=True)
class SubStep:
    """One executed piece of a layer call: rows [start_row, stop_row) of every rank, on one path.

    num_rows_per_rank are the agreed counts of this piece; runtime_capacity names the runtime that serves it.
    """

    sub_step_idx: int
    start_row: int
    stop_row: int
    path: Path
    runtime_capacity: int
    num_rows_per_rank: tuple[int, ...]

    @classmethod
    def whole(cls, path: Path, runtime_capacity: int, num_rows_per_rank: tuple[int, ...]) -> SubStep:
        """The only piece of a layer call: all rows of every rank."""
        return cls(
            sub_step_idx=0,
            start_row=0,
            stop_row=max(num_rows_per_rank, default=0),
            path=path,
            runtime_capacity=runtime_capacity,
            num_rows_per_rank=num_rows_per_rank,
        )

    @property
    def max_rows(self) -> int:
        return max(self.num_rows_per_rank)


def choose_path(plan: StepPlan, bundle: Bundle, policy: PathPolicy) -> tuple[SubStep, ...]:
    """The sub-steps of a plan, in order; empty when no rank has rows.

    Rule (protocol): the first of small_m (any phase), fixed_slot (any phase), large_m (prefill step of at least
    large_m_min_tokens), compact that is built, enabled and whose capacity holds the agreed maximum.
    Raises InvalidArgumentError when the maximum is above step_rows_limit (agree refuses that before).
    """
    deployment = bundle.deployment
    if policy.version != plan.policy_version:
        raise InvalidArgumentError(
            must_be("policy.version", f"the plan's {plan.policy_version}", policy.version)
        )
    if plan.max_rows > deployment.step_rows_limit:
        raise InvalidArgumentError(
            must_be(
                "rows of a step",
                f"at most max_step_rows = {deployment.step_rows_limit}",
                plan.max_rows,
            )
        )
    capacity = deployment.max_tokens_per_rank
    sub_steps = []
    for idx, start in enumerate(range(0, plan.max_rows, capacity)):
        counts = tuple(min(max(rows - start, 0), capacity) for rows in plan.num_rows_per_rank)
        path, runtime_capacity = _first_fit(max(counts), plan.phase, bundle, policy)
        sub_steps.append(
            SubStep(
                sub_step_idx=idx,
                start_row=start,
                stop_row=start + max(counts),
                path=path,
                runtime_capacity=runtime_capacity,
                num_rows_per_rank=counts,
            )
        )
    return tuple(sub_steps)


def _first_fit(max_rows: int, phase: Phase, bundle: Bundle, policy: PathPolicy) -> tuple[Path, int]:
    for path in Path:
        if not policy.allows(path):
            continue
        if path is Path.LARGE_M and (phase is not Phase.PREFILL or max_rows < policy.large_m_min_tokens):
            continue
        for runtime_capacity in bundle.capacities(path):
            if max_rows <= runtime_capacity:
                return path, runtime_capacity
    raise AssertionError("compact is always built and holds every sub-step: this is a bug")


def is_fall_off(sub_step: SubStep, phase: Phase, bundle: Bundle, policy: PathPolicy) -> bool:
    """A decode sub-step above every enabled small_m and fixed_slot capacity, where at least one such is enabled."""
    capacities = [
        value
        for path in (Path.SMALL_M, Path.FIXED_SLOT)
        if policy.allows(path)
        for value in bundle.capacities(path)
    ]
    return phase is Phase.DECODE and bool(capacities) and sub_step.max_rows > max(capacities)
