"""What others' kernels were measured at on eight MI355X: V4-Pro EP8, uniform routing, graph replay, median of the
slowest rank, microseconds, by tokens a rank."""

from __future__ import annotations

from megamoe.bundle import Path

SEVERAL_LAUNCHES = {
    1: 101.7, 2: 179.4, 4: 219.1, 8: 255.9, 16: 322.0, 32: 336.3, 64: 346.5, 128: 364.3, 256: 570.7, 512: 694.7,
    1024: 970.2, 2048: 1681.1, 4096: 2729.8, 8192: 5186.0,
}  # fmt: skip
"""fixed_slot at a capacity of so many tokens up to 128, compact above (of capacity 8192 from 1024)."""
FUSED = {
    1: 84.5, 2: 169.2, 4: 189.2, 8: 226.2, 16: 286.8, 32: 295.7, 64: 304.6, 128: 315.3, 256: 380.0, 512: 560.5,
    1024: 903.1, 2048: 1374.0, 4096: 2304.3, 8192: 4211.8,
}  # fmt: skip
"""small_m up to 512, large_m above."""


def paths_of(num_tokens: int) -> dict[Path, float]:
    """The paths that the sources measured at so many tokens, and their times."""
    several = Path.FIXED_SLOT if num_tokens <= 128 else Path.COMPACT
    fused = Path.SMALL_M if num_tokens <= 512 else Path.LARGE_M
    return {several: SEVERAL_LAUNCHES[num_tokens], fused: FUSED[num_tokens]}
