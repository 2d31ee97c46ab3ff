"""Into tiles of which widths an expert's rows are cut: pure functions of its row count and a launch's widths."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations_with_replacement


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How the last up to 2 * block_n rows of an expert are cut: into tiles of `first` and `second` (0: none) rows,
    which hold up to `most`."""

    most: int
    first: int
    second: int


def last_cuts(widths: tuple[int, ...]) -> tuple[Cut, ...]:
    """All cuts, those for few rows first. One tile where one is wide enough, else two: no expert gets more tiles than
    with the widest alone, since each reads the expert's weights, but narrower ones."""
    one = [Cut(most=width, first=width, second=0) for width in sorted(widths)]
    two: dict[int, Cut] = {}
    for first, second in combinations_with_replacement(widths, 2):  # widest first
        if first + second > widths[0]:
            # Of equal sums the one with the widest tile, which is the most efficient.
            two.setdefault(first + second, Cut(most=first + second, first=first, second=second))
    return (*one, *(two[most] for most in sorted(two)))


def cut_table(widths: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """Last cuts (most, first, second) as a kernel's constants, those for most rows first."""
    return tuple((cut.most, cut.first, cut.second) for cut in reversed(last_cuts(widths)))


def tile_rows(count: int, widths: tuple[int, ...]) -> tuple[int, ...]:
    """Widths of the tiles of an expert with `count` rows, in the order of its rows."""
    if count == 0:
        return ()
    num_full = max(-(-count // widths[0]) - 2, 0)
    rest = count - num_full * widths[0]
    last = next(cut for cut in last_cuts(widths) if rest <= cut.most)
    return (widths[0],) * num_full + tuple(width for width in (last.first, last.second) if width)
