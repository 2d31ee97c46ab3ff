"""The command: refusals, exit status, what it prints and writes. The tier is a fake, in real time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import loadgen.cli.main as cli
import loadgen.steps.service_count as service_count
from loadgen.corpus.synth import SyntheticTraces
from loadgen.moe.live import LiveTier
from loadgen.moe.scrape import Counters
from loadgen.trace.writing import write_traces
from megamoe.errors import MegaMoeError, PeerTimeoutError, UnavailableError
from tests.loadgen.fake_tier import FakeTier, demo_info

FAST = ["--concurrency", "4", "--duration", "0.6", "--warmup-requests", "1", "--grace-period", "0.5"]
FAST += ["--traces", "30", "--time-scale", "0.002", "--plain"]


class RealTimeTier(FakeTier):
    """Answers at once; only the modelled attention takes time."""

    def __init__(self, **kwargs: object) -> None:
        super().__init__(self, info=replace(demo_info(), metrics_urls=("rank 0",)), **kwargs)

    def advance(self, seconds: float) -> None:
        """The fake lets its clock pass; here real time passes by itself."""


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RealTimeTier]:
    """Connect the command to a fake tier, and its scrapes to what the fake counted (plus `extra` calls)."""

    def connect(extra: int = 0, unread: bool = False, **kwargs: object) -> RealTimeTier:
        tier = RealTimeTier(**kwargs)
        seen = [0]

        @contextlib.asynccontextmanager
        async def connected(
            target: str, *, holder: str, wait_ready_s: float, transport: str
        ) -> AsyncIterator[RealTimeTier]:
            yield tier

        async def scrape(urls: tuple[str, ...]) -> Counters:
            if unread:
                raise UnavailableError("metrics page cannot be read")
            seen[0] = len(tier.calls)
            return Counters()

        async def settled(
            urls: tuple[str, ...], before: Counters, num_calls: int, num_sub_steps: int
        ) -> Counters:
            counted: dict[str, int] = {}
            for step_idx, _ in tier.calls[seen[0] :]:
                rows, phases = tier.steps[step_idx]
                most = max(rows)
                path = "small_m" if most <= 32 else "fixed_slot" if most <= 64 else "compact"
                if most >= 128 and "prefill" in phases:
                    path = "large_m"
                counted[path] = counted.get(path, 0) + 1
            return Counters(len(tier.calls) - seen[0] + extra, counted)

        monkeypatch.setattr(LiveTier, "connect", connected)
        monkeypatch.setattr(service_count, "scrape", scrape)
        monkeypatch.setattr(service_count, "scrape_settled", settled)
        return tier

    return connect


def invoke(*arguments: str, out: Path) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, [*arguments, "--out", str(out)], env={"COLUMNS": "160"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_a_run_prints_tables_and_leaves_a_report(
    connected: Callable[..., RealTimeTier], tmp_path: Path
) -> None:
    tier = connected()
    status, text = invoke("--scenario", "agentx", *FAST, out=tmp_path)
    assert status == 0, text
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["service_steps_match"] is True
    assert report["calls"] == len(tier.calls)
    assert report["requests"]["completed"] > 0
    assert report["config"]["attention_tier"]["chunk_rows"] == 512  # the demo profile, as the service runs it
    assert (tmp_path / "requests.jsonl").exists()
    assert (tmp_path / "slices.csv").exists()
    for wanted in (
        "TTFT ms",
        "ITL ms",
        "small_m",
        "P90 interactivity",
        "count the same steps: yes",
        "report.json",
    ):
        assert wanted in text
    counted = re.search(r"small_m *│ *([\d,]+) ", text)
    assert counted
    assert int(counted[1].replace(",", "")) == report["paths"]["small_m"]["num_steps"]


def test_a_failed_request_makes_the_status_non_zero(
    connected: Callable[..., RealTimeTier], tmp_path: Path
) -> None:
    def fail(step_idx: int, layer_idx: int) -> MegaMoeError | None:
        return PeerTimeoutError("rank 2 did not come", [2]) if step_idx in (30, 31) else None

    connected(fail=fail)
    status, text = invoke(*FAST, out=tmp_path)
    assert status == 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["requests"]["failed"] > 0
    assert report["errors"] == {"peer_timeout: rank 2 did not come": 2}
    assert "failed" in text


def test_a_run_in_which_nothing_completes_makes_the_status_non_zero(
    connected: Callable[..., RealTimeTier], tmp_path: Path
) -> None:
    connected()
    short = ["--duration", "0.3", "--warmup-requests", "0", "--grace-period", "0", "--plain"]
    status, _ = invoke("--scenario", "uniform", "--output-tokens", "100000", *short, out=tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["requests"]["completed"] == report["requests"]["failed"] == 0
    assert status == 1
    assert any(
        re.fullmatch(r"none of \d+ requests completed", reason)
        for reason in report["submission_invalid_reasons"]
    )


def test_other_counts_of_the_service_make_the_status_non_zero(
    connected: Callable[..., RealTimeTier], tmp_path: Path
) -> None:
    connected(extra=1)
    status, text = invoke(*FAST, out=tmp_path)
    assert status == 1
    assert json.loads((tmp_path / "report.json").read_text())["service_steps_match"] is False
    assert "layer calls" in text


def test_counters_that_cannot_be_read_are_said_to_be_unknown(
    connected: Callable[..., RealTimeTier], tmp_path: Path
) -> None:
    connected(unread=True)
    status, text = invoke(*FAST, out=tmp_path)
    assert status == 0
    assert json.loads((tmp_path / "report.json").read_text())["service_steps_match"] is None
    assert "metrics page cannot be read" in text


def test_a_crash_still_leaves_a_report(connected: Callable[..., RealTimeTier], tmp_path: Path) -> None:
    def fail(step_idx: int, layer_idx: int) -> MegaMoeError | None:
        if step_idx == 25:
            raise ZeroDivisionError("bug")
        return None

    connected(fail=fail)
    with pytest.raises(ZeroDivisionError, match="bug"):
        invoke(*FAST, out=tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["run_aborted"] == "ZeroDivisionError: bug"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_writes_a_report_marked_cancelled(
    connected: Callable[..., RealTimeTier], tmp_path: Path, number: signal.Signals
) -> None:
    def fail(step_idx: int, layer_idx: int) -> MegaMoeError | None:
        if (step_idx, layer_idx) == (40, 2):
            os.kill(os.getpid(), number)
        return None

    connected(fail=fail)
    status, text = invoke(*FAST, "--duration", "20", out=tmp_path)
    assert status == 130
    assert json.loads((tmp_path / "report.json").read_text())["run_cancelled"] is True
    assert "cancelled" in text


def test_ctrl_c_while_the_report_is_made_leaves_it(
    connected: Callable[..., RealTimeTier], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected()
    settled = service_count.scrape_settled

    async def interrupted(*arguments: Any) -> Counters:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.05)
        return await settled(*arguments)

    monkeypatch.setattr(service_count, "scrape_settled", interrupted)
    status, _ = invoke(*FAST, out=tmp_path)
    assert status == 130
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["requests"]["completed"] > 0
    assert report["service_steps_match"] is True
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--scenario", "other"], "scenario must be one of agentx, uniform, fixed, got 'other'"),
        (["--concurrency", "8,16"], "concurrency must be one number, got '8,16'; --sweep takes a list"),
        (["--sweep", "8,16"], "scenario agentx forbids a list of concurrencies, got 8,16"),
        (["--sweep", "8,x"], "sweep must be whole numbers with commas between them, got '8,x'"),
        (["--fixed-schedule"], "scenario agentx forbids a fixed schedule"),
        (["--no-ignore-eos"], "scenario agentx locks ignore_eos on"),
        (["--scenario", "fixed", "--rows", "0"], "rows must be from 1 to 1,048,576, got 0"),
        (
            ["--scenario", "uniform", "--input-tokens", "100"],
            "input_tokens must be a multiple of 64, got 100",
        ),
        (["--trace-file", "not there"], "No such file"),
        (["--scenario", "uniform", "--sweep", "8,8"], "sweep must be different numbers, got '8,8'"),
        (["--duration", "nan"], "duration_wall_s must be finite, got nan"),
        (
            ["--target", "127.0.0.1:1", "--wait-ready", "nan"],
            "wait_ready must be at least 0, and finite, got nan",
        ),
        (["--concurrency", "many"], "concurrency must be a whole number, got 'many'"),
        (["--request-rate", "3"], "forbids a fixed request rate"),
        (["--ignore-delays"], "forbids ignoring the recorded delays"),
        (["--no-streaming"], "locks streaming on"),
        (["--routing", "odd"], "routing must be one of uniform"),
        (["--drafts", "12"], "num_drafts must be from 0 to 8, got 12"),
        (["--profile", "odd"], "profile must be auto or one of"),
        (["--time-scale", "0"], "time_scale must be above 0"),
    ],
)
def test_a_refused_run_begins_nothing(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    status, text = invoke(*arguments, "--target", "127.0.0.1:1", out=tmp_path)
    assert status == 2
    assert sentence in text
    assert not list(tmp_path.iterdir())


def test_an_out_that_cannot_be_written_is_refused_before_anything_begins(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none")):
        status, text = invoke("--target", "127.0.0.1:1", out=out)
        assert status == 2
        assert f"out must be a folder that can be written to, got {out}" in text


def test_recorded_sessions_are_played(connected: Callable[..., RealTimeTier], tmp_path: Path) -> None:
    connected()
    source = SyntheticTraces(8, seed=2)
    write_traces(tmp_path / "recorded.jsonl", (source[idx] for idx in range(8)))
    status, text = invoke(*FAST, "--trace-file", str(tmp_path / "recorded.jsonl"), out=tmp_path / "out")
    assert status == 0, text
    assert json.loads((tmp_path / "out/report.json").read_text())["traces"] == "recorded.jsonl (8 sessions)"
    ids = {json.loads(line)["trace_id"] for line in (tmp_path / "out/requests.jsonl").open()}
    assert ids <= {source[idx].id for idx in range(8)}
    assert len(ids) >= 4


def test_a_broken_recording_is_refused_before_anything_begins(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"id": 3}\n')
    arguments = ["--trace-file", str(tmp_path / "bad.jsonl"), "--target", "127.0.0.1:1"]
    status, text = invoke(*arguments, out=tmp_path / "out")
    assert status == 2
    assert "bad.jsonl:1: id must be a string of Unicode text, got 3" in text


SIMPLE = ["--duration", "0.5", "--plain", "--grace-period", "0.2"]


def test_fixed_rows_are_the_same_in_every_step(
    connected: Callable[..., RealTimeTier], tmp_path: Path
) -> None:
    tier = connected()
    status, text = invoke(
        "--scenario", "fixed", "--rows", "48", "--warmup-requests", "3", *SIMPLE, out=tmp_path
    )
    assert status == 0, text
    report = json.loads((tmp_path / "report.json").read_text())
    steady = [rows for rows, phases in tier.steps if set(phases) == {"decode"}]
    assert len(steady) > 20
    assert set(steady) == {(48,) * 8}
    assert report["scenario"] == "fixed"
    assert ("TTFT ms" in text) == (report["requests"]["completed"] > 0), "no table of dashes"
    assert report["submission_invalid_reasons"][0] == "the scenario is fixed, not agentx"
    assert report["profile"]["paths"]["fixed_slot"]["num_steps"] == 4 * len(steady)


def test_drafts_of_fixed_rows_must_divide_them(
    connected: Callable[..., RealTimeTier], tmp_path: Path
) -> None:
    tier = connected()
    invoke("--scenario", "fixed", "--rows", "48", "--drafts", "3", *SIMPLE, out=tmp_path)
    assert {max(rows) for rows, phases in tier.steps if set(phases) == {"decode"}} == {48}
    status, text = invoke("--scenario", "fixed", "--rows", "50", "--drafts", "3", *SIMPLE, out=tmp_path)
    assert status == 2
    assert "rows must be at most 2048 and a multiple of num_drafts + 1 = 4, got 50" in text


def test_uniform_load_keeps_requests_in_flight(
    connected: Callable[..., RealTimeTier], tmp_path: Path
) -> None:
    connected()
    arguments = [
        "--scenario",
        "uniform",
        "--concurrency",
        "16",
        "--input-tokens",
        "128",
        "--output-tokens",
        "8",
    ]
    status, text = invoke(*arguments, "--time-scale", "0.01", *SIMPLE, out=tmp_path)
    assert status == 0, text
    requests = [json.loads(line) for line in (tmp_path / "requests.jsonl").open()]
    assert len(requests) > 40
    assert {request["num_input"] for request in requests} == {128}
    assert {request["num_output"] for request in requests if request["status"] == "completed"} <= set(
        range(6, 11)
    )


def test_a_sweep_leaves_a_report_for_each_concurrency(
    connected: Callable[..., RealTimeTier], tmp_path: Path
) -> None:
    connected()
    arguments = ["--scenario", "uniform", "--sweep", "4,12", "--input-tokens", "64", "--output-tokens", "8"]
    status, text = invoke(*arguments, "--time-scale", "0.01", *SIMPLE, out=tmp_path)
    assert status == 0, text
    for number in (4, 12):
        report = json.loads((tmp_path / f"c{number}" / "report.json").read_text())
        assert report["config"]["scenario"]["concurrency"] == number
        assert report["config"]["scenario"]["sweep"] == "4,12"


def test_a_sweep_of_agentx_is_marked(connected: Callable[..., RealTimeTier], tmp_path: Path) -> None:
    connected()
    status, text = invoke(*FAST[2:], "--sweep", "2,3", "--unsafe-override", out=tmp_path)
    assert status == 0, text
    report = json.loads((tmp_path / "c3" / "report.json").read_text())
    assert "the scenario forbids a list of concurrencies, got 2,3" in report["submission_invalid_reasons"]


def test_an_override_goes_on_and_is_marked(connected: Callable[..., RealTimeTier], tmp_path: Path) -> None:
    connected()
    status, _ = invoke(*FAST, "--ignore-delays", "--unsafe-override", out=tmp_path)
    assert status == 0
    reasons = json.loads((tmp_path / "report.json").read_text())["submission_invalid_reasons"]
    assert "the scenario forbids ignoring the recorded delays" in reasons
    assert "unsafe_override is set" in reasons


def test_a_service_that_is_not_there_is_refused(tmp_path: Path) -> None:
    status, text = invoke("--target", "127.0.0.1:1", "--wait-ready", "0.2", out=tmp_path)
    assert status == 2
    assert "127.0.0.1:1" in text
