"""What the charts of the page show; how they look is in `svg`. Every function gives SVG, or "" without data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, StrMethodFormatter

from loadgen.page.svg import INK, MUTED, PATH_COLORS, SERIES, chart, legend_above
from loadgen.report.run import Run

NUM_BINS = 120
"""Bins along the time of a run: more would be finer than a screen."""
STAGES = ("quantize", "dispatch", "gemm1", "gemm2", "combine", "wait")


def throughput_against_interactivity(runs: Sequence[Run]) -> str:
    """One dot a run, named by its concurrency; runs that differ in nothing else are joined by a line."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if run.report["p90_intvty"] and run.report["total_tput_tps"]:
            groups.setdefault(run.series, []).append(run)
    if not groups:
        return ""
    top = 0.97 - 0.065 * len(groups) if len(groups) > 1 else 0.95  # a line of the legend for each
    with chart(
        "Total throughput per GPU against P90 interactivity, one dot a run", top=max(top, 0.5)
    ) as drawing:
        axes = drawing.axes
        for (name, group), color in zip(groups.items(), SERIES * len(groups)):
            group.sort(key=lambda run: run.concurrency)
            xs = [run.report["p90_intvty"] for run in group]
            ys = [run.report["total_tput_tps"] for run in group]
            axes.plot(xs, ys, "o-", color=color, label=name, markersize=5)
            for x, y, run in zip(xs, ys, group):
                axes.annotate(
                    f"{run.concurrency}", (x, y), (5, 5), textcoords="offset points", color=MUTED, fontsize=9
                )
        axes.set_xlabel("P90 interactivity, tok/s/user")
        axes.set_ylabel("total tok/s per GPU")
        axes.yaxis.set_major_formatter(_short)
        axes.margins(0.12)
        axes.set_ylim(bottom=0)
        if len(groups) > 1:
            legend_above(axes, 1)
    return drawing.svg


def latencies(run: Run, names: Sequence[tuple[str, str]], title: str) -> str:
    """Distributions of latencies by the logarithm of time, in shares of all values. names: (metric, label)."""
    found = [(name, label, run.report["distributions"][name]) for name, label in names]
    found = [(name, label, histogram) for name, label, histogram in found if histogram["counts"]]
    if not found:
        return ""
    with chart(title) as drawing:
        axes = drawing.axes
        for idx, ((name, label, histogram), color) in enumerate(zip(found, SERIES)):
            bounds = np.asarray(histogram["bounds"]) * 1e3
            shares = np.asarray(histogram["counts"]) / sum(histogram["counts"]) * 100
            axes.stairs(shares, bounds, fill=True, color=color, alpha=0.25)
            axes.stairs(shares, bounds, color=color, label=label, linewidth=1.4)
            p90 = run.report[name]["p90"] * 1e3
            axes.axvline(p90, color=color, linewidth=1.2, linestyle=(0, (3, 2)))
            axes.annotate(
                f"P90 {p90:,.0f}" if p90 >= 10 else f"P90 {p90:.1f}",
                (p90, 1.0),
                (3, -2 - 11 * idx),  # one below the other: they may lie close together
                color=INK,
                fontsize=8,
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                va="top",
            )
        _log_axis(axes)
        axes.set_xlabel("ms")
        axes.set_ylabel("% of values")
        legend_above(axes)
    return drawing.svg


def path_mix(run: Run) -> str:
    """Share of sub-steps by path over the time of the profile."""
    counts = {path: run.over_time(path, NUM_BINS) for path in PATH_COLORS}
    total = np.sum(list(counts.values()), axis=0) if counts else np.zeros(0)
    if not total.any():
        return ""
    with chart("Share of sub-steps by path over time") as drawing:
        axes = drawing.axes
        shares = [
            np.divide(value * 100.0, total, where=total > 0, out=np.zeros(len(total)))
            for value in counts.values()
        ]
        axes.stackplot(
            run.bin_times(NUM_BINS),
            *shares,
            colors=list(PATH_COLORS.values()),
            labels=list(counts),
            alpha=0.85,
        )
        axes.set_ylim(0, 100)
        axes.set_ylabel("% of sub-steps")
        _time_axis(axes, run)
        legend_above(axes)
    return drawing.svg


