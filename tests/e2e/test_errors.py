"""Bad input gets a status and a sentence, the same on all ranks, within the step timeout, and poisons nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
import torch

from megamoe import PlanId
from megamoe.errors import (
    AgreementError,
    DrainingError,
    InvalidArgumentError,
    LeaseHeldError,
    MegaMoeError,
    OverloadedError,
    PeerTimeoutError,
    StaleCallError,
)
from service.client import AsyncFront, AsyncMoeGroup, RemoteError, forward_step
from service.front.group import MAX_WAITING
from tests.e2e.harness import (
    CONFIG,
    LEASE_TIMEOUT_S,
    SHAPE,
    STEP_TIMEOUT_S,
    ServiceProcess,
    call,
    group_rows,
    intent,
    next_plan_id,
    on_all,
    rows,
    take_sequence,
    works,
)

pytestmark = pytest.mark.any_backend

COUNTS = [2, 0, 5, 1, 0, 3, 0, 4]
CALLED = [rank for rank, n in enumerate(COUNTS) if n]
BATCHES = group_rows(COUNTS, seed=1)


def same_error(
    results: dict[int, Any], kind: type[MegaMoeError], *words: str, status: grpc.StatusCode
) -> MegaMoeError:
    """Every rank answered the same sentence, class and status; returns one of them."""
    for rank, result in results.items():
        assert isinstance(result, kind), f"rank {rank}: {result!r}"
        assert isinstance(result, RemoteError)
        assert result.status is status
        for word in words:
            assert word in str(result), f"rank {rank}: {result}"
    assert len({str(result) for result in results.values()}) == 1, results
    return next(iter(results.values()))


async def open_plan(group: AsyncMoeGroup, *, announce: bool = True) -> PlanId:
    plan_id = next_plan_id(group)
    ranks = CALLED if announce else range(8)
    replies = await on_all(
        group, {rank: intent(group, plan_id, COUNTS, rank, announce=announce) for rank in ranks}
    )
    assert all(not isinstance(reply, Exception) for reply in replies.values()), replies
    return plan_id


def tensors_with(**change: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rank 2's rows with one tensor changed."""
    table = dict(zip(("hidden_states", "topk_ids", "topk_weights"), BATCHES[2]))  # type: ignore[arg-type]
    return tuple((table | change).values())


bad_ids = rows(5, seed=1)[1].clone()
bad_ids[3, 4] = SHAPE.num_experts
BAD_ROWS: list[tuple[str, tuple[torch.Tensor, ...], str]] = [
    (
        "dtype",
        tensors_with(hidden_states=torch.zeros(5, SHAPE.hidden)),
        "hidden_states.dtype must be bfloat16",
    ),
    (
        "shape",
        tensors_with(hidden_states=torch.zeros(5, 255, dtype=torch.bfloat16)),
        "hidden_states.shape must be [5, 256], got [5, 255]",
    ),
    ("length", rows(6), "rows of the layer call must be 5, as plan"),
    (
        "ids",
        tensors_with(topk_ids=bad_ids),
        "topk_ids[3][4] (token 3, slot 4) must be -1 or an expert id below 64",
    ),
    ("ids_dtype", tensors_with(topk_ids=bad_ids.long()), "topk_ids.dtype must be int32, got int64"),
    ("topk", tensors_with(topk_weights=torch.zeros(5, 3)), "topk_weights.shape must be [5, 6], got [5, 3]"),
]


@pytest.mark.parametrize(("bad", "sentence"), [b[1:] for b in BAD_ROWS], ids=[b[0] for b in BAD_ROWS])
@pytest.mark.parametrize("announce", [True, False], ids=["counts", "no_counts"])
async def test_bad_rows_of_one_rank(
    group: AsyncMoeGroup, bad: tuple[torch.Tensor, ...], sentence: str, announce: bool
) -> None:
    plan_id = await open_plan(group, announce=announce)
    sequence = take_sequence(group)
    batches = {rank: BATCHES[rank] for rank in (CALLED if announce else range(8))}
    batches[2] = bad
    results = await on_all(group, {r: call(group, plan_id, 0, sequence, b) for r, b in batches.items()})
    same_error(results, InvalidArgumentError, "rank 2", sentence, status=grpc.StatusCode.INVALID_ARGUMENT)
    # The plan stays open, and the refused sequence is consumed.
    sequence = take_sequence(group)
    batches[2] = BATCHES[2]
    results = await on_all(group, {r: call(group, plan_id, 0, sequence, b) for r, b in batches.items()})
    assert all(not isinstance(result, Exception) for result in results.values()), results


