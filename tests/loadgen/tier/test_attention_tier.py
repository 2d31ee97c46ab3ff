"""Schedulers, router and step shapes of the simulated attention tier."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.tier.attention_tier import AttentionTier, TierConfig
from loadgen.tier.attention_time import AttentionTime
from loadgen.tier.router import RankState, Router, RouterConfig
from loadgen.tier.speculation import Speculation
from loadgen.tier.step import TierRequest, TierStep, Work
from megamoe.errors import ConfigError, InvalidArgumentError


def make(
    uid: str, blocks: int, out: int = 10, *, first: int = 0, agent: str = "", cache: str = "s"
) -> TierRequest:
    return TierRequest(
        uid=uid,
        cache_uid=cache,
        agent_uid=agent or uid,
        hash_ids=np.arange(first, first + blocks),
        block_size=64,
        num_input=64 * blocks,
        num_output=out,
    )


def tier_of(num_ranks: int = 2, **changes: object) -> AttentionTier:
    return AttentionTier(
        num_ranks, TierConfig(**{"chunk_rows": 256, "decode_rounds_per_prefill": 3} | changes)
    )


def run(tier: AttentionTier, limit: int = 10_000) -> list[TierStep]:
    """Play until nothing is left; step n ends at time n."""
    steps = []
    while (step := tier.next_step()) is not None:
        steps.append(step)
        tier.finish_step(step, float(len(steps)))
        assert len(steps) < limit
    return steps


def test_a_prompt_is_prefilled_in_chunks_and_its_first_token_comes_with_the_last() -> None:
    tier = tier_of(1)
    request = make("a", 10, out=5)
    tier.submit(request)
    steps = run(tier)
    assert [step.num_rows_per_rank for step in steps[:3]] == [(256,), (256,), (128,)]
    assert [step.phase for step in steps] == ["prefill"] * 3 + ["decode"] * (len(steps) - 3)
    assert request.emissions[0] == 3.0
    assert all(step.num_rows_per_rank == (7,) for step in steps[3:])
    assert request.num_emitted == 5


def test_one_chunk_takes_several_prompts_and_cuts_the_last() -> None:
    tier = tier_of(1)
    for uid, first in (("a", 0), ("b", 1000), ("c", 2000)):
        tier.submit(make(uid, 2, first=first))
    step = tier.next_step()
    assert step is not None
    assert [(request.uid, rows) for request, rows in step.ranks[0].parts] == [("a", 128), ("b", 128)]


def test_only_uncached_tokens_are_prefilled_and_at_least_one_block() -> None:
    tier = tier_of(1)
    first = make("a", 4, out=1)
    tier.submit(first)
    run(tier)
    longer, same = make("b", 6, out=1), make("c", 4, out=1)
    tier.submit(longer)
    tier.submit(same)
    step = tier.next_step()
    assert step is not None
    assert [(request.uid, rows) for request, rows in step.ranks[0].parts] == [("b", 128), ("c", 64)]
    assert (longer.num_cached, same.num_cached) == (256, 192)


def test_prefill_comes_in_rounds_with_decode_between() -> None:
    tier = tier_of(2)
    tier.submit(make("long", 1, out=1000))
    tier.finish_step(tier.next_step(), 0.0)
    for idx in range(4):
        tier.submit(make(f"p{idx}", 4, out=1, first=1000 * (idx + 1)))
    phases = []
    for number in range(9):
        step = tier.next_step()
        phases.append(step.phase)
        tier.finish_step(step, float(number))
    assert phases == ["decode"] * 3 + ["prefill"] + ["decode"] * 3 + ["prefill", "decode"]


def test_ranks_extend_verify_and_idle_side_by_side() -> None:
    tier = tier_of(3, decode_rounds_per_prefill=0)
    tier.submit(make("decoding", 1, out=100))
    tier.finish_step(tier.next_step(), 0.0)
    tier.submit(make("prompt", 1, first=500))
    step = tier.next_step()
    assert [rank.work for rank in step.ranks] == [Work.VERIFY, Work.EXTEND, Work.IDLE]
    assert step.num_rows_per_rank == (7, 64, 0)
    assert step.phase == "prefill"


def test_a_rank_runs_at_most_max_running_requests() -> None:
    tier = tier_of(1, max_running=2, decode_rounds_per_prefill=0, chunk_rows=8192)
    for idx in range(5):
        tier.submit(make(f"r{idx}", 1, out=50, first=100 * idx))
    for step in run(tier):
        assert len(step.ranks[0].parts) <= 2


def test_a_request_over_the_context_limit_is_refused() -> None:
    tier = tier_of(1, context_limit=640)
    tier.submit(make("fits", 9, out=64))
    with pytest.raises(
        InvalidArgumentError, match="prompt and output must be at most context_limit = 640 tokens"
    ):
        tier.submit(make("too long", 9, out=65))


def test_failed_requests_leave_the_tier() -> None:
    tier = tier_of(1)
    tier.submit(make("a", 2, out=9))
    tier.submit(make("b", 9, out=9, first=900))
    step = tier.next_step()
    assert {request.uid for request in tier.fail_step(step)} == {"a", "b"}
    assert tier.num_in_flight == 0
    assert tier.next_step() is None


@given(
    requests=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 12), st.integers(1, 40)), min_size=1, max_size=25
    ),
    num_ranks=st.sampled_from([1, 2, 8]),
    chunk=st.integers(1, 700),
    interval=st.integers(0, 5),
    drafts=st.integers(0, 8),
    arrivals=st.integers(1, 6),
)
def test_tokens_are_conserved(
    requests: list[tuple[int, int, int]],
    num_ranks: int,
    chunk: int,
    interval: int,
    drafts: int,
    arrivals: int,
) -> None:
    tier = tier_of(
        num_ranks,
        chunk_rows=chunk,
        decode_rounds_per_prefill=interval,
        speculation=Speculation(drafts),
        max_running=3,
    )
    made = [
        make(f"r{idx}", blocks, out, first=1000 * family, agent=f"agent {family}", cache=f"session {family}")
        for idx, (family, blocks, out) in enumerate(requests)
    ]
    waiting = list(made)
    prefill_rows = decode_rows = tokens = 0
    complete: list[TierRequest] = []
    for number in range(100_000):
        for _ in range(arrivals):
            if waiting:
                tier.submit(waiting.pop())
        step = tier.next_step()
        if step is None:
            break
        for rank in step.ranks:
            if rank.work is Work.EXTEND:
                assert rank.num_rows <= chunk
                prefill_rows += rank.num_rows
            elif rank.work is Work.VERIFY:
                assert rank.num_rows == (drafts + 1) * len(rank.parts)
                decode_rows += rank.num_rows
        done, emitted = tier.finish_step(step, float(number))
        tokens += emitted
        complete += done
    assert sorted(request.uid for request in complete) == sorted(request.uid for request in made)
    assert (
        tokens == sum(request.num_output for request in made) == sum(request.num_emitted for request in made)
    )
    assert prefill_rows == sum(request.num_input - request.num_cached for request in made)
    assert decode_rows == (drafts + 1) * sum(request.num_verify_steps for request in made)
    for request in made:
        assert request.prefill_left == 0
        assert len(request.emissions) == 1 + request.num_verify_steps
        assert request.emissions == sorted(set(request.emissions))
        assert request.num_accepted >= request.num_output - 1


def states(matches: list[float], loads: list[int], tokens: list[int]) -> list[RankState]:
    return [RankState(*known) for known in zip(matches, loads, tokens, strict=True)]


def test_a_stream_sticks_to_the_rank_that_holds_its_prefix() -> None:
    router = Router(RouterConfig())
    assert (
        router.choose("s", "s/0", states([0, 0, 0], [2, 3, 1], [9, 1, 5])) == 1
    )  # nobody holds it: fewest tokens
    assert router.choose("s", "s/0", states([0, 0.4, 0], [0, 40, 0], [0, 9, 0])) == 1
    assert router.choose("s", "s/0", states([0, 0.4, 0.41], [0, 4, 9], [0, 9, 9])) == 2
    assert (
        router.choose("s", "s/0", states([0.9, 0, 0.9], [1, 0, 2], [0, 0, 9])) == 2
    )  # of equals the one where it was
    assert router.choose("s", "s/0", states([0.3, 0, 0], [1, 0, 2], [9, 9, 1])) == 2  # too little to stay for


def test_the_idlest_rank_takes_everything_when_ranks_are_far_from_balanced() -> None:
    router = Router(RouterConfig(abs_margin=4, rel_margin=1.5))
    assert router.choose("s", "s/0", states([0, 0.9], [20, 24], [0, 0])) == 1  # 4 ahead: within the margin
    assert router.choose("s", "s/0", states([0, 0.9], [20, 29], [0, 0])) == 1  # 9 ahead, but not 1.5 times
    assert router.choose("s", "s/0", states([0, 0.9], [20, 31], [0, 0])) == 0


def test_attention_time_is_that_of_the_slowest_rank_at_full_length() -> None:
    model = AttentionTime(
        base_s=1.0,
        prefill_row_s=0.1,
        prefill_row_context_s=0.001,
        decode_request_s=2.0,
        decode_context_s=0.01,
        decode_row_s=0.5,
    )
    tier = tier_of(2, decode_rounds_per_prefill=0)
    tier.submit(make("a", 2, out=100))
    step = tier.next_step()
    assert tier.attention_s(step, model, 1.0) == pytest.approx(1 + 128 * 0.1)
    assert tier.attention_s(step, model, 0.5) == pytest.approx(1 + 256 * 0.1)
    tier.finish_step(step, 0.0)
    step = tier.next_step()
    assert tier.attention_s(step, model, 0.5) == pytest.approx(1 + 2 + 129 / 0.5 * 0.01 + 7 * 0.5)


@pytest.mark.parametrize(
    "change", [{"chunk_rows": 0}, {"max_running": 0}, {"context_limit": 0}, {"decode_rounds_per_prefill": -1}]
)
def test_impossible_settings_are_refused(change: dict[str, int]) -> None:
    (name,) = change
    with pytest.raises(ConfigError, match=name):
        TierConfig(**change)
