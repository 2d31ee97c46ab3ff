"""`megamoe bench-calls`: what a layer call costs beyond the layer, per transport, against a running service.

A caller process a rank, as attention tiers are laid out; all of them make the same steps. The layer's own time is what
the service reports of each call (the device's, on a GPU); overhead is the rest of what the caller waited.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from megamoe import MAX_TOKENS_PER_RANK_LIMIT, MemoryKind, MoeBatch, Phase, prev_power_of_2, route_rank
from megamoe.errors import InvalidArgumentError, MegaMoeError, PeerTimeoutError, must_be
from service.cli.words import counted
from service.client import Front, MoeRank
from service.client.rank import TRANSPORTS

_START_TIMEOUT_S = 120.0
_ANSWER_TIMEOUT_S = 120.0
_WARM_UP_STEPS = 5
_MAX_SPIN_US = 1e6


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every caller process is told. calls: timed layer calls per size."""

    front: str
    calls: int
    phase: str
    spin_us: float | None
    device: str


@dataclass(frozen=True)
class Figures:
    """Microseconds of one size: per call what the slowest rank's caller waited, what the slowest rank's runtime and the
    slowest layer took; overhead is waited minus layer, over all callers and calls."""

    path: str
    call_us: float
    runtime_us: float
    layer_us: float
    overhead_us: float
    overhead_p90_us: float


def print_bench_calls(settings: Settings, *, transports: str, rows: str) -> None:
    """Run and print it. Raises InvalidArgumentError for transports or rows that cannot be, and a service's errors."""
    if settings.phase not in (Phase.DECODE, Phase.PREFILL):
        raise InvalidArgumentError(must_be("phase", "decode or prefill", repr(settings.phase)))
    if settings.spin_us is not None and not 0 <= settings.spin_us < _MAX_SPIN_US:
        raise InvalidArgumentError(must_be("spin_us", f"from 0 to {_MAX_SPIN_US:g}", settings.spin_us))
    if settings.device not in ("", "cpu", "cuda") and not re.fullmatch(r"cuda:\d{1,3}", settings.device):
        raise InvalidArgumentError(must_be("device", "cpu or a GPU, as cuda:0", repr(settings.device)))
    ways = tuple(part.strip() for part in transports.split(",") if part.strip())
    if not ways or not set(ways) <= set(TRANSPORTS):
        raise InvalidArgumentError(must_be("transport", f"of {', '.join(TRANSPORTS)}", repr(transports)))
    _numbers(rows, MAX_TOKENS_PER_RANK_LIMIT)
    with Front(settings.front) as front:
        info = front.wait_ready(10.0)
    sizes = _numbers(rows, info.limits.max_tokens_per_rank)
    out = Console()
    out.print(
        f"{info.backend}, {info.model_name}: hidden {info.shape.hidden}, top-{info.shape.num_topk}, "
        f"{counted(info.num_ranks, 'rank')}, {settings.phase}; a caller process a rank, {settings.calls} layer calls a "
        "size, microseconds",
        highlight=False,
    )
    table = Table(
        "transport",
        "rows\na rank",
        "path",
        "call\np50",
        "runtime\np50",
        "layer\np50",
        "overhead\np50",
        "overhead\np90",
    )
    with _callers(settings, info.num_ranks) as ask, out.status("measuring ..."):
        for way in ways:
            ask(("connect", way, max(sizes)))
            for size in sizes:
                got = _figures(ask(("measure", size)))
                numbers = (got.call_us, got.runtime_us, got.layer_us, got.overhead_us, got.overhead_p90_us)
                table.add_row(way, str(size), got.path, *(f"{number:.0f}" for number in numbers))
            ask(("close",))
    out.print(table)


def _numbers(text: str, most: int) -> tuple[int, ...]:
    try:
        numbers = tuple(sorted({int(part) for part in text.split(",") if part}))
    except ValueError:
        numbers = ()
    if not numbers or numbers[0] < 1 or numbers[-1] > most:
        wanted = f"numbers from 1 to the service's max_tokens_per_rank (at most {most}) with commas between"
        raise InvalidArgumentError(must_be("rows", wanted, repr(text)))
    return numbers


