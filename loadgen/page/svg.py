"""matplotlib figures as inline SVG that follows the page: its colours are the page's CSS variables, its text is text.

Figures are drawn with placeholder colours, one for each variable of the page's style, which are replaced in the SVG.
All have one size, so that a card on a phone and one on a desktop show letters of much the same height.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

SIZE_INCHES = (5.0, 3.2)
COLORS = {
    "ink": "#000001",
    "muted": "#000002",
    "grid": "#000003",
    "a": "#000011",
    "b": "#000012",
    "c": "#000013",
    "d": "#000014",
    "e": "#000015",
    "f": "#000016",
}
"""Name of the page's CSS variable -> placeholder in the drawing."""
INK, MUTED, GRID = COLORS["ink"], COLORS["muted"], COLORS["grid"]
SERIES = tuple(COLORS[letter] for letter in "abcdef")
PATH_COLORS = dict(zip(("small_m", "fixed_slot", "large_m", "compact"), SERIES))

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "megamoe",  # the same drawing has the same bytes
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
}


class Chart:
    """One drawing: `axes` is drawn on, `svg` is its text afterwards."""

    def __init__(self, figure: Figure, axes: Axes) -> None:
        self._figure = figure
        self.axes = axes
        self.svg = ""


@contextmanager
def chart(label: str, left: float = 0.14, top: float = 0.9) -> Iterator[Chart]:
    """Draw inside the body. label: what a screen reader says of it. left, top: edges of the axes in the drawing."""
    with mpl.rc_context(_STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=SIZE_INCHES)
        figure.subplots_adjust(left=left, right=0.97, bottom=0.17, top=top)
        drawing = Chart(figure, figure.add_subplot())
        yield drawing
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    drawing.svg = _themed(out.getvalue(), label)


def legend_above(axes: Axes, num_columns: int = 4) -> None:
    """A legend in a row above the drawing, where it hides nothing."""
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=num_columns,
        handlelength=1.2,
        columnspacing=1.2,
        borderaxespad=0.2,
    )


def _themed(svg: str, label: str) -> str:
    svg = svg[svg.index("<svg") :]  # an SVG inside HTML has no XML prologue
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)  # would hold for the whole page
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg)  # names of parts, the same in every drawing of a page
    svg = re.sub(r" font-family: [^;\"]+;", "", svg)  # the page decides
    svg = re.sub(r' transform="rotate\(-0 [^"]*"', "", svg)
    svg = re.sub(r"(\d\.\d\d)\d+", r"\1", svg)  # a hundredth of a point is finer than any screen
    for name, placeholder in COLORS.items():
        svg = svg.replace(placeholder, f"var(--{name})")
    svg = re.sub(
        r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', r'<svg viewBox="\1" role="img" aria-label="@">', svg, count=1
    )
    return re.sub(r"\n\s*", "\n", svg).replace("@", html.escape(label, quote=True), 1)
