"""What a person sees: a live view while the run goes on, and the final tables.

On a terminal the view redraws in place; elsewhere a line is printed now and then. It only reads the replay.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from loadgen.replay.replay import Replay
from loadgen.report.figures import percentiles_of
from loadgen.report.report import PATHS
from loadgen.steps.records import PathTimes, RunPhase, Status

REFRESH_S = 0.5
LINE_EVERY_S = 5.0
RATE_WINDOW_S = 10.0
RECENT = 400
"""Layer calls per path that the live view takes its median from."""


class Progress:
    """Running counts over the records of a replay; each record is looked at once."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self._counts = {phase: dict.fromkeys(Status, 0) for phase in RunPhase}
        self.num_tokens = 0
        self._seen_requests = 0
        self._seen_steps = 0
        self._rates: list[tuple[float, int, int]] = []

    def update(self) -> None:
        record = self.replay.record
        for request in record.requests[self._seen_requests :]:
            self._counts[request.phase][request.status] += 1
        self._seen_requests = len(record.requests)
        for step in record.steps[self._seen_steps :]:
            self.num_tokens += step.num_tokens
        self._seen_steps = len(record.steps)
        now = time.monotonic()
        recent = [point for point in self._rates if now - point[0] < RATE_WINDOW_S]
        self._rates = [*(recent or self._rates[-1:]), (now, self._seen_steps, self.num_tokens)]

    @property
    def counts(self) -> dict[Status, int]:
        """Requests of the phase that runs, by how they ended."""
        return self._counts[self.replay.phase]

    @property
    def rates(self) -> tuple[float, float]:
        """Steps and output tokens a second of late."""
        (then, steps, tokens), (now, more_steps, more_tokens) = self._rates[0], self._rates[-1]
        span = now - then
        return ((more_steps - steps) / span, (more_tokens - tokens) / span) if span > 0 else (0.0, 0.0)

    @property
    def elapsed_s(self) -> float:
        """Seconds of the phase that runs."""
        record = self.replay.record
        start = record.profile_start_s if self.replay.phase is RunPhase.PROFILE else record.run_start_s
        return max(self.replay.now() - start, 0.0)

    def line(self) -> str:
        steps_per_s, tokens_per_s = self.rates
        rows = self.replay.record.steps[-1].num_rows_per_rank if self.replay.record.steps else ()
        return (
            f"{self.replay.phase} {self.elapsed_s:5.1f} s: {self.counts[Status.COMPLETED]} completed, "
            f"{self.counts[Status.FAILED]} failed, {self.replay.num_in_flight} in flight, "
            f"{self.replay.num_running} decoding, {steps_per_s:.1f} steps/s, {tokens_per_s:.0f} tok/s, "
            f"rows {list(rows)}"
        )

    def view(self, title: str) -> RenderableType:
        config = self.replay.config
        profiling = self.replay.phase is RunPhase.PROFILE
        total = config.duration_wall_s if profiling else None
        bar = ProgressBar(
            total=total, completed=min(self.elapsed_s, total or 0), width=40, pulse=not profiling
        )
        steps_per_s, tokens_per_s = self.rates
        head = Table.grid(padding=(0, 2))
        head.add_row("phase", Text(str(self.replay.phase), style="bold"), bar, f"{self.elapsed_s:.0f} s")
        failed = self.counts[Status.FAILED]
        head.add_row(
            "requests",
            f"{self.counts[Status.COMPLETED]} completed",
            Text(f"{failed} failed", style="bold red" if failed else ""),
            f"{self.replay.num_in_flight} in flight, {self.replay.num_running} decoding, "
            f"{self.replay.num_live_trees} sessions",
        )
        head.add_row("rates", f"{steps_per_s:.1f} steps/s", f"{tokens_per_s:.0f} output tok/s", "")
        table = Table(box=None, padding=(0, 2))
        for name in ("path", "sub-steps", "p50 ms", "p90 ms"):
            table.add_column(name, justify="left" if name == "path" else "right")
        for path in PATHS:
            times = self.replay.record.times.get((self.replay.phase, path)) or PathTimes()
            points = percentiles_of(times.client[-RECENT:], (50, 90), 1e3)
            table.add_row(path, f"{times.num_steps}", _number(points["p50"]), _number(points["p90"]))
        return Group(Text(title, style="bold"), head, table)


