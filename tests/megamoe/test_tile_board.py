"""Which tiles run when: every row once, in canonical order, and never before its source is there."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megamoe.backends.cpu.tile_board import TileBoard

BLOCK_M = 4
NUM_RANKS, NUM_EXPERTS = 4, 3

counts_of_source = st.lists(st.integers(0, 9), min_size=NUM_EXPERTS, max_size=NUM_EXPERTS)


@given(
    counts=st.lists(counts_of_source, min_size=NUM_RANKS, max_size=NUM_RANKS),
    idle=st.sets(st.integers(0, NUM_RANKS - 1)),
    counts_order=st.permutations(range(NUM_RANKS)),
    rows_order=st.permutations(range(NUM_RANKS)),
    max_rows=st.integers(1, 20),
    data=st.data(),
)
def test_any_order_of_arrival(
    counts: list[list[int]],
    idle: set[int],
    counts_order: list[int],
    rows_order: list[int],
    max_rows: int,
    data: st.DataObject,
) -> None:
    table = np.array(counts)
    table[list(idle)] = 0
    busy = [rank for rank in range(NUM_RANKS) if rank not in idle]
    board = TileBoard(NUM_RANKS, NUM_EXPERTS, BLOCK_M, busy)
    owner_of_row: list[tuple[int, int]] = []  # routed row -> (source, expert), as it arrives
    tiles: dict[int, list[list[tuple[int, int]]]] = {expert: [] for expert in range(NUM_EXPERTS)}
    events = [("counts", rank) for rank in counts_order if rank in busy]
    waiting = [rank for rank in rows_order if rank in busy]
    known: set[int] = set()

    def run_what_can_run() -> None:
        while len(chunk := board.take(max_rows)):
            rows, sizes = board.rows_of(chunk)
            assert len(chunk) == 1 or sizes.sum() <= max_rows
            for expert, part in zip(
                board.experts_of(chunk), np.split(rows, np.cumsum(sizes)[:-1]), strict=True
            ):
                named = [owner_of_row[row] for row in part]
                assert all(got == expert for _, got in named)
                tiles[int(expert)].append([source for source, _ in named])
            board.set_done(chunk)

    while events or waiting:
        ready = [rank for rank in waiting if rank in known]
        if events and (not ready or data.draw(st.booleans())):
            _, rank = events.pop(0)
            board.set_counts(rank, table[rank])
            known.add(rank)
        else:
            rank = ready[0]
            waiting.remove(rank)
            first = len(owner_of_row)
            owner_of_row += [(rank, e) for e in range(NUM_EXPERTS) for _ in range(table[rank][e])]
            board.set_arrived(rank, first)
        run_what_can_run()
        if not events:  # all counts known: exactly the tiles without a missing source are done
            missing = set(waiting)
            for expert in range(NUM_EXPERTS):
                sources = np.repeat(range(NUM_RANKS), table[:, expert])
                want = [list(sources[i : i + BLOCK_M]) for i in range(0, len(sources), BLOCK_M)]
                want = [tile for tile in want if not missing & set(tile)]
                assert sorted(tiles[expert]) == sorted(want)
    run_what_can_run()
    assert board.finished
    assert all(board.source_finished(rank) for rank in range(NUM_RANKS))
    assert sum(len(tile) for per_expert in tiles.values() for tile in per_expert) == table.sum()


def test_full_tiles_before_an_unknown_source_run() -> None:
    """Rank 2 says nothing at all: what ranks 0 and 1 fill runs, the tile they share with rank 2 does not."""
    board = TileBoard(4, 1, BLOCK_M, range(4))
    for rank, rows in ((0, 5), (1, 5), (3, 8)):
        board.set_counts(rank, [rows])
        board.set_arrived(rank, {0: 0, 1: 5, 3: 10}[rank])
    chunk = board.take(100)
    assert board.rows_of(chunk)[0].tolist() == list(range(8))
    board.set_done(chunk)
    assert not len(board.take(100))
    assert not board.source_finished(1)
    board.set_counts(2, [3])
    board.set_arrived(2, 18)
    rest = board.take(100)
    # What rank 3 filled alone was complete before rank 2 came.
    assert board.rows_of(rest)[0].tolist() == [13, 14, 15, 16, 17, 8, 9, 18, 19, 20, 10, 11, 12]


def test_earlier_complete_tiles_go_first() -> None:
    board = TileBoard(2, 2, BLOCK_M, range(2))
    board.set_counts(0, [0, 4])
    board.set_counts(1, [4, 0])
    board.set_arrived(0, 0)
    board.set_arrived(1, 4)
    assert board.experts_of(board.take(100)).tolist() == [1, 0]
