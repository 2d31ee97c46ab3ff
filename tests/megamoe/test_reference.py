"""The oracles against a loop written per element from the specification, with ml_dtypes for the formats."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from megamoe import MoeBatch, MoeShape, RowFormat, reference
from megamoe.errors import InvalidArgumentError
from megamoe.routing import route_rank
from megamoe.weights import random_layer_weights

SHAPE = MoeShape(hidden=64, intermediate=32, num_experts=8, num_topk=3, num_ranks=4, swiglu_limit=1.0)
WEIGHTS = random_layer_weights(SHAPE, seed=5)


def batch_of(num_rows: int, seed: int = 0, **share: float) -> MoeBatch:
    ids, weights = route_rank(SHAPE, "uniform", num_rows, seed=seed, rank=0, **share)
    x = torch.randn(num_rows, SHAPE.hidden, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return MoeBatch.of(SHAPE, x, ids, weights)


def mxfp8(row: np.ndarray) -> np.ndarray:
    out = np.empty_like(row, dtype=np.float64)
    for start in range(0, len(row), 32):
        block = row[start : start + 32].astype(np.float64)
        largest = np.abs(block).max()
        exponent = -127 if largest == 0 else max(-127, math.ceil(math.log2(largest / 448.0)))
        codes = (block / 2.0**exponent).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
        out[start : start + 32] = codes.astype(np.float64) * 2.0**exponent
    return out


def one_token(batch: MoeBatch, token: int, formats: list[RowFormat], exact: bool) -> np.ndarray:
    w13, w2 = (w.double().numpy() for w in WEIGHTS.dequantized())
    x = batch.hidden_states[token].double().numpy()
    x = x if exact else mxfp8(x)
    total = np.zeros(SHAPE.hidden, dtype=np.float64 if exact else np.float32)
    for slot in range(SHAPE.num_topk):
        expert, weight = int(batch.topk_ids[token, slot]), float(batch.topk_weights[token, slot])
        if expert == -1:
            continue
        inner = np.empty(SHAPE.intermediate)
        for i in range(SHAPE.intermediate):
            gate = min(float(w13[expert, i] @ x), SHAPE.swiglu_limit)
            up = max(
                -SHAPE.swiglu_limit, min(SHAPE.swiglu_limit, float(w13[expert, SHAPE.intermediate + i] @ x))
            )
            inner[i] = gate / (1 + math.exp(-gate)) * up
        row = w2[expert] @ (inner if exact else mxfp8(inner.astype(np.float32)))
        if exact:
            total += row * weight
        elif formats[expert // 2] is RowFormat.FP8:
            total += mxfp8(row.astype(np.float32) * np.float32(weight)).astype(np.float32)
        else:
            total += row.astype(ml_dtypes.bfloat16).astype(np.float32) * np.float32(weight)
    return total if exact else total.astype(ml_dtypes.bfloat16).astype(np.float64)


def test_exact_equals_the_loop() -> None:
    batch = batch_of(9, no_expert_share=0.2, duplicate_share=0.5)
    got = reference.exact_moe(batch, WEIGHTS, SHAPE)
    for token in range(9):
        np.testing.assert_allclose(
            got[token].numpy(), one_token(batch, token, [], True), rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize("formats", ["bf16", "fp8", "mixed"])
def test_quantized_equals_the_loop(formats: str) -> None:
    per_rank = {
        "bf16": [RowFormat.BF16] * 4,
        "fp8": [RowFormat.FP8] * 4,
        "mixed": [RowFormat.FP8, RowFormat.BF16, RowFormat.BF16, RowFormat.FP8],
    }[formats]
    batch = batch_of(24, seed=3, no_expert_share=0.1, duplicate_share=0.3)
    got = reference.quantized_moe(batch, WEIGHTS, SHAPE, per_rank).double().numpy()
    want = np.stack([one_token(batch, token, per_rank, False) for token in range(24)])
    # A value on a rounding edge may fall either way (the loop sums in its own order): a few last-bit differences.
    assert np.linalg.norm(got - want) <= 2e-3 * np.linalg.norm(want)
    assert (np.abs(got - want) <= 0.02 * np.abs(want) + 1e-3).mean() > 0.99


def test_quantization_errors_have_the_known_size() -> None:
    """One e4m3 row quantization alone costs relative L2 0.027 (protocol); input and intermediate each likewise."""
    batch = batch_of(256)
    exact = reference.exact_moe(batch, WEIGHTS, SHAPE)
    bf16_rows = reference.relative_l2(reference.quantized_moe(batch, WEIGHTS, SHAPE), exact)
    fp8_rows = reference.relative_l2(reference.quantized_moe(batch, WEIGHTS, SHAPE, RowFormat.FP8), exact)
    assert 0.02 < bf16_rows < fp8_rows < reference.EXACT_REL_L2


def test_identity_is_the_weighted_sum() -> None:
    ids = torch.tensor([[0, -1, 7], [3, 3, -1], [-1, -1, -1]], dtype=torch.int32)
    weights = torch.tensor([[0.5, 9.0, 2.0], [1.0, 0.25, 9.0], [9.0, 9.0, 9.0]])
    x = torch.arange(3 * 64).view(3, 64).remainder(8).bfloat16()
    for row_format in (RowFormat.BF16, RowFormat.FP8):
        got = reference.identity_moe(MoeBatch.of(SHAPE, x, ids, weights), SHAPE, row_format)
        assert torch.equal(got, x * torch.tensor([[2.5], [1.25], [0.0]]).bfloat16())


def test_pre_quantized_rows_are_not_quantized_again() -> None:
    from megamoe import mx

    batch = batch_of(16)
    codes, scales = mx.quantize_mxfp8(batch.hidden_states.float())
    same = MoeBatch.of(SHAPE, codes, batch.topk_ids, batch.topk_weights, scales)
    assert torch.equal(
        reference.quantized_moe(same, WEIGHTS, SHAPE), reference.quantized_moe(batch, WEIGHTS, SHAPE)
    )


@pytest.mark.parametrize("limit", [0.0, 0.5, 10.0])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_swiglu_per_element(limit: float, activation: str) -> None:
    """act(min(gate, L)) * clamp(up, -L, L), gate first; no clamp for L = 0."""
    gates = [-30.0, -3.0, -0.5, 0.0, 0.4, 0.6, 3.0, 30.0]
    ups = [-30.0, 30.0, -0.4, 0.6, -0.6, 2.0, 11.0, -11.0]
    got = reference.swiglu(torch.tensor([gates + ups], dtype=torch.float64), limit, activation)
    for value, gate, up in zip(got[0].tolist(), gates, ups, strict=True):
        if limit:
            gate, up = min(gate, limit), max(-limit, min(limit, up))
        if activation == "silu":
            act = gate / (1 + math.exp(-gate))
        else:
            act = gate * 0.5 * (1 + math.erf(gate / math.sqrt(2)))
        assert value == pytest.approx(act * up, rel=1e-12, abs=1e-300)


def test_poison_stays_in_its_row_and_nobody_reads_weights_of_nobody() -> None:
    batch = batch_of(12, seed=8, no_expert_share=0.2)
    x, weights = batch.hidden_states.clone(), batch.topk_weights.clone()
    x[3, 7], x[5, 63], x[6, 0] = float("nan"), float("inf"), float("-inf")
    weights[batch.topk_ids == -1] = float("nan")
    poisoned = MoeBatch.of(SHAPE, x, batch.topk_ids, weights)
    served = (batch.topk_ids >= 0).any(-1)
    dirty = torch.zeros(12, dtype=torch.bool)
    dirty[[3, 5, 6]] = True
    for oracle in (
        reference.exact_moe,
        reference.quantized_moe,
        lambda b, w, s: reference.quantized_moe(b, w, s, RowFormat.FP8),
        lambda b, w, s: reference.identity_moe(b, s),
    ):
        clean, got = oracle(batch, WEIGHTS, SHAPE), oracle(poisoned, WEIGHTS, SHAPE)
        assert torch.equal(got[~dirty], clean[~dirty])
        assert bool(got[dirty & served].isnan().any(-1).all())


def test_nobody_and_empty_batches_give_zeros() -> None:
    ids = torch.full((2, 3), -1, dtype=torch.int32)
    batch = MoeBatch.of(SHAPE, torch.ones(2, 64).bfloat16(), ids, torch.ones(2, 3))
    for got in (
        reference.exact_moe(batch, WEIGHTS, SHAPE),
        reference.quantized_moe(batch, WEIGHTS, SHAPE),
        reference.identity_moe(batch, SHAPE),
    ):
        assert torch.equal(got, torch.zeros(2, 64, dtype=got.dtype))
    empty = MoeBatch.empty(SHAPE)
    assert reference.quantized_moe(empty, WEIGHTS, SHAPE).shape == (0, 64)
    assert reference.exact_moe(empty, WEIGHTS, SHAPE).dtype is torch.float64


def test_rounding_order_of_the_combine() -> None:
    """fp32 in ascending slot order, then bf16 once. 2^25 swallows 1 in fp32, so the order of slots can be seen; and
    1 + 3 * 2^-10 survives to the end only if the sum is not rounded to bf16 on the way."""
    ids = torch.tensor([[0, 1, 2], [0, 1, 2], [0, 1, 2], [2, 1, 0]], dtype=torch.int32)
    weights = torch.tensor(
        [[2.0**25, 1.0, -(2.0**25)], [2.0**25, -(2.0**25), 1.0], [1.0, 2**-9, 2**-9], [1.0, 1, 1]]
    )
    x = torch.ones(4, 64).bfloat16()
    got = reference.identity_moe(MoeBatch.of(SHAPE, x, ids, weights), SHAPE)
    # 1 + 2^-9 would round to 1 in bf16 and so would the next addition; together they are half a step: ties to even.
    assert got[:, 0].tolist() == [0.0, 1.0, 1.0, 3.0]
    weights[2] = torch.tensor([1.0, 3 * 2**-10, 3 * 2**-10])
    got = reference.identity_moe(MoeBatch.of(SHAPE, x, ids, weights), SHAPE)
    assert float(got[2, 0]) == 1.0 + 2**-7


def test_row_formats_are_by_owner_rank() -> None:
    """A weight that FP8 cannot hold shows which owner's rows were quantized after weighting."""
    ids = torch.tensor([[0, -1, -1], [2, -1, -1], [5, -1, -1], [7, -1, -1]], dtype=torch.int32)
    weights = torch.full((4, 3), 1.0625)
    x = torch.ones(4, 64).bfloat16()
    formats = [RowFormat.FP8, RowFormat.BF16, RowFormat.FP8, RowFormat.BF16]
    got = reference.identity_moe(MoeBatch.of(SHAPE, x, ids, weights), SHAPE, formats)
    assert got[:, 0].tolist() == [1.0, 1.0625, 1.0, 1.0625]
    with pytest.raises(InvalidArgumentError, match="row_format_per_rank must be one format for each of 4"):
        reference.identity_moe(MoeBatch.of(SHAPE, x, ids, weights), SHAPE, formats[:3])


