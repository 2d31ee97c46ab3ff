"""`loadgen synth` writes trace files, `loadgen stats` prints what is in them beside the published figures."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from loadgen.cli.exit_status import refusals
from loadgen.corpus.statistics import TARGETS, Corpus
from loadgen.corpus.synth import SyntheticTraces
from loadgen.trace.file import read_traces
from loadgen.trace.trace import limit_context
from loadgen.trace.writing import write_trace_folder, write_traces
from megamoe.errors import ConfigError, InvalidArgumentError, must_be

NUM_SESSIONS = 393


def synth(
    out: Annotated[Path, typer.Argument(help="file to write, one session a line; a folder with --split")],
    sessions: Annotated[int, typer.Option(help="number of sessions")] = NUM_SESSIONS,
    seed: Annotated[int, typer.Option(help="of everything that is drawn")] = 42,
    split: Annotated[
        bool, typer.Option("--split", help="one .json file a session, as the public harness reads them")
    ] = False,
    max_context: Annotated[
        int | None, typer.Option(help="leave out requests with more tokens, prompt and output together")
    ] = None,
) -> None:
    """Write synthetic sessions in the recorded format, with the published statistics."""
    console = Console(highlight=False)
    with refusals(console):
        if max_context is not None and max_context < 1:
            raise ConfigError(must_be("max_context", "at least 1", max_context))
        corpus = SyntheticTraces(sessions, seed)
        if out.exists() and (not split or not out.is_dir() or any(out.iterdir())):
            raise ConfigError(must_be("out", "a path with nothing there yet", str(out)))
        write = write_trace_folder if split else write_traces
        traces = (corpus[idx] for idx in range(len(corpus)))
        if max_context is not None:
            traces = (kept for trace in traces if (kept := limit_context(trace, max_context)) is not None)
        part = out.with_name(
            f"{out.name}.part"
        )  # half a corpus is a valid file of fewer sessions: no one shall find it
        _remove(part)  # of a process that was killed
        try:
            count = write(part, traces)
            if not count:
                raise ConfigError(must_be("max_context", "so that some request fits", max_context))
            part.replace(out)
        finally:
            _remove(part)
        files = sorted(out.iterdir()) if split else [out]
        megabytes = sum(file.stat().st_size for file in files) / 1e6
        console.print(f"{count} sessions, {megabytes:,.0f} MB: {out}", soft_wrap=True)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def stats(
    path: Annotated[Path, typer.Argument(help="trace file, or a folder of .json files")],
) -> None:
    """Print the statistics of recorded or synthetic sessions beside those published for the AgentX corpus."""
    console = Console(highlight=False)
    with refusals(console):
        if not path.exists():
            raise InvalidArgumentError(
                must_be("path", "a trace file or a folder of them", f"nothing at {path}")
            )
        corpus = Corpus.of(read_traces(path))
        if not corpus.num_sessions:
            raise InvalidArgumentError(must_be(f"sessions in {path}", "at least 1", 0))
        console.print(statistics_table(corpus.statistics(), str(path)))


def statistics_table(statistics: dict[str, float], title: str) -> Table:
    """Measured beside published figures, with how far off they are."""
    table = Table(title=title, title_justify="left")
    table.add_column("quantity")
    for name in ("published", "here", "off"):
        table.add_column(name, justify="right")
    for target in TARGETS:
        here = statistics[target.name]
        off = here / target.published - 1
        far = target.tolerance is not None and not abs(off) <= target.tolerance
        shown = "" if math.isnan(off) else f"{off:+.1%}"
        style = "yellow" if far else ""
        table.add_row(target.name, f"{target.published:,.6g}", f"{here:,.6g}", shown, style=style)
    return table