def _figures(answers: list[Any]) -> Figures:
    """Of the answers of all callers: (path; waited, in the runtime and in the layer, of every call)."""
    paths = {answer[0] for answer in answers}
    waited, runtimes, layers = (
        [max(calls) for calls in zip(*(answer[kind] for answer in answers))] for kind in (1, 2, 3)
    )
    over = sorted(wall - layer for _, walls, _, own in answers for wall, layer in zip(walls, own))
    return Figures(
        path=", ".join(sorted(paths)),
        call_us=statistics.median(waited),
        runtime_us=statistics.median(runtimes),
        layer_us=statistics.median(layers),
        overhead_us=statistics.median(over),
        overhead_p90_us=over[len(over) * 9 // 10],
    )


# ---------------------------------------------------------------------------------------------- callers


@contextlib.contextmanager
def _callers(settings: Settings, num_ranks: int) -> Iterator[Any]:
    """A process a rank; gives a function that asks all of them one thing and returns their answers in rank order."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(num_ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, settings, rank, os.getpid()), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)

    def ask(question: tuple[Any, ...] | None, timeout_s: float = _ANSWER_TIMEOUT_S) -> list[Any]:
        for pipe in pipes if question is not None else ():
            with contextlib.suppress(OSError):  # it has ended; its answer says so
                pipe.send(question)
        return [_answer(rank, pipe, timeout_s) for rank, pipe in enumerate(pipes)]

    try:
        ask(None, _START_TIMEOUT_S)
        yield ask
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(10.0)
            if process.is_alive():
                process.kill()


def _answer(rank: int, pipe: Connection, timeout_s: float) -> Any:
    if not pipe.poll(timeout_s):
        raise PeerTimeoutError(f"the caller of rank {rank} gave no answer in {timeout_s:.0f} s", [rank])
    try:
        answer = pipe.recv()
    except (EOFError, OSError):
        raise PeerTimeoutError(f"the caller of rank {rank} ended early", [rank]) from None
    if isinstance(answer, MegaMoeError):
        raise answer
    return answer


def _serve(pipe: Connection, settings: Settings, rank: int, run: int) -> None:
    """One caller process: connects, measures and closes as it is told, until the pipe ends."""
    torch.set_num_threads(1)
    pipe.send("ready")
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as opened:
        moe: MoeRank | None = None
        way = ""
        while True:
            try:
                what, *more = pipe.recv()
            except (EOFError, OSError):
                return
            answer: Any = "done"
            try:
                if what == "connect":
                    way, max_rows = more
                    moe = opened.enter_context(
                        MoeRank.connect(
                            settings.front,
                            rank=rank,
                            holder=f"bench-calls-{run}-{way}",
                            transport=way,
                            max_rows=prev_power_of_2(2 * max_rows - 1),
                            spin_us=settings.spin_us,
                            wait_ready_s=60.0,
                        )
                    )
                elif what == "measure":
                    assert moe is not None
                    answer = _measure(moe, way == "memory", settings, *more)
                else:
                    opened.close()
            except MegaMoeError as error:
                answer = MegaMoeError(f"caller of rank {rank}, {way}: {type(error).__name__}: {error}")
            try:
                pipe.send(answer)
            except OSError:  # whoever asked has ended, of another caller's error or a Ctrl-C
                return


def _measure(
    moe: MoeRank, in_memory: bool, settings: Settings, num_rows: int
) -> tuple[str, list[float], list[float], list[float]]:
    """(paths; microseconds of every timed call: waited, in its rank's runtime, of its layer)."""
    shape, layers = moe.info.shape, moe.info.num_layers
    ids, weights = route_rank(shape, "uniform", num_rows, seed=num_rows, rank=moe.rank)
    x = torch.randn(num_rows, shape.hidden, generator=torch.Generator().manual_seed(moe.rank)).bfloat16()
    MoeBatch.of(shape, x, ids, weights)
    out = torch.empty_like(x)
    num_bytes = -(-x.numel() * 2 // 4096) * 4096
    lent = moe.share(2 * num_bytes, device=_device(moe, settings)) if in_memory else None
    if lent is not None:
        x_there = lent.tensor(0, tuple(x.shape), x.dtype)
        x_there.copy_(x)
        x, out = x_there, lent.tensor(num_bytes, tuple(x.shape), x.dtype)
    walls: list[float] = []
    outputs = []
    for number in range(_WARM_UP_STEPS + -(-settings.calls // layers)):
        with moe.step(num_rows, settings.phase) as step:
            for layer_idx in range(layers):
                start = time.perf_counter()
                output = step.layer(layer_idx, x, ids, weights, out=out)
                wall = time.perf_counter() - start
                if number >= _WARM_UP_STEPS:
                    walls.append(wall * 1e6)
                    outputs.append(output)
    reports = [output.sub_steps for output in outputs]
    paths = {str(report.path) for pieces in reports for report in pieces}
    if lent is not None:
        moe.unshare(lent)
    layer_us = [sum(report.times.total_us for report in pieces) for pieces in reports]
    return ", ".join(sorted(paths)), walls, [output.total_us for output in outputs], layer_us


def _device(moe: MoeRank, settings: Settings) -> str:
    """Where rows lie with transport memory: with ranks on GPUs, on the rank's."""
    if settings.device or MemoryKind.CUDA_IPC not in moe.memory_kinds:
        return settings.device.removeprefix("cpu")
    used = min(moe.info.num_ranks, torch.cuda.device_count())
    return f"cuda:{moe.rank * used // moe.info.num_ranks}"
