"""Replays published A/B runs in simulation and holds them against the sources' figures.

Decode runs: fixed-slot runtime against compact only, at constant concurrency. The sources do not say how long prompts
and outputs were; 1,024 tokens each are assumed. AgentX runs: fused paths on against off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from loadgen.corpus.single_turns import SingleTurns
from loadgen.moe.source import SimulatedMoe
from loadgen.moe.table import MoeTimeTable
from loadgen.published.calibrate import BEFORE, TIER, Figures, Map, Setting
from loadgen.published.simulate import Simulation
from loadgen.published.sources import AGENTX_RUNS, DECODE_ROWS, DECODE_RUNS, HOUR_PROFILE, DecodeRun
from loadgen.scenario.scenario import ScenarioConfig
from loadgen.tier.attention_time import AttentionTime
from megamoe import Path as MoePath

AFTER = frozenset(MoePath)
DECODE_S = 600.0
"""Length of a decode run: several outputs a lane, so that filling the tier at the start does not count for much."""
GAIN_POINTS = 5.0
SAME_PERCENT = 1.0
FIGURE_PERCENT = 15.0
HOUR_CONCURRENCY = 128
"""Run whose requests are held against the published hour; the source does not name its own."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A simulated figure, and what it has to come close to. off is in points for gains, in percent for figures."""

    name: str
    simulated: float
    published: float
    off: float
    limit: float
    is_gain: bool = False

    @property
    def good(self) -> bool:
        """Close enough and, for a gain, of the right sign."""
        return abs(self.off) <= self.limit and (not self.is_gain or self.simulated * self.published >= 0)


def figure(name: str, simulated: float, published: float) -> Check:
    off = 100 * (simulated / published - 1)
    return Check(name=name, simulated=simulated, published=published, off=off, limit=FIGURE_PERCENT)


def gain(name: str, simulated: tuple[float, float], published: tuple[float, float]) -> Check:
    """Changes from before to after, in percent."""
    ours, theirs = (100 * (after / before - 1) for before, after in (simulated, published))
    return Check(
        name=name, simulated=ours, published=theirs, off=ours - theirs, limit=GAIN_POINTS, is_gain=True
    )


def same(name: str, simulated: tuple[float, float]) -> Check:
    """Both sides run the same kernels: the change, in percent, has to be next to nothing."""
    change = 100 * (simulated[1] / simulated[0] - 1)
    return Check(name=name, simulated=change, published=0.0, off=change, limit=SAME_PERCENT)


def shown(name: str, simulated: float, published: float) -> Check:
    """A figure that is shown and not held: the source's other figures contradict it."""
    return replace(figure(name, simulated, published), limit=math.inf)


def decode_simulation(
    table: MoeTimeTable, run: DecodeRun, attention: AttentionTime, paths: frozenset[MoePath]
) -> Simulation:
    """A run at constant concurrency; every lane sends its next request when the one before is complete."""
    scenario = ScenarioConfig(
        concurrency=run.concurrency,
        duration_wall_s=DECODE_S,
        warmup_requests=1,
        unsafe_override=True,
        grace_wall_s=0.0,
    )
    return Simulation(
        moe=SimulatedMoe(table=table, enabled=paths),
        scenario=scenario,
        tier=replace(TIER, speculation=run.speculation),
        attention=attention,
        traces=SingleTurns(count=8 * run.concurrency, num_input=1024, num_output=1024),
    )


def replay_decode(table: MoeTimeTable, attention: AttentionTime, run_all: Map) -> list[Check]:
    """Fixed slots against compact only; where a step is larger than the slots, both sides have to be the same."""
    sides = (frozenset[MoePath](), frozenset({MoePath.FIXED_SLOT}))
    figures = run_all(
        [decode_simulation(table, run, attention, side) for run in DECODE_RUNS for side in sides]
    )
    checks = []
    for run, before, after in zip(DECODE_RUNS, figures[::2], figures[1::2]):
        pair = (before[run.metric]["p50"], after[run.metric]["p50"])
        name = f"{run.name}: {run.metric} p50"
        if run.same_kernels:
            checks.append(same(f"{name}, fixed_slot on, %", pair))
        else:
            checks.append(gain(f"{name}, fixed_slot on, %", pair, (run.before_ms, run.after_ms)))
    return checks


def replay_agentx(setting: Setting, attention: AttentionTime, run_all: Map) -> list[Check]:
    """Absolute figures with the fused paths off, gains with them on, and the requests of an hour."""
    figures = run_all(
        [setting.simulation(run, attention, side) for run in AGENTX_RUNS for side in (BEFORE, AFTER)]
    )
    checks = []
    for run, before, after in zip(AGENTX_RUNS, figures[::2], figures[1::2]):
        name = f"AgentX at {run.concurrency}"
        totals = (before["total_tput_tps"], after["total_tput_tps"])
        checks += [
            figure(f"{name}: total tok/s per GPU", totals[0], run.before_total_tps),
            figure(f"{name}: P90 interactivity, tok/s/user", before["p90_intvty"], run.before_p90_intvty),
            gain(
                f"{name}: total tok/s, fused paths on, %", totals, (run.before_total_tps, run.after_total_tps)
            ),
        ]
        rows = before["rows_per_rank"]["decode"]
        checks += [
            shown(f"{name}: decode rows a rank {point}, another run", rows[point], published)
            for (concurrency, point), published in DECODE_ROWS.items()
            if concurrency == run.concurrency
        ]
        if run.concurrency == HOUR_CONCURRENCY:
            checks += hour_checks(before)
    return checks


def hour_checks(report: Figures) -> list[Check]:
    """Requests of a run's profile against those of the published hour."""
    seen: dict[str, Any] = {
        "theoretical_cache_hit_rate": report["theoretical_cache_hit_rate"],
        **{
            f"{side}_{point}": report[f"{side}_tokens"][point]
            for side in ("input", "output")
            for point in ("mean", "p50", "p90")
        },
    }
    return [
        figure(f"an hour at {HOUR_CONCURRENCY}: {name}", seen[name], value)
        for name, value in HOUR_PROFILE.items()
    ]


def markdown(checks: Sequence[Check]) -> str:
    """The checks as a table."""
    lines = ["| figure | simulated | published | apart | at most | |", "|---|---|---|---|---|---|"]
    for check in checks:
        unit = " points" if check.is_gain else " %"
        limit = f"{check.limit:g}{unit}" if math.isfinite(check.limit) else "not held"
        digits = 3 if abs(check.published) < 1 and check.published else 1
        lines.append(
            f"| {check.name} | {check.simulated:,.{digits}f} | {check.published:,.{digits}f} | "
            f"{check.off:+.1f}{unit} | {limit} | {'' if check.good else '**no**'} |"
        )
    return "\n".join(lines) + "\n"
