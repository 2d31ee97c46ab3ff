"""`loadgen --moe-time`: a whole run without a service, and a report that says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import loadgen.cli.main as cli

RUN = [
    "--moe-time",
    "mi355x-v4-pro",
    "--concurrency",
    "8",
    "--duration",
    "120",
    "--warmup-requests",
    "1",
    "--plain",
]


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "160"})
    return result.exit_code, result.output


def test_a_simulated_run_calls_no_service_and_says_so(tmp_path: Path) -> None:
    status, text = invoke(*RUN, "--paths", "fixed_slot", "--out", str(tmp_path))
    assert status == 0, text
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["moe_time"] == "simulated"
    assert report["simulated"]["paths"] == ["compact", "fixed_slot"]
    assert {proxy["path"] for proxy in report["simulated"]["proxies"]} >= {"fixed_slot"}
    assert report["attention_time"] == "modelled"
    assert report["attention_model"]["base_s"] > 0
    assert not report["submission_valid"]
    assert "MoE time is simulated" in report["submission_invalid_reasons"]
    assert report["service_steps_match"] is None
    assert report["requests"]["completed"] > 5
    assert report["profile"]["duration_s"] >= 120
    assert report["paths"]["fixed_slot"]["num_steps"] > 0
    assert report["paths"]["small_m"]["num_steps"] == report["paths"]["large_m"]["num_steps"] == 0


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        (["--paths", "middle_m"], "paths must be among"),
        (["--routing", "hot60"], "routing must be 'uniform' with --moe-time"),
        (["--micro-batches", "2"], "micro_batches must be at least 1, and 1 with --moe-time"),
        (["--straggler-share", "2"], "share of stragglers must be from 0 to 1"),
        (["--kv-capacity-tokens", "-1"], "kv_capacity_tokens must be at least 0"),
    ],
)
def test_what_cannot_be_simulated_is_refused(extra: list[str], sentence: str, tmp_path: Path) -> None:
    status, text = invoke(*RUN, *extra, "--out", str(tmp_path))
    assert status == 2
    assert sentence in " ".join(text.split())
    assert not list(tmp_path.iterdir())


def test_paths_belong_to_a_table() -> None:
    status, text = invoke("--paths", "small_m")
    assert status == 2
    assert "paths must be given with --moe-time" in text
