"""`loadgen --scenario agentx`: one run against a service, live progress, final tables, a report on disk.

Without a command loadgen runs a scenario; the commands beside it (`loadgen synth` ...) are added by `cli_*`.

Exit status: 0 all requests succeeded; 1 some failed, the run was aborted, or the service counted other steps than
were made; 2 the run was refused before it began; 130 cancelled with Ctrl-C (the report is written all the same).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler

from loadgen import cli_report, cli_traces
from loadgen.attention_time import Stragglers
from loadgen.cli_engine import engine
from loadgen.cli_exit import EXIT_CANCELLED, EXIT_FAILED, EXIT_REFUSED, exit_status
from loadgen.cli_published import calibrate, published
from loadgen.display import final_tables, watch
from loadgen.live import LiveTier
from loadgen.moe_source import SimulatedMoe, open_moe
from loadgen.moe_table import TableTier
from loadgen.page.page import write_page
from loadgen.page.run import read_run
from loadgen.profiles import RunProfile, run_profile
from loadgen.replay import Replay
from loadgen.report import build_report, write_report
from loadgen.routing_model import ROUTINGS
from loadgen.scenario import AGENTX, FIXED, SCENARIOS
from loadgen.service_count import ServiceCount
from loadgen.speculation import Speculation
from loadgen.trace_file import FileTraces
from loadgen.workload import Workload
from megamoe.errors import ConfigError, MegaMoeError, must_be

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(cli_traces.synth)
app.command()(cli_traces.stats)
app.command()(engine)
app.command()(calibrate)
app.command()(published)
app.command()(cli_report.compare)
app.command()(cli_report.page)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line, before the service has said which profile it runs. None = as the profile says."""

    target: str
    out: Path
    profile: str
    holder: str
    wait_ready_s: float
    routing: str
    plain: bool
    scenario: dict[str, Any]
    tier: dict[str, Any]
    num_drafts: int | None
    workload: Workload = field(default_factory=Workload)
    simulated: SimulatedMoe | None = None
    num_micro_batches: int = 1

    def resolve(self, service_profile: str) -> RunProfile:
        """The settings of the run. Raises ConfigError naming the field."""
        base = self.workload.settings(run_profile(self.profile, service_profile))
        scenario = base.scenario.with_changes(**self.scenario)
        changes = {name: value for name, value in self.tier.items() if value is not None}
        if self.num_drafts is not None:
            changes["speculation"] = Speculation(self.num_drafts)
        return RunProfile(scenario=scenario, tier=replace(base.tier, seed=scenario.seed, **changes))