async def test_unknown_layer(group: AsyncMoeGroup) -> None:
    plan_id = await open_plan(group)
    sequence = take_sequence(group)
    results = await on_all(group, {r: call(group, plan_id, 4, sequence, BATCHES[r]) for r in CALLED})
    same_error(results, InvalidArgumentError, "layer_idx must be from 0 to 3, got 4", status=_invalid)
    await works(group)


_invalid = grpc.StatusCode.INVALID_ARGUMENT
_precondition = grpc.StatusCode.FAILED_PRECONDITION

IntentChange = tuple[str, dict[str, Any], type[MegaMoeError], str, grpc.StatusCode]
BAD_INTENTS: list[IntentChange] = [
    (
        "counts",
        {"num_rows_per_rank": [2, 0, 5, 1, 0, 3, 0, 9]},
        AgreementError,
        "num_rows_per_rank",
        _invalid,
    ),
    ("own_count", {"num_rows": 7}, MegaMoeError, "num_rows", _invalid),
    ("dtype", {"dtype": "mxfp8"}, AgreementError, "dtype must be equal on all ranks", _invalid),
    ("unknown_dtype", {"dtype": "float64"}, InvalidArgumentError, "dtype must be", _invalid),
    ("phase", {"wire_phase": 0}, InvalidArgumentError, "phase of a rank with 5 rows", _invalid),
]


@pytest.mark.parametrize(
    ("change", "kind", "word", "status"), [b[1:] for b in BAD_INTENTS], ids=[b[0] for b in BAD_INTENTS]
)
async def test_ranks_that_say_different_things(
    group: AsyncMoeGroup, change: dict[str, Any], kind: type[MegaMoeError], word: str, status: grpc.StatusCode
) -> None:
    plan_id = next_plan_id(group)
    requests = {r: intent(group, plan_id, COUNTS, r, **(change if r == 2 else {})) for r in CALLED}
    results = await on_all(group, requests)
    same_error(results, kind, word, status=status)
    await works(group)


async def test_a_step_above_max_step_rows(group: AsyncMoeGroup) -> None:
    counts = [2049, 0, 0, 0, 0, 0, 0, 3]
    plan_id = next_plan_id(group)
    results = await on_all(group, {r: intent(group, plan_id, counts, r, phase="prefill") for r in (0, 7)})
    same_error(
        results, InvalidArgumentError, "rank 0", "at most max_step_rows = 2048, got 2049", status=_invalid
    )
    await works(group)


async def test_generations_and_leases_that_are_not_ours(group: AsyncMoeGroup) -> None:
    for change, word in (
        ({"lease_serial": group.lease_serial + 7}, "lease_serial"),
        ({"plan_id": replace(next_plan_id(group), generation=group.generation - 1)}, "generation"),
    ):
        plan_id = change.pop("plan_id", next_plan_id(group))
        results = await on_all(group, {r: intent(group, plan_id, COUNTS, r, **change) for r in CALLED})  # type: ignore[arg-type]
        same_error(results, StaleCallError, word, status=_precondition)
    await works(group)


