"""What a person chose on the command line of a run, as values; the settings that follow once the service is known."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from loadgen.moe.source import SimulatedMoe
from loadgen.scenario.profiles import RunProfile, run_profile
from loadgen.scenario.workload import Workload
from loadgen.tier.speculation import Speculation
from megamoe.errors import ConfigError, must_be


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line, before the service has said which profile it runs. None = as the profile says."""

    target: str
    out: Path
    profile: str
    holder: str
    wait_ready_s: float
    transport: str
    routing: str
    plain: bool
    scenario: dict[str, Any]
    tier: dict[str, Any]
    num_drafts: int | None
    workload: Workload = field(default_factory=Workload)
    simulated: SimulatedMoe | None = None
    num_micro_batches: int = 1

    def resolve(self, service_profile: str) -> RunProfile:
        """The settings of the run. Raises ConfigError naming the field."""
        base = self.workload.settings(run_profile(self.profile, service_profile))
        scenario = base.scenario.with_changes(**self.scenario)
        changes = {name: value for name, value in self.tier.items() if value is not None}
        if self.num_drafts is not None:
            changes["speculation"] = Speculation(self.num_drafts)
        return RunProfile(scenario=scenario, tier=replace(base.tier, seed=scenario.seed, **changes))


def one_number(concurrency: str | None) -> int | None:
    """`--concurrency`. Raises ConfigError."""
    if concurrency is None:
        return None
    if "," in concurrency:
        raise ConfigError(f"concurrency must be one number, got {concurrency!r}; --sweep takes a list")
    try:
        return int(concurrency)
    except ValueError:
        raise ConfigError(must_be("concurrency", "a whole number", repr(concurrency))) from None


def numbers(text: str | None) -> tuple[int, ...]:
    """`--sweep`. Raises ConfigError."""
    try:
        found = tuple(int(part) for part in text.split(",")) if text is not None else ()
    except ValueError:
        raise ConfigError(must_be("sweep", "whole numbers with commas between them", repr(text))) from None
    if len(set(found)) < len(found):  # each has its own folder
        raise ConfigError(must_be("sweep", "different numbers", repr(text)))
    return found


def writable(folder: Path) -> Path:
    """`--out`, made where it is not there: a report that has nowhere to go is noticed before the run, not after it.

    Raises ConfigError.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ConfigError(must_be("out", "a folder that can be written to", f"{folder}: {error}")) from None
