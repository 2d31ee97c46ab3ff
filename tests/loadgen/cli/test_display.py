"""The live view on a terminal and as lines."""

from __future__ import annotations

import asyncio
import io

import pytest
from rich.console import Console

import loadgen.cli.display as display
from loadgen.corpus.synth import SyntheticTraces
from loadgen.replay.replay import Replay
from loadgen.scenario.profiles import PROFILES
from loadgen.steps.records import RunPhase
from tests.loadgen.fake_tier import FakeTier


class YieldingClock:
    """Virtual time that lets other tasks run whenever it passes."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds

    async def sleep_until(self, deadline: float) -> None:
        self._now = max(self._now, deadline)
        await asyncio.sleep(0.0005)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_while_the_run_goes_on(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "REFRESH_S", 0.02)
    monkeypatch.setattr(display, "LINE_EVERY_S", 0.02)
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=120, color_system=None)
    config = PROFILES["demo"].scenario.with_changes(concurrency=8, duration_wall_s=4.0)
    clock = YieldingClock()
    replay = Replay(FakeTier(clock), SyntheticTraces(40), config, PROFILES["demo"].tier, clock)

    async def run() -> None:
        async with display.watch(replay, console, "agentx: 8 lanes"):
            await replay.run()

    asyncio.run(run())
    shown = text.getvalue()
    assert "agentx: 8 lanes" in shown
    assert "warmup" in shown
    assert "profile" in shown
    assert "completed" in shown
    assert ("small_m" in shown) == terminal
    done = sum(request.status == "completed" for request in replay.record.requests)
    assert done > 50


def test_running_counts_equal_the_records() -> None:
    config = PROFILES["demo"].scenario.with_changes(concurrency=4, duration_wall_s=2.0)
    clock = YieldingClock()
    replay = Replay(FakeTier(clock), SyntheticTraces(40), config, PROFILES["demo"].tier, clock)
    progress = display.Progress(replay)
    progress.update()
    asyncio.run(replay.run())
    progress.update()
    in_profile = [request for request in replay.record.requests if request.phase is RunPhase.PROFILE]
    assert 0 < len(in_profile) < len(replay.record.requests)
    assert sum(progress.counts.values()) == len(in_profile), "the warm-up counts for itself"
    assert progress.num_tokens == sum(step.num_tokens for step in replay.record.steps)


def test_the_tables_fit_a_terminal_of_80_columns() -> None:
    """Names and numbers stand in full, also in a run of an hour."""
    points = {"p50": 1234.56, "p90": 2345.67, "p99": 34567.89}
    paths = {
        path: {"num_steps": 98_765, "latency_ms": points, "scraped_num_steps": 98_764}
        for path in display.PATHS
    }
    checked = {path: {"replies_p50_ms": 345.67, "scraped_p50_ms": 346.78} for path in display.PATHS}
    report = {"calls": 395_000, "layers": 61, "paths": paths, "service_check": {"paths": checked}}
    text = io.StringIO()
    Console(file=text, width=80, color_system=None).print(display._paths(report))
    shown = text.getvalue()
    assert "…" not in shown
    for word in (*display.PATHS, "98,765", "98,764", "345.67", "346.78"):
        assert word in shown, shown


def test_a_run_whose_service_was_not_read_has_tables_too() -> None:
    report = {
        "calls": 4,
        "layers": 4,
        "paths": {"compact": {"num_steps": 4, "latency_ms": dict.fromkeys(("p50", "p90", "p99"), 1.0)}},
        "service_check": {"match": None, "reasons": ["not read"]},
    }
    text = io.StringIO()
    Console(file=text, width=80, color_system=None).print(display._paths(report))
    assert text.getvalue().count(" - ") == 3