async def test_stale_plans_layers_and_sequences(group: AsyncMoeGroup) -> None:
    plan_id = await open_plan(group)

    async def layer(plan: PlanId, layer_idx: int, sequence: int) -> dict[int, Any]:
        return await on_all(group, {r: call(group, plan, layer_idx, sequence, BATCHES[r]) for r in CALLED})

    done = take_sequence(group)
    results = await layer(plan_id, 2, done)
    assert all(not isinstance(result, Exception) for result in results.values()), results

    same_error(
        await layer(plan_id, 3, done), StaleCallError, f"sequence {done} is done", status=_precondition
    )
    not_above = await layer(plan_id, 2, take_sequence(group))
    same_error(not_above, StaleCallError, "above 2, the last one, got 2", status=_precondition)
    unknown = replace(plan_id, step_id=plan_id.step_id + 1000)
    same_error(
        await layer(unknown, 3, take_sequence(group)),
        StaleCallError,
        "must be an open plan",
        status=_precondition,
    )

    same_step = await on_all(group, {r: intent(group, plan_id, COUNTS, r) for r in CALLED})
    same_error(same_step, StaleCallError, "step", status=_precondition)
    await works(group)
    closed = await layer(plan_id, 3, take_sequence(group))
    same_error(closed, StaleCallError, str(plan_id), status=_precondition)
    await works(group)


async def test_a_sequence_that_skips_ahead_waits_and_then_names_the_gap(group: AsyncMoeGroup) -> None:
    plan_id = await open_plan(group)
    far = group.next_sequence + 10_000
    results = await on_all(group, {r: call(group, plan_id, 0, far, BATCHES[r]) for r in CALLED})
    same_error(results, InvalidArgumentError, "sequence must be contiguous", status=_invalid)
    await works(group)


@pytest.mark.parametrize("missing", [0, 5])
async def test_a_missing_intent_is_named_within_the_step_timeout(group: AsyncMoeGroup, missing: int) -> None:
    plan_id = next_plan_id(group)
    start = time.monotonic()
    ranks = [rank for rank in CALLED if rank != missing]
    results = await on_all(group, {r: intent(group, plan_id, COUNTS, r, timeout_s=1.5) for r in ranks})
    took = time.monotonic() - start
    error = same_error(
        results, PeerTimeoutError, "1.5 s", str(missing), status=grpc.StatusCode.DEADLINE_EXCEEDED
    )
    assert isinstance(error, PeerTimeoutError)
    assert error.missing_ranks == (missing,)
    assert 1.4 <= took <= 1.5 + STEP_TIMEOUT_S
    late = await on_all(group, {missing: intent(group, plan_id, COUNTS, missing)})
    assert str(late[missing]) == str(error), "who comes late is told the same"
    await works(group)


async def test_a_missing_layer_call_is_named_within_the_step_timeout(group: AsyncMoeGroup) -> None:
    plan_id = next_plan_id(group)
    await on_all(group, {r: intent(group, plan_id, COUNTS, r, timeout_s=1.5) for r in CALLED})
    sequence = take_sequence(group)
    ranks = [rank for rank in CALLED if rank != 3]
    start = time.monotonic()
    results = await on_all(group, {r: call(group, plan_id, 0, sequence, BATCHES[r]) for r in ranks})
    for result in results.values():
        assert isinstance(result, PeerTimeoutError), result
        assert result.missing_ranks == (3,)
    assert time.monotonic() - start <= 1.5 + STEP_TIMEOUT_S
    await works(group)


async def test_a_second_caller_group_is_told_who_holds_the_lease(
    group: AsyncMoeGroup, running_service: ServiceProcess
) -> None:
    with pytest.raises(LeaseHeldError, match="'test'") as caught:
        async with AsyncMoeGroup.connect(running_service.front, holder="other"):
            pass
    assert isinstance(caught.value, RemoteError)
    assert caught.value.status is _precondition
    with pytest.raises(LeaseHeldError, match="'test'"):
        await forward_step(running_service.front, 0, BATCHES)
    await works(group)


async def test_a_lease_without_traffic_ends(running_service: ServiceProcess) -> None:
    manager = AsyncMoeGroup.connect(running_service.front, holder="dead")
    group = await manager.__aenter__()
    for stream in group.streams:  # as if the process were gone: nothing is given back
        stream._call.cancel()
    with pytest.raises(LeaseHeldError, match="'dead'"):
        await forward_step(running_service.front, 0, BATCHES)
    await asyncio.sleep(LEASE_TIMEOUT_S + 0.3)
    await forward_step(running_service.front, 0, BATCHES)
    await manager.__aexit__(None, None, None)


