"""Agreement and path choice as pure functions: no two ranks ever hold different plans."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamoe import (
    Deployment,
    Path,
    PathPolicy,
    Phase,
    PlanId,
    StagedPolicies,
    StepIntent,
    StepPlan,
    agree,
    choose_path,
    is_fall_off,
    plan_bundle,
    preset,
)
from megamoe.errors import (
    AgreementError,
    ConfigError,
    DrainingError,
    InvalidArgumentError,
    MegaMoeError,
)
from megamoe.path import MAX_STAGED_POLICIES

DEMO = Deployment(
    shape=preset("demo"),
    max_tokens_per_rank=512,
    small_m_capacities=(16, 32),
    small_m_enabled=True,
    fixed_slot_max=64,
    large_m_capacity=512,
    large_m_enabled=True,
    large_m_min_tokens=128,
)
BUNDLE = plan_bundle(DEMO)


def intent(rank: int, num_rows: int, phase: Phase = Phase.DECODE, **kwargs: object) -> StepIntent:
    fields: dict[str, object] = {
        "rank": rank,
        "num_ranks": 8,
        "plan_id": PlanId(1, 5),
        "num_rows": num_rows,
        "phase": phase if num_rows else Phase.IDLE,
    }
    return StepIntent(**(fields | kwargs))  # type: ignore[arg-type]


def intents_of(counts: list[int], **kwargs: object) -> list[StepIntent]:
    return [intent(rank, rows, **kwargs) for rank, rows in enumerate(counts)]  # type: ignore[arg-type]


steps = st.tuples(
    st.lists(
        st.one_of(st.just(0), st.integers(0, 40), st.integers(0, 2048)),
        min_size=8,
        max_size=8,
    ),
    st.lists(st.sampled_from([Phase.DECODE, Phase.PREFILL]), min_size=8, max_size=8),
    st.lists(st.integers(0, 3), min_size=8, max_size=8),
)


@given(steps)
def test_every_rank_makes_the_same_plan_and_paths(
    step: tuple[list[int], list[Phase], list[int]],
) -> None:
    """Each rank agrees and chooses for itself from intents that reached it in its own order."""
    counts, phases, staged = step
    policies = {
        version: PathPolicy(version=version, small_m_enabled=version % 2 == 1, large_m_enabled=True)
        for version in range(4)
    }
    intents = [intent(r, counts[r], phases[r], policy_version=staged[r]) for r in range(8)]
    outcomes = []
    for rank in range(8):
        arrived = intents[:]
        random.Random(rank).shuffle(arrived)
        plan = agree(
            sorted(arrived, key=lambda one: one.rank),
            max_step_rows=DEMO.step_rows_limit,
        )
        outcomes.append((plan, choose_path(plan, BUNDLE, policies[plan.policy_version])))
    assert all(outcome == outcomes[0] for outcome in outcomes)
    plan, sub_steps = outcomes[0]
    assert plan.policy_version == min(staged)
    has_prefill = any(n and p is Phase.PREFILL for n, p in zip(counts, phases, strict=True))
    assert plan.phase is (Phase.PREFILL if has_prefill else Phase.DECODE if any(counts) else Phase.IDLE)
    # The cut loses and repeats no row, on any rank.
    for rank in range(8):
        assert sum(sub_step.num_rows_per_rank[rank] for sub_step in sub_steps) == counts[rank]
    for sub_step in sub_steps:
        assert sub_step.max_rows <= sub_step.runtime_capacity


@given(steps, st.integers(0, 7))
def test_own_count_never_decides(step: tuple[list[int], list[Phase], list[int]], rank: int) -> None:
    """Swapping two ranks' counts leaves every choice as it was: only the maximum and the phase matter."""
    counts, phases, _ = step
    other = (rank + 3) % 8
    swapped_counts, swapped_phases = counts[:], phases[:]
    swapped_counts[rank], swapped_counts[other] = counts[other], counts[rank]
    swapped_phases[rank], swapped_phases[other] = phases[other], phases[rank]
    policy = PathPolicy.of(DEMO)

    def chosen(rows: list[int], said: list[Phase]) -> list[tuple[Path, int]]:
        plan = agree([intent(r, rows[r], said[r]) for r in range(8)])
        return [(sub_step.path, sub_step.runtime_capacity) for sub_step in choose_path(plan, BUNDLE, policy)]

    assert chosen(counts, phases) == chosen(swapped_counts, swapped_phases)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            {"plan_id": PlanId(1, 6)},
            AgreementError,
            ["plan id", "rank 3: 1/6/0", "rank 0: 1/5/0"],
        ),
        ({"plan_id": PlanId(2, 5)}, AgreementError, ["plan id", "rank 3: 2/5/0"]),
        ({"plan_id": PlanId(1, 5, 1)}, AgreementError, ["plan id", "rank 3: 1/5/1"]),
        (
            {"dtype": "mxfp8"},
            AgreementError,
            ["dtype", "rank 3: mxfp8", "rank 0: bfloat16"],
        ),
        (
            {"weights_version": 7},
            AgreementError,
            ["weights_version", "rank 3: 7", "rank 0: 0"],
        ),
        ({"placement_version": 1}, AgreementError, ["placement_version", "rank 3: 1"]),
        ({"draining": True}, DrainingError, ["[3]"]),
        ({"num_rows": 2049}, InvalidArgumentError, ["rank 3", "2048", "2049"]),
    ],
    ids=["step_id", "generation", "micro_batch", "dtype", "weights", "placement", "draining", "oversize"],
)
def test_one_rank_differs(change: dict[str, object], error: type[MegaMoeError], words: list[str]) -> None:
    intents = intents_of([4] * 8)
    intents[3] = replace(intents[3], **change)  # type: ignore[arg-type]
    with pytest.raises(error) as caught:
        agree(intents, max_step_rows=DEMO.step_rows_limit)
    for word in words:
        assert word in str(caught.value)


