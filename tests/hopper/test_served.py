"""What the backend serves, with which kernels, and what a captured graph depends on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megamoe import Deployment, MoeShape, Path, RowFormat, check_switch, plan_bundle
from megamoe.backends import Launch
from megamoe.backends.hopper import served
from megamoe.backends.hopper.buffers import BoundLayer
from megamoe.backends.hopper.call import Call, Recipes
from megamoe.backends.hopper.staging import Outgoing
from megamoe.batch import MoeBatch
from megamoe.errors import ConfigError
from megamoe.path import SubStep

SHAPE = MoeShape(hidden=96, intermediate=64, num_experts=16, num_topk=4, num_ranks=2)
DEPLOYMENT = Deployment(
    shape=SHAPE,
    backend="hopper",
    max_tokens_per_rank=128,
    fixed_slot_max=64,
    small_m_capacities=(32,),
    large_m_capacity=128,
    large_m_min_tokens=40,
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"combine_row_format": RowFormat.AUTO}, "combine_row_format on hopper must be bf16 or fp8"),
        ({"shape": replace(SHAPE, activation="gelu")}, "activation on hopper must be silu"),
        ({"shape": replace(SHAPE, hidden=16384)}, "hidden on hopper must be at most 8192"),
        (
            {"shape": replace(SHAPE, num_experts=2 * 4097)},
            "experts per rank on hopper must be at most 4096 where large_m is built, got 4097",
        ),
    ],
)
def test_what_is_not_served_is_named(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        served.check_served(plan_bundle(replace(DEPLOYMENT, **change)))


@pytest.mark.parametrize("row_format", [RowFormat.BF16, RowFormat.FP8])
def test_all_four_paths_are_served(row_format: RowFormat) -> None:
    deployment = replace(DEPLOYMENT, combine_row_format=row_format)
    served.check_served(plan_bundle(replace(deployment, small_m_enabled=True, large_m_enabled=True)))
    assert all(served.gemm_plans(plan_bundle(deployment), path) for path in Path)


def test_compact_multiplies_as_large_m_does_where_that_may_serve() -> None:
    deployment = replace(DEPLOYMENT, large_m_min_tokens=10)
    bundle = plan_bundle(deployment)
    least = deployment.large_m_min_tokens
    assert served.gemm_plan(bundle, Path.COMPACT, least).stream_max_rows == 0
    assert served.gemm_plan(bundle, Path.LARGE_M, least).stream_max_rows == 0
    assert served.gemm_plan(bundle, Path.COMPACT, 1).stream_max_rows > 0
    without = plan_bundle(replace(deployment, large_m_capacity=256))
    assert served.gemm_plan(without, Path.COMPACT, least).stream_max_rows > 0


def test_graphs_are_of_a_binding_a_path_and_a_bucket() -> None:
    recipes = Recipes(plan_bundle(DEPLOYMENT))

    def key(
        rows: int = 45,
        path: Path = Path.FIXED_SLOT,
        slot: int = 0,
        version: int = 0,
        closing: bool = False,
        quantized: bool = False,
    ):
        sub_step = SubStep.whole(path, 64, (rows, 0))
        launch = Launch(
            slot_idx=slot, epoch=5, buffer_idx=1, sub_step=sub_step, closing=closing, refused=False, deadline_s=0.0
        )  # fmt: skip
        layer, none = BoundLayer(None, None, version), torch.empty(0)
        batch = MoeBatch.empty(SHAPE, quantized=quantized)
        return Call(launch, layer, recipes.of(sub_step), batch, Outgoing(none, none, none)).graph_key

    assert key(45) == key(64)
    # Of another plan in the same bucket; of another bucket.
    others = [key(35), key(17), key(slot=1), key(version=1), key(path=Path.SMALL_M), key(path=Path.COMPACT)]
    assert len({key(45), *others, key(closing=True), key(quantized=True)}) == 9


def test_large_m_is_not_switched_on_beside_fp8_gemms() -> None:
    """Its steps have compact's bits, and it has no FP8 GEMMs: where compact has, it is on from the start or off."""
    many = replace(DEPLOYMENT, max_tokens_per_rank=1024, large_m_capacity=1024)
    [first] = [
        rows
        for rows in range(40, 1024)
        if served.gemm_plan(plan_bundle(many), Path.COMPACT, rows).is_fp8
        > served.gemm_plan(plan_bundle(many), Path.COMPACT, rows - 1).is_fp8
    ]
    wanted = rf"large_m on hopper must be on from the start .*got switched on \(from {first} rows"
    with pytest.raises(ConfigError, match=wanted):
        check_switch(plan_bundle(many), Path.LARGE_M)
    check_switch(plan_bundle(many), Path.SMALL_M)
    on = replace(many, large_m_enabled=True)
    for deployment in (on, DEPLOYMENT, replace(many, batch_invariant=True), replace(many, backend="cpu")):
        check_switch(plan_bundle(deployment), Path.LARGE_M)
