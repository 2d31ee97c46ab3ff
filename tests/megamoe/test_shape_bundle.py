"""Shapes, deployments and bundles: clear refusals, reasons, and digests that tell configurations apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megamoe import (
    PRESETS,
    Deployment,
    MoeShape,
    Path,
    RowFormat,
    plan_bundle,
    preset,
    prev_power_of_2,
)
from megamoe.errors import ConfigError

DEMO = preset("demo")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": 100}, ["hidden", "multiple of 32", "100"]),
        ({"hidden": 0}, ["hidden", "0"]),
        ({"intermediate": -32}, ["intermediate", "-32"]),
        ({"num_ranks": 3}, ["num_ranks", "1, 2, 4 or 8", "3"]),
        ({"num_ranks": 16}, ["num_ranks", "one host", "16"]),
        ({"num_experts": 60}, ["num_experts", "multiple of num_ranks = 8", "60"]),
        ({"num_experts": 0}, ["num_experts"]),
        ({"num_topk": 0}, ["num_topk"]),
        ({"num_topk": 65}, ["num_topk", "32", "65"]),
        ({"num_layers": 0}, ["num_layers"]),
        ({"swiglu_limit": -1.0}, ["swiglu_limit", "-1.0"]),
        ({"swiglu_limit": float("nan")}, ["swiglu_limit", "nan"]),
        ({"activation": "relu"}, ["activation", "relu"]),
        ({"quant": "bf16"}, ["quant", "bf16"]),
    ],
)
def test_shape_refuses(change: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(DEMO, **change)  # type: ignore[arg-type]
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_split_over_all_rank_counts(name: str) -> None:
    shape = preset(name)
    for num_ranks in (1, 2, 4, 8):
        split = shape.with_ranks(num_ranks)
        assert split.num_experts_per_rank * num_ranks == shape.num_experts
        assert split.owner_rank(shape.num_experts - 1) == num_ranks - 1
        assert split.owner_rank(0) == 0


def test_v4_pro_weight_bytes() -> None:
    """1.685 GB a rank and layer: the figure of the reference table."""
    assert preset("deepseek-v4-pro").weight_bytes_per_rank_and_layer == pytest.approx(1.685e9, rel=1e-3)


def test_unknown_preset_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="demo"):
        preset("nope")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens_per_rank": 100}, ["max_tokens_per_rank", "power of two", "100"]),
        ({"max_tokens_per_rank": 16384}, ["max_tokens_per_rank", "8192", "16384"]),
        ({"max_tokens_per_rank": 0}, ["max_tokens_per_rank", "0"]),
        ({"backend": "tpu"}, ["backend", "cpu", "tpu"]),
        ({"fixed_slot_max": -1}, ["fixed_slot_max", "-1"]),
        ({"small_m_capacities": (24,)}, ["small_m_capacities", "24"]),
        ({"small_m_capacities": (32, 16)}, ["small_m_capacities", "ascending"]),
        ({"large_m_min_tokens": 0}, ["large_m_min_tokens"]),
        ({"large_m_min_tokens": 2**32}, ["large_m_min_tokens", "2147483647", "4294967296"]),
        ({"fixed_slot_max": 2**31}, ["fixed_slot_max", "2147483647"]),
        ({"auto_fp8_min_rows": 10**23}, ["auto_fp8_min_rows", "2147483647"]),
        ({"auto_fp8_min_rows_of_expert": 2**31}, ["auto_fp8_min_rows_of_expert", "2147483647"]),
        ({"max_step_rows": 2**31}, ["max_step_rows", "2147483647"]),
        ({"max_step_rows": 100}, ["max_step_rows", "8192", "100"]),
        (
            {"batch_invariant": True, "combine_row_format": RowFormat.AUTO},
            ["combine_row_format", "auto"],
        ),
    ],
)
def test_deployment_refuses(change: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Deployment(**({"shape": DEMO} | change))  # type: ignore[arg-type]
    for word in words:
        assert word in str(caught.value)


def test_prev_power_of_2() -> None:
    expected = {
        0: 0,
        1: 1,
        2: 2,
        3: 2,
        127: 64,
        128: 128,
        255: 128,
        256: 256,
        511: 256,
        512: 512,
    }
    assert {value: prev_power_of_2(value) for value in expected} == expected
    assert prev_power_of_2(-5) == 0


def test_small_capacities_are_bounded_and_merge() -> None:
    bundle = plan_bundle(Deployment(shape=DEMO, max_tokens_per_rank=128))
    assert bundle.capacities(Path.SMALL_M) == (128,)
    assert bundle.capacities(Path.COMPACT) == (128,)
    assert bundle.capacities(Path.LARGE_M) == ()
    assert "8192" in bundle.reasons[Path.LARGE_M]


@pytest.mark.parametrize(
    ("change", "needle"),
    [
        ({"num_ranks": 4}, "num_ranks must be 8, got 4"),
        ({"hidden": 4096}, "hidden must be 7168, got 4096"),
        ({"intermediate": 2048}, "intermediate must be 3072, got 2048"),
        ({"num_experts": 256}, "num_experts must be 384, got 256"),
        ({"num_topk": 8}, "num_topk must be 6, got 8"),
        ({"activation": "gelu"}, "activation must be silu, got gelu"),
    ],
)
def test_gfx950_gate_says_why_and_compact_stays(change: dict[str, object], needle: str) -> None:
    shape: MoeShape = replace(preset("deepseek-v4-pro"), **change)  # type: ignore[arg-type]
    bundle = plan_bundle(Deployment(shape=shape, backend="gfx950"))
    assert {spec.path for spec in bundle.runtimes} == {Path.COMPACT}
    assert set(bundle.reasons) == {Path.SMALL_M, Path.FIXED_SLOT, Path.LARGE_M}
    assert all(needle in reason for reason in bundle.reasons.values())


def test_gfx950_gate_opens_for_v4_pro_and_for_the_emulated_profile() -> None:
    for shape, emulated in ((preset("deepseek-v4-pro"), False), (DEMO, True)):
        bundle = plan_bundle(Deployment(shape=shape, backend="gfx950", gfx950_emulated=emulated))
        assert {spec.path for spec in bundle.runtimes} == set(Path)
        assert not bundle.reasons


def test_sub_steps_and_fingerprint() -> None:
    deployment = Deployment(shape=DEMO, max_tokens_per_rank=512)
    assert (deployment.step_rows_limit, deployment.max_sub_steps) == (2048, 4)
    assert replace(deployment, max_step_rows=513).max_sub_steps == 2
    assert deployment.fingerprint() == Deployment(shape=DEMO, max_tokens_per_rank=512).fingerprint()
    assert deployment.fingerprint() != replace(deployment, fixed_slot_max=511).fingerprint()
    assert (
        deployment.fingerprint() != replace(deployment, shape=replace(DEMO, swiglu_limit=0.0)).fingerprint()
    )
