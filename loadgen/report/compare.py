"""Two sides of one question: what changed from A to B, and how sure that is.

Each side is one run or several repeats of it. The change is that of the geometric means. With repeats on both sides it
has a 95 % interval, on logarithms, because ratios are what scatters: Student's over pairs where both sides ran the same
seeds, since a seed's sessions are the same on both; else Welch's. Without repeats there is no interval, and a change is
held against how much public replicates of this workload scatter.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from loadgen.report.run import Run, read_run
from megamoe.errors import ConfigError, must_be

REPLICATE_NOISE = {"throughput": 0.057, "latency": 0.07}
"""Scatter between runs of the same configuration, as published for AgentX: throughput, and P90 ITL."""
METRICS = (
    ("total_tput_tps", "total tok/s per GPU", 1.0, "throughput"),
    ("output_tput_tps", "output tok/s per GPU", 1.0, "throughput"),
    ("p90_intvty", "P90 interactivity tok/s/user", 1.0, "throughput"),
    ("itl.p50", "ITL p50 ms", 1e3, "latency"),
    ("itl.p90", "ITL p90 ms", 1e3, "latency"),
    ("step_interval.p50", "step interval p50 ms", 1e3, "latency"),
    ("ttft.p50", "TTFT p50 ms", 1e3, "latency"),
    ("ttft.p90", "TTFT p90 ms", 1e3, "latency"),
    ("e2el.p50", "E2E latency p50 ms", 1e3, "latency"),
)
"""(path in the report, label with unit, factor to that unit, whether more or less is better)."""
_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5 % point of Student's t by degrees of freedom, from 1; the last one is used beyond."""
_PASSED = {"seed", "generation", "concurrency"}
"""Settings in which runs of one side may differ, or that the table tells anyway."""

Verdict = Literal["better", "worse", "no difference shown"]


@dataclass(frozen=True)
class Change:
    """One metric. a, b: geometric means of the sides. ratio - 1 is the change; low, high: its interval, None without
    repeats."""

    label: str
    a: float
    b: float
    low: float | None
    high: float | None
    verdict: Verdict

    @property
    def change(self) -> float:
        return self.b / self.a - 1.0


@dataclass(frozen=True)
class Comparison:
    """paired: repeats were matched by seed. changes: metrics that both sides have. differences: settings that differ
    beside what was meant to."""

    num_a: int
    num_b: int
    paired: bool
    changes: tuple[Change, ...]
    differences: tuple[str, ...]

    @property
    def repeated(self) -> bool:
        return min(self.num_a, self.num_b) >= 2


def read_side(path: Path) -> list[Run]:
    """The runs of one side: a report.json, or all of them in a folder and below.

    Raises ConfigError naming the path when there is none.
    """
    if not path.is_dir():
        return [read_run(path)]
    files = sorted(path.rglob("report.json"))
    if not files:
        raise ConfigError(f"{path}: must be a report.json or a folder with one below, got none")
    return [read_run(file) for file in files]


def compare_runs(a: Sequence[Run], b: Sequence[Run]) -> Comparison:
    """What changed from a to b. Raises ConfigError when there is no figure that both have."""
    a, b = sorted(a, key=_seed), sorted(b, key=_seed)
    seeds = [_seed(run) for run in a]
    paired = len(set(seeds)) == len(seeds) and seeds == [_seed(run) for run in b]
    changes = []
    for name, label, factor, kind in METRICS:
        values_a, values_b = _values(a, name), _values(b, name)
        if values_a and values_b:
            matched = paired and len(values_a) == len(values_b) == len(a)
            changes.append(_change(label, factor, kind, values_a, values_b, matched))
    if not changes:
        completed = [sum(run.report["requests"]["completed"] for run in side) for side in (a, b)]
        raise ConfigError(must_be("completed requests of A and of B", "above 0 on both", completed))
    return Comparison(len(a), len(b), paired, tuple(changes), tuple(_differences(a, b)))


def _seed(run: Run) -> int:
    return int(run.report["config"]["scenario"]["seed"])


def _change(
    label: str, factor: float, kind: str, a: Sequence[float], b: Sequence[float], paired: bool
) -> Change:
    logs_a, logs_b = [math.log(value) for value in a], [math.log(value) for value in b]
    mean_a, mean_b = statistics.fmean(logs_a), statistics.fmean(logs_b)
    moved = mean_b - mean_a
    low = high = None
    if len(a) >= 2 and len(b) >= 2:
        margin = _paired_margin(logs_a, logs_b) if paired else _welch_margin(logs_a, logs_b)
        low, high = math.expm1(moved - margin), math.expm1(moved + margin)
        shown = low > 0 or high < 0
    else:
        shown = abs(math.expm1(moved)) > REPLICATE_NOISE[kind]
    gain = moved if kind == "throughput" else -moved
    verdict: Verdict = "no difference shown" if not shown else "better" if gain > 0 else "worse"
    return Change(label, math.exp(mean_a) * factor, math.exp(mean_b) * factor, low, high, verdict)


def _t_975(degrees: float) -> float:
    return _T_975[min(max(int(degrees), 1), len(_T_975)) - 1]


def _paired_margin(a: Sequence[float], b: Sequence[float]) -> float:
    """Half width of the 95 % interval of the mean of b - a, pair by pair."""
    moved = [after - before for before, after in zip(a, b, strict=True)]
    return statistics.stdev(moved) / math.sqrt(len(moved)) * _t_975(len(moved) - 1)


def _welch_margin(a: Sequence[float], b: Sequence[float]) -> float:
    """Half width of the 95 % interval of mean(b) - mean(a); degrees of freedom are rounded down."""
    parts = [(statistics.variance(side) / len(side), len(side) - 1) for side in (a, b)]
    total = sum(part for part, _ in parts)
    if total == 0:
        return 0.0
    freedom = total**2 / sum(part**2 / degrees for part, degrees in parts)
    return math.sqrt(total) * _t_975(freedom)


def _values(runs: Sequence[Run], name: str) -> list[float]:
    values = []
    for run in runs:
        value: Any = run.report
        for part in name.split("."):
            value = value[part]
        values.append(value)
    return [float(value) for value in values if value]


def _differences(a: Sequence[Run], b: Sequence[Run]) -> list[str]:
    """Settings whose values on one side are not those on the other, one sentence each."""
    sides = [_settings(a), _settings(b)]
    found = []
    for name in sorted(set(sides[0]) | set(sides[1])):
        mine, theirs = (side.get(name, set()) for side in sides)
        if mine != theirs and name.rsplit(".", 1)[-1] not in _PASSED:
            found.append(
                f"{name}: {' / '.join(sorted(mine)) or '-'} against {' / '.join(sorted(theirs)) or '-'}"
            )
    return found


def _settings(runs: Sequence[Run]) -> dict[str, set[str]]:
    """Name -> values of every setting that makes a run what it is."""
    settings: dict[str, set[str]] = {}
    for run in runs:
        report = run.report
        chosen = {name: report[name] for name in ("scenario", "traces", "routing", "moe_time", "layers")}
        parts = (
            chosen
            | {"service": report["service"], "simulated": report.get("simulated") or {}}
            | report["config"]
        )
        for name, value in _flat("", parts):
            settings.setdefault(name, set()).add(value)
    return settings


def _flat(prefix: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [
            pair
            for name, inner in value.items()
            for pair in _flat(f"{prefix}.{name}" if prefix else name, inner)
        ]
    return [(prefix, ", ".join(map(str, value)) if isinstance(value, list) else str(value))]
