"""`loadgen calibrate` fits attention time to published figures; `loadgen published` replays published A/B runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from loadgen.cli.exit_status import refusals
from loadgen.moe.table import MoeTimeTable
from loadgen.published.calibrate import Figures, Setting, fit_agentx, fit_decode, run_in_processes
from loadgen.published.runs import markdown, replay_agentx, replay_decode
from loadgen.published.simulate import Simulation
from loadgen.tier.attention_time import AttentionTime
from megamoe.errors import ConfigError, must_be

TABLE = "mi355x-v4-pro"
BEGIN, END = "<!-- published: loadgen published -->", "<!-- end published -->"

Duration = Annotated[float, typer.Option(help="profile of an AgentX run, in simulated seconds")]
Processes = Annotated[int, typer.Option(min=1, help="runs side by side")]


def calibrate(
    moe_time: Annotated[str, typer.Option(help="table of MoE times: a file or one that ships")] = TABLE,
    duration: Duration = 3600.0,
    processes: Processes = 2,
) -> None:
    """Fit the constants of attention time to published figures without the paths in question; takes minutes."""
    console = Console(highlight=False)
    with refusals(console):
        setting = Setting(table=MoeTimeTable.named(moe_time), duration_s=duration)
        start = fit_decode(setting.table)
        console.print(
            f"from decode runs: base_s {start.base_s:.5g}, decode_request_s {start.decode_request_s:.3g}, "
            f"decode_row_s {start.decode_row_s:.4g}",
            soft_wrap=True,
        )
        fitted = fit_agentx(setting, start, lambda runs: run_in_processes(runs, processes), console.print)
        for name, value in asdict(fitted).items():
            console.print(f"{name} = {value:.4g}")


def published(
    moe_time: Annotated[str, typer.Option(help="table of MoE times: a file or one that ships")] = TABLE,
    duration: Duration = 3600.0,
    processes: Processes = 2,
    write: Annotated[
        Path | None, typer.Option(help="file whose table to rewrite, between its markers")
    ] = None,
) -> None:
    """Simulate published A/B runs and hold them against the sources. Exit status 1 when one is too far off."""
    console = Console(highlight=False)
    with refusals(console):
        table = MoeTimeTable.named(moe_time)
        if write is not None:
            replaced(write, "")
        setting, attention = Setting(table=table, duration_s=duration), AttentionTime()
        made: list[tuple[Simulation, Figures]] = []

        def run_all(simulations: Sequence[Simulation]) -> list[Figures]:
            reports = run_in_processes(simulations, processes)
            made.extend(zip(simulations, reports))
            return reports

        checks = replay_decode(table, attention, run_all)
        checks += replay_agentx(setting, attention, run_all)
        text = f"{markdown(checks)}\n{slowest(made)}\n"
        console.print(text, soft_wrap=True)
        if write is not None:
            write.write_text(replaced(write, text), encoding="utf-8")
        if not all(check.good for check in checks):
            raise typer.Exit(1)


def replaced(path: Path, text: str) -> str:
    """What the file says with `text` between its markers. Raises ConfigError when they are missing."""
    known = path.read_text(encoding="utf-8")
    if known.count(BEGIN) != 1 or known.count(END) != 1:
        raise ConfigError(must_be(f"markers in {path}", f"one {BEGIN} and one {END}", "other"))
    before, rest = known.split(BEGIN)
    return f"{before}{BEGIN}\n{text}{END}{rest.split(END)[1]}"


def slowest(made: Sequence[tuple[Simulation, Figures]]) -> str:
    """What the most expensive of the longest runs cost, as a sentence."""
    longest = max(round(report["profile"]["duration_s"], -2) for _, report in made)
    candidates = [run for run in made if round(run[1]["profile"]["duration_s"], -2) == longest]
    simulation, report = max(candidates, key=lambda run: float(run[1]["cost"]["cpu_s"]))
    cost, profile = report["cost"], report["profile"]
    return (
        f"The most expensive of the longest runs (concurrency {simulation.scenario.concurrency}, "
        f"{profile['duration_s']:,.0f} s of profile and {profile['steps']:,} steps, after its warm-up) took "
        f"{cost['cpu_s']:.0f} s of one CPU and at most {cost['peak_mb']:,.0f} MB."
    )
