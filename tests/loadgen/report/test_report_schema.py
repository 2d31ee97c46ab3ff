"""The JSON Schema that ships: reports satisfy it, and it objects to what is missing, strange or out of range."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from loadgen.report.report import SCHEMA, build_report
from loadgen.steps.records import RunRecord
from tests.loadgen.fake_tier import demo_info
from tests.loadgen.reports import PROFILES, write_run

DOCUMENT = json.loads(files("loadgen").joinpath("report/schemas/report.schema.json").read_text())
REPORT = Draft202012Validator(DOCUMENT)
REQUEST = Draft202012Validator(DOCUMENT["$defs"]["request"] | {"$defs": DOCUMENT["$defs"]})
FIELD_NAMES = (
    "total_tput_tps", "output_tput_tps", "input_tput_tps", "ttft", "e2el", "itl", "tpot", "step_interval", "intvty",
    "e2e_norm_intvty", "theoretical_cache_hit_rate", "request_accounting", "accept_length", "rows_per_rank",
    "off_decode_path_share", "run_cancelled", "submission_valid",
)  # fmt: skip


def objections(validator: Draft202012Validator, value: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(value)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run")).parent


@pytest.fixture
def report(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return value


def test_the_schema_is_one_and_names_the_version_that_is_written() -> None:
    Draft202012Validator.check_schema(DOCUMENT)
    assert DOCUMENT["properties"]["schema"]["const"] == SCHEMA


def test_reports_of_runs_satisfy_it(report: dict[str, Any]) -> None:
    assert objections(REPORT, report) == []
    assert report["requests"]["completed"] > 20


def test_a_report_of_nothing_satisfies_it() -> None:
    """A run that was cancelled before its first request."""
    chosen = PROFILES["demo"]
    report = build_report(
        RunRecord(cancelled=True), demo_info(), chosen.scenario, chosen.tier, None,
        traces="none", distribution="uniform",
    )  # fmt: skip
    assert objections(REPORT, report) == []
    assert report["itl"]["p90"] is None


def test_lines_of_requests_satisfy_it(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    assert len(lines) > 20
    assert [objection for line in lines for objection in objections(REQUEST, line)] == []
    assert set(lines[0]) <= set(DOCUMENT["$defs"]["request"]["properties"])


def test_the_names_of_the_field_are_required() -> None:
    assert set(FIELD_NAMES) <= set(DOCUMENT["required"])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda report: report.pop("itl"),
        lambda report: report.update(surprise=1),
        lambda report: report["ttft"].pop("p90"),
        lambda report: report.update(cache_hit_rate=1.5),
        lambda report: report["requests"].update(failed=-1),
        lambda report: report["paths"].pop("large_m"),
        lambda report: report.update(schema="other/1"),
        lambda report: report.update(service_steps_match="yes"),
    ],
)
def test_it_objects(report: dict[str, Any], spoil: Callable[[dict[str, Any]], Any]) -> None:
    spoil(report)
    assert objections(REPORT, report) != []


def test_histograms_hold_every_value(report: dict[str, Any]) -> None:
    for name in ("ttft", "itl", "step_interval", "e2el"):
        histogram = report["distributions"][name]
        assert sum(histogram["counts"]) == report[name]["count"], name
        assert len(histogram["bounds"]) == len(histogram["counts"]) + 1
        assert histogram["bounds"][0] <= report[name]["min"] <= report[name]["max"] <= histogram["bounds"][-1]
    rows = report["distributions"]
    assert sum(rows["max_rows"]["counts"]) == report["profile"]["steps"]
    assert sum(rows["decode_max_rows"]["counts"]) == report["decode_steps"]
    assert rows["max_rows"]["bounds"] == rows["decode_max_rows"]["bounds"]
