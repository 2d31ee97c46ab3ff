"""One measured size, and the line that tells of it."""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.backends.hopper.floors import work_of
from megamoe.backends.hopper.plan import GemmPlan
from megamoe.shape import MoeShape


@dataclass(frozen=True)
class Timing:
    """One measured size. us: median over replays of the slowest rank. rows, experts_hit: of the busiest rank.
    floor_us: the larger of weight bytes of the experts hit and arithmetic of the rows, at this machine's rates.
    tb_per_s, tflop_per_s: those bytes and operations over us; one GPU's where ranks share it."""

    what: str
    path: str
    distribution: str
    tokens: int
    rows: int
    experts_hit: int
    us: float
    floor_us: float
    tb_per_s: float
    tflop_per_s: float

    @property
    def fraction(self) -> float:
        return self.floor_us / self.us

    def __str__(self) -> str:
        return (
            f"{self.what:22s} {self.path:10s} {self.distribution:18s} T={self.tokens:5d} rows={self.rows:6d} "
            f"hit={self.experts_hit:3d} {self.us:9.1f} us  floor {self.floor_us:8.1f}  {self.fraction:.3f}"
            f"  {self.tb_per_s:5.2f} TB/s {self.tflop_per_s:6.0f} TFLOP/s"
        )


@dataclass(frozen=True)
class BaselineTiming:
    """The same layer and routes from other parts. us: median over replays of the slowest rank."""

    name: str
    distribution: str
    tokens: int
    us: float

    def __str__(self) -> str:
        return f"{self.name:14s} {self.distribution:18s} T={self.tokens:5d} {self.us:9.1f} us"


def achieved(
    shape: MoeShape, rows: int, experts_hit: int, us: float, ranks_a_gpu: int = 1
) -> tuple[float, float]:
    """(TB/s, TFLOP/s)."""
    num_bytes, flops = work_of(shape, rows, experts_hit)
    return ranks_a_gpu * num_bytes / us / 1e6, ranks_a_gpu * flops / us / 1e6


def label(gemms: GemmPlan) -> str:
    return f"s{gemms.stream_max_rows}{'r' if gemms.ring else 'n'}{gemms.block_n}"
