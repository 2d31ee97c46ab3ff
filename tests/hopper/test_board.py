"""large_m's board: lists do not overlap, and every place fits where it travels."""

from __future__ import annotations

from itertools import pairwise

import pytest

from megamoe.backends.hopper import board, plan
from megamoe.backends.hopper.tables import TableSizes
from megamoe.layout import MAX_RANKS
from megamoe.shape import MoeShape, preset

V4_PRO = preset("deepseek-v4-pro")
SMALL = MoeShape(hidden=96, intermediate=64, num_experts=32, num_topk=4)


@pytest.mark.parametrize("shape", [V4_PRO, SMALL, SMALL.with_ranks(1)])
@pytest.mark.parametrize("capacity", [16, 8192])
def test_lists_follow_each_other_and_hold_every_entry(shape: MoeShape, capacity: int) -> None:
    sizes = TableSizes(shape=shape, capacity=capacity)
    lists = board.board_layout(sizes)
    begins = [lists.arrived, lists.done, lists.queue1, lists.queue2, lists.tables]
    assert begins[0] == board.BoardWord.ENTRIES
    assert all(stop - begin == sizes.max_tiled_entries for begin, stop in pairwise(begins))
    assert lists.num_words - lists.tables == shape.num_experts_per_rank * (shape.num_ranks + 2) + 1
    # An expert's rows are cut into entries of at least 128: the lists hold the worst routing.
    most = sizes.max_routed_rows // board.NARROW_ROWS + shape.num_experts_per_rank
    assert sizes.max_tiled_entries >= most


def test_head_words_do_not_overlap() -> None:
    words = board.BoardWord
    assert words.EXPAND + MAX_RANKS <= words.SENT
    assert words.SENT + board.SECTIONS <= words.ENTRIES
    assert len({words.SEND, words.REPORTED, words.HEAD1, words.HEAD2, words.TAIL1, words.TAIL2}) == 6
    assert max(words.TAIL1, words.TAIL2) < words.EXPAND


def test_a_place_and_an_expert_fit_one_word() -> None:
    most_rows_of_an_expert = 8192 * V4_PRO.num_topk
    assert V4_PRO.num_experts_per_rank <= board.MAX_EXPERTS_PER_RANK
    assert (most_rows_of_an_expert << board.PLACE_SHIFT) + board.MAX_EXPERTS_PER_RANK < 1 << 31


def test_one_wide_tile_for_every_step_unless_rows_are_quantized_on_their_way() -> None:
    assert {board.plan_large_m(V4_PRO, rows).block_n for rows in (1, 1024, 8192)} == {256}
    assert board.plan_large_m(V4_PRO, 8192, fp8_rows=True).block_n == board.NARROW_ROWS
    narrow = plan.GemmPlan(stream_max_rows=0, block_n=board.NARROW_ROWS)
    for columns in (V4_PRO.hidden, V4_PRO.intermediate, 352):
        wide, small = board.plan_large_m(V4_PRO, 1).tiled(columns), narrow.tiled(columns)
        # Both rings lie in the same memory, the narrow one with stages half as large.
        assert small.stages * small.block_n <= wide.stages * wide.block_n
        assert wide.chunks_per_stage == small.chunks_per_stage == 1
