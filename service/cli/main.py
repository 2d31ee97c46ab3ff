"""`megamoe serve | plan | bench | compile | doctor | demo`: the command line of the service.

Owns: what is printed. Settings come from service.config alone; every command takes the same ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from megamoe import DISTRIBUTIONS, check_backend
from megamoe.errors import InvalidArgumentError, MegaMoeError, must_be
from service.cli.options import with_config_options
from service.cli.words import counted
from service.config import ServiceConfig

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    help="Expert-parallel MoE layers as a service.",
)


@app.command()
@with_config_options
def serve(config: ServiceConfig) -> None:
    """Start the service: ranks, front and metrics. Ctrl-C or SIGTERM stops it cleanly."""
    # Nobody forks here without exec; gRPC would print a line for every process that Ray starts. Read at its import.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from service.launch.supervisor import Supervisor
    from service.net.info import State

    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname).1s %(name)s: %(message)s"
    )

    def on_up(state: State) -> None:
        where = state.addresses
        typer.echo(
            f"megamoe is ready: generation {state.generation}, {counted(len(where.ranks), 'rank')}, "
            f"{counted(config.moe_shape.num_layers, 'layer')} of {config.label}, profile {config.profile}\n"
            f"  front    {where.front}   (gRPC: GetInfo, ForwardStep, Admin)\n"
            f"  ranks    {' '.join(where.ranks)}   (gRPC: Forward)\n"
            f"  metrics  {' '.join(where.metrics)}   (Prometheus)\n"
            f"  http     http://{where.http}/sd  /healthz  /readyz\n"
            f"  memory   /dev/shm/{state.group_name}-*"
        )
        for path, reason in config.bundle.reasons.items():
            typer.echo(f"  {path} is not built: {reason}")

    check_backend(config.bundle)
    num_ranks = counted(config.moe_shape.num_ranks, "rank")
    typer.echo(f"megamoe starts {num_ranks} with the {config.launcher} launcher ...")
    try:
        asyncio.run(Supervisor(config, on_up=on_up).run())
    except MegaMoeError as error:
        typer.secho(f"megamoe serve: {error}", fg="red", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    typer.echo("megamoe has stopped")


@app.command()
@with_config_options
def plan(config: ServiceConfig) -> None:
    """What a deployment would build: runtimes, bytes per path and region, and whether this machine holds it."""
    from service.cli.plan import print_plan

    if not print_plan(config):
        raise typer.Exit(1)


@app.command()
@with_config_options
def bench(
    config: ServiceConfig,
    sizes: Annotated[
        str,
        typer.Option(help="tokens a rank, with commas between [1,16,64,256; on hopper 1 to 8192]"),
    ] = "",
    paths: Annotated[str, typer.Option(help="paths, with commas between; default: all that are built")] = "",
    distribution: Annotated[
        str,
        typer.Option(
            help=f"routing: {', '.join(DISTRIBUTIONS)} [uniform; on hopper all, or some with commas between]"
        ),
    ] = "",
    calls: Annotated[int, typer.Option(min=3, help="timed layer calls a path and size")] = 15,
    as_deployed: Annotated[
        bool, typer.Option(help="the deployment's own runtimes; otherwise every path is built for every size")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="hopper: file for all figures")] = None,
    plot: Annotated[Path | None, typer.Option(help="hopper: file for a plot, .png, .svg or .pdf")] = None,
    triton_kernels: Annotated[
        Path | None, typer.Option(help="hopper: folder of that package, for a second baseline")
    ] = None,
    baselines: Annotated[bool, typer.Option(help="hopper: time the baselines in the same run")] = True,
    gemms: Annotated[
        bool, typer.Option(help="hopper: time the expert GEMMs of one rank alone as well")
    ] = False,
) -> None:
    """Latency and rows/s per path and size without the service around it, and the ratio to plain torch.

    On hopper at DeepSeek-V4-Pro's dimensions, 48 experts a rank, a rank a GPU (--ranks), unless --shape says otherwise:
    captured graphs, the machine's own floor and the fraction of it that is reached, and two baselines.
    """
    from service.cli import gpu
    from service.cli.bench import print_bench

    with _told():
        if config.backend == "hopper":
            files = gpu.Files(json=json, plot=plot, triton_kernels=triton_kernels)
            right = gpu.bench(config, sizes, paths, distribution, files, baselines=baselines, gemms=gemms)
            raise typer.Exit(not right)
        gpu.refuse_elsewhere(config, json=json, plot=plot, triton_kernels=triton_kernels, gemms=gemms)
        print_bench(
            config,
            sizes=sizes or "1,16,64,256",
            paths=paths,
            distribution=distribution or "uniform",
            num_calls=calls,
            as_deployed=as_deployed,
        )


@app.command("bench-calls")
def bench_calls(
    front: Annotated[str, typer.Option(help="address of the front, host:port")] = "127.0.0.1:50051",
    transport: Annotated[
        str, typer.Option(help="of grpc, ring, memory; commas between")
    ] = "grpc,ring,memory",
    rows: Annotated[str, typer.Option(help="rows a rank, with commas between")] = "1,16,128,512",
    calls: Annotated[int, typer.Option(min=3, help="timed layer calls a transport and size")] = 200,
    phase: Annotated[str, typer.Option(help="decode or prefill")] = "decode",
    spin_us: Annotated[
        float | None, typer.Option(min=0, help="how long callers spin before they sleep; default: as MoeRank")
    ] = None,
    device: Annotated[
        str, typer.Option(help="of rows with transport memory: cpu, cuda:0, ...; default: the rank's own")
    ] = "",
) -> None:
    """What a layer call costs beyond the layer: a caller process a rank against a running service on this host."""
    from service.cli.bench_calls import Settings, print_bench_calls

    settings = Settings(front=front, calls=calls, phase=phase, spin_us=spin_us, device=device)
    with _told():
        print_bench_calls(settings, transports=transport, rows=rows)


@app.command()
@with_config_options
def selftest(
    config: ServiceConfig,
    fast: Annotated[
        bool, typer.Option("--fast", help="hopper: one shape and BF16 rows, all ranks in one process")
    ] = False,
    soak: Annotated[int, typer.Option(min=1, help="hopper: mixed steps of the soak")] = 50,
) -> None:
    """Every path of a deployment, on a process a rank, against the oracles: is it right on this machine?

    On hopper before that the backend's own shapes, all ranks in one process, sharing GPUs where there are fewer.
    """
    from service.cli import gpu
    from service.cli.trial import print_trial

    with _told():
        right = True
        if config.backend == "hopper":
            right = gpu.selftest(config, fast=fast, num_soak_steps=soak)
        else:
            gpu.refuse_elsewhere(config, fast=fast)
        if not fast:
            right &= print_trial(config)
        if not right:
            raise typer.Exit(1)


@app.command("compile")
@with_config_options
def compile_command(
    config: ServiceConfig,
    out: Annotated[
        Path | None, typer.Option(help="folder to fill, for --gfx950-kernels; on hopper none")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="compile nothing; name every kernel that it lacks")
    ] = False,
    jobs: Annotated[int, typer.Option(min=0, help="compiling processes, 400 MB each; 0 = one a core")] = 0,
) -> None:
    """Every gfx950 kernel of a deployment as a code object, without a GPU; with --check, whether a folder has them.

    With --backend hopper its kernels go into Triton's own cache, from which ranks take them when they open.
    """
    from service.cli import gpu
    from service.cli.compile import print_compiled, print_missing

    with _told():
        if config.backend == "hopper":
            gpu.compile_kernels(config, out=out, check=check)
            return
        if out is None:
            raise InvalidArgumentError(must_be("out", "a folder to fill", "none"))
        if check and not print_missing(config, out):
            raise typer.Exit(1)
        if not check:
            print_compiled(config, out, jobs)


@app.command()
@with_config_options
def doctor(config: ServiceConfig) -> None:
    """Whether this machine can run the configuration: python, torch, shared memory, ports, ray."""
    from service.cli.doctor import print_diagnosis

    if not print_diagnosis(config):
        raise typer.Exit(1)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="folder for the report and the service's log")] = Path(
        "out/agentx"
    ),
    launcher: Annotated[str, typer.Option(help="ray or local")] = "ray",
    duration: Annotated[float | None, typer.Option(help="seconds of load; default: about a minute")] = None,
) -> None:
    """Start the service, run the agentx scenario of the load generator against it, stop everything."""
    from service.cli.demo import run_demo

    with _told():
        try:
            status = run_demo(out=out, launcher=launcher, duration_s=duration)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
    raise typer.Exit(status)


@app.command()
def drain(
    front: Annotated[str, typer.Argument(help="address of the front, host:port")],
    resume: Annotated[bool, typer.Option(help="take plans again")] = False,
) -> None:
    """Let a running service finish what is open and take no new plans."""
    from service.client import Front

    with _told(), Front(front) as opened:
        typer.echo("draining" if opened.drain(resume=resume) else "serving")


@app.command("set-path")
def set_path(
    front: Annotated[str, typer.Argument(help="address of the front, host:port")],
    path: Annotated[str, typer.Argument(help="small_m, fixed_slot or large_m")],
    enabled: Annotated[bool, typer.Option("--on/--off", help="switch it on or off")] = True,
) -> None:
    """Switch a path of a running service; it takes effect on all ranks at one agreed step."""
    from service.client import Front

    with _told(), Front(front) as opened:
        policy = opened.set_path_enabled(path, enabled)
        typer.echo(f"{path} is {'on' if enabled else 'off'} from policy version {policy.version}")


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Errors of a service as one line."""
    try:
        yield
    except MegaMoeError as error:
        typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(1) from error
