"""Warm-up reaches every runtime of every deployment, with few rows, the same on all ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe import Deployment, PathPolicy, choose_path, plan_bundle, preset
from service.config import PROFILES, load_config
from service.rank import warmup


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_every_runtime_of_every_profile(profile: str) -> None:
    bundle = load_config(overrides={"profile": profile}, env=False).bundle
    policy = PathPolicy.of(bundle.deployment)
    steps = warmup.warm_up_steps(bundle, policy)
    assert [step.spec for step in steps] == list(bundle.runtimes)


@given(
    max_tokens=st.sampled_from([1, 2, 16, 64, 512, 8192]),
    fixed_slot_max=st.sampled_from([0, 1, 31, 255, 600]),
    small=st.sampled_from([(), (1,), (16, 32), (256, 512)]),
    large=st.sampled_from([1, 64, 8192]),
    large_min=st.sampled_from([1, 48, 1024]),
    small_on=st.booleans(),
    large_on=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_each_step_is_served_by_its_runtime(
    max_tokens: int,
    fixed_slot_max: int,
    small: tuple[int, ...],
    large: int,
    large_min: int,
    small_on: bool,
    large_on: bool,
) -> None:
    deployment = Deployment(
        shape=preset("demo"),
        max_tokens_per_rank=max_tokens,
        fixed_slot_max=fixed_slot_max,
        small_m_capacities=small,
        small_m_enabled=small_on,
        large_m_capacity=large,
        large_m_enabled=large_on,
        large_m_min_tokens=large_min,
    )
    bundle, policy = plan_bundle(deployment), PathPolicy.of(deployment)
    steps = warmup.warm_up_steps(bundle, policy)
    newer = [step.policy.version for step in steps if step.policy is not policy]
    assert newer == list(range(1, len(newer) + 1)), "each can be staged after the ones before"
    for step in steps:
        (sub_step,) = choose_path(step.plan, bundle, step.policy)
        assert (sub_step.path, sub_step.runtime_capacity) == (step.spec.path, step.spec.capacity)
    served = warmup.served_policy(bundle, policy)
    assert replace(served, version=policy.version) == policy
    assert served.version == (len(newer) + 1 if newer else 0)
