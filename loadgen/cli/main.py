"""`loadgen --scenario agentx`: one run against a service, live progress, final tables, a report on disk.

Without a command loadgen runs a scenario; the commands beside it (`loadgen synth` ...) are added by `cli_*`.

Exit status: 0 all requests succeeded; 1 some failed, none completed, the run was aborted, or the service counted
other steps than were made; 2 the run was refused before it began; 130 cancelled with Ctrl-C (the report is written all
the same).
"""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.logging import RichHandler

from loadgen.cli import report
from loadgen.cli import traces as trace_commands
from loadgen.cli.engine import engine
from loadgen.cli.exit_status import refusals
from loadgen.cli.options import Options, numbers, one_number, writable
from loadgen.cli.published import calibrate, published
from loadgen.cli.run import run_all
from loadgen.moe.routing_model import ROUTINGS
from loadgen.moe.source import SimulatedMoe
from loadgen.scenario.scenario import AGENTX, SCENARIOS
from loadgen.scenario.workload import Workload
from loadgen.tier.attention_time import Stragglers
from loadgen.trace.file import FileTraces
from megamoe.errors import ConfigError, must_be

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
for command in (
    trace_commands.synth, trace_commands.stats, engine, calibrate, published, report.compare, report.page,
):  # fmt: skip
    app.command()(command)


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
    transport: Annotated[
        str, typer.Option(help="how rows reach the service: grpc, or ring (shared memory of its host)")
    ] = "grpc",
    plain: Annotated[bool, typer.Option("--plain", help="progress as lines, also on a terminal")] = False,
) -> None:
    if context.invoked_subcommand is not None:
        return
    console = Console()
    logging.basicConfig(
        level=logging.WARNING, format="%(message)s", handlers=[RichHandler(console=console, show_path=False)]
    )
    with refusals(console):
        concurrencies = numbers(sweep)
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
            transport=transport,
            routing=routing,
            plain=plain,
            num_drafts=drafts,
            scenario={
                "scenario": scenario,
                "concurrency": one_number(concurrency),
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
        writable(out)
        status = run_all(options, concurrencies, console)
    raise typer.Exit(status)
