"""`loadgen engine`: serve the simulated attention tier over HTTP until Ctrl-C, then leave a report.

Exit status: 0 when every request was answered, 1 when some failed or the service counted other steps than were made,
2 when it could not begin.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from aiohttp import web
from rich.console import Console

from loadgen.cli.display import final_tables
from loadgen.cli.exit_status import exit_status, refusals
from loadgen.cli.options import writable
from loadgen.engine.core import Engine
from loadgen.engine.http import ChatServer
from loadgen.engine.tokens import write_tokenizer
from loadgen.moe.live import LiveTier
from loadgen.moe.routing_model import ROUTINGS
from loadgen.page.page import write_page
from loadgen.report.files import write_report
from loadgen.report.report import build_report
from loadgen.report.run import ENGINE, read_run
from loadgen.scenario.profiles import run_profile
from loadgen.scenario.scenario import ScenarioConfig
from loadgen.steps.service_count import ServiceCount
from loadgen.tier.attention_tier import TierConfig
from loadgen.tier.speculation import Speculation
from megamoe.errors import ConfigError, must_be

NOT_A_SCENARIO = "requests came from outside, over HTTP"


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The command line. None = as the profile says. port 0 = any free one."""

    target: str
    host: str
    port: int
    out: Path
    profile: str
    holder: str
    wait_ready_s: float
    routing: str
    seed: int
    num_drafts: int | None
    time_scale: float | None
    tier: dict[str, Any]

    def resolve(self, service_profile: str) -> tuple[ScenarioConfig, TierConfig]:
        """Raises ConfigError naming the field."""
        base = run_profile(self.profile, service_profile)
        # Prompts come at their own length: nothing is scaled but modelled time.
        config = base.scenario.with_changes(seed=self.seed, time_scale=self.time_scale, token_scale=1.0)
        changes = {name: value for name, value in self.tier.items() if value is not None}
        if self.num_drafts is not None:
            changes["speculation"] = Speculation(self.num_drafts)
        return config, replace(base.tier, seed=self.seed, **changes)


def engine(
    target: Annotated[str, typer.Option(help="host:port of the service's front")] = "127.0.0.1:50051",
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port to listen on; 0 = any free one")] = 8000,
    out: Annotated[Path, typer.Option(help="folder of the report")] = Path("out/engine"),
    profile: Annotated[str, typer.Option(help="auto, demo or full, as without a command")] = "auto",
    seed: Annotated[int, typer.Option(help="of rows and acceptance")] = 42,
    drafts: Annotated[int | None, typer.Option(help="draft tokens K of a decode step [6]")] = None,
    chunk_rows: Annotated[int | None, typer.Option(help="prefill rows a rank and step [full: 8192]")] = None,
    decode_rounds_per_prefill: Annotated[
        int | None, typer.Option(help="decode steps between two prefill rounds [full: 8]")
    ] = None,
    context_limit: Annotated[int | None, typer.Option(help="longest prompt + output [1048576]")] = None,
    time_scale: Annotated[
        float | None, typer.Option(help="wall seconds per modelled second of attention [full: 1]")
    ] = None,
    routing: Annotated[str, typer.Option(help=f"expert ids: {', '.join(ROUTINGS)}")] = "uniform",
    holder: Annotated[str, typer.Option(help="name under which the service is leased")] = "loadgen-engine",
    wait_ready: Annotated[float, typer.Option(help="seconds to wait until the service is ready")] = 60.0,
    write_tokenizer_to: Annotated[
        Path | None,
        typer.Option("--write-tokenizer", help="write the engine's tokenizer to a folder and end"),
    ] = None,
) -> None:
    """Serve the simulated attention tier as an OpenAI-compatible endpoint; every step calls the MoE service."""
    console = Console()
    if write_tokenizer_to is not None:
        with refusals(console):
            write_tokenizer(write_tokenizer_to)
        console.print(f"tokenizer, one token a byte: {write_tokenizer_to}", highlight=False, soft_wrap=True)
        return
    options = EngineOptions(
        target=target,
        host=host,
        port=port,
        out=out,
        profile=profile,
        holder=holder,
        wait_ready_s=wait_ready,
        routing=routing,
        seed=seed,
        num_drafts=drafts,
        time_scale=time_scale,
        tier={
            "chunk_rows": chunk_rows,
            "decode_rounds_per_prefill": decode_rounds_per_prefill,
            "context_limit": context_limit,
        },
    )
    with refusals(console):
        if routing not in ROUTINGS:
            raise ConfigError(must_be("routing", f"one of {', '.join(ROUTINGS)}", repr(routing)))
        options.resolve("")  # what is wrong whatever the service says is refused before anything is leased
        writable(out)
        report = asyncio.run(serve(options, console))
    raise typer.Exit(exit_status(report))


async def serve(options: EngineOptions, console: Console) -> dict[str, Any]:
    """Serve until SIGINT or SIGTERM; returns the report. Raises MegaMoeError when it cannot begin."""
    async with LiveTier.connect(
        options.target, holder=options.holder, wait_ready_s=options.wait_ready_s
    ) as moe:
        config, tier_config = options.resolve(moe.info.profile)
        engine = Engine(
            moe,
            tier_config,
            time_scale=config.time_scale,
            step_retries=config.step_retries,
            seed=config.seed,
            distribution=options.routing,
        )
        count = ServiceCount(lambda: moe.info, engine.record, engine.now)
        await count.begin()
        moe.on_restart = count.restarted
        name = moe.info.model_name
        crash: Exception | None = None
        async with _listening(ChatServer(engine, name), options.host, options.port) as address:
            console.print(f"{name} on http://{address}/v1, Ctrl-C stops it", highlight=False, soft_wrap=True)
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, engine.stop)
            try:
                await engine.run()
            except Exception as error:  # the report of what there is comes first, then the error
                crash = error
                engine.record.aborted = engine.record.aborted or f"{type(error).__name__}: {error}"
        counted, not_counted = await count.end()
        report = build_report(
            engine.record,
            moe.info,
            config,
            engine.tier_config,
            counted,
            traces=NOT_A_SCENARIO,
            distribution=options.routing,
            not_counted=not_counted,
            scenario=ENGINE,
            invalid_reasons=[NOT_A_SCENARIO],
        )
        path = write_report(options.out, report, engine.record, config.slice_s)
    write_page([read_run(path)], path.with_name("report.html"))
    console.print(final_tables(report))
    console.print(f"Report: {path}, page: {path.with_name('report.html')}", highlight=False, soft_wrap=True)
    if crash is not None:
        raise crash
    return report


@contextlib.asynccontextmanager
async def _listening(server: ChatServer, host: str, port: int) -> AsyncIterator[str]:
    """Serve HTTP while the body runs; gives host:port. A caller that hangs up cancels its handler."""
    runner = web.AppRunner(server.app, handler_cancellation=True, access_log=None, shutdown_timeout=5.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        bound_host, bound_port = runner.addresses[0][:2]
        yield f"{bound_host}:{bound_port}"
    finally:
        await runner.cleanup()
