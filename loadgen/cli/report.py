"""`loadgen compare` and `loadgen page`: what to do with reports once there are some. No service is needed.

Exit status: 0, or 2 when a file is no report.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadgen.cli.exit_status import refusals
from loadgen.page.page import write_page
from loadgen.report.compare import REPLICATE_NOISE, Comparison, compare_runs, read_side

_STYLES = {"better": "green", "worse": "red", "no difference shown": ""}


def compare(
    a: Annotated[Path, typer.Argument(help="before: a report.json, or a folder of repeats")],
    b: Annotated[Path, typer.Argument(help="after: the same")],
) -> None:
    """Say what changed from A to B, and how sure that is."""
    console = Console()
    with refusals(console):
        comparison = compare_runs(read_side(a), read_side(b))
    console.print(_table(comparison))
    for line in comparison.differences:
        console.print(f"differs: {line}", highlight=False, soft_wrap=True)
    if not comparison.repeated:
        throughput, latency = (f"{REPLICATE_NOISE[kind]:.1%}" for kind in ("throughput", "latency"))
        console.print(
            f"No interval without repeats on both sides: a change counts as one beyond {throughput} (throughput) or "
            f"{latency} (latency), the scatter of public replicates.",
            highlight=False, soft_wrap=True,
        )  # fmt: skip


def page(
    reports: Annotated[list[Path], typer.Argument(help="report.json files, or folders with some below")],
    out: Annotated[Path, typer.Option(help="the page")] = Path("out/report.html"),
) -> None:
    """Write one self-contained HTML page of one run or several."""
    console = Console()
    with refusals(console):
        runs = [run for path in reports for run in read_side(path)]
        write_page(runs, out)
    console.print(f"Page of {len(runs)} runs: {out}", highlight=False, soft_wrap=True)


def _table(comparison: Comparison) -> Table:
    matched = ", matched by seed" if comparison.repeated and comparison.paired else ""
    title = f"A ({_runs(comparison.num_a)}) against B ({_runs(comparison.num_b)}){matched}"
    table = Table(title=title, title_justify="left")
    for name in ("", "A", "B", "change", "95 % interval", "verdict"):
        table.add_column(name, justify="right" if name not in ("", "verdict") else "left")
    for row in comparison.changes:
        interval = "-" if row.low is None or row.high is None else f"{row.low:+.1%} to {row.high:+.1%}"
        verdict = Text(row.verdict, style=_STYLES[row.verdict])
        table.add_row(row.label, f"{row.a:,.2f}", f"{row.b:,.2f}", f"{row.change:+.1%}", interval, verdict)
    return table


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"
