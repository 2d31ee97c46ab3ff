"""Numbers through every door: streams on all four paths, ForwardStep, quantized rows, cut steps, empty ranks."""

from __future__ import annotations

import asyncio

import pytest
import torch

from megamoe import MoeBatch, Path, Phase
from megamoe.mx import quantize_mxfp8
from megamoe.reference import quantized_moe, relative_l2
from service.client import AsyncMoeGroup, GroupOutput, MoeGroup, forward_step
from tests.e2e.harness import SHAPE, ServiceProcess, check_numbers, group_rows, next_plan_id, weights_of

pytestmark = pytest.mark.any_backend

PATHS = [
    (Path.SMALL_M, 16, [16, 3, 0, 1, 0, 7, 16, 2], "decode"),
    (Path.SMALL_M, 32, [2, 17, 0, 32, 5, 0, 0, 9], "decode"),
    (Path.FIXED_SLOT, 64, [64, 0, 33, 1, 12, 0, 64, 5], "decode"),
    (Path.COMPACT, 512, [65, 0, 130, 1, 12, 0, 64, 5], "decode"),
    (Path.LARGE_M, 512, [128, 0, 300, 1, 12, 0, 64, 5], "prefill"),
]


def check(outs: GroupOutput, batches: list[object], layer_idx: int) -> None:
    for rank, batch in enumerate(batches):
        got = outs.hidden_states[rank]
        if batch is None:
            assert got.shape == (0, SHAPE.hidden)
        else:
            check_numbers(got, batch, layer_idx, outs.reports_per_rank[rank])  # type: ignore[arg-type]


@pytest.mark.parametrize(("path", "capacity", "counts", "phase"), PATHS, ids=str)
async def test_every_path(
    group: AsyncMoeGroup, path: Path, capacity: int, counts: list[int], phase: str
) -> None:
    batches = group_rows(counts, seed=capacity)
    async with group.step(counts, phase) as step:
        assert [(s.path, s.runtime_capacity) for s in step.sub_steps] == [(path, capacity)]
        assert step.plan.num_rows_per_rank == tuple(counts)
        for layer_idx in (0, 3):
            outs = await step.layer(layer_idx, batches)
            check(outs, batches, layer_idx)  # type: ignore[arg-type]
            for reports in outs.reports_per_rank:
                for report in reports:
                    assert (report.path, report.num_rows_per_rank) == (path, tuple(counts))
                    assert report.times.total_us > 0
    counters = outs.sub_steps[0].counters
    if path is Path.FIXED_SLOT:
        assert (counters.count_exchanges, counters.prepare_passes) == (0, 0)
    if path is Path.SMALL_M:
        assert (counters.launches, counters.group_barriers) == (1, 0)
    if path is Path.COMPACT:
        assert counters.count_exchanges >= 1
        assert counters.prepare_passes >= 1


@pytest.mark.parametrize(("path", "capacity", "counts", "phase"), PATHS[1:], ids=str)
async def test_forward_step(
    running_service: ServiceProcess, path: Path, capacity: int, counts: list[int], phase: str
) -> None:
    batches = group_rows(counts, seed=7)
    outs = await forward_step(running_service.front, 2, batches, phase)
    assert outs.sub_steps[0].path is path
    assert outs.plan.phase == Phase(phase)
    check(outs, batches, 2)  # type: ignore[arg-type]


async def test_streams_and_forward_step_give_the_same_bits(running_service: ServiceProcess) -> None:
    counts = [20, 0, 3, 0, 31, 1, 0, 2]
    batches = group_rows(counts, seed=3)
    unary = await forward_step(running_service.front, 1, batches)
    async with AsyncMoeGroup.connect(running_service.front, holder="bits") as group:
        outs = []
        for announce in (True, False):
            async with group.step(counts, announce_counts=announce) as step:
                outs.append(await step.layer(1, batches))
    for rank in range(8):
        assert torch.equal(outs[0].hidden_states[rank], unary.hidden_states[rank])
        assert torch.equal(outs[0].hidden_states[rank], outs[1].hidden_states[rank])
    assert [bool(reports) for reports in outs[1].reports_per_rank] == [True] * 8, "all ranks were called"


async def test_whoever_has_a_forward_steps_answer_can_lease(running_service: ServiceProcess) -> None:
    """It held the lease of all ranks, and has given it back by then."""
    batches = group_rows([1] * 8, seed=4)
    for number in range(20):
        await forward_step(running_service.front, 1, batches)
        async with AsyncMoeGroup.connect(running_service.front, holder=f"after-{number}"):
            pass


