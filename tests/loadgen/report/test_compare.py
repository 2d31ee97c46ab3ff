"""A against B: changes, intervals, verdicts, and settings that differ."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import loadgen.cli.main as cli
from loadgen.report.compare import Change, Comparison, compare_runs, read_side
from megamoe.errors import ConfigError
from tests.loadgen.reports import write_changed, write_run


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("base"))


def side(folder: Path, base: Path, speeds: dict[int, float]) -> Path:
    """Repeats by seed."""
    for seed, speed in speeds.items():
        write_changed(folder / f"seed{seed}", base, seed, speed)
    return folder


def compared(a: Path, b: Path) -> Comparison:
    return compare_runs(read_side(a), read_side(b))


def row(comparison: Comparison, label: str) -> Change:
    (found,) = [change for change in comparison.changes if change.label.startswith(label)]
    return found


def test_a_run_against_itself_shows_no_difference(base: Path) -> None:
    comparison = compared(base, base)
    assert {change.verdict for change in comparison.changes} == {"no difference shown"}
    assert all(change.change == 0 for change in comparison.changes)
    assert comparison.differences == ()
    assert len(comparison.changes) == 9


@pytest.mark.parametrize(
    ("speed", "verdict"),
    [(1.2, "better"), (0.8, "worse"), (1.04, "no difference shown"), (0.96, "no difference shown")],
)
def test_single_runs_are_held_against_published_scatter(
    base: Path, tmp_path: Path, speed: float, verdict: str
) -> None:
    comparison = compared(base, write_changed(tmp_path / "b", base, 1, speed))
    for label in ("total tok/s", "ITL p90", "TTFT p50"):  # more of one is better, less of the other
        change = row(comparison, label)
        assert change.verdict == verdict
        assert (change.low, change.high) == (None, None)
    assert row(comparison, "total tok/s").change == pytest.approx(speed - 1)
    assert row(comparison, "ITL p90").change == pytest.approx(1 / speed - 1)


def test_repeats_of_other_seeds_give_welchs_interval(base: Path, tmp_path: Path) -> None:
    a = side(tmp_path / "a", base, {1: 1.00, 2: 1.02, 3: 0.98})
    b = side(tmp_path / "b", base, {4: 1.10, 5: 1.13, 6: 1.08, 7: 1.12})
    comparison = compared(a, b)
    assert (comparison.num_a, comparison.num_b, comparison.paired) == (3, 4, False)
    change = row(comparison, "total tok/s")
    # From the textbook's formula on the logarithms: difference 0.10209, standard error 0.01530, 4.46 -> 4 degrees.
    assert change.change == pytest.approx(math.expm1(0.10209), abs=1e-4)
    assert change.low == pytest.approx(math.expm1(0.10209 - 2.776 * 0.01530), abs=2e-4)
    assert change.high == pytest.approx(math.expm1(0.10209 + 2.776 * 0.01530), abs=2e-4)
    assert change.verdict == "better"


def test_scatter_larger_than_the_change_shows_no_difference(base: Path, tmp_path: Path) -> None:
    a = side(tmp_path / "a", base, {1: 1.0, 2: 1.3, 3: 0.7})
    b = side(tmp_path / "b", base, {4: 1.1, 5: 1.4, 6: 0.8})
    change = row(compared(a, b), "total tok/s")
    assert change.low is not None
    assert change.high is not None
    assert change.low < 0 < change.high
    assert change.verdict == "no difference shown"


def test_the_same_seeds_are_compared_pair_by_pair(base: Path, tmp_path: Path) -> None:
    """Seeds scatter widely, but every one of them gains about 5 %."""
    a = side(tmp_path / "a", base, {1: 1.0, 2: 1.3, 3: 0.7})
    b = side(tmp_path / "b", base, {3: 0.735, 1: 1.051, 2: 1.364})
    comparison = compared(a, b)
    assert comparison.paired
    change = row(comparison, "total tok/s")
    assert change.verdict == "better"
    assert change.low == pytest.approx(0.05, abs=0.003)


def test_settings_that_differ_are_named(base: Path, tmp_path: Path) -> None:
    other = write_changed(tmp_path / "b", base, 1, 1.0)
    report = json.loads(other.read_text())
    report["config"]["attention_tier"]["chunk_rows"] = 1024
    report["routing"] = "zipf"
    other.write_text(json.dumps(report))
    assert compared(base, other).differences == (
        "attention_tier.chunk_rows: 512 against 1024",
        "routing: uniform against zipf",
    )


def test_the_command_prints_the_table(base: Path, tmp_path: Path) -> None:
    b = side(tmp_path / "b", base, {1: 1.2, 2: 1.21})
    result = CliRunner().invoke(cli.app, ["compare", str(base), str(b)], env={"COLUMNS": "140"})
    assert result.exit_code == 0, result.output
    assert "A (1 run) against B (2 runs)" in result.output
    assert "+20.5%" in result.output
    assert "P90 interactivity" in result.output
    assert "the scatter of public replicates" in result.output


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{}", "'schema' is a required property"),
        ("{", "cannot be read as a report"),
        ("", "cannot be read as a report"),
        ("\xff", "cannot be read as a report"),
        ("[" * 100_000, "cannot be read as a report: maximum recursion depth"),
        ("[]", "$: [] is not of type 'object'"),
    ],
)
def test_what_is_no_report_is_refused(base: Path, tmp_path: Path, content: str, sentence: str) -> None:
    (tmp_path / "report.json").write_text(content)
    result = CliRunner().invoke(cli.app, ["compare", str(base), str(tmp_path)], env={"COLUMNS": "140"})
    assert result.exit_code == 2
    assert sentence in result.output
    assert str(tmp_path) in result.output


def test_an_empty_folder_is_refused(base: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["compare", str(base), str(tmp_path)], env={"COLUMNS": "140"})
    assert result.exit_code == 2
    assert "got none" in result.output


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda report: report.update(schema="megamoe.loadgen.report/2"), "$.schema: "),
        (lambda report: report.pop("config"), "$: 'config' is a required property"),
        (lambda report: report["config"].update(scenario=None), "$.config.scenario: None is not of type"),
        (
            lambda report: report["config"]["scenario"].update(seed="x"),
            "$.config.scenario.seed: 'x' is not of",
        ),
        (
            lambda report: report["config"]["scenario"].update(slice_s=0),
            "$.config.scenario.slice_s: 0 is less than or equal to",
        ),
        (lambda report: report["config"].update(attention_tier={}), "'speculation' is a required property"),
        (lambda report: report.update(simulated={}), "$.simulated: 'paths' is a required property"),
        (lambda report: report.update(itl=[]), "$.itl: [] is not of type 'object'"),
        (lambda report: report["itl"].update(p50=-1.0), "$.itl.p50: -1.0 is less than the minimum of 0"),
        (lambda report: report.update(total_tput_tps=float("nan")), "NaN is no number"),
        (lambda report: report.update(paths={"small_m": 3}), "$.paths"),
    ],
)
@pytest.mark.parametrize("command", ["compare", "page"])
def test_an_odd_report_is_refused_with_the_field(
    base: Path, tmp_path: Path, command: str, change: Callable[[dict[str, Any]], object], sentence: str
) -> None:
    report = json.loads(base.read_text())
    change(report)
    (tmp_path / "report.json").write_text(json.dumps(report))
    arguments = {"compare": [str(base), str(tmp_path)], "page": [str(tmp_path), "--out", str(tmp_path / "x")]}
    result = CliRunner().invoke(cli.app, [command, *arguments[command]], env={"COLUMNS": "140"})
    assert result.exit_code == 2, result.output
    assert sentence in result.output
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "slices", ["start_s,rows\n1,x\n", "start_s,rows\n1\n", "a,a\n1,2\n", "a\nnan\n", "\xff"]
)
def test_odd_slices_are_refused_with_the_file(base: Path, tmp_path: Path, slices: str) -> None:
    (tmp_path / "report.json").write_text(base.read_text())
    (tmp_path / "slices.csv").write_bytes(slices.encode("latin-1"))
    with pytest.raises(ConfigError, match="slices.csv: must be lines of numbers under one of names"):
        read_side(tmp_path)


def test_a_page_that_cannot_be_written_is_refused(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "file" / "page.html"
    out.parent.write_text("no folder")
    result = CliRunner().invoke(cli.app, ["page", str(base), "--out", str(out)])
    assert result.exit_code == 2
    assert "loadgen: " in result.output


def test_a_side_on_which_nothing_was_completed_is_refused(base: Path, tmp_path: Path) -> None:
    report = json.loads(base.read_text())
    none = dict.fromkeys(report["itl"], None) | {"unit": "ms", "count": 0}
    report |= dict.fromkeys(
        ("ttft", "e2el", "itl", "tpot", "step_interval", "intvty", "e2e_norm_intvty"), none
    )
    report |= dict.fromkeys(("total_tput_tps", "output_tput_tps", "input_tput_tps", "p90_intvty", "span_s"))
    report["requests"]["completed"] = 0
    (tmp_path / "report.json").write_text(json.dumps(report))
    with pytest.raises(
        ConfigError, match=r"completed requests of A and of B must be above 0 .*, got \[\d+, 0\]"
    ):
        compare_runs(read_side(base), read_side(tmp_path))