def rows_over_time(run: Run) -> str:
    """The most rows that one rank brought to a step, over the time of the profile."""
    lines = {"all steps": ("max_rows", SERIES[3]), "decode steps": ("decode_max_rows", SERIES[0])}
    if not run.over_time("max_rows", NUM_BINS).any():
        return ""
    with chart("Largest number of rows on one rank over time") as drawing:
        axes = drawing.axes
        for label, (column, color) in lines.items():
            most = run.over_time(column, NUM_BINS, largest=True)
            # A bin without such a step is a gap, not a zero.
            axes.step(
                run.bin_times(NUM_BINS),
                np.where(most > 0, most, np.nan),
                where="mid",
                color=color,
                label=label,
            )
        _row_axis(axes, "y")
        axes.set_ylabel("rows, largest rank")
        _time_axis(axes, run)
        legend_above(axes)
    return drawing.svg


def rows_per_rank(run: Run) -> str:
    """How many steps had how many rows on their largest rank, which is what decides the path."""
    every, decode = (run.report["distributions"][name] for name in ("max_rows", "decode_max_rows"))
    if not every["counts"]:
        return ""
    with chart("Distribution of rows on the largest rank of a step") as drawing:
        axes = drawing.axes
        num_steps = sum(every["counts"])
        for histogram, label, color in ((every, "all steps", SERIES[3]), (decode, "decode steps", SERIES[0])):
            if histogram["counts"]:
                shares = np.asarray(histogram["counts"]) / num_steps * 100
                axes.stairs(shares, histogram["bounds"], fill=True, color=color, alpha=0.55, label=label)
        p50, p90 = (
            run.report["rows_per_rank"]["decode"]["max_over_ranks"][point] for point in ("p50", "p90")
        )
        if p50 is not None:
            axes.set_title(f"decode: p50 {p50:.0f}, p90 {p90:.0f} rows", loc="right", color=MUTED, fontsize=9)
        _row_axis(axes, "x")
        axes.set_xlabel("rows, largest rank")
        axes.set_ylabel("% of steps")
        legend_above(axes)
    return drawing.svg


def stages(run: Run) -> str:
    """Median time of every stage of a sub-step, by path."""
    found = {
        path: figures["stages_ms"]
        for path, figures in run.report["profile"]["paths"].items()
        if any(figures["stages_ms"].values())
    }
    if not found:
        return ""
    names = [stage for stage in STAGES if any(times.get(stage) for times in found.values())]
    with chart("Median time of every stage of a sub-step, by path", left=0.2, top=0.84) as drawing:
        axes = drawing.axes
        left = np.zeros(len(found))
        for stage, color in zip(names, SERIES):
            widths = np.array([times.get(stage) or 0.0 for times in found.values()])
            axes.barh(list(found), widths, left=left, color=color, label=stage, height=0.6)
            left += widths
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("ms, medians stacked")
        legend_above(axes, 3)
    return drawing.svg


def tokens_over_time(run: Run) -> str:
    """Output tokens a second of all GPUs, over the time of the profile."""
    tokens = run.over_time("output_tokens", NUM_BINS)
    if not tokens.any():
        return ""
    with chart("Output tokens a second over time") as drawing:
        axes = drawing.axes
        rate = tokens / run.bin_width_s(NUM_BINS)
        axes.fill_between(run.bin_times(NUM_BINS), rate, color=SERIES[0], alpha=0.25, linewidth=0)
        axes.plot(run.bin_times(NUM_BINS), rate, color=SERIES[0])
        axes.yaxis.set_major_formatter(_short)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("output tok/s, all GPUs")
        _time_axis(axes, run)
    return drawing.svg


# ---------------------------------------------------------------- axes


@FuncFormatter
def _short(value: float, position: Any = None) -> str:
    return f"{value / 1000:,.4g}k" if abs(value) >= 1000 else f"{value:g}"


def _time_axis(axes: Axes, run: Run) -> None:
    axes.set_xlim(0, run.duration_s)
    axes.set_xlabel("seconds of the profile")


def _log_axis(axes: Axes) -> None:
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    subs = (1.0, 2.0, 5.0) if high / low < 1000 else (1.0,)  # more labels would touch each other
    axes.xaxis.set_major_locator(LogLocator(subs=subs, numticks=8))
    axes.xaxis.set_major_formatter(_short)
    axes.xaxis.set_minor_formatter(NullFormatter())


def _row_axis(axes: Axes, which: Literal["x", "y"]) -> None:
    """Powers of four: capacities of runtimes are among them."""
    scale, axis = (axes.set_xscale, axes.xaxis) if which == "x" else (axes.set_yscale, axes.yaxis)
    scale("log", base=2)
    axis.set_major_locator(LogLocator(base=4))
    axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axis.set_minor_formatter(NullFormatter())