def test_counts_vector_must_match_everyone() -> None:
    counts = (4, 4, 4, 4, 4, 4, 4, 4)
    intents = [intent(rank, 4, num_rows_per_rank=counts) for rank in range(8)]
    assert agree(intents).num_rows_per_rank == counts
    intents[2] = intent(2, 5)
    with pytest.raises(AgreementError, match="num_rows_per_rank as sent to rank 0"):
        agree(intents)


@pytest.mark.parametrize("counts", [(4,), (4,) * 9, (4, 4, 4, 4, 4, 4, 4, -1)])
def test_counts_vector_is_validated(counts: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="num_rows_per_rank"):
        intent(0, 4, num_rows_per_rank=counts)
    with pytest.raises(
        InvalidArgumentError,
        match=r"num_rows must be num_rows_per_rank\[0\] = 3, got 4",
    ):
        intent(0, 4, num_rows_per_rank=(3,) * 8)


def test_idle_and_rows_exclude_each_other() -> None:
    with pytest.raises(InvalidArgumentError, match="'idle'"):
        StepIntent(rank=0, num_ranks=8, plan_id=PlanId(1, 1), num_rows=0, phase=Phase.DECODE)
    with pytest.raises(InvalidArgumentError, match="'prefill' or 'decode'"):
        StepIntent(rank=0, num_ranks=8, plan_id=PlanId(1, 1), num_rows=2, phase=Phase.IDLE)


def test_missing_intent_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="one per rank"):
        agree(intents_of([1] * 8)[:7])
    with pytest.raises(InvalidArgumentError, match="one per rank"):
        agree([])


def plan_of(max_rows: int, phase: Phase) -> StepPlan:
    return agree(intents_of([max_rows] + [1] * 7, phase=phase))


@pytest.mark.parametrize(
    ("max_rows", "phase", "path", "capacity"),
    [
        (16, Phase.DECODE, Path.SMALL_M, 16),
        (17, Phase.DECODE, Path.SMALL_M, 32),
        (33, Phase.DECODE, Path.FIXED_SLOT, 64),
        (65, Phase.DECODE, Path.COMPACT, 512),
        (200, Phase.DECODE, Path.COMPACT, 512),
        (127, Phase.PREFILL, Path.COMPACT, 512),
        (128, Phase.PREFILL, Path.LARGE_M, 512),
    ],
)
def test_demo_profile_serves_all_four(max_rows: int, phase: Phase, path: Path, capacity: int) -> None:
    (sub_step,) = choose_path(plan_of(max_rows, phase), BUNDLE, PathPolicy.of(DEMO))
    assert (sub_step.path, sub_step.runtime_capacity) == (path, capacity)
    assert is_fall_off(sub_step, phase, BUNDLE, PathPolicy.of(DEMO)) is (
        phase is Phase.DECODE and max_rows > 64
    )


def test_no_fall_off_where_no_decode_path_is_enabled() -> None:
    policy = PathPolicy.of(DEMO).with_path(Path.SMALL_M, False).with_path(Path.FIXED_SLOT, False)
    plan = replace(plan_of(200, Phase.DECODE), policy_version=policy.version)
    (sub_step,) = choose_path(plan, BUNDLE, policy)
    assert not is_fall_off(sub_step, Phase.DECODE, BUNDLE, policy)


def test_compact_cannot_be_switched_off_and_versions_rise() -> None:
    policy = PathPolicy.of(DEMO)
    with pytest.raises(ConfigError, match="compact"):
        policy.with_path(Path.COMPACT, False)
    switched = policy.with_path(Path.SMALL_M, False)
    assert switched.version == policy.version + 1
    assert not switched.allows(Path.SMALL_M)
    assert switched.allows(Path.LARGE_M)
    assert switched.large_m_min_tokens == 128


def test_policy_of_another_version_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"policy\.version"):
        choose_path(plan_of(4, Phase.DECODE), BUNDLE, PathPolicy(version=3))


def test_staged_policies_are_bounded() -> None:
    staged = StagedPolicies(PathPolicy())
    first = staged.newest
    while staged.newest.version < MAX_STAGED_POLICIES - 1:
        staged.stage(staged.newest.with_path(Path.SMALL_M, not staged.newest.small_m_enabled))
    assert staged.of(0) == first
    assert first in staged
    staged.stage(staged.newest.with_path(Path.LARGE_M, True))
    assert staged.newest.version == MAX_STAGED_POLICIES
    assert staged.of(1).small_m_enabled
    with pytest.raises(ConfigError, match="policy_version of the plan must be one staged here"):
        staged.of(0)
    with pytest.raises(ConfigError, match="policy.version must be above the staged"):
        staged.stage(first)
