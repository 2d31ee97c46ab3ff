"""What is kept of a run: JSON, and tables in Markdown. A report read back gives the same tables."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path as FilePath
from typing import Any

from megamoe.backends.hopper.bench.timing import BaselineTiming, Timing
from megamoe.backends.hopper.floors import Rates
from megamoe.bundle import Path
from megamoe.errors import InvalidArgumentError, must_be
from megamoe.shape import MoeShape

MI355X = Rates(8.0e12, 5.0e15)
"""Data sheet: HBM, and dense MXFP8 matrix operations, at which MXFP8 x MXFP4 runs."""
MI355X_US = {
    1: 83.5, 2: 170.6, 4: 191.9, 8: 225.3, 16: 290.5, 32: 297.8, 64: 303.0, 128: 314.7, 256: 381.3, 512: 564.1,
    1024: 903.1, 2048: 1374.0, 4096: 2304.3, 8192: 4211.8,
}  # fmt: skip
MI355X_SHAPE = "deepseek-v4-pro"
"""Published: 8 x MI355X, this shape at EP8, the fused path at capacity 8192, tokens a rank -> microseconds."""


@dataclass(frozen=True)
class Report:
    """A run, which grows while it goes on. machine: GPUs and versions. shape: of the whole deployment, EP8. rates: of
    this run."""

    machine: dict[str, str | int]
    shape: MoeShape
    num_ranks: int
    rates: Rates
    timings: list[Timing]
    baselines: list[BaselineTiming]

    def title(self) -> str:
        """Machine, shape and rates."""
        machine = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        return f"{machine}; {self.shape.name}, {self.num_ranks} ranks; {self.rates}"

    def best(self, distribution: str, tokens: int) -> Timing:
        """The fastest path of a size."""
        return min(self._at(distribution, tokens), key=lambda timing: timing.us)

    def distributions(self) -> list[str]:
        """In the order of the run."""
        return list(dict.fromkeys(timing.distribution for timing in self.timings))

    def sizes(self, distribution: str) -> list[int]:
        return sorted({timing.tokens for timing in self.timings if timing.distribution == distribution})

    def ratio(self, baseline: BaselineTiming) -> float:
        """How many times as long it takes as the best path here; NaN where none was measured."""
        if not self._at(baseline.distribution, baseline.tokens):
            return float("nan")
        return baseline.us / self.best(baseline.distribution, baseline.tokens).us

    def table(self, distribution: str) -> list[str]:
        """Lines of Markdown: a row a size, microseconds and fraction of the floor for every path, baselines."""
        paths = [path for path in map(str, Path) if any(path == timing.path for timing in self.timings)]
        names = list(dict.fromkeys(baseline.name for baseline in self.baselines))
        lines = _header(["T", "rows", "hit", "floor", *paths, "TB/s", "TFLOP/s", *names])
        for tokens in self.sizes(distribution):
            by_path = {timing.path: timing for timing in self._at(distribution, tokens)}
            by_name = {
                one.name: f"{one.us:.0f} ({self.ratio(one):.2f}x)"
                for one in self.baselines
                if (one.distribution, one.tokens) == (distribution, tokens)
            }
            best = self.best(distribution, tokens)
            cells = [str(tokens), str(best.rows), str(best.experts_hit), f"{best.floor_us:.0f}"]
            cells += [_us(by_path[path]) if path in by_path else "" for path in paths]
            cells += [f"{best.tb_per_s:.2f}", f"{best.tflop_per_s:.0f}"]
            lines.append(_row(cells + [by_name.get(name, "") for name in names]))
        return lines

    def beside_mi355x(self) -> list[str]:
        """Lines of Markdown: both machines' times under uniform routing as fractions of their own floors.

        The published times are of DeepSeek-V4-Pro at EP8; rows and experts hit are taken from this run.
        """
        lines = _header(["T", "MI355X us", "of its floor", "here us", "of its floor", "path here"])
        for tokens in self.sizes("uniform"):
            best, theirs = self.best("uniform", tokens), MI355X_US.get(tokens)
            floor = MI355X.floor_us(self.shape, best.rows, best.experts_hit)
            cells = [f"{theirs:.1f}", f"{floor / theirs:.2f}"] if theirs else ["", ""]
            lines.append(_row([str(tokens), *cells, f"{best.us:.1f}", f"{best.fraction:.2f}", best.path]))
        return lines

    def markdown(self) -> list[str]:
        """All tables of a run."""
        lines = [self.title(), ""]
        for distribution in self.distributions():
            lines += [f"{distribution}, microseconds (fraction of the floor):", ""]
            lines += [*self.table(distribution), ""]
        if self.shape.name == MI355X_SHAPE and "uniform" in self.distributions():
            lines += ["Uniform routing beside 8 x MI355X:", "", *self.beside_mi355x(), ""]
        return lines

    def write(self, file: FilePath) -> None:
        """As JSON, with every timing's fraction of its floor, every baseline's ratio to the best path (null: none)."""
        fields = asdict(self)
        for timing, kept in zip(self.timings, fields["timings"], strict=True):
            kept["fraction"] = timing.fraction
        for baseline, kept in zip(self.baselines, fields["baselines"], strict=True):
            ratio = self.ratio(baseline)
            kept["over_best_path"] = None if math.isnan(ratio) else ratio
        file.write_text(json.dumps(fields, indent=1))

    def _at(self, distribution: str, tokens: int) -> list[Timing]:
        return [t for t in self.timings if (t.distribution, t.tokens) == (distribution, tokens)]


def read_reports(files: Iterable[FilePath]) -> Report:
    """One report of the runs of one machine, group and shape, timings one after the other.

    Raises InvalidArgumentError for files of different groups, or that no bench has left.
    """
    reports = [_read(file) for file in files]
    first = reports[0]
    for other in reports[1:]:
        if (other.shape, other.num_ranks) != (first.shape, first.num_ranks):
            raise InvalidArgumentError(
                must_be(
                    "reports",
                    f"{first.num_ranks} ranks of {first.shape.name}",
                    f"{other.num_ranks} of {other.shape.name}",
                )
            )
    return Report(
        first.machine,
        first.shape,
        first.num_ranks,
        first.rates,
        [timing for report in reports for timing in report.timings],
        [baseline for report in reports for baseline in report.baselines],
    )


def _read(file: FilePath) -> Report:
    try:
        return _report_of(json.loads(file.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        got = f"{file}: {type(error).__name__}: {error}"
        raise InvalidArgumentError(must_be("reports", "what bench --json has left", got)) from error


def _report_of(kept: dict[str, Any]) -> Report:
    for timing in kept["timings"]:
        timing.pop("fraction")
    for baseline in kept["baselines"]:
        baseline.pop("over_best_path")
    return Report(
        kept["machine"],
        MoeShape(**kept["shape"]),
        kept["num_ranks"],
        Rates(**kept["rates"]),
        [Timing(**timing) for timing in kept["timings"]],
        [BaselineTiming(**baseline) for baseline in kept["baselines"]],
    )


def _us(timing: Timing) -> str:
    return f"{timing.us:.0f} ({timing.fraction:.2f})"


def _header(names: Sequence[str]) -> list[str]:
    return [_row(names), "|" + "---|" * len(names)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
