"""The stages' references, chained over all ranks, are the layer: against the oracles, on the CPU."""

from __future__ import annotations

import pytest
import torch

from megamoe import Deployment, MoeBatch, MoeShape, Path, RowFormat, plan_bundle, random_layer_weights, shard
from megamoe.backends.hopper.buffers import BoundLayer
from megamoe.backends.hopper.lockstep import IDENTITY, Lockstep
from megamoe.backends.hopper.plan import GemmPlan
from megamoe.reference import QUANTIZED_REL_L2, identity_moe, quantized_moe, relative_l2, tolerance
from megamoe.routing import DISTRIBUTIONS, route_rank

SHAPE = MoeShape(
    name="hopper-tests",
    hidden=96,
    intermediate=64,
    num_experts=32,
    num_topk=4,
    num_ranks=8,
    swiglu_limit=10.0,
)
torch.set_num_threads(1)  # the matrices are small: a second thread only waits for a core

COUNTS = (16, 0, 5, 16, 1, 9, 16, 3)
PATHS = [Path.FIXED_SLOT, Path.COMPACT]


def lockstep(row_format: RowFormat = RowFormat.BF16) -> Lockstep:
    deployment = Deployment(
        shape=SHAPE,
        backend="hopper",
        max_tokens_per_rank=16,
        fixed_slot_max=16,
        small_m_capacities=(16,),
        large_m_capacity=16,
        combine_row_format=row_format,
    )
    return Lockstep(plan_bundle(deployment), torch.device("cpu"))


def batches(
    distribution: str, *, exact: bool, seed: int = 3, counts: tuple[int, ...] = COUNTS
) -> list[MoeBatch]:
    out = []
    for rank, rows in enumerate(counts):
        generator = torch.Generator().manual_seed(100 * seed + rank)
        ids, weights = route_rank(
            SHAPE, distribution, rows, seed=seed, rank=rank, no_expert_share=0.1, duplicate_share=0.2
        )
        if exact:
            x = torch.randint(-8, 9, (rows, SHAPE.hidden), generator=generator).bfloat16()
            weights = torch.exp2(torch.randint(-2, 2, weights.shape, generator=generator).float())
        else:
            x = torch.randn(rows, SHAPE.hidden, generator=generator).bfloat16()
        out.append(MoeBatch.of(SHAPE, x, ids, weights))
    return out


@pytest.mark.parametrize("row_format", [RowFormat.BF16, RowFormat.FP8])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_transport_is_bitwise(path: Path, distribution: str, row_format: RowFormat) -> None:
    group = lockstep(row_format)
    rows = batches(distribution, exact=True)
    got = group.forward(rows, [IDENTITY] * 8, path, epoch=0xFFFFFFFF)
    for batch, out in zip(rows, got, strict=True):
        assert torch.equal(out, identity_moe(batch, SHAPE, row_format))


@pytest.mark.parametrize("row_format", [RowFormat.BF16, RowFormat.FP8])
@pytest.mark.parametrize("stream_max_rows", [0, 32])
@pytest.mark.parametrize("path", PATHS)
def test_layer_is_the_quantized_oracle(path: Path, row_format: RowFormat, stream_max_rows: int) -> None:
    plan = GemmPlan(stream_max_rows=stream_max_rows, block_n=32)
    weights = random_layer_weights(SHAPE, seed=5)
    layers = [BoundLayer.packed(shard(weights, SHAPE, rank), torch.device("cpu")) for rank in range(8)]
    group = lockstep(row_format)
    for epoch, distribution in enumerate(("uniform", "one_rank")):
        rows = batches(distribution, exact=False, seed=epoch)
        got = group.forward(rows, layers, path, epoch=epoch, gemms=plan)
        want = [quantized_moe(batch, weights, SHAPE, row_format) for batch in rows]
        error = relative_l2(torch.cat(got), torch.cat(want))
        assert error <= tolerance(QUANTIZED_REL_L2, sum(COUNTS)), distribution


def test_old_slots_are_never_taken_for_this_launch() -> None:
    """A full step, then one in which the same slots (same buffer) are mostly empty or name other ranks."""
    group = lockstep()
    group.forward(
        batches("uniform", exact=True, seed=1, counts=(16,) * 8), [IDENTITY] * 8, Path.FIXED_SLOT, epoch=2
    )
    rows = batches("one_rank", exact=True, seed=2, counts=(0, 16, 0, 2, 0, 0, 1, 0))
    got = group.forward(rows, [IDENTITY] * 8, Path.FIXED_SLOT, epoch=4)
    for batch, out in zip(rows, got, strict=True):
        assert torch.equal(out, identity_moe(batch, SHAPE))
