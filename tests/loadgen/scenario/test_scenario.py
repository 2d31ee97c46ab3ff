"""Locks of the scenario, and what makes a run invalid for submission."""

from __future__ import annotations

import math

import pytest

from loadgen.scenario.profiles import PROFILES, run_profile
from loadgen.scenario.scenario import ScenarioConfig
from megamoe.errors import ConfigError


def test_the_defaults_are_the_published_ones_and_valid() -> None:
    config = ScenarioConfig()
    assert config.invalid_reasons == ()
    assert (config.duration_wall_s, config.seed, config.num_traces, config.slice_s) == (3600, 42, 393, 1)
    assert (config.warmup_requests, config.max_failed_share, config.max_overflow_share) == (10, 0.10, 0.01)
    assert (config.tree_idle_cap_s, config.system_idle_cap_s) == (300, 10)
    assert (config.start_min, config.start_max) == (0.25, 0.75)


@pytest.mark.parametrize(
    ("change", "clause"),
    [
        ({"streaming": False}, "locks streaming on"),
        ({"ignore_eos": False}, "locks ignore_eos on"),
        ({"cache_bust": False}, "locks the cache-bust marker"),
        ({"fixed_schedule": True}, "forbids a fixed schedule"),
        ({"sweep": "8,16"}, "forbids a list of concurrencies, got 8,16"),
        ({"ignore_delays": True}, "forbids ignoring the recorded delays"),
        ({"request_rate": 2.0}, "forbids a fixed request rate, got 2 a second"),
    ],
)
def test_a_lock_is_refused_or_overridden_and_marked(change: dict[str, object], clause: str) -> None:
    with pytest.raises(ConfigError, match=f"{clause}.*--unsafe-override"):
        ScenarioConfig(**change)
    config = ScenarioConfig(**change, unsafe_override=True)
    assert any(clause in reason for reason in config.invalid_reasons)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"time_scale": 0.5}, "time_scale is 0.5, not 1"),
        ({"token_scale": 0.25}, "token_scale is 0.25, not 1"),
        ({"duration_wall_s": 60.0}, "duration is 60 s, below 900 s"),
        ({"unsafe_override": True}, "unsafe_override is set"),
        (
            {"scenario": "uniform", "sweep": "8", "ignore_delays": True},
            "the scenario is uniform, not agentx",
        ),
    ],
)
def test_scaling_is_allowed_and_marked(change: dict[str, object], reason: str) -> None:
    assert ScenarioConfig(**change).invalid_reasons == (reason,)


@pytest.mark.parametrize(
    "change",
    [
        {"concurrency": 0},
        {"duration_wall_s": 0.0},
        {"time_scale": 1.5},
        {"token_scale": 0.0},
        {"warmup_requests": -1},
        {"start_min": 0.8},
        {"num_traces": 0},
        {"step_retries": -1},
        {"seed": -1},
        {"concurrency": 10**7},
        {"num_traces": 10**9},
        {"duration_wall_s": math.nan},
        {"duration_wall_s": math.inf},
        {"time_scale": math.nan},
        {"grace_wall_s": math.nan},
        {"request_rate": math.inf},
    ],
)
def test_an_impossible_value_is_named(change: dict[str, object]) -> None:
    (name,) = change
    with pytest.raises(ConfigError, match=f"{name}.* must be .*got"):
        ScenarioConfig(**change)


def test_profiles_by_name_and_by_service() -> None:
    assert run_profile("auto", "demo") is PROFILES["demo"]
    assert run_profile("auto", "deepseek-v4-pro-ep8") is PROFILES["full"]
    assert run_profile("full", "demo").scenario == ScenarioConfig()
    with pytest.raises(ConfigError, match="profile must be auto or one of full, demo, got 'x'"):
        run_profile("x", "demo")
