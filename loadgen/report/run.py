"""One run as the page sees it: its report, and its time slices binned to what a screen shows."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from loadgen.report.report import PATHS
from loadgen.scenario.scenario import AGENTX
from megamoe.errors import ConfigError

Array = npt.NDArray[np.float64]
ENGINE = "engine"
"""Scenario of a report whose requests came from outside: nobody configured their concurrency."""
SCHEMA_FILE = Path(__file__).parent / "schemas" / "report.schema.json"


@dataclass(frozen=True)
class Run:
    """report: the JSON; slices: columns of slices.csv by name, one entry a slice. name: the run's folder."""

    name: str
    report: dict[str, Any]
    slices: dict[str, Array]

    @property
    def concurrency(self) -> int:
        return int(self.report["config"]["scenario"]["concurrency"])

    @property
    def title(self) -> str:
        """What was run, in a few words."""
        scenario = str(self.report["scenario"])
        return scenario if scenario == ENGINE else f"{scenario} at concurrency {self.concurrency}"

    @property
    def series(self) -> str:
        """What a run has in common with runs that differ in concurrency alone."""
        report, service = self.report, self.report["service"]
        simulated = report.get("simulated")
        tier = report["config"]["attention_tier"]
        source = f"served by {service['backend']}"
        if simulated:
            every = set(simulated["paths"]) == set(PATHS)
            source = "simulated, " + ("all paths" if every else " + ".join(simulated["paths"]))
        parts = [source, f"{tier['speculation']['num_drafts']} drafts"]
        if report["scenario"] != AGENTX:
            parts.insert(0, report["scenario"])
        return ", ".join(parts)

    @property
    def duration_s(self) -> float:
        """Seconds that the slices cover."""
        return self.slice_s * self._num_slices

    @property
    def slice_s(self) -> float:
        return float(self.report["config"]["scenario"]["slice_s"])

    @property
    def _num_slices(self) -> int:
        return len(next(iter(self.slices.values()), ()))

    def bin_width_s(self, max_bins: int) -> float:
        """Whole slices, so many that at most max_bins bins cover the run."""
        return self.slice_s * float(max(-(-self._num_slices // max_bins), 1))

    def bin_times(self, max_bins: int) -> Array:
        """Middle of every bin, seconds from the start of the profile."""
        width = self.bin_width_s(max_bins)
        return np.asarray(
            (np.arange(len(self.over_time("start_s", max_bins))) + 0.5) * width, dtype=np.float64
        )

    def over_time(self, column: str, max_bins: int, *, largest: bool = False) -> Array:
        """A column of the slices summed (or its largest value) over bins."""
        values = self.slices.get(column, np.zeros(0))
        size = round(self.bin_width_s(max_bins) / self.slice_s)
        values = values[: len(values) // size * size]  # a bin that is not full would look like a drop
        starts = np.arange(0, len(values), size)
        if len(starts) == 0:
            return np.zeros(0)
        reduce = np.maximum if largest else np.add
        return np.asarray(reduce.reduceat(values, starts), dtype=np.float64)


def read_run(path: Path) -> Run:
    """Read a report.json, or the one in a folder, with the slices.csv beside it.

    Raises ConfigError naming the file, and the field, when it is not a report of this program.
    """
    file = path / "report.json" if path.is_dir() else path
    try:
        report = json.loads(file.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: cannot be read as a report: {error}") from error
    wrong = best_match(_schema().iter_errors(report))
    if wrong is not None:
        raise ConfigError(f"{file}: not a report of this program: {wrong.json_path}: {wrong.message[:300]}")
    return Run(file.resolve().parent.name, report, _read_slices(file.with_name("slices.csv")))


@cache
def _schema() -> Draft202012Validator:
    return Draft202012Validator(json.loads(SCHEMA_FILE.read_text(encoding="utf-8")))


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _read_slices(file: Path) -> dict[str, Array]:
    """Columns by name; none without the file or with an empty one, as a run of no steps leaves it.

    Raises ConfigError naming the file.
    """
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            names, *rows = list(csv.reader(lines)) or [[]]
        columns = np.array(rows, dtype=np.float64).reshape(len(rows), len(names))
        if len(set(names)) < len(names) or not np.isfinite(columns).all():
            raise ValueError("a name that comes twice, or a number that is not finite")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(f"{file}: must be lines of numbers under one of names, got {error}") from error
    return dict(zip(names, columns.T))
