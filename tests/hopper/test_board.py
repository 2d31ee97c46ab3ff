"""large_m's board: lists do not overlap, tiles are dealt out once, and every place fits where it travels."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest

from megamoe.backends.hopper import board, plan
from megamoe.backends.hopper.record import MAX_RANKS
from megamoe.backends.hopper.tables import TableSizes
from megamoe.backends.hopper.widths import tile_rows
from megamoe.shape import MoeShape, preset

V4_PRO = preset("deepseek-v4-pro")
SMALL = MoeShape(hidden=96, intermediate=64, num_experts=32, num_topk=4)


@pytest.mark.parametrize(("shape", "capacity"), [(V4_PRO, 8192), (V4_PRO, 64), (SMALL, 16)])
def test_lists_follow_each_other_and_hold_every_entry(shape: MoeShape, capacity: int) -> None:
    sizes = TableSizes(shape=shape, capacity=capacity)
    lists = board.board_layout(sizes)
    begins = [lists.arrived, lists.done, lists.taken]
    assert begins[0] == board.BoardWord.ENTRIES
    assert all(stop - begin == sizes.max_tiled_entries for begin, stop in pairwise(begins))
    assert lists.tables - lists.taken == sizes.max_tiled_entries * sizes.gemm1_groups
    words_of_experts = shape.num_experts_per_rank * (shape.num_ranks + board.EXPERT_WORDS)
    assert lists.of_width - lists.tables == words_of_experts
    # No expert has more tiles than with the widest alone: the lists hold the worst routing.
    widths = board.plan_large_m(shape, capacity).widths
    assert lists.num_words - lists.of_width >= 2 * len(widths)
    most = sizes.max_routed_rows // widths[0] + shape.num_experts_per_rank
    assert sizes.max_tiled_entries >= most
    assert all(len(tile_rows(rows, widths)) == -(-rows // widths[0]) for rows in range(1, 4 * widths[0]))


def test_head_words_do_not_overlap() -> None:
    words = board.BoardWord
    assert words.EXPAND + MAX_RANKS <= words.SENT
    assert words.SENT + board.SECTIONS <= words.ENTRIES
    assert len({words.SEND, words.REPORTED, words.COMPLETE, words.EARLY}) == 4
    assert max(words.SEND, words.REPORTED, words.COMPLETE, words.EARLY) < words.EXPAND


def test_a_thread_for_every_tile_in_sight() -> None:
    assert board.MAX_WIDTHS * board.TILES_IN_SIGHT <= 256
    for fp8_rows in (False, True):
        assert len(board.plan_large_m(V4_PRO, 1, fp8_rows=fp8_rows).widths) <= board.MAX_WIDTHS


@pytest.mark.parametrize("num_blocks", [16, 132])
@pytest.mark.parametrize("numbers", [(0, 0, 0), (1, 0, 130), (48, 2304, 960), (7000, 131, 1)])
def test_every_tile_has_one_thread_block_and_no_block_two_more_than_another(
    numbers: tuple[int, ...], num_blocks: int
) -> None:
    before = [0, *accumulate(numbers)]
    own = [
        [list(board.own_tiles(block, num_blocks, *kind)) for kind in zip(before, numbers, strict=False)]
        for block in range(num_blocks)
    ]
    for i, number in enumerate(numbers):
        assert sorted(tile for widths in own for tile in widths[i]) == list(range(number))
    loads = [sum(map(len, widths)) for widths in own]
    assert max(loads) - min(loads) <= 1


def test_a_place_and_an_expert_fit_one_word() -> None:
    most_rows_of_an_expert = 8192 * V4_PRO.num_topk
    assert V4_PRO.num_experts_per_rank <= board.MAX_EXPERTS_PER_RANK
    assert (most_rows_of_an_expert << board.PLACE_SHIFT) + board.MAX_EXPERTS_PER_RANK < 1 << 31


def test_the_same_tiles_for_every_step_in_boxes_of_one_chunk() -> None:
    assert {board.plan_large_m(V4_PRO, rows).block_n for rows in (1, 1024, 8192)} == {plan.MAX_BLOCK_N}
    for fp8_rows in (False, True):
        gemms = board.plan_large_m(V4_PRO, 1, fp8_rows=fp8_rows)
        for columns in (V4_PRO.hidden, V4_PRO.intermediate):
            assert all(tile.chunks_per_stage == 1 for tile in gemms.tiles(columns))