@contextlib.asynccontextmanager
async def watch(replay: Replay, console: Console, title: str, *, plain: bool = False) -> AsyncIterator[None]:
    """Show progress while the body runs. plain: lines instead of a redrawn view."""
    progress = Progress(replay)
    progress.update()
    plain = plain or not console.is_terminal
    if plain:
        console.print(title, highlight=False, soft_wrap=True)

    async def lines() -> None:
        while True:
            await asyncio.sleep(LINE_EVERY_S)
            progress.update()
            console.print(progress.line(), highlight=False, soft_wrap=True)

    async def redraw(live: Live) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            progress.update()
            live.update(progress.view(title), refresh=True)

    with contextlib.ExitStack() as stack:
        if plain:
            task = asyncio.create_task(lines())
        else:
            live = stack.enter_context(Live(progress.view(title), console=console, auto_refresh=False))
            task = asyncio.create_task(redraw(live))
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def final_tables(report: dict[str, Any]) -> RenderableType:
    """The report's main figures as tables; those of requests where any has completed."""
    requests = [_throughput(report), _latencies(report)] if report["requests"]["completed"] else []
    return Group(*requests, _paths(report), *_verdict(report))


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _throughput(report: dict[str, Any]) -> Table:
    table = Table(title="Throughput per GPU (rank)", title_justify="left")
    for name in ("total tok/s", "output tok/s", "input tok/s", "requests/s", "P90 interactivity tok/s/user"):
        table.add_column(name, justify="right")
    names = ("total_tput_tps", "output_tput_tps", "input_tput_tps", "request_tput_rps", "p90_intvty")
    table.add_row(*(_number(report[name]) for name in names))
    return table


def _latencies(report: dict[str, Any]) -> Table:
    table = Table(title="Requests of the profile", title_justify="left")
    for name in ("", "mean", "p50", "p75", "p90", "p95", "std"):
        table.add_column(name, justify="right" if name else "left")
    for name, label in (("ttft", "TTFT ms"), ("itl", "ITL ms"), ("tpot", "TPOT ms"), ("step_interval", "step ms"),
                        ("e2el", "E2E ms")):  # fmt: skip
        points = (report[name][point] for point in ("mean", "p50", "p75", "p90", "p95", "std"))
        table.add_row(label, *(_number(None if value is None else value * 1e3, 1) for value in points))
    return table


def _paths(report: dict[str, Any]) -> Table:
    table = Table(
        title=f"Paths, whole run: {report['calls']:,} layer calls, {report['layers']} layers a step",
        title_justify="left",
    )
    headings = (
        "path", "sub-\nsteps", "p50\nms", "p90\nms", "p99\nms",
        "scraped\nsteps", "replies\np50 ms", "scraped\np50 ms",
    )  # fmt: skip
    for name in headings:
        table.add_column(name, justify="left" if name == "path" else "right", overflow="fold")
    table.columns[0].no_wrap = True
    for path, figures in report["paths"].items():
        latency, checked = figures["latency_ms"], report["service_check"].get("paths", {}).get(path, {})
        table.add_row(
            path,
            f"{figures['num_steps']:,}",
            *(_number(latency[point]) for point in ("p50", "p90", "p99")),
            f"{figures['scraped_num_steps']:,}" if "scraped_num_steps" in figures else "-",
            _number(checked.get("replies_p50_ms")),
            _number(checked.get("scraped_p50_ms")),
        )
    return table


def _restarts(report: dict[str, Any]) -> list[Text]:
    times = report["steps"]["service_restarts"]
    if not times:
        return []
    when = ", ".join(f"{at:.0f}" for at in times)
    uncounted = report["service_check"].get("calls_before_restart", 0)
    line = f"The service's group restarted {len(times)} time(s), after {when} s; {uncounted:,} calls before that are "
    return [Text(line + "counted by nobody any more", style="bold yellow")]


def _verdict(report: dict[str, Any]) -> list[Text]:
    rows, requests = report["rows_per_rank"], report["requests"]
    off, hit = report["off_decode_path_share"], report["theoretical_cache_hit_rate"]
    match = report["service_steps_match"]
    lines = [
        Text(
            f"Requests: {requests['completed']:,} completed, {requests['failed']:,} failed, "
            f"{requests['cancelled']:,} cancelled at the end; accept length {_number(report['accept_length'])}; "
            f"prefix-cache hit {'-' if hit is None else f'{hit:.3f}'} in theory"
        ),
        Text(
            f"Steps of the profile: {report['prefill_steps']:,} with prefill, {report['decode_steps']:,} pure decode; "
            f"{report['steps']['retried']:,} tried again, {report['steps']['failed']:,} failed"
        ),
        *_restarts(report),
        Text(
            f"Rows per rank: p50 {_number(rows['p50'], 0)}, p90 {_number(rows['p90'], 0)}, max "
            f"{_number(rows['max'], 0)}; decode steps off the decode path: {'-' if off is None else f'{off:.1%}'}"
        ),
        Text(
            "Service and load generator count the same steps: "
            + {True: "yes", False: "NO", None: "not known"}[match]
            + "".join(f"\n  {reason}" for reason in report["service_check"]["reasons"]),
            style="" if match else "bold red",
        ),
    ]
    if report["run_cancelled"]:
        lines.append(Text("The run was cancelled: the report covers what had happened.", style="bold yellow"))
    if report["run_aborted"]:
        lines.append(Text(f"The run was aborted: {report['run_aborted']}", style="bold red"))
    reasons = report["submission_invalid_reasons"]
    lines.append(
        Text("submission_valid: " + ("true" if not reasons else "false (" + "; ".join(reasons) + ")"))
    )
    return lines
