"""What one step asks of the MoE tier: target and draft passes, micro-batches in flight at once, time accounted for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.clock import RealClock, VirtualClock
from loadgen.moe.rows import RankRows, RowSource
from loadgen.moe.table import MoeTimeTable, TableTier
from loadgen.moe.tier import LayerOutcome
from loadgen.steps.passes import ServedSteps, SimulatedSteps
from loadgen.steps.records import RunPhase, RunRecord, StepRecord
from loadgen.tier.attention_tier import AttentionTier, TierConfig
from loadgen.tier.attention_time import AttentionTime, Stragglers
from loadgen.tier.speculation import Speculation
from loadgen.tier.step import StepRows, TierRequest, TierStep
from megamoe import Path as MoePath
from megamoe.errors import ConfigError, PeerTimeoutError
from tests.loadgen.fake_tier import demo_info

CONFIG = TierConfig(chunk_rows=256, draft_moe_layers=1, speculation=Speculation(2, mean=2.0))


def first_steps(config: TierConfig, num_ranks: int = 8) -> tuple[TierStep, TierStep]:
    """A prefill step, ranks 0 and 1 extending by 64 and 128 rows, and the decode step after it."""
    tier = AttentionTier(num_ranks, config)
    for uid, blocks in (("a", 1), ("b", 2)):
        tier.submit(
            TierRequest(
                uid=uid,
                cache_uid=uid,
                agent_uid=uid,
                hash_ids=np.arange(blocks),
                block_size=64,
                num_input=64 * blocks,
                num_output=50,
            )
        )
    prefill = tier.next_step()
    assert prefill is not None
    tier.finish_step(prefill, 1.0)
    decode = tier.next_step()
    assert decode is not None
    return prefill, decode


def test_draft_passes_carry_one_row_a_request_and_the_first_takes_prompts() -> None:
    prefill, decode = first_steps(CONFIG)
    assert decode.num_rows_per_rank == (3, 3, 0, 0, 0, 0, 0, 0)
    assert [rows.num_rows_per_rank for rows in decode.draft_passes(2)] == [(1, 1, 0, 0, 0, 0, 0, 0)] * 2
    assert [rows.num_rows_per_rank for rows in prefill.draft_passes(2)] == [(64, 128, 0, 0, 0, 0, 0, 0)]
    assert decode.draft_passes(0) == []


def test_a_simulated_step_takes_attention_and_all_its_passes() -> None:
    moe = TableTier(MoeTimeTable.named("mi355x-v4-pro"), frozenset({MoePath.FIXED_SLOT}))
    clock, record = VirtualClock(), RunRecord()
    steps = SimulatedSteps(moe, clock, record, CONFIG, time_scale=1.0)
    _, decode = first_steps(CONFIG)
    done = asyncio.run(steps.execute(decode, 7, 0.030, RunPhase.PROFILE, 0.0))
    # Ranks 0 and 1 have 3 rows, the others none: looked up at (3 + 6 / 8) / 2 rows; drafts at less than one row.
    target_us, draft_us = 101.7 + 0.875 * (179.4 - 101.7), 101.7
    assert done.moe_s == pytest.approx((61 * target_us + 2 * draft_us) * 1e-6)
    assert done.end_s == pytest.approx(0.030 + done.moe_s)
    assert done.overhead_s == pytest.approx(0.0)
    assert record.num_calls == 61 + 2
    assert record.times[RunPhase.PROFILE, "fixed_slot"].num_steps == 63


class Overlapping:
    """A tier whose layers take real time; notes how many calls are in flight at once."""

    def __init__(self, fail_micro_batch: int = -1) -> None:
        self.info = demo_info(num_layers=3)
        self.fail_micro_batch = fail_micro_batch
        self.calls: list[tuple[int, int]] = []
        self.plans: dict[int, tuple[int, ...]] = {}
        self.in_flight = self.most = self.open = 0
        self.calls_s = 0.0

    @asynccontextmanager
    async def step(
        self, *, num_rows_per_rank: Sequence[int], phase: Sequence[str], micro_batch_idx: int = 0
    ) -> AsyncIterator[_Step]:
        self.plans[micro_batch_idx] = tuple(num_rows_per_rank)
        self.open += 1
        try:
            yield _Step(self, micro_batch_idx)
        finally:
            self.open -= 1


class _Step:
    def __init__(self, tier: Overlapping, micro_batch_idx: int) -> None:
        self.tier, self.micro_batch_idx = tier, micro_batch_idx

    async def layer(self, layer_idx: int, batches: Sequence[RankRows | None]) -> LayerOutcome:
        tier = self.tier
        tier.calls.append((self.micro_batch_idx, layer_idx))
        began_s = RealClock().now()
        tier.in_flight += 1
        tier.most = max(tier.most, tier.in_flight)
        await asyncio.sleep(0.02)
        tier.in_flight -= 1
        tier.calls_s += RealClock().now() - began_s
        if self.micro_batch_idx == tier.fail_micro_batch:
            raise PeerTimeoutError("rank 3 is missing")
        rows = tuple(0 if batch is None else batch[0].shape[0] for batch in batches)
        assert rows == tier.plans[self.micro_batch_idx]
        return LayerOutcome(num_rows_per_rank=rows, sub_steps=())


def serve(
    tier: Overlapping, step: TierStep, micro_batches: int, config: TierConfig
) -> tuple[StepRecord, RunRecord]:
    record = RunRecord()
    steps = ServedSteps(
        tier,
        RowSource(tier.info.shape, tier.info.num_layers, 256),
        RealClock(),
        record,
        config,
        time_scale=1.0,
        num_micro_batches=micro_batches,
    )
    return asyncio.run(steps.execute(step, 0, 0.03, RunPhase.PROFILE, RealClock().now())), record


def test_micro_batches_overlap_and_every_one_calls_its_layers_in_order() -> None:
    config = TierConfig(chunk_rows=256, speculation=Speculation(2, mean=2.0))
    prefill, _ = first_steps(config)
    alone, overlapping = Overlapping(), Overlapping()
    serve(alone, prefill, 1, config)
    done, record = serve(overlapping, prefill, 2, config)
    assert (alone.most, overlapping.most) == (1, 2)
    assert overlapping.plans == {0: (32, 64, 0, 0, 0, 0, 0, 0), 1: (32, 64, 0, 0, 0, 0, 0, 0)}
    for micro_batch_idx in range(2):
        assert [layer for idx, layer in overlapping.calls if idx == micro_batch_idx] == [0, 1, 2]
    assert record.num_calls == 6
    # 6 calls in pairs, attention under them: what overlaps counts once, and nothing is lost.
    assert overlapping.calls_s / 2 <= done.moe_s < overlapping.calls_s * 0.9
    assert done.overhead_s >= 0.0
    assert done.agree_s + done.moe_s + done.attention_s + done.overhead_s == pytest.approx(
        done.end_s - done.start_s
    )


def test_the_draft_layer_is_the_last_one_and_comes_after_the_target() -> None:
    _, decode = first_steps(CONFIG)
    tier = Overlapping()
    serve(tier, decode, 1, CONFIG)
    assert tier.calls == [(0, 0), (0, 1), (0, 2), (0, 2), (0, 2)]
    assert tier.plans[0] == (1, 1, 0, 0, 0, 0, 0, 0)


def test_a_failed_micro_batch_fails_the_step_and_leaves_nothing_open() -> None:
    prefill, _ = first_steps(CONFIG)
    tier = Overlapping(fail_micro_batch=1)
    with pytest.raises(PeerTimeoutError, match="rank 3"):
        serve(tier, prefill, 2, CONFIG)
    assert tier.open == 0


@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["prefill", "decode"])), min_size=8, max_size=8),
    st.integers(1, 5),
    st.integers(1, 7),
)
def test_micro_batches_share_rows_out_evenly_by_whole_requests(
    ranks: list[tuple[int, str]], num_parts: int, unit: int
) -> None:
    counts = tuple(rows * (unit if phase == "decode" else 1) for rows, phase in ranks)
    phases = tuple(phase if rows else "idle" for rows, phase in ranks)
    parts = StepRows(counts, phases).split(num_parts, unit)
    assert tuple(map(sum, zip(*(part.num_rows_per_rank for part in parts)))) == counts or not any(counts)
    for part in parts:
        assert any(part.num_rows_per_rank) or num_parts == 1
        for rows, phase, whole in zip(part.num_rows_per_rank, part.phases, phases):
            assert phase == (whole if rows else "idle") or num_parts == 1
            assert whole != "decode" or rows % unit == 0
    for rank in range(8):
        share = [part.num_rows_per_rank[rank] for part in parts]
        assert max(share, default=0) - min(share, default=0) <= unit or len(parts) < num_parts


def test_stragglers_slow_their_share_of_steps_and_depend_only_on_the_seed() -> None:
    late = Stragglers(share=0.1, slowdown=3.0)
    factors = [late.factor(step, rank) for step in range(2000) for rank in range(8)]
    assert set(factors) == {1.0, 3.0}
    assert factors.count(3.0) / len(factors) == pytest.approx(0.1, abs=0.01)
    assert factors == [
        Stragglers(share=0.1, slowdown=3.0).factor(step, rank) for step in range(2000) for rank in range(8)
    ]
    assert Stragglers().factor(5, 5) == 1.0
    for wrong in ({"share": 1.5}, {"slowdown": 0.5}):
        with pytest.raises(ConfigError, match="of stragglers must be"):
            Stragglers(**wrong)


def test_a_late_rank_makes_the_whole_step_late() -> None:
    model = AttentionTime(
        base_s=1.0,
        prefill_row_s=0,
        prefill_row_context_s=0,
        decode_request_s=0,
        decode_context_s=0,
        decode_row_s=0,
    )
    tier = AttentionTier(2, TierConfig(stragglers=Stragglers(share=1.0, slowdown=2.5)))
    _, decode = first_steps(CONFIG, num_ranks=2)
    assert tier.attention_s(decode, model, 1.0) == 2.5