async def test_forward_step_refusals(running_service: ServiceProcess) -> None:
    front = running_service.front

    async def refused(match: str, call: Callable[[], Awaitable[Any]], kind: type[MegaMoeError]) -> None:
        with pytest.raises(kind, match=match) as caught:
            await call()
        assert isinstance(caught.value, RemoteError)

    bad = list(BATCHES)
    bad[2] = tensors_with(topk_ids=bad_ids)
    await refused(r"rank 2: topk_ids\[3\]\[4\]", lambda: forward_step(front, 0, bad), InvalidArgumentError)
    await refused(
        "layer_idx must be from 0 to 3", lambda: forward_step(front, 9, BATCHES), InvalidArgumentError
    )
    big = [rows(2049)] + [None] * 7
    await refused("at most max_step_rows = 2048", lambda: forward_step(front, 0, big), InvalidArgumentError)
    await forward_step(front, 0, BATCHES)


async def test_a_forward_step_above_its_cap_names_forward(running_service: ServiceProcess) -> None:
    num_rows = CONFIG.forward_step_max_bytes // CONFIG.row_bytes + 1
    huge = [rows(num_rows)] + [None] * 7
    with pytest.raises(
        InvalidArgumentError, match=r"at most forward_step_max_bytes = 67108864 .*use one Forward"
    ):
        await forward_step(running_service.front, 0, huge)


async def test_forward_step_overload(running_service: ServiceProcess) -> None:
    """More callers than may wait: some are refused at once, all others are served."""
    async with AsyncFront(running_service.front) as front:
        await front.info()
        calls = [front.forward_step(0, BATCHES) for _ in range(3 * MAX_WAITING)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        refused = [result for result in results if isinstance(result, Exception)]
        assert refused
        assert len(refused) < len(results)
        for error in refused:
            assert isinstance(error, OverloadedError), error
            assert error.status is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
        await front.forward_step(0, BATCHES)


async def test_plans_of_too_many_rows_are_refused_when_they_are_agreed(group: AsyncMoeGroup) -> None:
    counts = [2048] + [0] * 7
    for micro_batch_idx in (0, 1):
        plan_id = next_plan_id(group, micro_batch_idx)
        (result,) = (await on_all(group, {0: intent(group, plan_id, counts, 0, phase="prefill")})).values()
        assert not isinstance(result, Exception), result
    plan_id = next_plan_id(group, 2)
    results = await on_all(group, {0: intent(group, plan_id, counts, 0, phase="prefill")})
    same_error(results, OverloadedError, "max_open_rows", status=grpc.StatusCode.RESOURCE_EXHAUSTED)
    await works(group)
    for micro_batch_idx in (1, 2):
        async with group.step([1] + [0] * 7, micro_batch_idx=micro_batch_idx):
            pass


async def test_steps_that_a_caller_gives_up_hold_nobody_up(group: AsyncMoeGroup) -> None:
    """Cancelled anywhere between their intent and their last layer; what they announced finishes behind them."""

    async def walk() -> None:
        async with group.step(COUNTS) as step:
            for layer_idx in range(SHAPE.num_layers):
                await step.layer(layer_idx, BATCHES)

    for idx in range(40):
        step = asyncio.create_task(walk())
        await asyncio.sleep(0.0007 * idx)
        step.cancel()
        await asyncio.wait({step})
        assert step.cancelled() or step.exception() is None, step.exception()
    start = time.monotonic()
    await works(group)
    assert time.monotonic() - start < STEP_TIMEOUT_S, "no rank waited in vain"


async def test_draining_lets_open_plans_finish_and_takes_no_new_ones(
    group: AsyncMoeGroup, running_service: ServiceProcess
) -> None:
    try:
        async with group.step(COUNTS) as step:
            await step.layer(0, BATCHES)
            assert await group.front.drain()
            assert (await group.front.info()).draining
            assert running_service.get("/readyz") == (503, "draining\n")
            await step.layer(1, BATCHES)
        plan_id = next_plan_id(group)
        results = await on_all(group, {r: intent(group, plan_id, COUNTS, r) for r in CALLED})
        same_error(results, DrainingError, "draining", status=grpc.StatusCode.UNAVAILABLE)
    finally:
        assert not await group.front.drain(resume=True)
    assert running_service.get("/readyz")[0] == 200
    await works(group)