async def test_a_step_above_every_capacity_is_cut(group: AsyncMoeGroup) -> None:
    counts = [1100, 0, 40, 512, 0, 0, 513, 3]
    batches = group_rows(counts, seed=11)
    async with group.step(counts, "prefill") as step:
        assert [s.path for s in step.sub_steps] == [Path.LARGE_M, Path.LARGE_M, Path.COMPACT]
        outs = await step.layer(0, batches)
    assert [r.num_rows_per_rank[0] for r in outs.sub_steps] == [512, 512, 76]
    check(outs, batches, 0)  # type: ignore[arg-type]


async def test_quantized_rows(group: AsyncMoeGroup) -> None:
    counts = [24, 0, 0, 5, 0, 0, 0, 70]
    plain = group_rows(counts, seed=13)
    batches = []
    for batch in plain:
        if batch is None:
            batches.append(None)
            continue
        codes, scales = quantize_mxfp8(batch[0])  # type: ignore[index]
        batches.append((codes, batch[1], batch[2], scales))  # type: ignore[index]
    async with group.step(counts, dtype="mxfp8") as step:
        assert step.plan.dtype == "mxfp8"
        outs = await step.layer(0, batches)
    for rank, batch in enumerate(batches):
        if batch is not None:
            want = quantized_moe(MoeBatch.of(SHAPE, *batch), weights_of(0), SHAPE)
            assert relative_l2(outs.hidden_states[rank], want) <= 2e-2


async def test_all_ranks_empty(group: AsyncMoeGroup) -> None:
    for announce in (True, False):
        async with group.step([0] * 8, announce_counts=announce) as step:
            assert step.plan.phase is Phase.IDLE
            assert step.sub_steps == ()
            outs = await step.layer(0, [None] * 8)
        assert [tuple(t.shape) for t in outs.hidden_states] == [(0, SHAPE.hidden)] * 8
        assert outs.sub_steps == ()


async def test_rows_with_nan_stay_in_their_row(group: AsyncMoeGroup) -> None:
    counts = [40] + [0] * 7
    (batch, *_) = group_rows(counts, seed=17)
    assert batch is not None
    clean = tuple(t.clone() for t in batch)  # type: ignore[union-attr]
    dirty = tuple(t.clone() for t in batch)  # type: ignore[union-attr]
    dirty[0][7, 100] = float("nan")
    async with group.step(counts) as step:
        want = await step.layer(0, [clean] + [None] * 7)
        got = await step.layer(1, [dirty] + [None] * 7)
    async with group.step(counts) as step:
        want = await step.layer(1, [clean] + [None] * 7)
    others = torch.arange(40) != 7
    assert torch.equal(got.hidden_states[0][others], want.hidden_states[0][others])


async def test_micro_batches_in_flight_and_layers_in_one_total_order(group: AsyncMoeGroup) -> None:
    """Two micro-batches walk all layers at the same time; each gets the numbers of its own rows."""

    async def walk(micro_batch_idx: int, counts: list[int]) -> None:
        batches = group_rows(counts, seed=20 + micro_batch_idx)
        for _ in range(3):
            async with group.step(counts, micro_batch_idx=micro_batch_idx) as step:
                for layer_idx in range(SHAPE.num_layers):
                    outs = await step.layer(layer_idx, batches)
                check(outs, batches, SHAPE.num_layers - 1)  # type: ignore[arg-type]

    first = group.next_sequence
    await asyncio.wait_for(
        asyncio.gather(
            walk(0, [4, 0, 0, 9, 1, 0, 0, 2]),
            walk(1, [0, 70, 0, 0, 0, 3, 1, 0]),
            walk(2, [0, 0, 1, 0, 0, 0, 0, 0]),
        ),
        40,
    )
    assert group.next_sequence == first + 3 * 3 * SHAPE.num_layers


def test_the_blocking_client_in_ten_lines(running_service: ServiceProcess) -> None:
    batches = group_rows([4] * 8, seed=30)
    with (
        MoeGroup.connect(running_service.front, holder="blocking") as moe,
        moe.step([4] * moe.info.num_ranks, phase="decode") as step,
    ):
        for layer_idx in range(moe.info.num_layers):
            outs = step.layer(layer_idx, batches)
    check(outs, batches, SHAPE.num_layers - 1)  # type: ignore[arg-type]


async def test_forward_step_callers_take_turns(running_service: ServiceProcess) -> None:
    batches = [group_rows([n, 0, 0, 2, 0, 0, 0, 1], seed=40 + n) for n in range(1, 9)]
    outs = await asyncio.gather(*(forward_step(running_service.front, 0, b) for b in batches))
    for out, batch in zip(outs, batches):
        check(out, batch, 0)  # type: ignore[arg-type]


async def test_steps_can_be_left_open_and_superseded(group: AsyncMoeGroup) -> None:
    plan_id = next_plan_id(group)
    assert plan_id.step_id >= 1
    for _ in range(3):
        async with group.step([1] + [0] * 7) as step:
            await step.layer(2, group_rows([1] + [0] * 7))