def test_a_nan_code_from_outside_is_a_nan_block() -> None:
    from megamoe import mx

    batch = batch_of(4)
    codes, scales = mx.quantize_mxfp8(batch.hidden_states)
    codes[2, 33] = 0xFF
    got = reference.identity_moe(MoeBatch.of(SHAPE, codes, batch.topk_ids, batch.topk_weights, scales), SHAPE)
    want = reference.identity_moe(batch, SHAPE)
    assert bool(got[2, 32:].isnan().all())
    got[2, 32:] = want[2, 32:]
    assert torch.equal(got, want)


def test_relative_l2_and_tolerance() -> None:
    assert reference.relative_l2(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 4.0])) == pytest.approx(0.75)
    assert reference.relative_l2(torch.zeros(0), torch.zeros(0)) == 0.0
    nan = reference.relative_l2(torch.tensor([float("nan")]), torch.ones(1))
    assert not nan <= reference.QUANTIZED_REL_L2, "a NaN must never pass a bound"
    with pytest.raises(InvalidArgumentError, match=r"shape of got must be \[2, 1\], got \[2\]"):
        reference.relative_l2(torch.zeros(2), torch.zeros(2, 1))
    assert reference.tolerance(1e-2, 63) == 2e-2
    assert reference.tolerance(1e-2, 64) == 1e-2
