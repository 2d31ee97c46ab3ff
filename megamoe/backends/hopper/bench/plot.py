"""A run as a picture: latency over tokens a rank, and the fraction of the floor, a column a routing distribution."""

from __future__ import annotations

from pathlib import Path as FilePath

from megamoe.backends.hopper.bench.report import Report
from megamoe.bundle import Path
from megamoe.errors import ConfigError


def check_plot() -> None:
    """Raises ConfigError where matplotlib is not installed."""
    try:
        import matplotlib as mpl  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError("a plot needs the package matplotlib (got: not installed)") from error


def draw(report: Report, file: FilePath) -> None:
    """Write the plot; its format follows the file's suffix (png, svg, pdf). Raises ConfigError without matplotlib."""
    check_plot()
    # The canvas of files alone: no window, no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = report.distributions()
    figure = Figure(figsize=(4.2 * len(names) + 1, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(names), squeeze=False, sharex=True, sharey="row")
    for column, distribution in enumerate(names):
        above, below = axes[:, column]
        for path in map(str, Path):
            mine = [t for t in report.timings if (t.path, t.distribution) == (path, distribution)]
            if mine:
                tokens = [timing.tokens for timing in mine]
                above.plot(tokens, [timing.us for timing in mine], marker=".", label=path)
                below.plot(tokens, [timing.fraction for timing in mine], marker=".", label=path)
        for name in dict.fromkeys(baseline.name for baseline in report.baselines):
            theirs = [b for b in report.baselines if (b.name, b.distribution) == (name, distribution)]
            above.plot(
                [b.tokens for b in theirs], [b.us for b in theirs], marker="x", linestyle="--", label=name
            )
        sizes = report.sizes(distribution)
        floors = [report.best(distribution, size).floor_us for size in sizes]
        above.plot(sizes, floors, color="black", linewidth=1, label="floor")
        above.set(xscale="log", yscale="log", title=distribution)
        above.set_xscale("log", base=2)
        below.set(xlabel="tokens a rank", ylim=(0, 1))
        below.xaxis.set_major_formatter("{x:.0f}")
        for one in (above, below):
            one.grid(visible=True, alpha=0.3)
    axes[0, 0].set_ylabel("microseconds a layer")
    axes[1, 0].set_ylabel("fraction of the floor")
    axes[0, 0].legend(fontsize="small")
    figure.suptitle(f"{report.machine.get('GPU', '')}, {report.shape.name}, {report.num_ranks} ranks")
    figure.savefig(file, dpi=120)
