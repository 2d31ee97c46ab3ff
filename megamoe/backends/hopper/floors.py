"""What a layer costs at least on this machine, measured: what the backend's bench and its baselines have in common."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from megamoe.shape import MoeShape

CALLS = 8
"""Layer calls of a captured graph."""
REPEATS = 7
_COPY_BYTES = 1 << 31
_MATMUL_SIZE = 8192


@dataclass(frozen=True)
class Rates:
    """What a GPU keeps up: bytes read and written a second by a copy within its memory, and floating-point operations
    a second of a bf16 matmul 8192^3 on random data."""

    bytes_per_s: float
    flops_per_s: float

    def floor_us(self, shape: MoeShape, rows: int, experts_hit: int) -> float:
        """The larger of streaming the weights of the experts hit and multiplying the rows."""
        num_bytes, flops = work_of(shape, rows, experts_hit)
        return 1e6 * max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)

    def __str__(self) -> str:
        return f"copy {self.bytes_per_s / 1e12:.2f} TB/s, bf16 matmul {self.flops_per_s / 1e12:.0f} TFLOP/s"


H200 = Rates(4.3e12, 671e12)
"""One H200's, for comparing runs of different days; a run measures its own."""


def measure_rates(devices: Sequence[torch.device]) -> Rates:
    """The fastest device's rates, so that no rank's floor is too easy."""
    rates = [_rates_of(device) for device in dict.fromkeys(devices)]
    return Rates(max(one.bytes_per_s for one in rates), max(one.flops_per_s for one in rates))


def _rates_of(device: torch.device) -> Rates:
    with torch.cuda.device(device):
        source = torch.randint(0, 256, (_COPY_BYTES,), dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copy_s = _median_s(partial(target.copy_, source), num_warmup=20)
        del source, target
        a, b = torch.randn((2, _MATMUL_SIZE, _MATMUL_SIZE), device=device).bfloat16()
        # Half a second of it: what the chip keeps up, not what it does before it has warmed up.
        matmul_s = _median_s(partial(torch.mm, a, b), num_warmup=300)
    return Rates(2 * _COPY_BYTES / copy_s, 2 * _MATMUL_SIZE**3 / matmul_s)


def _median_s(work: Callable[[], object], num_warmup: int, num_timed: int = 50) -> float:
    """Of work on the current device's current stream."""
    marks = []
    for _ in range(num_warmup + num_timed):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        stop.record()
        marks.append((start, stop))
    torch.cuda.synchronize()
    times_ms = [float(start.elapsed_time(stop)) for start, stop in marks[num_warmup:]]
    return statistics.median(times_ms) / 1e3


def ranks_of(shape: MoeShape, num_ranks: int) -> MoeShape:
    """A group of num_ranks with as many experts a rank as EP8 of `shape` has: rows and weights a rank are EP8's."""
    experts = shape.num_experts // 8 * num_ranks
    return replace(shape, num_experts=experts, num_ranks=num_ranks, name=f"{shape.name}-ep{num_ranks}")


def work_of(shape: MoeShape, rows: int, experts_hit: int) -> tuple[float, float]:
    """(weight bytes, floating-point operations) of a layer on one rank."""
    weights = 3.0 * shape.hidden * shape.intermediate
    return experts_hit * weights * (0.5 + 1 / 32), 2.0 * rows * weights


def busiest(shape: MoeShape, ids: Sequence[torch.Tensor], rates: Rates) -> tuple[int, int]:
    """(routed rows, experts hit) of the rank with the highest floor. A slot without expert (-1) is no row."""
    flat = torch.cat([part.flatten() for part in ids]).long()
    counts = torch.bincount(flat[flat >= 0], minlength=shape.num_experts)
    per_rank = counts.view(shape.num_ranks, -1)
    work = [(int(row.sum()), int((row > 0).sum())) for row in per_rank]
    return max(work, key=lambda one: rates.floor_us(shape, *one))
