"""Kernel planning: what is chosen follows from agreed numbers, and tables hold every legal routing."""

from __future__ import annotations

from itertools import pairwise, product, takewhile

import pytest

from megamoe.backends.hopper import plan
from megamoe.backends.hopper.launches import Device
from megamoe.backends.hopper.packing import CHUNK, UNIT_BYTES
from megamoe.backends.hopper.tables import TableSizes, expert_entries
from megamoe.backends.hopper.widths import tile_rows
from megamoe.errors import InternalError
from megamoe.shape import MoeShape, preset

V4_PRO = preset("deepseek-v4-pro")
SMALL = MoeShape(hidden=96, intermediate=64, num_experts=32, num_topk=4)


@pytest.mark.parametrize(
    ("max_rows", "stream_max_rows", "block_n", "ring"),
    [
        (1, 32, 64, None),
        (48, 32, 64, None),
        (64, 0, 96, plan.RING_FEW_ROWS),
        (128, 0, 96, plan.RING_FEW_ROWS),
        (256, 0, 96, plan.RING),
        (512, 0, 96, plan.RING),
        (768, 0, 96, plan.RING),
        (1024, 0, 256, None),
        (8192, 0, 256, None),
    ],
)
def test_kernels_by_agreed_rows(
    max_rows: int, stream_max_rows: int, block_n: int, ring: plan.RingPlan | None
) -> None:
    got = plan.plan_gemms(V4_PRO, max_rows)
    assert (got.stream_max_rows, got.block_n, got.ring) == (stream_max_rows, block_n, ring)
    assert not plan.plan_gemms(V4_PRO, max_rows, fp8_rows=True).ring
    # small_m has the ring where the others have it, and so their bits there.
    assert plan.plan_small_m(V4_PRO, max_rows).ring == ring


@pytest.mark.parametrize("ring", [plan.RING, plan.RING_FEW_ROWS])
def test_ring_fits_shared_memory_and_registers(ring: plan.RingPlan) -> None:
    assert len(ring.widths) <= plan.MAX_WIDTHS
    # A tile is one or two boxes.
    boxes = [[rows for rows in plan.RING_BOX_ROWS if width & rows] for width in ring.widths]
    assert [sum(rows) for rows in boxes] == list(ring.widths)
    assert max(len(rows) for rows in boxes) <= 2
    most = max(rows[0] for rows in boxes) + max(sum(rows[1:]) for rows in boxes)
    stage = plan.RING_CONSUMERS * 2 * UNIT_BYTES + most * CHUNK * 2
    # Beside the ring a consumer takes up to 6.5 KB to lay out what it stores of 32 tokens.
    assert ring.stages * stage + plan.RING_CONSUMERS * 6656 <= 227 * 1024
    # A warpgroup has 128 threads; the loading warp counts as one, with 24 registers a thread, 32 in small_m.
    assert plan.RING_CONSUMERS * plan.RING_REGISTERS + 32 <= 512
    for width, rows in zip(ring.widths, boxes, strict=True):
        # Sums of 128 rows, a chunk's words, and half or all of it as bf16.
        halves = 2 if rows[0] <= plan.RING_WHOLE_CHUNKS else 1
        assert width + 16 + 32 * halves <= plan.RING_REGISTERS


