"""Reports for tests that read them: of a run on a fake service in virtual time, and of given figures."""

from __future__ import annotations

import asyncio
import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

from loadgen.clock import VirtualClock
from loadgen.corpus.synth import SyntheticTraces
from loadgen.replay.replay import Replay
from loadgen.report.files import write_report
from loadgen.report.report import build_report
from loadgen.scenario.profiles import PROFILES
from tests.loadgen.fake_tier import FakeTier


@cache
def _played(concurrency: int, duration_s: float) -> tuple[Replay, FakeTier]:
    clock = VirtualClock()
    tier = FakeTier(clock, layer_s=lambda rows: 0.006 + rows * 0.00012)
    config = PROFILES["demo"].scenario.with_changes(concurrency=concurrency, duration_wall_s=duration_s)
    replay = Replay(tier, SyntheticTraces(30, 1), config, PROFILES["demo"].tier, clock)
    asyncio.run(replay.run())
    return replay, tier


def write_run(folder: Path, concurrency: int = 6, duration_s: float = 20.0) -> Path:
    """A whole report of a run on a fake service; returns the path of its JSON."""
    replay, tier = _played(concurrency, duration_s)
    report = build_report(
        replay.record, tier.info, replay.config, replay.tier_config, None,
        traces="given", distribution="uniform", not_counted="a fake has no counters",
    )  # fmt: skip
    return write_report(folder, report, replay.record, 1.0)


def write_changed(folder: Path, base: Path, seed: int, speed: float) -> Path:
    """A copy of a report, `speed` times as fast, of another seed."""
    report: dict[str, Any] = copy.deepcopy(json.loads(base.read_text()))
    report["config"]["scenario"]["seed"] = seed
    for name in ("total_tput_tps", "output_tput_tps", "p90_intvty"):
        report[name] *= speed
    for name in ("itl", "ttft", "e2el", "step_interval"):
        for point in ("p50", "p90"):
            report[name][point] /= speed
    folder.mkdir(parents=True)
    path = folder / "report.json"
    path.write_text(json.dumps(report))
    return path
