"""Control block, staging and private tables: sizes and words, on the CPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from struct import Struct

import torch

from megamoe import Deployment, MoeBatch, MoeShape, Path, RowFormat, SubStep, plan_bundle
from megamoe.backends import Launch
from megamoe.backends.hopper import record
from megamoe.backends.hopper.buffers import (
    Addresses,
    RankBuffers,
    Request,
    allocate_heap,
    control_words,
    heap_offsets,
    host_view,
    host_words,
    request_words,
    result_bytes,
)
from megamoe.backends.hopper.record import Word
from megamoe.layout import FlagKind, plan_layout

SHAPE = MoeShape(hidden=96, intermediate=64, num_experts=16, num_topk=4, num_layers=3)
CPU = torch.device("cpu")


def layout_of(capacity: int = 16):
    bundle = plan_bundle(Deployment(shape=SHAPE, backend="hopper", max_tokens_per_rank=capacity))
    return plan_layout(bundle)


def launch_of(slot_idx: int, buffer_idx: int, *, refused: bool = False) -> Launch:
    sub_step = SubStep.whole(Path.COMPACT, 16, (5, 0, 1, 2, 3, 4, 5, 0))
    return Launch(
        slot_idx=slot_idx,
        epoch=0xFFFFFFFE,
        buffer_idx=buffer_idx,
        sub_step=sub_step,
        closing=False,
        refused=refused,
        deadline_s=0.0,
    )


def test_control_block_names_the_launch() -> None:
    layout = layout_of()
    batch = MoeBatch.empty(SHAPE)
    out = torch.empty((0, SHAPE.hidden), dtype=torch.bfloat16)
    for buffer_idx in (0, 1):
        words = control_words(layout, launch_of(2, buffer_idx), batch, out, 123)
        assert len(words) == record.NUM_WORDS
        assert words[Word.EPOCH] == 0xFFFFFFFE
        assert words[Word.TIMEOUT_NS] == 123
        assert words[Word.FLAGS_OFFSET] == layout.flag_offset(2, buffer_idx, FlagKind.COUNTS, 0)
        assert words[Word.ROWS_OFFSET] == layout.region(f"payload_rows{buffer_idx}").offset
        assert words[Word.ROWS_PER_RANK : Word.ROWS_PER_RANK + 8] == [5, 0, 1, 2, 3, 4, 5, 0]
        assert not any(words[record.FIRST_STATUS :])


def test_a_refused_call_carries_the_error_bit() -> None:
    batch = MoeBatch.empty(SHAPE)
    out = torch.empty((0, SHAPE.hidden), dtype=torch.bfloat16)
    words = control_words(layout_of(), launch_of(0, 0, refused=True), batch, out, 1)
    assert words[Word.INFO] == record.INFO_ERROR
    assert words[Word.NUM_ROWS] == 0


def test_status_words_follow_the_request() -> None:
    assert all(word < record.FIRST_STATUS for word in Word if word.name == "ROWS_PER_RANK" or word < 16)
    assert Word.ROWS_PER_RANK + record.MAX_RANKS <= record.FIRST_STATUS
    assert max(Word) < record.NUM_WORDS


def test_every_word_of_a_request_is_in_its_place() -> None:
    at = Addresses(5, 101, 102, 103, 104, 105, 106, 107)
    words = request_words(launch_of(0, 0), at, (201, 202, 203, 204, 205, 206), 301)
    assert len(words) == record.NUM_REQUEST_WORDS <= record.FIRST_STATUS
    want = {
        Word.NUM_ROWS: 5,
        Word.TIMEOUT_NS: 301,
        Word.CAPACITY: 16,
        Word.HIDDEN_PTR: 101,
        Word.SF_PTR: 102,
        Word.IDS_PTR: 103,
        Word.WEIGHTS_PTR: 104,
        Word.OUT_PTR: 105,
        Word.IDS_SRC: 106,
        Word.WEIGHTS_SRC: 107,
        Word.FLAGS_OFFSET: 201,
        Word.COUNTS_OFFSET: 202,
        Word.META_OFFSET: 203,
        Word.ROWS_OFFSET: 204,
        Word.COMBINE_OFFSET: 205,
        Word.ABORTS_OFFSET: 206,
    }
    assert {word: words[word] for word in want} == want


def test_heap_offsets_are_the_layouts() -> None:
    layout = layout_of()
    offsets = heap_offsets(layout, 2, 1)
    names = ("counts1", "payload_meta1", "payload_rows1", "combine_rows1", "aborts")
    assert offsets[1:] == tuple(layout.region(name).offset for name in names)
    assert offsets[0] == layout.flag_offset(2, 1, FlagKind.COUNTS, 0)


def test_host_words_are_seen_through_their_view() -> None:
    words = torch.zeros(4, dtype=torch.int64)
    view = host_view(words)
    Struct("4q").pack_into(view, 0, 1, -2, 1 << 62, 4)
    assert words.tolist() == [1, -2, 1 << 62, 4]
    words[0] = 9
    assert view.tolist() == [9, -2, 1 << 62, 4]


def test_flags_of_a_slot_lie_a_line_apart() -> None:
    """Kernels reach the flags of a kind by its number of cache lines from the first."""
    layout = layout_of()
    first = layout.flag_offset(1, 1, FlagKind.COUNTS, 0)
    assert [layout.flag_offset(1, 1, kind, 0) - first for kind in FlagKind] == [
        64 * line for line in range(len(FlagKind))
    ]


def test_private_tables_are_what_the_plan_says() -> None:
    layout = layout_of()
    heap = allocate_heap(layout, CPU)
    assert heap.numel() == layout.num_bytes
    buffers = RankBuffers(layout, rank=0, heap_addresses=[heap.data_ptr()] * 8, device=CPU)
    held = (buffers.image, buffers.middle, buffers.row_slot, buffers.row_address, buffers.row_weight)
    tables = (*held, buffers.block_info, buffers.work, buffers.part_counts, buffers.token_index)
    assert sum(table.numel() * table.itemsize for table in tables) == buffers.num_bytes


def test_result_bytes() -> None:
    assert result_bytes(SHAPE, RowFormat.BF16) == 192
    assert result_bytes(SHAPE, RowFormat.FP8) == 99


def test_a_request_is_the_whole_one_whatever_was_asked_before() -> None:
    layout, words = layout_of(), host_words(CPU)
    request = Request(words, layout)
    first, second = (Addresses(5, *range(at, at + 7)) for at in (101, 301))
    launch = launch_of(0, 0)
    next_layer = launch._replace(slot_idx=1, buffer_idx=1)
    refused = launch._replace(refused=True)
    wider = launch._replace(sub_step=replace(launch.sub_step, runtime_capacity=32))
    asked = product((first, second, first), (launch, next_layer, refused, wider, launch))
    for epoch, (at, of_epoch_0) in enumerate(asked):
        one = of_epoch_0._replace(epoch=epoch)
        request.write(one, at, 1000 + epoch)
        want = request_words(one, at, heap_offsets(layout, one.slot_idx, one.buffer_idx), 1000 + epoch)
        assert words.tolist() == [*want, *(0,) * (record.NUM_WORDS - len(want))]