@app.callback(
    invoke_without_command=True,
    help="Drive a MoE service with simulated agent sessions and report what they saw.",
)
def main(
    context: typer.Context,
    scenario: Annotated[str, typer.Option(help=f"what to run: {', '.join(SCENARIOS)}")] = AGENTX,
    target: Annotated[str, typer.Option(help="host:port of the service's front")] = "127.0.0.1:50051",
    out: Annotated[Path, typer.Option(help="folder of the report")] = Path("out/agentx"),
    profile: Annotated[
        str, typer.Option(help="auto, demo or full; auto = demo for a service with its demo profile")
    ] = "auto",
    concurrency: Annotated[str | None, typer.Option(help="lanes = live session trees [full: 128]")] = None,
    duration: Annotated[float | None, typer.Option(help="wall seconds of the profile [full: 3600]")] = None,
    seed: Annotated[int | None, typer.Option(help="of traces, starts, rows, acceptance [42]")] = None,
    traces: Annotated[int | None, typer.Option(help="number of synthetic sessions [393]")] = None,
    trace_file: Annotated[
        Path | None, typer.Option(help="recorded sessions to play: a file of JSON lines or a folder of .json")
    ] = None,
    input_tokens: Annotated[int, typer.Option(help="of a request of --scenario uniform")] = 1024,
    output_tokens: Annotated[int, typer.Option(help="of a request of --scenario uniform, about")] = 256,
    rows: Annotated[int, typer.Option(help="of each rank in each step of --scenario fixed")] = 128,
    sweep: Annotated[
        str | None,
        typer.Option(help="runs with these concurrencies, by commas (fixed: rows); forbidden by agentx"),
    ] = None,
    warmup_requests: Annotated[
        int | None, typer.Option(help="requests a lane before the profile, after the primers [full: 10]")
    ] = None,
    time_scale: Annotated[
        float | None, typer.Option(help="wall seconds per recorded second, at most 1 [full: 1]")
    ] = None,
    token_scale: Annotated[float | None, typer.Option(help="factor on lengths, at most 1 [full: 1]")] = None,
    grace_period: Annotated[
        float | None, typer.Option(help="wall seconds for requests in flight at the end [full: 30]")
    ] = None,
    drafts: Annotated[int | None, typer.Option(help="draft tokens K of a decode step [6]")] = None,
    chunk_rows: Annotated[int | None, typer.Option(help="prefill rows a rank and step [full: 8192]")] = None,
    decode_rounds_per_prefill: Annotated[
        int | None, typer.Option(help="decode steps between two prefill rounds [full: 16]")
    ] = None,
    step_retries: Annotated[
        int | None, typer.Option(help="tries more of a failed step before its requests fail [1]")
    ] = None,
    routing: Annotated[str, typer.Option(help=f"expert ids: {', '.join(ROUTINGS)}")] = "uniform",
    streaming: Annotated[
        bool | None, typer.Option("--streaming/--no-streaming", help="locked on by the scenario")
    ] = None,
    ignore_eos: Annotated[
        bool | None, typer.Option("--ignore-eos/--no-ignore-eos", help="locked on by the scenario")
    ] = None,
    cache_bust: Annotated[
        bool | None, typer.Option("--cache-bust/--no-cache-bust", help="locked on by the scenario")
    ] = None,
    ignore_delays: Annotated[
        bool | None, typer.Option("--ignore-delays", help="send turns at once; forbidden by the scenario")
    ] = None,
    fixed_schedule: Annotated[
        bool | None,
        typer.Option("--fixed-schedule", help="send turns at recorded times; forbidden by the scenario"),
    ] = None,
    request_rate: Annotated[
        float | None, typer.Option(help="at most so many requests a second; forbidden by the scenario")
    ] = None,
    unsafe_override: Annotated[
        bool | None,
        typer.Option("--unsafe-override", help="go on where the scenario forbids; submission_valid=false"),
    ] = None,
    draft_moe_layers: Annotated[
        int | None,
        typer.Option(help="MoE layers of the draft model, called once a draft with n rows [full: 1]"),
    ] = None,
    kv_capacity_tokens: Annotated[
        int | None, typer.Option(help="KV memory of a rank in tokens; 0 = unlimited [0]")
    ] = None,
    straggler_share: Annotated[
        float, typer.Option(help="how often a rank's attention is late, as a share of its steps")
    ] = 0.0,
    straggler_slowdown: Annotated[float, typer.Option(help="how many times longer it then takes")] = 2.0,
    micro_batches: Annotated[int, typer.Option(help="parts of a step in flight at once")] = 1,
    moe_time: Annotated[
        str | None,
        typer.Option(
            help="simulate: take MoE time from this table and call no service; a file or mi355x-v4-pro"
        ),
    ] = None,
    paths: Annotated[
        str | None,
        typer.Option(help="with --moe-time: paths that may serve, by commas; compact always may [all]"),
    ] = None,
    holder: Annotated[
        str, typer.Option(help="name under which the service is leased [loadgen-<host>-<pid>]")
    ] = "",
    wait_ready: Annotated[float, typer.Option(help="seconds to wait until the service is ready")] = 60.0,
    plain: Annotated[bool, typer.Option("--plain", help="progress as lines, also on a terminal")] = False,
) -> None:
    if context.invoked_subcommand is not None:
        return
    console = Console()
    logging.basicConfig(
        level=logging.WARNING, format="%(message)s", handlers=[RichHandler(console=console, show_path=False)]
    )
    try:
        concurrencies = _sweep(sweep)
        if micro_batches < 1 or (moe_time and micro_batches > 1):
            raise ConfigError(must_be("micro_batches", "at least 1, and 1 with --moe-time", micro_batches))
        if paths is not None and not moe_time:
            raise ConfigError("paths must be given with --moe-time: a service has its own")
        if moe_time and routing != "uniform":
            raise ConfigError(
                must_be("routing", "'uniform' with --moe-time: tables hold no other", repr(routing))
            )
        if routing not in ROUTINGS:
            raise ConfigError(must_be("routing", f"one of {', '.join(ROUTINGS)}", repr(routing)))
        options = Options(
            target=target,
            out=out,
            profile=profile,
            # Two generators under one name would share a lease, and trip over each other's steps.
            holder=holder or f"loadgen-{socket.gethostname()}-{os.getpid()}",
            wait_ready_s=wait_ready,
            routing=routing,
            plain=plain,
            num_drafts=drafts,
            scenario={
                "scenario": scenario,
                "concurrency": _lanes(concurrency),
                "sweep": sweep,
                "duration_wall_s": duration,
                "seed": seed,
                "num_traces": traces,
                "warmup_requests": warmup_requests,
                "time_scale": time_scale,
                "token_scale": token_scale,
                "grace_wall_s": grace_period,
                "step_retries": step_retries,
                "streaming": streaming,
                "ignore_eos": ignore_eos,
                "cache_bust": cache_bust,
                "ignore_delays": ignore_delays,
                "fixed_schedule": fixed_schedule,
                "request_rate": request_rate,
                "unsafe_override": unsafe_override,
            },
            tier={
                "chunk_rows": chunk_rows,
                "decode_rounds_per_prefill": decode_rounds_per_prefill,
                "draft_moe_layers": draft_moe_layers,
                "kv_capacity_tokens": kv_capacity_tokens,
                "stragglers": Stragglers(share=straggler_share, slowdown=straggler_slowdown),
            },
            workload=Workload(
                scenario=scenario,
                recorded=FileTraces(trace_file) if trace_file is not None else None,
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                rows=rows,
            ),
            simulated=SimulatedMoe.read(moe_time, paths) if moe_time else None,
            num_micro_batches=micro_batches,
        )
        options.resolve("")  # what is wrong whatever the service says is refused before anything is leased
        status = run_all(options, concurrencies, console)
    except (MegaMoeError, OSError) as error:
        console.print(f"loadgen: {error}", style="bold red", highlight=False, soft_wrap=True)
        raise typer.Exit(EXIT_REFUSED) from None
    raise typer.Exit(status)


def _lanes(concurrency: str | None) -> int | None:
    """One number."""
    if concurrency is None:
        return None
    if "," in concurrency:
        raise ConfigError(f"concurrency must be one number, got {concurrency!r}; --sweep takes a list")
    try:
        return int(concurrency)
    except ValueError:
        raise ConfigError(must_be("concurrency", "a whole number", repr(concurrency))) from None


def _sweep(text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text is not None else ()
    except ValueError:
        raise ConfigError(must_be("sweep", "whole numbers with commas between them", repr(text))) from None


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
        options.simulated, options.target, holder=options.holder, wait_ready_s=options.wait_ready_s
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
        with _cancel_on_signals(replay):
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


if __name__ == "__main__":
    app()
