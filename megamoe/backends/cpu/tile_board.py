"""Which tiles of an owner's experts can run, given whose counts and rows have arrived. Pure index arithmetic.

An expert's rows are ordered by source rank, so where a source's rows begin is known once all earlier sources have
sent their counts. Full tiles in front of the first unknown source are fixed already; the rest is when all counts are
there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class TileBoard:
    """State of one launch. Sources outside busy_ranks bring no rows and count as known and arrived."""

    def __init__(self, num_ranks: int, num_experts: int, block_m: int, busy_ranks: Sequence[int]) -> None:
        self.num_ranks, self.num_experts, self.block_m = num_ranks, num_experts, block_m
        self.known: BoolArray = np.ones(num_ranks, dtype=np.bool_)
        self.known[list(busy_ranks)] = False
        self.arrived: BoolArray = self.known.copy()
        self.counts: Int64Array = np.zeros((num_ranks, num_experts), dtype=np.int64)
        self._rank_of_arrival: Int64Array = np.zeros(num_ranks, dtype=np.int64)
        self._num_arrived = 0
        self._first_row: Int64Array = np.zeros((num_ranks, num_experts), dtype=np.int64)
        """Where an arrived source's rows of an expert begin among the routed rows."""
        self._rows_left: Int64Array = np.zeros(num_ranks, dtype=np.int64)
        self._done: set[tuple[int, int]] = set()
        # Per tile of the plan: its expert, and which of the expert's rows it holds.
        self._expert = self._start = self._stop = self._ready = np.empty(0, dtype=np.int64)
        self._source_start: Int64Array = self.counts
        self._plan_is_old = self._order_is_old = True

    def set_counts(self, src_rank: int, counts: npt.ArrayLike) -> None:
        """src_rank will bring counts[expert] rows."""
        self.counts[src_rank] = counts
        self._rows_left[src_rank] = self.counts[src_rank].sum()
        self.known[src_rank] = True
        self._plan_is_old = True

    def set_arrived(self, src_rank: int, first_row: int) -> None:
        """src_rank's rows are here, expert after expert, from routed row first_row on."""
        self._first_row[src_rank] = first_row + np.cumsum(self.counts[src_rank]) - self.counts[src_rank]
        self.arrived[src_rank] = True
        self._num_arrived += 1
        self._rank_of_arrival[src_rank] = self._num_arrived
        self._order_is_old = True

    def source_finished(self, src_rank: int) -> bool:
        """All rows of src_rank are computed (also true if it has none)."""
        return bool(self.arrived[src_rank]) and self._rows_left[src_rank] == 0

    @property
    def finished(self) -> bool:
        return bool(self.arrived.all()) and not self._rows_left.any()

    def take(self, max_rows: int) -> Int64Array:
        """Complete tiles that nobody took yet, earliest completed first, of about max_rows rows together.

        Tile numbers hold until the next set_counts: give them back by set_done before.
        """
        if self._plan_is_old:
            self._plan()
        if self._order_is_old:
            self._order()
        ready = self._ready
        if not len(ready):
            return ready
        rows = np.cumsum(self._stop[ready] - self._start[ready])
        chunk = ready[: max(int(np.searchsorted(rows, max_rows, side="right")), 1)]
        self._ready = ready[len(chunk) :]
        return chunk

    def experts_of(self, tiles: Int64Array) -> Int64Array:
        return self._expert[tiles]

    def rows_of(self, tiles: Int64Array) -> tuple[Int64Array, Int64Array]:
        """(routed rows of the tiles in canonical order, one tile after the other; rows per tile)."""
        index = tiles
        begin, size = self._overlap(index)
        expert = self._expert[index]
        start = self._first_row.T[expert] + begin
        flat_start, flat_size = start.ravel(), size.ravel()
        stops = np.cumsum(flat_size)
        rows = np.arange(int(stops[-1])) + np.repeat(flat_start - (stops - flat_size), flat_size)
        return rows, self._stop[index] - self._start[index]

    def set_done(self, tiles: Int64Array) -> None:
        index = tiles
        self._rows_left -= self._overlap(index)[1].sum(axis=0)
        self._done.update(zip(self._expert[index].tolist(), self._start[index].tolist(), strict=True))

    def _overlap(self, index: Int64Array) -> tuple[Int64Array, Int64Array]:
        """[tiles, sources]: which of a source's rows of the expert lie in a tile, as (first, number)."""
        source_start = self._source_start.T[self._expert[index]]
        source_stop = source_start + self.counts.T[self._expert[index]]
        low = np.maximum(self._start[index, None], source_start)
        high = np.minimum(self._stop[index, None], source_stop)
        return low - source_start, np.maximum(high - low, 0)

    def _plan(self) -> None:
        """Lay out the tiles that the known counts fix. Sources are known from rank 0 up to the first gap."""
        prefix = self.num_ranks if self.known.all() else int(np.argmin(self.known))
        self._source_start = np.cumsum(self.counts, axis=0) - self.counts
        rows = self.counts[:prefix].sum(axis=0)
        if prefix < self.num_ranks:
            rows = rows // self.block_m * self.block_m
        num_tiles = -(-rows // self.block_m)
        self._expert = np.repeat(np.arange(self.num_experts), num_tiles)
        first_tile = np.cumsum(num_tiles) - num_tiles
        self._start = (np.arange(len(self._expert)) - first_tile[self._expert]) * self.block_m
        self._stop = np.minimum(self._start + self.block_m, rows[self._expert])
        self._plan_is_old, self._order_is_old = False, True

    def _order(self) -> None:
        """Complete tiles, not yet done, by when their last source arrived, then by expert."""
        self._order_is_old = False
        self._ready = np.empty(0, dtype=np.int64)
        if not len(self._expert):
            return
        needs: BoolArray = self._overlap(np.arange(len(self._expert)))[1] > 0
        complete = np.logical_not((needs & ~self.arrived).any(axis=1))
        if self._done:
            keys = zip(self._expert.tolist(), self._start.tolist(), strict=True)
            complete &= np.array([key not in self._done for key in keys])
        ready = np.flatnonzero(complete)
        completed_at = (needs[ready] * self._rank_of_arrival).max(axis=1, initial=0)
        self._ready = ready[np.argsort(completed_at, kind="stable")]
