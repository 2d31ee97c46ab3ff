"""`loadgen --scenario agentx` as a user runs it, against the running service."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from service.client import AsyncFront, Front
from tests.e2e.harness import ServiceProcess, scrape
from tests.e2e.load_generator import LoadGenerator

Start = Callable[..., LoadGenerator]
PATHS = ("small_m", "fixed_slot", "large_m", "compact")

# Requests of many steps, and no time for them to end in.
LONG = ("--concurrency", "12", "--token-scale", "0.02", "--warmup-requests", "0", "--grace-period", "0")


def counted(addresses: tuple[str, ...]) -> tuple[float, dict[str, float]]:
    """(layer calls of the group, sub-steps by path) on rank 0's page."""
    samples = scrape(addresses[:1])
    calls = sum(value for (name, _), value in samples.items() if name == "megamoe_group_layer_calls_total")
    paths = dict.fromkeys(PATHS, 0.0)
    for (name, labels), value in samples.items():
        if name == "megamoe_sub_steps_total":
            paths[dict(labels)["path"]] += value
    return calls, paths


@pytest.mark.any_backend
def test_a_run_reports_what_the_service_counted(
    running_service: ServiceProcess, start_loadgen: Start, tmp_path: Path
) -> None:
    with Front(running_service.front) as front:
        info = front.info()
    calls_before, paths_before = counted(info.metrics_addresses)
    status, report = (generator := start_loadgen(running_service, tmp_path, "--duration", "6")).end()
    assert status == 0, generator.text
    calls, paths = counted(info.metrics_addresses)
    assert report["calls"] == calls - calls_before == report["layers"] * report["steps"]["executed"] > 0
    assert report["layers"] == info.num_layers
    for path in PATHS:
        assert report["paths"][path]["num_steps"] == paths[path] - paths_before[path]
    assert report["service_steps_match"] is True
    assert report["requests"]["completed"] > 10
    assert 0 <= report["generator"]["overhead_share_of_answer_time"] < 0.10  # it never holds the service up
    assert report["requests"]["failed"] == 0
    for path in ("small_m", "large_m"):
        latency = report["paths"][path]["latency_ms"]
        assert (
            0
            < report["paths"][path]["service_ms"]["p50"]
            <= latency["p50"]
            <= latency["p90"]
            <= latency["p99"]
        )
    for name in ("ttft", "itl", "tpot", "e2el", "step_interval", "intvty", "e2e_norm_intvty"):
        points = report[name]
        assert points["p50"] > 0, name
    assert report["itl"]["p90"] == pytest.approx(1 / report["p90_intvty"])
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert (
        sum(line["phase"] == "profile" and line["status"] == "completed" for line in lines)
        == (report["requests"]["completed"])
    )
    assert "count the same steps: yes" in generator.text


@pytest.mark.one_launcher("local")
def test_micro_batches_and_draft_passes_are_served_too(
    running_service: ServiceProcess, start_loadgen: Start, tmp_path: Path
) -> None:
    """Two plans in flight at once, and the draft model's passes: more calls than layers times steps, all counted."""
    options = ("--duration", "5", "--micro-batches", "2", "--draft-moe-layers", "1")
    status, report = (generator := start_loadgen(running_service, tmp_path, *options)).end()
    assert status == 0, generator.text
    assert report["requests"]["failed"] == 0
    assert report["requests"]["completed"] > 5
    assert report["service_steps_match"] is True
    assert report["steps"]["retried"] == 0
    executed = report["steps"]["executed"]
    passes = (report["calls"] - report["layers"] * executed) / executed
    assert passes > 1.0  # a second micro-batch is another call a layer, and every draft is one


@pytest.mark.one_launcher("local")
def test_ctrl_c_leaves_a_report_and_the_lease(
    running_service: ServiceProcess, start_loadgen: Start, tmp_path: Path
) -> None:
    generator = start_loadgen(running_service, tmp_path / "first", "--duration", "600", *LONG)
    generator.wait_for(r"profile .*, \d+ in flight, (?:[3-9]|\d\d) decoding", 90)
    generator.process.send_signal(signal.SIGINT)
    status, report = generator.end(30)
    assert status == 130, generator.text
    assert report["run_cancelled"] is True
    assert report["service_steps_match"] is True
    assert report["request_accounting"]["profile"]["cancelled"] > 0
    status, report = start_loadgen(running_service, tmp_path / "second", "--duration", "1").end()
    assert status == 0, "the lease must be free at once"
    assert report["service_steps_match"] is True


@pytest.mark.one_launcher("ray")
async def test_a_service_that_refuses_fails_the_run(
    running_service: ServiceProcess, start_loadgen: Start, tmp_path: Path
) -> None:
    generator = start_loadgen(running_service, tmp_path, "--duration", "600")
    generator.wait_for("profile", 90)
    async with AsyncFront(running_service.front) as front:
        await front.drain()
        try:
            status, report = generator.end(60)
        finally:
            await front.drain(resume=True)
            await front.wait_ready(10)
    assert status == 1, generator.text
    assert report["requests"]["failed"] > 0
    assert "requests failed" in report["run_aborted"]
    assert any(error.startswith("draining: ") for error in report["errors"])
    assert "draining" in generator.text


@pytest.mark.one_launcher("local")
def test_fixed_rows_with_drifting_routes(
    running_service: ServiceProcess, start_loadgen: Start, tmp_path: Path
) -> None:
    options = ("--scenario", "fixed", "--rows", "24", "--routing", "drift", "--duration", "3")
    status, report = (generator := start_loadgen(running_service, tmp_path, *options)).end()
    assert status == 0, generator.text
    assert report["service_steps_match"] is True
    assert report["routing"] == "drift"
    steady = report["profile"]["paths"]["small_m"]["num_steps"]
    assert steady > 4 * report["layers"]
    assert report["requests"]["failed"] == report["requests"]["completed"] == 0
    rows = [row for row in report["request_accounting"]["profile"].items() if row[0] == "cancelled"]
    assert rows == [("cancelled", 24 * report["service"]["num_ranks"])]
