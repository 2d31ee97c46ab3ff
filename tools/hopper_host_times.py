"""What a layer call costs beside its kernels: Runtime.forward on a host clock, one rank, by path, rows and memory.

`python tools/hopper_host_times.py` prints a line a case: median microseconds of a call, of it between the
first and the last kernel, what is left, and where that goes. A group of one rank of DeepSeek-V4-Pro at EP8 computes
for real: launches that hide behind kernels here hide behind them in a service too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

from megamoe.backends.hopper import check_gpu, exit_status
from megamoe.backends.hopper.floors import ranks_of
from megamoe.batch import MoeBatch
from megamoe.bundle import Deployment, Path
from megamoe.path import PathPolicy
from megamoe.routing import route_rank
from megamoe.runtime import Runtime
from megamoe.shape import MoeShape, preset
from megamoe.step import Phase, PlanId, StepPlan

CAPACITY = 512
PATHS = (Path.SMALL_M, Path.FIXED_SLOT, Path.COMPACT)
PLACES = ("host", "pinned", "rows", "device")
"""Ordinary host memory, pinned, rows and results on the GPU with ids and weights on the host, everything there."""
CALLS = 200


@dataclass(frozen=True)
class HostTime:
    """Median microseconds of a call; parts: of steps inside it, by name."""

    path: str
    rows: int
    place: str
    call_us: float
    device_us: float
    parts: dict[str, float]

    def line(self) -> str:
        parts = " ".join(f"{name} {us:.1f}" for name, us in self.parts.items())
        return (
            f"{self.path:10s} {self.rows:4d} rows {self.place:6s} {self.call_us:8.1f} us, device "
            f"{self.device_us:8.1f}, beside {self.call_us - self.device_us:6.1f}   {parts}"
        )


def deployment_of(shape: MoeShape) -> Deployment:
    return Deployment(
        shape=shape,
        backend="hopper",
        max_tokens_per_rank=CAPACITY,
        fixed_slot_max=CAPACITY,
        small_m_capacities=(CAPACITY,),
        small_m_enabled=True,
        large_m_capacity=2 * CAPACITY,
    )


def batch_of(shape: MoeShape, rows: int, place: str, device: torch.device) -> tuple[MoeBatch, torch.Tensor]:
    """Random rows, and memory for their result."""
    ids, weights = route_rank(shape, "uniform", rows, seed=3, rank=0)
    hidden = torch.randn(rows, shape.hidden, generator=torch.Generator().manual_seed(rows)).bfloat16()
    tensors = [hidden, ids, weights, torch.full_like(hidden, float("nan"))]
    if place == "pinned":
        tensors = [tensor.pin_memory() for tensor in tensors]
    elif place == "device":
        tensors = [tensor.to(device) for tensor in tensors]
    hidden, ids, weights, out = tensors
    if place == "rows":
        hidden, out = hidden.to(device), out.to(device)
    torch.cuda.synchronize(device)
    return MoeBatch(hidden, ids, weights), out


class Stopwatch:
    """Times functions of a backend from inside, while it is open. Context manager."""

    def __init__(self, backend: Any) -> None:
        from megamoe.backends.hopper import sub_steps as module

        self.spent: dict[str, list[float]] = defaultdict(list)
        self._before: list[tuple[Any, str, Any]] = []
        self._points: list[tuple[str, Any, str]] = [
            ("begin", backend, "begin"),
            ("bring", backend.staging, "bring"),
            ("outgoing", backend.staging, "outgoing"),
            ("ask", backend._sub_steps, "_ask"),
            ("replay", backend.graphs, "replay"),
            ("finish", backend, "finish"),
            ("wait", backend.stream, "synchronize"),
            ("report", module, "report_of"),
        ]

    def __enter__(self) -> Stopwatch:
        for name, owner, attribute in self._points:
            before = getattr(owner, attribute)
            self._before.append((owner, attribute, owner.__dict__.get(attribute)))
            setattr(owner, attribute, self._timed(name, before))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, attribute, own in reversed(self._before):
            if own is None:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, own)

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        spent = self.spent[name]

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                spent.append((time.perf_counter_ns() - started) / 1e3)

        return timed


def time_calls(
    runtime: Runtime, plan: StepPlan, batch: MoeBatch, out: torch.Tensor
) -> tuple[float, float, str]:
    """Median microseconds of (a call, its time on the device), and its path."""
    calls, device = [], []
    for number in range(CALLS + 5):
        started = time.perf_counter_ns()
        answer = runtime.forward(batch, plan, number & 1, out=out)
        calls.append((time.perf_counter_ns() - started) / 1e3)
        device.append(answer.sub_steps[0].times.total_us)
    return statistics.median(calls[5:]), statistics.median(device[5:]), str(answer.sub_steps[0].path)


def measure(runtime: Runtime, path: Path, rows: int, place: str) -> HostTime:
    policy = runtime.policy
    shape, backend = runtime.bundle.shape, runtime.backend
    device = torch.device("cuda", torch.cuda.current_device())
    plan = StepPlan(
        plan_id=PlanId(1, rows),
        num_rows_per_rank=(rows,),
        phase=Phase.DECODE,
        dtype="bfloat16",
        weights_version=0,
        placement_version=0,
        policy_version=policy.version,
    )
    batch, out = batch_of(shape, rows, place, device)
    call_us, device_us, taken = time_calls(runtime, plan, batch, out)
    assert taken == path, (taken, path)
    if bool(torch.isnan(out.float()).any()):
        raise RuntimeError(f"{path} with {rows} rows on {place} left results unwritten")
    with Stopwatch(backend) as watch:
        time_calls(runtime, plan, batch, out)
    parts = {name: statistics.median(us) for name, us in watch.spent.items() if us}
    return HostTime(taken, rows, place, call_us, device_us, parts)


def only(policy: PathPolicy, path: Path) -> PathPolicy:
    """The next policy, under which decode takes `path`."""
    policy = policy.with_path(Path.SMALL_M, path is Path.SMALL_M)
    return policy.with_path(Path.FIXED_SLOT, path is Path.FIXED_SLOT)


def main(arguments: Sequence[str] | None = None) -> None:
    from megamoe.backends.hopper.bench.group import random_packed, rolled
    from megamoe.backends.hopper.compile_ahead import compile_all, jobs_of

    parser = argparse.ArgumentParser(description="time layer calls of one rank on the host's clock")
    parser.add_argument("--shape", default="deepseek-v4-pro")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 128, 512])
    parser.add_argument("--places", nargs="+", choices=PLACES, default=PLACES)
    parser.add_argument("--paths", nargs="+", type=Path, choices=PATHS, default=PATHS)
    chosen = parser.parse_args(arguments)
    check_gpu()
    deployment = deployment_of(ranks_of(preset(chosen.shape), 1))
    compile_all(jobs_of(deployment, 1))
    name = f"megamoe-host-times-{time.monotonic_ns()}"
    with Runtime.open(deployment, rank=0, group_name=name, num_slots=2, timeout_s=100.0) as runtime:
        backend: Any = runtime.backend
        first = random_packed(deployment.shape, backend.device, seed=1)
        backend._swap(0, first)
        backend._swap(1, rolled(first))
        for path in chosen.paths:
            runtime.stage_policy(only(runtime.policy, path))
            for rows in chosen.rows:
                for place in chosen.places:
                    print(measure(runtime, path, rows, place).line(), flush=True)


if __name__ == "__main__":
    sys.exit(exit_status(main))
