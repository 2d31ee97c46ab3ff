"""Calibration and published runs: what can be checked in seconds. `loadgen published` checks the rest in minutes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import loadgen.cli.main as cli
from loadgen.cli.published import BEGIN, END, replaced, slowest
from loadgen.moe.table import TABLES, MoeTimeTable, TableTier
from loadgen.published.calibrate import (
    BEFORE,
    Figures,
    Setting,
    fit_agentx,
    fit_decode,
    moe_step_ms,
    report_of,
)
from loadgen.published.runs import decode_simulation, figure, gain, hour_checks, markdown, same, shown
from loadgen.published.simulate import Simulation
from loadgen.published.sources import AGENTX_RUNS, DECODE_ROWS, DECODE_RUNS, HOUR_PROFILE
from loadgen.tier.attention_time import AttentionTime
from megamoe import Path as MoePath
from megamoe.errors import ConfigError

TABLE = MoeTimeTable.named("mi355x-v4-pro")
FITTED = AttentionTime()


def test_the_constants_of_decode_are_what_the_fit_finds() -> None:
    found = fit_decode(TABLE)
    for name in ("base_s", "decode_request_s", "decode_row_s"):
        assert getattr(FITTED, name) == pytest.approx(getattr(found, name), rel=2e-3), name


@pytest.mark.parametrize("run", DECODE_RUNS, ids=lambda run: run.name)
def test_decode_steps_come_close_to_the_published_ones_on_both_sides(run: object) -> None:
    other_ms = 1e3 * FITTED.decode_s(run.concurrency / 8, run.num_rows_per_rank, 0)
    before = other_ms + moe_step_ms(TableTier(TABLE, frozenset()), run)
    after = other_ms + moe_step_ms(TableTier(TABLE, frozenset({MoePath.FIXED_SLOT})), run)
    assert before == pytest.approx(run.before_ms, rel=0.05)  # these were fitted
    assert after == pytest.approx(run.after_ms, rel=0.05)  # these were not
    check = gain(run.name, (before, after), (run.before_ms, run.after_ms))
    assert check.good if not run.same_kernels else same(run.name, (before, after)).good, check


def test_a_simulated_decode_run_gains_what_the_source_gained() -> None:
    run = DECODE_RUNS[3]  # three drafts at 32
    sides = (frozenset[MoePath](), frozenset({MoePath.FIXED_SLOT}))
    pair = []
    for side in sides:
        simulation = decode_simulation(TABLE, run, FITTED, side)
        short = replace(simulation, scenario=replace(simulation.scenario, duration_wall_s=30.0))
        report = report_of(short)
        assert report["accept_length"] == pytest.approx(1 + 3 * 0.915, abs=0.01)
        assert (
            report["paths"]["fixed_slot"]["num_steps"] > 0
            if side
            else not report["paths"]["fixed_slot"]["num_steps"]
        )
        pair.append(report["step_interval"]["p50"])
    assert gain("", (pair[0], pair[1]), (run.before_ms, run.after_ms)).good


def test_the_fit_of_agentx_finds_constants_that_explain_its_figures() -> None:
    """Figures made by a known law, instead of simulated hours, lead back to the constants that made them."""
    truth = {"prefill_row_s": 60e-6, "decode_context_s": 0.8e-9}

    def law(prefill_row_s: float, decode_context_s: float, concurrency: int) -> float:
        return 1 + 4e3 * prefill_row_s + decode_context_s * 1e6 * concurrency

    def run_all(simulations: Sequence[Simulation]) -> list[Figures]:
        figures = []
        for simulation in simulations:
            run = next(run for run in AGENTX_RUNS if run.concurrency == simulation.scenario.concurrency)
            assert simulation.moe.enabled == BEFORE
            constants = simulation.attention.prefill_row_s, simulation.attention.decode_context_s
            slower = law(*constants, run.concurrency) / law(*truth.values(), run.concurrency)
            figures.append(
                {
                    "total_tput_tps": run.before_total_tps / slower,
                    "p90_intvty": run.before_p90_intvty / slower**2,
                }
            )
        return figures

    notes: list[str] = []
    found = fit_agentx(Setting(table=TABLE), FITTED, run_all, notes.append, iterations=3)
    assert found.prefill_row_s == pytest.approx(truth["prefill_row_s"], rel=0.1)
    assert found.base_s == FITTED.base_s
    assert len(notes) == 4


def test_checks_judge_size_and_sign() -> None:
    assert figure("x", 114.0, 100.0).good
    assert not figure("x", 84.0, 100.0).good
    assert gain("x", (100, 106), (100, 110)).good
    assert not gain("x", (100, 104), (100, 110)).good
    assert not gain("x", (100, 99), (100, 103)).good  # close, and the wrong sign
    assert same("x", (100, 100.9)).good
    assert not same("x", (100, 98.9)).good
    table = markdown([figure("close", 101.0, 100.0), figure("far", 2.0, 100.0)])
    assert [line.count("**no**") for line in table.splitlines()[2:]] == [0, 1]
    assert shown("x", 50.0, 100.0).good
    assert "| -50.0 % | not held |" in markdown([shown("x", 50.0, 100.0)])


def test_an_hour_is_held_against_every_published_figure() -> None:
    report = {
        "theoretical_cache_hit_rate": 0.975,
        "input_tokens": {"mean": 113_814.0, "p50": 94_821.0, "p90": 163_328.0},
        "output_tokens": {"mean": 806.0, "p50": 333.0, "p90": 1_874.0},
    }
    checks = hour_checks(report)
    assert len(checks) == len(HOUR_PROFILE)
    assert [check.off for check in checks] == pytest.approx([0.0] * len(checks))
    report["input_tokens"]["p50"] *= 1.2
    assert sum(not check.good for check in hour_checks(report)) == 1


def test_the_table_is_written_between_its_markers_only(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert replaced(path, "new\n") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    path.write_text("nothing")
    with pytest.raises(ConfigError, match="markers in .*page.md must be one"):
        replaced(path, "new")
    result = CliRunner().invoke(cli.app, ["published", "--write", str(path)], env={"COLUMNS": "200"})
    assert (result.exit_code, path.read_text()) == (2, "nothing")


def test_the_documented_table_has_every_check_and_all_are_good() -> None:
    text = (Path(__file__).parents[3] / "docs" / "agentx.md").read_text()
    table = text.split(BEGIN)[1].split(END)[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(DECODE_RUNS) + 3 * len(AGENTX_RUNS) + len(HOUR_PROFILE) + len(DECODE_ROWS)
    for name in ("request", "row", "prefill_row"):
        assert f"`{name}`" in text


def test_a_simulated_hour_at_384_is_quick() -> None:
    """A slice of it, by CPU time: an hour with its warm-up may take 2 minutes of this machine."""
    setting = Setting(table=TABLE, duration_s=60.0)
    simulation = setting.simulation(AGENTX_RUNS[-1], FITTED, BEFORE)
    scenario = replace(simulation.scenario, warmup_requests=1, grace_wall_s=0.0)
    report = report_of(replace(simulation, scenario=scenario))
    steps = report["steps"]["executed"]
    per_step_s = report["cost"]["cpu_s"] / steps
    full_run_steps = 55_000
    assert per_step_s * full_run_steps < 120.0, (report["cost"], steps)
    assert report["cost"]["peak_mb"] < 2000


def test_the_cost_of_the_most_expensive_run_is_told() -> None:
    setting = Setting(table=TABLE)
    runs = [setting.simulation(run, FITTED, BEFORE) for run in AGENTX_RUNS[:2]]
    costs = [
        {"cost": {"cpu_s": cpu_s, "peak_mb": 500.0}, "profile": {"duration_s": 3600.0, "steps": 10}}
        for cpu_s in (20.0, 10.0)
    ]
    sentence = slowest(list(zip(runs, costs)))
    assert "concurrency 128" in sentence
    assert "20 s of one CPU" in sentence


def test_the_shipped_table_names_its_source_and_the_full_shape() -> None:
    fields = json.loads((TABLES / "mi355x-v4-pro.json").read_text())
    assert fields["source"]
    assert TABLE.deployment.shape.num_layers == 61
    assert np.isclose(TABLE.max_weight, 0.5)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--duration", "0"], "duration_wall_s must be above 0, got 0.0"),
        (["--duration", "nan"], "duration_wall_s must be finite, got nan"),
        (["--processes", "0"], "--processes"),
        (["--moe-time", "nothing"], "moe_time must be a file or one of"),
    ],
)
@pytest.mark.parametrize("command", ["published", "calibrate"])
def test_a_wrong_option_is_refused_before_anything_runs(
    command: str, arguments: list[str], sentence: str
) -> None:
    result = CliRunner().invoke(cli.app, [command, *arguments], env={"COLUMNS": "160"})
    assert result.exit_code == 2
    assert sentence in result.output
