"""Exit statuses of loadgen's commands, and how they say what they refuse."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import typer
from rich.console import Console

from loadgen.report.report import none_completed
from megamoe.errors import MegaMoeError

EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_CANCELLED = 130


def exit_status(report: dict[str, Any]) -> int:
    """What a run tells its caller."""
    if report["run_aborted"] or report["requests"]["failed"] or report["service_steps_match"] is False:
        return EXIT_FAILED
    if report["run_cancelled"]:
        return EXIT_CANCELLED
    return EXIT_FAILED if none_completed(report["request_accounting"], report["scenario"]) else 0


@contextlib.contextmanager
def refusals(console: Console) -> Iterator[None]:
    """What is refused is said in one sentence, with its exit status."""
    try:
        yield
    except (MegaMoeError, OSError) as error:
        console.print(f"loadgen: {error}", style="bold red", highlight=False, soft_wrap=True, markup=False)
        raise typer.Exit(EXIT_REFUSED) from None
