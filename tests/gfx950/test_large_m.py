"""large_m by itself: what its one kernel leaves in memory, and that a late source holds up its own tiles only."""

from __future__ import annotations

import pytest
import torch

from megamoe.backends.gfx950 import references
from megamoe.backends.gfx950.launches import RankLaunches
from megamoe.backends.gfx950.lockstep import NUM_CUS, Ranks, batches_of, emulated, shape_of
from megamoe.backends.gfx950.plan import LaunchPlan, plan_launch
from megamoe.backends.gfx950.record import BOARD_BYTES, POSTED, Word
from megamoe.batch import MoeBatch
from megamoe.bundle import Path, RowFormat
from megamoe.errors import PeerTimeoutError
from megamoe.layout import FlagKind

CAPACITY = 64
LATE = 5


def staged(ranks: Ranks, batches: list[MoeBatch]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(rows, words) of every rank as quantize must leave them."""
    layout = ranks.backends[0].launches.layout
    pairs = [references.quantize(layout, b.hidden_states, b.topk_ids, b.topk_weights) for b in batches]
    return [rows for rows, _ in pairs], [words for _, words in pairs]


def tilings(ranks: Ranks, words: list[torch.Tensor], plan: LaunchPlan) -> list[references.Tiling]:
    """What every owner's director must lay out."""
    layout = ranks.backends[0].launches.layout
    return [
        references.tiling(
            layout,
            torch.stack([references.lists(layout, one, owner)[0] for one in words]),
            capacity=CAPACITY,
            block_m=plan.block_m,
        )
        for owner in range(8)
    ]


def board(launches: RankLaunches, num_tiles: int) -> torch.Tensor:
    """[tiles, words of a place]."""
    return launches.board.read(torch.int32, (num_tiles, BOARD_BYTES // 4))


def published(launches: RankLaunches, num_tiles: int) -> tuple[list[int], list[tuple[int, int]]]:
    """(tiles, chunks as (first tile, mask)) in the order in which the director published them."""
    low, high = launches.control.read(torch.int32, (2,), 8 * Word.READY).tolist()
    places = board(launches, num_tiles)
    return places[:low, 1].tolist(), [tuple(one) for one in places[: high & 0x7FFFFFFF, 4:6].tolist()]


def tiles_of(chunk: tuple[int, int]) -> list[int]:
    first, mask = chunk
    return [first + i for i in range(8) if mask >> i & 1]


@pytest.mark.parametrize("row_format", [RowFormat.BF16, RowFormat.FP8])
def test_memory_after_the_kernel(row_format: RowFormat) -> None:
    """Identity experts, so that all of it is exact: counts, lists, payload, tiles, result rows, outputs."""
    fp8 = row_format is RowFormat.FP8
    deployment = emulated(shape_of(544, 96, num_experts=16, num_topk=4), combine_row_format=row_format)
    with Ranks(deployment, seed=9) as ranks:
        ranks.bind_identity()
        shape, layout = ranks.shape, ranks.backends[0].launches.layout
        batches = batches_of(
            shape, [3, 0, 5, 1, 2, 4, 0, 9], seed=4, no_expert_share=0.2, duplicate_share=0.2
        )
        outs, _ = ranks.run(Path.LARGE_M, batches)
        assert ranks.reports() == []
        rows, words = staged(ranks, batches)
        plan = plan_launch(shape, 9, NUM_CUS)
        regions = [
            torch.zeros(b.num_rows * shape.num_topk, layout.result_bytes, dtype=torch.uint8) for b in batches
        ]
        for owner, want in enumerate(tilings(ranks, words, plan)):
            launches = ranks.backends[owner].launches
            at = layout.region("counts0").offset
            counts = launches.heap.read(torch.int32, (8, layout.counts_words), at)
            at = layout.region("payload_meta0").offset
            pairs = launches.heap.read(torch.int32, (8, CAPACITY * layout.meta_words // 2, 2), at)
            for src in range(8):
                want_counts, want_pairs = references.lists(layout, words[src], owner)
                assert torch.equal(counts[src, : shape.num_experts_per_rank], want_counts)
                assert torch.equal(pairs[src, : len(want_pairs)], want_pairs)
            assert torch.equal(launches.experts.read(torch.int32, want.experts.shape), want.experts)
            assert torch.equal(launches.segments.read(torch.int32, want.segments.shape), want.segments)
            num_tiles = len(want.tiles)
            assert torch.equal(board(launches, num_tiles)[:, 0], want.tiles)
            order, chunks = published(launches, num_tiles)
            assert sorted(order) == list(range(num_tiles))
            assert sorted(tile for chunk in chunks for tile in tiles_of(chunk)) == sorted(order)
            routed = references.dispatch(layout, owner, words, capacity=CAPACITY, tile_shift=plan.tile_shift)
            at = layout.region("payload_rows0").offset
            payload = launches.heap.read(torch.uint8, (layout.max_rows_received, layout.row_bytes), at)
            sent = references.result_rows(references.identity(payload, routed, shape.hidden), routed, fp8=fp8)
            for record, one in zip(routed.row_table.tolist(), sent, strict=True):
                src, index = record[1] >> 20, record[1] & (1 << 20) - 1
                assert torch.equal(payload[record[0]], rows[src][index // shape.num_topk])
                regions[src][index] = one
        for rank, backend in enumerate(ranks.backends):
            at = layout.region("combine_rows0").offset
            got = backend.launches.heap.read(torch.uint8, regions[rank].shape, at)
            kept = shape.hidden + layout.sf_bytes if fp8 else layout.result_bytes
            served = (words[rank][:, 1 : 1 + shape.num_topk] >= 0).flatten()
            assert torch.equal(got[served, :kept], regions[rank][served, :kept])
            region = regions[rank].view(-1, shape.num_topk, layout.result_bytes)
            assert torch.equal(outs[rank], references.combine(layout, words[rank], region, [fp8] * 8))


@pytest.mark.parametrize(("num_topk", "rows", "num_tiles"), [(6, 64, 4), (1, 32, 8), (1, 64, 16)])
def test_large_experts_come_in_chunks(num_topk: int, rows: int, num_tiles: int) -> None:
    """All tokens to the first experts, of num_tiles each: chunks of up to 2, 4, 8 tiles; the same bits as compact."""
    with Ranks(emulated(shape_of(128, 64, num_topk=num_topk)), checked=False, num_cus=8) as ranks:
        ranks.bind()
        batches = batches_of(ranks.shape, [rows] * 8, "one_rank")
        compact, _ = ranks.run(Path.COMPACT, batches, epoch=0)
        _, words = staged(ranks, batches)
        wants = tilings(ranks, words, plan_launch(ranks.shape, rows, NUM_CUS))
        assert {int(want.experts[0, 0]) for want in wants} == {rows * 8, 0}
        sizes = set()
        for seed in range(1, 4):
            ranks.schedule(seed)
            large, _ = ranks.run(Path.LARGE_M, batches, epoch=seed)
            assert torch.equal(torch.cat(large), torch.cat(compact))
            for owner, want in enumerate(wants):
                order, chunks = published(ranks.backends[owner].launches, len(want.tiles))
                assert sorted(order) == list(range(len(want.tiles)))
                assert sorted(tile for chunk in chunks for tile in tiles_of(chunk)) == sorted(order)
                for chunk in chunks:
                    members = tiles_of(chunk)
                    sizes.add(len(members))
                    assert len({int(want.tiles[tile]) >> 16 for tile in members}) == 1
                    limit = 1 << (int(want.tiles[members[0]]) & 0xFF)
                    assert limit == num_tiles // 2
                    assert members[0] // limit == members[-1] // limit
        assert 2 <= max(sizes) <= num_tiles // 2


def hold_back_payload(ranks: Ranks) -> None:
    """As if LATE had many more workgroups that send rows, and the last of them never came: no payload flag."""
    ranks.backends[LATE].launches.control.write(torch.full((8,), -1000, dtype=torch.int64), 8 * Word.SENT)


@pytest.mark.parametrize("identity", [True, False])
def test_a_late_source_holds_up_its_own_tiles_only(identity: bool) -> None:
    """Rank 5 tells what it brings, and its payload flags stay out: all tiles without its rows finish, their rows are
    back at their sources, and sources whose tiles are all done are told."""
    with Ranks(emulated(shape_of(128, 64)), checked=False, seed=1, num_cus=8) as ranks:
        if identity:
            ranks.bind_identity()
        else:
            ranks.bind()
        shape, layout = ranks.shape, ranks.backends[0].launches.layout
        batches = batches_of(shape, [64] * 8, "one_rank", exact=identity)
        ranks.run(Path.COMPACT, batches, epoch=0)
        ranks.begin(Path.LARGE_M, batches, epoch=1)
        hold_back_payload(ranks)
        for backend in ranks.backends:
            with pytest.raises(PeerTimeoutError) as error:
                backend.finish()
            backend.abandon(error.value)
        _, words = staged(ranks, batches)
        plan = plan_launch(shape, 64, NUM_CUS)
        told = 0
        for owner, want in enumerate(tilings(ranks, words, plan)):
            launches = ranks.backends[owner].launches
            free = [tile for tile in range(len(want.tiles)) if not want.sources(tile) >> LATE & 1]
            order, _ = published(launches, len(want.tiles))
            assert sorted(order) == free
            routed = references.dispatch(layout, owner, words, capacity=CAPACITY, tile_shift=plan.tile_shift)
            for tile in free:
                count, row_base, tile_base, _ = want.experts[int(want.tiles[tile]) >> 16].tolist()
                low = (tile - tile_base) * plan.block_m
                for i in range(low, min(low + plan.block_m, count)):
                    place = int(routed.row_table[row_base + i, 1])
                    at = [
                        layout.region(f"combine_rows{buffer_idx}").offset
                        + (place & (1 << 20) - 1) * layout.result_bytes
                        for buffer_idx in (0, 1)
                    ]
                    heap = ranks.backends[place >> 20].launches.heap
                    got, want_row = [heap.read(torch.uint8, (layout.result_bytes,), one) for one in at]
                    assert torch.equal(got, want_row)
            for src in range(8):
                done = all(tile in free for tile in range(len(want.tiles)) if want.sources(tile) >> src & 1)
                flag = ranks.backends[src].launches.heap.read(
                    torch.int64, (1,), layout.flag_offset(0, 1, FlagKind.ROWS, owner)
                )
                assert (int(flag) & (1 << 64) - 1 == 1 | POSTED << 32) == done
                told += done and bool(len(want.tiles))
        assert told >= 4


def test_kernels_name_a_late_source() -> None:
    """With a clock that is soon over the director gives up for all, and nobody else is named."""
    with Ranks(emulated(shape_of(128, 64)), checked=False, num_cus=8) as ranks:
        ranks.bind_identity()
        for backend in ranks.backends:
            backend.device.tick_hz = 20.0
        ranks.begin(Path.LARGE_M, batches_of(ranks.shape, [2] * 8, exact=True))
        hold_back_payload(ranks)
        for backend in ranks.backends:
            with pytest.raises(PeerTimeoutError) as error:
                backend.finish()
            assert error.value.missing_ranks == (LATE,)


def test_compact_waits_for_a_late_source() -> None:
    """Rank 5 tells what it brings and does not dispatch: no result row of anybody comes back."""
    with Ranks(emulated(shape_of(128, 64)), checked=False, num_cus=8) as ranks:
        ranks.bind_identity()
        layout = ranks.backends[0].launches.layout
        batches = batches_of(ranks.shape, [64] * 8, "one_rank", exact=True)
        ranks.begin(Path.COMPACT, batches, ranks=[rank for rank in range(8) if rank != LATE])
        ranks.begin(Path.COMPACT, batches, ranks=[LATE], stages=("quantize", "prepare"))
        for backend in ranks.backends:
            with pytest.raises(PeerTimeoutError):
                backend.finish()
        for backend in ranks.backends:
            at = layout.region("combine_rows0").offset
            assert not backend.launches.heap.read(torch.uint8, (64 * 6, layout.result_bytes), at).any()


def test_more_rows_than_a_workgroup_lists_at_once() -> None:
    """All waves of a workgroup list rows, in several rounds; experts of many tiles, some of one source alone."""
    shape = shape_of(128, 64, num_ranks=2, num_experts=8, num_topk=2)
    deployment = emulated(shape, max_tokens_per_rank=1024, large_m_capacity=1024)
    with Ranks(deployment, seed=4, num_cus=8) as ranks:
        ranks.bind()
        batches = batches_of(shape, [600, 70], "zipf", no_expert_share=0.1, duplicate_share=0.1)
        compact, _ = ranks.run(Path.COMPACT, batches, epoch=0)
        large, _ = ranks.run(Path.LARGE_M, batches, epoch=1)
        assert torch.equal(torch.cat(large), torch.cat(compact))
        assert ranks.reports() == []


@pytest.mark.parametrize(("num_ranks", "num_cus", "num_senders"), [(4, 8, 2), (4, 24, 6), (2, 32, 8)])
def test_any_number_of_senders(num_ranks: int, num_cus: int, num_senders: int) -> None:
    """Fewer senders than ranks, several a destination, also unevenly: every row goes once, a flag tells of all."""
    shape = shape_of(128, 512, num_ranks=num_ranks, num_experts=8, num_topk=2)
    deployment = emulated(shape, max_tokens_per_rank=256, large_m_capacity=256)
    rows = [200, 70, 0, 33][:num_ranks]
    batches = batches_of(shape, rows, "uniform")
    with Ranks(deployment, seed=5, num_cus=num_cus) as ranks:
        assert plan_launch(shape, max(rows), num_cus).large_m_senders == num_senders
        ranks.bind()
        compact, _ = ranks.run(Path.COMPACT, batches, epoch=0)
        large, _ = ranks.run(Path.LARGE_M, batches, epoch=1)
        assert torch.equal(torch.cat(large), torch.cat(compact))
        assert ranks.reports() == []
        for rank, backend in enumerate(ranks.backends):
            owners = batches[rank].topk_ids // shape.num_experts_per_rank
            others = [owner for owner in range(num_ranks) if owner != rank]
            sent = sum(int((owners == owner).any(dim=1).sum()) for owner in others)
            assert int(backend.launches.control.read(torch.int32, (1,), 8 * Word.ROWS_SENT)) == sent
