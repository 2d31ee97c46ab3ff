"""The model's tables for docs/gfx950.md: predicted against published, and today's settings against others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean, geometric_mean
from typing import Any

from megamoe.backends.gfx950.model.counts import TILES
from megamoe.backends.gfx950.model.machine import Mi355x
from megamoe.backends.gfx950.model.predict import Prediction, predict
from megamoe.backends.gfx950.model.published import FUSED, paths_of
from megamoe.backends.gfx950.model.work import expected
from megamoe.backends.gfx950.plan import plan_launch, plan_tiles
from megamoe.bundle import Path
from megamoe.shape import preset

SHAPE = preset("deepseek-v4-pro")
OPENING = "<!-- model: python -m megamoe.backends.gfx950.model --write docs/gfx950.md -->"
CLOSING = "<!-- end model -->"
CLEARLY = 0.95
"""An alternative is clearly better when it is predicted to take at most this share of the time of today's."""
CHOICE_TOKENS = (1, 8, 128, 256, 512, 1024, 2048, 4096, 8192)


def predicted(path: Path, num_tokens: int, seed: int = 0, **settings: Any) -> Prediction:
    """`predict` for V4-Pro EP8 with uniform routing."""
    return predict(path, expected(SHAPE, num_tokens, seed=seed), **settings)


def seeds(num_tokens: int) -> range:
    """Routings to average over: with few tokens the busiest rank's number of experts depends on the draw."""
    return range(8 if num_tokens <= 16 else 1)


def us_of(path: Path, num_tokens: int, **settings: Any) -> float:
    """Predicted microseconds, the mean over `seeds`."""
    return fmean(predicted(path, num_tokens, seed, **settings).us for seed in seeds(num_tokens))


def floor_us(num_tokens: int) -> float:
    """The memory floor at the peak rate, the mean over `seeds`."""
    peak = Mi355x().hbm_peak
    return fmean(expected(SHAPE, num_tokens, seed=seed).memory_floor_us(peak) for seed in seeds(num_tokens))


def published_rows() -> list[tuple[int, Path, float]]:
    """(tokens a rank, path, published microseconds)."""
    return [(tokens, path, us) for tokens in FUSED for path, us in paths_of(tokens).items()]


def ratios_of(path: Path, machine: Mi355x) -> list[float]:
    """Predicted over published, of all rows of a path."""
    return [us_of(path, tokens, machine=machine) / us for tokens, one, us in published_rows() if one is path]


def comparison() -> list[str]:
    """Predicted against published, a line each."""
    head = (
        "tokens a rank, path, memory floor, predicted, with FP8 result rows, waits most for, published, ratio"
    )
    lines = []
    for tokens, path, us in published_rows():
        ours, fp8 = us_of(path, tokens), us_of(path, tokens, fp8=True)
        bound = predicted(path, tokens).bound
        lines.append(
            (
                tokens,
                path,
                f"{floor_us(tokens):.0f}",
                f"{ours:.0f}",
                f"{fp8:.0f}",
                bound,
                us,
                f"{ours / us:.2f}",
            )
        )
    return markdown(head.split(", "), lines)


def errors() -> list[str]:
    """How far predicted and published are apart, a line a path."""
    head = "path, geometric mean of ratios, least, most, mean with 0.7 of the peaks, with 0.9"
    lines = []
    for path in (Path.FIXED_SLOT, Path.COMPACT, Path.SMALL_M, Path.LARGE_M):
        ratios = ratios_of(path, Mi355x())
        others = [ratios_of(path, Mi355x(hbm_share=share, link_share=share)) for share in (0.7, 0.9)]
        values = (geometric_mean(ratios), min(ratios), max(ratios), *map(geometric_mean, others))
        lines.append((path, *(f"{value:.2f}" for value in values)))
    return markdown(head.split(", "), lines)


def alternatives(path: Path, num_tokens: int) -> dict[str, float]:
    """Predicted microseconds by setting: rows of a tile; one workgroup of 32 rows a compute unit instead of two;
    large_m's share of senders."""
    cus = Mi355x().num_cus
    plans = {f"{size} rows": plan_tiles(SHAPE, num_tokens, cus, size) for size in TILES}
    small = plans["32 rows"]
    once = {
        name: min(getattr(small, name), cus) for name in ("gemm1_groups", "gemm2_groups", "small_m_groups")
    }
    if path is not Path.LARGE_M:
        plans["32 rows, 1 a CU"] = replace(small, **once)
    now = plan_launch(SHAPE, num_tokens, cus)
    if path is Path.LARGE_M:
        for share in (2, 8, 16):
            plans[f"senders 1/{share}"] = replace(now, large_m_senders=now.large_m_groups // share)
    return {name: us_of(path, num_tokens, plan=plan) for name, plan in plans.items()}


def choices() -> list[str]:
    """Today's settings beside the alternatives; what is clearly better stands in bold."""
    rows = [(tokens, path) for tokens, path, _ in published_rows() if tokens in CHOICE_TOKENS]
    found = {row: alternatives(row[1], row[0]) for row in rows}
    names = list(dict.fromkeys(name for times in found.values() for name in times))
    lines = []
    for (tokens, path), times in found.items():
        now = us_of(path, tokens)

        def cell(name: str, times: dict[str, float] = times, now: float = now) -> str:
            if name not in times:
                return ""
            text = f"{times[name]:.0f}"
            return f"**{text}**" if times[name] <= CLEARLY * now else text

        block_m = plan_launch(SHAPE, tokens, Mi355x().num_cus).block_m
        lines.append((tokens, path, block_m, f"{now:.0f}", *map(cell, names)))
    return markdown(["tokens a rank", "path", "today: rows", "predicted", *names], lines)


def markdown(head: Sequence[str], lines: Iterable[Iterable[object]]) -> list[str]:
    """A table."""
    rule = "|---" * len(head) + "|"
    return [
        "| " + " | ".join(head) + " |",
        rule,
        *("| " + " | ".join(map(str, line)) + " |" for line in lines),
    ]


def all_tables() -> str:
    return "\n".join([*comparison(), "", *errors(), "", *choices()])


def refreshed(text: str) -> str:
    """A document with the tables as they should be. Raises ValueError when it has not one pair of markers."""
    if text.count(OPENING) != 1 or text.count(CLOSING) != 1:
        raise ValueError(f"there must be one pair of markers {OPENING} and {CLOSING}")
    before, rest = text.split(OPENING)
    return f"{before}{OPENING}\n\n{all_tables()}\n\n{CLOSING}{rest.split(CLOSING)[1]}"
