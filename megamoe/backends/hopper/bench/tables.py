"""`python -m megamoe.backends.hopper.bench.tables FILE...`: tables and a plot of what runs have left (--json)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path as FilePath

from megamoe.backends.hopper import exit_status
from megamoe.backends.hopper.bench.plot import draw
from megamoe.backends.hopper.bench.report import read_reports


def main(arguments: Sequence[str] | None = None) -> None:
    """Several reports of one machine and group make one."""
    parser = argparse.ArgumentParser(description="tables of reports, in Markdown")
    parser.add_argument("reports", nargs="+", type=FilePath)
    parser.add_argument("--plot", type=FilePath, help="png, svg or pdf; needs matplotlib")
    chosen = parser.parse_args(arguments)
    report = read_reports(chosen.reports)
    print("\n".join(report.markdown()))
    if chosen.plot:
        draw(report, chosen.plot)


if __name__ == "__main__":
    sys.exit(exit_status(main))
