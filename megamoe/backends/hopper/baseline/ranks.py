"""One process and GPU a rank, joined by NCCL, that time a baseline."""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path as FilePath

import torch
import torch.distributed as dist

from megamoe.backends.hopper.baseline.grouped_mm import GroupedMm
from megamoe.backends.hopper.baseline.layer import Baseline, all_to_all
from megamoe.backends.hopper.baseline.mxfp4 import Mxfp4
from megamoe.backends.hopper.baseline.routes import routes_of
from megamoe.backends.hopper.bench.layer import routes_at
from megamoe.backends.hopper.bench.timing import BaselineTiming
from megamoe.backends.hopper.floors import CALLS, REPEATS
from megamoe.errors import PeerTimeoutError
from megamoe.shape import MoeShape

_SIZE_TIMEOUT_S = 180.0
"""For one size: the first one compiles, draws weights and joins the ranks."""
_END_S = 5.0
"""Between the last that is heard of a process and its exit status."""


@dataclass(frozen=True, kw_only=True)
class BaselineConfig:
    """What to time. triton_kernels: folder of that package for its experts in MXFP4; None: torch's in bf16."""

    shape: MoeShape
    tokens: Sequence[int]
    distributions: Sequence[str]
    triton_kernels: FilePath | None = None

    @property
    def name(self) -> str:
        return "triton_kernels" if self.triton_kernels else "grouped_mm"

    def open(self, device: torch.device, seed: int) -> Baseline:
        """One rank's layer with random weights."""
        if self.triton_kernels:
            return Mxfp4.random(self.shape, device, seed, self.triton_kernels)
        return GroupedMm.random(self.shape, device, seed)


def time_baseline(config: BaselineConfig) -> Iterator[BaselineTiming]:
    """Yield a timing a size and distribution, as they are measured.

    Raises PeerTimeoutError naming ranks that ended early, or all of them when a size takes too long.
    """
    # Ranks of one process group: nothing may share their connections' port.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    processes = [
        context.Process(target=_rank, args=(rank, config, port, theirs if rank == 0 else None), daemon=True)
        for rank in range(config.shape.num_ranks)
    ]
    for process in processes:
        process.start()
    theirs.close()
    try:
        for _ in range(len(config.tokens) * len(config.distributions)):
            yield next_answer(ours, processes, config.name)
        for process in processes:
            process.join(30.0)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        ours.close()


def next_answer(
    answers: Connection, processes: Sequence[BaseProcess], name: str, timeout_s: float = _SIZE_TIMEOUT_S
) -> BaselineTiming:
    """Rank 0's next timing. Where another rank has ended, rank 0 waits in NCCL: ends are looked for too.

    Raises PeerTimeoutError naming the ranks that ended early, or all of them after timeout_s.
    """
    deadline_s = time.monotonic() + timeout_s
    running = {process.sentinel: process for process in processes}
    while True:
        ready = wait([answers, *running], max(deadline_s - time.monotonic(), 0.0))
        if answers in ready:
            with suppress(EOFError):
                timing: BaselineTiming = answers.recv()
                return timing
        for sentinel in running.keys() & set(ready):
            running.pop(sentinel).join(_END_S)
        ended = [rank for rank, process in enumerate(processes) if process.exitcode]
        if ended or answers in ready:
            ranks = ended or [0]
            raise PeerTimeoutError(f"{name}: ranks {ranks} ended early; their own output says why", ranks)
        if not ready:
            ranks = list(range(len(processes)))
            raise PeerTimeoutError(f"{name}: ranks {ranks} have no time to tell after {timeout_s:g} s", ranks)


def _rank(rank: int, config: BaselineConfig, port: int, answers: Connection | None) -> None:
    shape = config.shape
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", world_size=shape.num_ranks, rank=rank, device_id=device
    )
    layer = config.open(device, seed=rank)
    generator = torch.Generator(device).manual_seed(rank)
    stream = torch.cuda.Stream(device)
    for distribution in config.distributions:
        for tokens in config.tokens:
            routes = routes_of(shape, routes_at(shape, distribution, tokens), rank, device)
            x = torch.randn((tokens, shape.hidden), device=device, generator=generator).bfloat16()
            us = _time_us(lambda x=x, routes=routes: layer.layer(x, routes, all_to_all), stream)  # type: ignore[misc]
            if answers is not None:
                answers.send(BaselineTiming(config.name, distribution, tokens, us))
    dist.destroy_process_group()


def _time_us(call: Callable[[], object], stream: torch.cuda.Stream) -> float:
    """Median over replays of one call's time on this rank's slowest peer."""
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            call()
    times = []
    gate = torch.zeros(1, device="cuda")
    for _ in range(REPEATS + 1):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        # All ranks leave this together, each with its graph already started.
        dist.all_reduce(gate)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        slowest = torch.tensor([start.elapsed_time(stop) * 1e3 / CALLS], device="cuda")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(float(slowest))
    return statistics.median(times[1:])
