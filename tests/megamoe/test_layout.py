"""The byte map: nothing overlaps, any legal routing fits, and sizes past 32 bits are right before anything exists."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megamoe import Deployment, HeapLayout, MoeShape, Path, Runtime, plan_bundle, plan_layout, preset
from megamoe.backends.cpu import CpuBackend
from megamoe.errors import ConfigError
from megamoe.layout import CACHE_LINE_BYTES, NUM_BUFFERS, PAGE_BYTES, FlagKind
from megamoe.reference import identity_moe
from tests.megamoe.groups import SHAPE, Case, batch_of, deployment, plan_for

GIB = 1 << 30


def layout_of(deployed: Deployment, **settings: int) -> HeapLayout:
    return plan_layout(plan_bundle(deployed), **settings)


@given(
    hidden=st.integers(1, 300).map(lambda blocks: 32 * blocks),
    num_topk=st.integers(1, 10),
    num_ranks=st.sampled_from([1, 2, 4, 8]),
    capacity=st.integers(0, 13).map(lambda power: 1 << power),
    num_layers=st.integers(1, 61),
)
def test_regions_never_overlap(
    hidden: int, num_topk: int, num_ranks: int, capacity: int, num_layers: int
) -> None:
    shape = MoeShape(
        hidden=hidden,
        intermediate=64,
        num_experts=16 * num_ranks,
        num_topk=num_topk,
        num_ranks=num_ranks,
        num_layers=num_layers,
    )
    layout = layout_of(Deployment(shape=shape, max_tokens_per_rank=capacity))
    stop = 0
    for region in layout.regions:
        assert region.offset >= stop, region
        assert region.offset % CACHE_LINE_BYTES == 0
        stop = region.stop
    assert stop <= layout.num_bytes < stop + PAGE_BYTES
    for used in layout.path_regions:
        home = layout.region(used.shared_with)
        assert home.offset == used.offset
        assert used.num_bytes <= home.num_bytes
    assert layout.row_bytes >= hidden + hidden // 32
    assert layout.meta_words >= 1 + 2 * num_topk
    assert layout.result_bytes >= hidden + hidden // 32, "FP8 rows travel in the place of a BF16 row"


def test_flags_have_a_word_each() -> None:
    layout = layout_of(deployment())
    offsets = [
        layout.flag_offset(slot, buffer_idx, kind, src)
        for slot in range(layout.num_slots)
        for buffer_idx in range(NUM_BUFFERS)
        for kind in FlagKind
        for src in range(layout.num_ranks)
    ]
    assert len(set(offsets)) == len(offsets)
    flags = layout.region("flags")
    assert all(flags.offset <= offset <= flags.stop - 8 and offset % 8 == 0 for offset in offsets)


def test_shared_regions_take_the_largest_runtime_and_not_the_sum() -> None:
    layout = layout_of(deployment())
    payload = layout.region("payload_rows0")
    assert payload.num_bytes == 8 * 64 * layout.row_bytes
    per_path = [r.num_bytes for r in layout.path_regions if r.shared_with == "payload_rows0"]
    assert len(per_path) == 4
    assert max(per_path) == payload.num_bytes
    big = layout_of(deployment(fixed_slot_max=16))
    assert big.path_bytes(Path.FIXED_SLOT) < layout.path_bytes(Path.FIXED_SLOT)
    assert big.num_bytes == layout.num_bytes


def test_numbers_of_v4_pro() -> None:
    """The headline deployment, by hand: rows of 7168 + 224 bytes, 64 bytes beside each, results of 14336 bytes."""
    layout = layout_of(Deployment(shape=preset("deepseek-v4-pro")))
    assert (layout.row_bytes, layout.meta_words * 4, layout.result_bytes) == (7392, 64, 14336)
    assert layout.region("payload_rows1").num_bytes == 8 * 8192 * 7392
    assert layout.region("combine_rows1").num_bytes == 8192 * 6 * 14336
    assert 2 * GIB < layout.num_bytes < 4 * GIB, "a rank, all paths together"
    assert layout.region("combine_rows1").stop > 1 << 31, "offsets pass 31 bits here"
    assert layout.max_routed_rows == 8 * 8192 * 6


def test_paths_that_are_not_built_use_nothing() -> None:
    layout = layout_of(Deployment(shape=SHAPE, max_tokens_per_rank=64, fixed_slot_max=0))
    assert layout.path_bytes(Path.FIXED_SLOT) == layout.path_bytes(Path.LARGE_M) == 0
    assert layout.path_bytes(Path.COMPACT) > 0


@pytest.mark.parametrize("num_slots", [0, 3])
def test_slots_are_one_per_layer_at_most(num_slots: int) -> None:
    with pytest.raises(ConfigError, match="num_slots must be from 1 to num_layers = 2"):
        layout_of(deployment(), num_slots=num_slots)


def test_offsets_beyond_4_gib() -> None:
    """One rank with 4.4 GiB: calls on both buffers, and the last result row's bytes stand where the layout says."""
    shape = MoeShape(hidden=7168, intermediate=32, num_experts=18, num_topk=18, num_ranks=1)
    deployed = Deployment(shape=shape, max_tokens_per_rank=8192, fixed_slot_max=0)
    name = f"megamoe-test-{os.getpid()}-big"
    with Runtime.open(deployed, rank=0, group_name=name) as runtime:
        runtime.bind_identity(0)
        case = Case(Path.COMPACT, (9,), exact=True)
        plan = replace(plan_for(case.num_rows_per_rank), policy_version=0)
        batch = batch_of(case, shape, 0)
        for _ in range(2):
            assert torch.equal(runtime.forward(batch, plan, 0).hidden_states, identity_moe(batch, shape))
        backend = runtime.backend
        assert isinstance(backend, CpuBackend)
        layout = backend.context.layout
        last = layout.region("combine_rows1").stop - layout.result_bytes
        assert last > 1 << 32
        backend.heap.buffers[1].results[0, -1].view(torch.uint8).copy_(torch.arange(14336) % 251)
        own = backend.heap.segments[0].buf
        assert bytes(own[last : last + 14336]) == bytes(i % 251 for i in range(14336))
