"""The oracles against a loop written per element from the specification, with ml_dtypes for the formats."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from megamoe import MoeBatch, MoeShape, RowFormat, reference
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


def test_relative_l2_and_tolerance() -> None:
    assert reference.relative_l2(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 4.0])) == pytest.approx(0.75)
    assert reference.relative_l2(torch.zeros(0), torch.zeros(0)) == 0.0
    nan = reference.relative_l2(torch.tensor([float("nan")]), torch.ones(1))
    assert not nan <= reference.QUANTIZED_REL_L2, "a NaN must never pass a bound"
    assert reference.tolerance(1e-2, 63) == 2e-2
    assert reference.tolerance(1e-2, 64) == 1e-2