@pytest.mark.parametrize("num_tiles", [1, 3, 132, 768, 1000])
@pytest.mark.parametrize("num_programs", [1, 3, 132])
def test_ring_programs_share_tiles(num_tiles: int, num_programs: int) -> None:
    num_waves = -(-num_tiles // num_programs)
    # As the device takes them: wave after wave, until one is beyond the last tile.
    shares = [
        list(
            takewhile(
                lambda tile: tile < num_tiles,
                (plan.ring_tile(wave, program, num_programs) for wave in range(num_waves + 1)),
            )
        )
        for program in range(num_programs)
    ]
    assert sorted(tile for share in shares for tile in share) == list(range(num_tiles))
    # The first quarter are twice as wide.
    costs = [sum(2 if tile < num_tiles // 4 else 1 for tile in share) for share in shares]
    assert max(costs) - sum(costs) / num_programs <= 2


@pytest.mark.parametrize(
    ("max_rows", "fp8_rows", "stream_max_rows", "block_n"),
    [(1, False, 32, 32), (56, False, 32, 32), (1024, False, 0, 64), (128, True, 32, 32), (256, True, 16, 32)],
)
def test_small_m_kernels_leave_room_for_two_thread_blocks(
    max_rows: int, fp8_rows: bool, stream_max_rows: int, block_n: int
) -> None:
    got = plan.plan_small_m(V4_PRO, max_rows, fp8_rows=fp8_rows)
    assert got.ring is None
    assert (got.stream_max_rows, got.block_n) == (stream_max_rows, block_n)
    for num_columns in (V4_PRO.hidden, V4_PRO.intermediate):
        tiled = got.tiled(num_columns)
        assert (tiled.occupancy, tiled.num_regs) == (plan.SMALL_M.occupancy, 128)
        # Where streaming is the rule, tokens of the tiled kernel leave L1 to it.
        ring_bytes = tiled.stages * tiled.block_n * tiled.chunks_per_stage * CHUNK * 2
        assert ring_bytes <= (24 if stream_max_rows == plan.STREAM_LIMIT else 96) * 1024


def test_thread_blocks_that_do_not_fit_together_are_refused() -> None:
    plan.check_resident(106_520, plan.SMALL_M.occupancy)
    with pytest.raises(InternalError, match="at most 115712 bytes, got 131096"):
        plan.check_resident(131_096, plan.SMALL_M.occupancy)


def test_small_m_is_never_wider_than_its_registers_allow() -> None:
    few_experts = MoeShape(hidden=96, intermediate=64, num_experts=8, num_topk=2)
    assert {plan.plan_small_m(few_experts, rows).block_n for rows in (1, 64, 512)} == {32, 64}
    assert {plan.plan_small_m(V4_PRO, rows, fp8_rows=True).block_n for rows in (1, 64, 512)} == {32}


def test_one_kernel_for_all_rows_when_batch_invariant() -> None:
    chosen = {plan.plan_gemms(V4_PRO, rows, batch_invariant=True).stream_max_rows for rows in (1, 64, 8192)}
    assert chosen == {0}


def test_fp8_rows_never_use_the_widest_tile() -> None:
    assert plan.plan_gemms(V4_PRO, 8192, fp8_rows=True).block_n == 128


@pytest.mark.parametrize("block_n", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("num_columns", [32, 512, 1536, 3072, 7168])
def test_token_rings_run_at_most_one_tile_ahead(block_n: int, num_columns: int) -> None:
    tiles = plan.GemmPlan(stream_max_rows=0, block_n=block_n).tiles(num_columns)
    chunks = -(-num_columns // 512) * 512 // CHUNK
    for tile in tiles:
        assert chunks % tile.chunks_per_stage == 0
        assert chunks // tile.chunks_per_stage >= tile.stages - 1
        assert chunks % tile.ahead == 0
        assert tile.ahead % tile.chunks_per_stage == 0
        ring_bytes = tile.stages * tile.block_n * tile.chunks_per_stage * CHUNK * 2
        assert ring_bytes * tile.occupancy <= 200 * 1024
    # Thread blocks of one launch are alike, and their boxes of tokens.
    assert len({(tile.chunks_per_stage, tile.num_regs, tile.occupancy) for tile in tiles}) == 1
    assert all(tile.block_n.bit_count() <= 2 for tile in tiles)
    assert all(sum(rows for rows in plan.BOX_ROWS if tile.block_n & rows) == tile.block_n for tile in tiles)


@pytest.mark.parametrize(
    ("block_n", "ring"),
    [*product([32, 64, 96, 128, 256], [None]), *product([96], [plan.RING, plan.RING_FEW_ROWS])],
)
def test_last_tiles_are_as_narrow_as_their_rows_allow(block_n: int, ring: plan.RingPlan | None) -> None:
    widths = plan.GemmPlan(stream_max_rows=0, block_n=block_n, ring=ring).widths
    assert len(widths) <= plan.MAX_WIDTHS
    assert tile_rows(0, widths) == ()
    for count in range(1, 4 * block_n + 1):
        tiles = tile_rows(count, widths)
        # As many as with the widest tile alone, each with rows of its own, widest first.
        assert len(tiles) == -(-count // block_n)
        assert sum(tiles[:-1]) < count <= sum(tiles)
        assert list(tiles) == sorted(tiles, reverse=True)
        assert set(tiles) <= set(widths)
        others = [
            sum(pair)
            for pair in product(widths, repeat=min(len(tiles), 2))
            if sum(pair) >= count - sum(tiles[:-2])
        ]
        assert sum(tiles[-2:]) == min(others)


@pytest.mark.parametrize("shape", [V4_PRO, SMALL, SMALL.with_ranks(1)])
@pytest.mark.parametrize("capacity", [1, 64, 512])
@pytest.mark.parametrize("max_rows_share", [0.1, 1.0])
def test_tables_hold_the_worst_routings(shape: MoeShape, capacity: int, max_rows_share: float) -> None:
    sizes = TableSizes(shape=shape, capacity=capacity)
    experts = shape.num_experts_per_rank
    total = sizes.max_routed_rows
    chosen = plan.plan_gemms(shape, max(int(capacity * max_rows_share), 1))
    even = [total // experts + (idx < total % experts) for idx in range(experts)]
    one_row_each = [1] * min(experts, total) + [0] * max(experts - total, 0)
    one_row_each[0] += total - sum(one_row_each)
    edges = [plan.STREAM_LIMIT + 1] * experts
    for counts in (even, [total] + [0] * (experts - 1), one_row_each, edges):
        if sum(counts) > total:
            continue
        entries = expert_entries(counts, chosen)
        last = max(e.first_row + sum(e.rows) for e in entries)
        assert last + plan.MAX_BLOCK_N <= sizes.padded_rows + plan.BLOCK_ROWS
        assert sum(len(e.rows) for e in entries if e.streaming) <= sizes.max_stream_entries
        assert sum(len(e.rows) for e in entries if not e.streaming) <= sizes.max_tiled_entries
        assert [sum(e.rows) for e in entries] == counts
        assert all(e.first_row % plan.BLOCK_ROWS == 0 for e in entries)


def test_memory_of_a_v4_pro_rank() -> None:
    decode = TableSizes(shape=V4_PRO, capacity=512)
    assert decode.num_bytes < 0.6e9
    prefill = TableSizes(shape=V4_PRO, capacity=8192)
    assert 8.0e9 < prefill.num_bytes < 8.3e9


@pytest.mark.parametrize(("capacity", "tokens"), [(1, 16), (128, 128), (512, 512), (8192, 512)])
def test_index_blocks_grow_with_the_step(capacity: int, tokens: int) -> None:
    assert plan.index_block_tokens(V4_PRO, capacity) == tokens


def test_waiting_kernels_of_all_ranks_fit_on_one_device() -> None:
    assert plan.grid_share(132, 8) * 8 <= 132
    for ranks in (2, 4, 8):
        waiting = (ranks - 1) * plan.SMALL_M.occupancy * Device(132, ranks).resident_share
        assert waiting < 132, "a multiprocessor is left for the first kernel of the rank that comes last"
    assert Device(132).resident_share == 132
    assert plan.grid_share(4, 8) == 1


@pytest.mark.parametrize("num_slots", [1, 16, 132])
@pytest.mark.parametrize(
    "num_tiles",
    [(0, 0, 0), (1, 0, 0), (0, 5, 0), (48 * 40, 48 * 8, 0), (100, 0, 4000), (48 * 2, 48 * 30, 48 * 16)],
)
def test_stream_ranges_cover_all_tiles_at_equal_cost(num_slots: int, num_tiles: tuple[int, int, int]) -> None:
    ranges = [plan.stream_range(slot, num_slots, num_tiles) for slot in range(num_slots)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == sum(num_tiles)
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    costs = [cost for number, cost in zip(num_tiles, plan.STREAM_COSTS, strict=True) for _ in range(number)]
    assert max(sum(costs[first:stop]) for first, stop in ranges) <= sum(costs) / num_slots + 2 * max(
        plan.STREAM_COSTS
    )


@pytest.mark.parametrize("count", range(plan.STREAM_LIMIT + 1))
def test_stream_entries_hold_an_expert_in_at_most_two(count: int) -> None:
    entries = plan.stream_entries(count)
    assert sum(entries) == count
    assert all(0 < rows <= plan.WIDEST_ROWS for rows in entries)
    assert len(entries) <= 2
    assert len(entries) < 2 or entries[0] == plan.BLOCK_ROWS


@pytest.mark.parametrize(
    ("num_ranks", "num_devices", "devices"),
    [
        (8, 1, (0,) * 8),
        (8, 2, (0, 0, 0, 0, 1, 1, 1, 1)),
        (2, 2, (0, 1)),
        (8, 8, tuple(range(8))),
        (2, 8, (0, 1)),
    ],
)
def test_ranks_are_spread_over_devices(num_ranks: int, num_devices: int, devices: tuple[int, ...]) -> None:
    assert plan.devices_of_ranks(num_ranks, num_devices) == devices
