"""Exit statuses of loadgen's commands."""

from __future__ import annotations

from typing import Any

EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_CANCELLED = 130


def exit_status(report: dict[str, Any]) -> int:
    """What a run tells its caller."""
    if report["run_aborted"] or report["requests"]["failed"] or report["service_steps_match"] is False:
        return EXIT_FAILED
    return EXIT_CANCELLED if report["run_cancelled"] else 0
