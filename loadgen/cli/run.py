"""Runs from lease to report: one, or one for each concurrency of a sweep."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from dataclasses import replace

from rich.console import Console

from loadgen.cli.display import final_tables, watch
from loadgen.cli.exit_status import EXIT_CANCELLED, EXIT_FAILED, exit_status
from loadgen.cli.options import Options
from loadgen.moe.live import LiveTier
from loadgen.moe.source import open_moe
from loadgen.moe.table import TableTier
from loadgen.page.page import write_page
from loadgen.replay.replay import Replay
from loadgen.report.files import write_report
from loadgen.report.report import build_report
from loadgen.report.run import read_run
from loadgen.scenario.scenario import FIXED
from loadgen.steps.service_count import ServiceCount


def run_all(options: Options, sweep: tuple[int, ...], console: Console) -> int:
    """One run, or one for each concurrency in a folder of its own; the worst exit status. Ctrl-C ends the sweep."""
    if not sweep:
        return asyncio.run(run(options, console))
    statuses = []
    for number in sweep:
        scenario = options.scenario | {"concurrency": number}
        workload = (
            replace(options.workload, rows=number) if options.workload.scenario == FIXED else options.workload
        )
        one = replace(options, out=options.out / f"c{number}", scenario=scenario, workload=workload)
        statuses.append(asyncio.run(run(one, console)))
        if statuses[-1] == EXIT_CANCELLED:
            break
    runs = [read_run(options.out / f"c{number}") for number in sweep[: len(statuses)]]
    page = write_page(runs, options.out / "report.html")
    console.print(f"Page of the sweep: {page}", highlight=False, soft_wrap=True)
    return EXIT_FAILED if EXIT_FAILED in statuses else max(statuses)


async def run(options: Options, console: Console) -> int:
    """One run from lease to report; returns the exit status. Raises MegaMoeError when it cannot begin."""
    async with open_moe(
        options.simulated,
        options.target,
        holder=options.holder,
        wait_ready_s=options.wait_ready_s,
        transport=options.transport,
    ) as (moe, clock):
        chosen = options.workload.fitted(options.resolve(moe.info.profile), moe.info)
        config = chosen.scenario
        traces = options.workload.traces(config)
        replay = Replay(
            moe,
            traces,
            config,
            chosen.tier,
            clock,
            attention=options.workload.attention,
            distribution=options.routing,
            num_micro_batches=options.num_micro_batches,
        )
        count = ServiceCount(lambda: moe.info, replay.record, replay.now)
        await count.begin()
        if isinstance(moe, LiveTier):
            moe.on_restart = count.restarted
        info = moe.info
        title = (
            f"{config.scenario}: {config.concurrency} lanes on {info.model_name} "
            f"({info.backend}, {info.num_ranks} ranks, {info.num_layers} layers), "
            f"time x{config.time_scale:.3g}, tokens x{config.token_scale:.3g}"
        )
        crash: Exception | None = None
        with _cancel_on_signals(replay):  # also while the report is made: it is what a run is for
            async with watch(replay, console, title, plain=options.plain):
                try:
                    await replay.run()
                except Exception as error:  # the report of what there is comes first, then the error
                    crash = error
                    replay.record.aborted = replay.record.aborted or f"{type(error).__name__}: {error}"
            counted, not_counted = await count.end()
            report = build_report(
                replay.record,
                moe.info,
                config,
                replay.tier_config,
                counted,
                traces=traces.description,
                distribution=options.routing,
                not_counted=not_counted,
                simulated=moe.description if isinstance(moe, TableTier) else None,
                attention=options.workload.attention,
            )
            path = write_report(options.out, report, replay.record, config.slice_s)
            write_page([read_run(path)], path.with_name("report.html"))
            console.print(final_tables(report))
            console.print(
                f"Report: {path}, page: {path.with_name('report.html')}", highlight=False, soft_wrap=True
            )
        if crash is not None:
            raise crash
    return exit_status(report)


@contextlib.contextmanager
def _cancel_on_signals(replay: Replay) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM ends the run with a report; the second one ends the process."""
    loop = asyncio.get_running_loop()

    def cancel() -> None:
        replay.cancel()
        restore()

    def restore() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, cancel)
    try:
        yield
    finally:
        restore()
