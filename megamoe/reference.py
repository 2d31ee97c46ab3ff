"""The oracles that backends are held to, in plain torch; imports no backend.

`exact_moe` is float64 on dequantized weights with unquantized activations. `quantized_moe` models every rounding
that the protocol fixes: MXFP8 rows in, SwiGLU in fp32 straight to MXFP8, one result row per routed row in BF16 or in
FP8 1x32 (the routing weight applied before the row is quantized), combine in fp32 in ascending slot order, then bf16.
`identity_moe` bypasses both GEMMs: expert(x) = x, for bitwise tests of transport.
Only tests, selftest and the binding self-check import this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megamoe import mx
from megamoe.batch import MoeBatch
from megamoe.bundle import RowFormat
from megamoe.errors import InvalidArgumentError, must_be
from megamoe.shape import MoeShape
from megamoe.weights import LayerWeights

QUANTIZED_REL_L2 = 1e-2
"""Backends against `quantized_moe`, over at least 64 rows; below that twice as much (protocol)."""
EXACT_REL_L2 = 8e-2
"""Backends against `exact_moe` (the sources' accuracy bound)."""


def tolerance(base: float, num_rows: int) -> float:
    """Relative L2 bound for a comparison over num_rows rows."""
    return base if num_rows >= 64 else 2 * base


def relative_l2(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want| in float64; 0 for equal tensors (empty or all-zero too), NaN where a NaN is compared.

    Raises InvalidArgumentError for different shapes: broadcasting would compare something else.
    """
    if got.shape != want.shape:
        raise InvalidArgumentError(must_be("shape of got", list(want.shape), list(got.shape)))
    difference = float((got.double() - want.double()).norm())
    return difference / max(float(want.double().norm()), 1e-300) if difference != 0 else 0.0


def swiglu(gate_up: torch.Tensor, limit: float, activation: str = "silu") -> torch.Tensor:
    """[.., 2 * intermediate] -> [.., intermediate]: act(min(gate, L)) * clamp(up, -L, L); L = 0 means no clamp."""
    gate, up = gate_up.chunk(2, dim=-1)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    act = torch.nn.functional.silu if activation == "silu" else torch.nn.functional.gelu
    return act(gate) * up


def rows_as_float(batch: MoeBatch) -> torch.Tensor:
    """The rows as the caller meant them, fp32, whatever their wire form."""
    if batch.hidden_states_sf is not None:
        return mx.dequantize_mxfp8(batch.hidden_states, batch.hidden_states_sf)
    return batch.hidden_states.float()


def _dispatched_rows(batch: MoeBatch) -> torch.Tensor:
    """The rows that owners receive, fp32. A block with a NaN code is NaN as a whole, as if it had been encoded here."""
    rows = rows_as_float(batch)
    if batch.hidden_states_sf is None:
        return _mxfp8_round(rows)
    blocks = rows.view(*batch.hidden_states_sf.shape, mx.BLOCK)
    return blocks.masked_fill(blocks.isnan().any(-1, keepdim=True), float("nan")).view(rows.shape)


def exact_moe(batch: MoeBatch, weights: LayerWeights, shape: MoeShape) -> torch.Tensor:
    """[n, hidden] float64: the layer without any activation quantization. weights: all experts of the layer."""
    x = rows_as_float(batch).double()
    out = torch.zeros_like(x)
    for expert, tokens, slots in _by_expert(batch.topk_ids):
        w13, w2 = (w[0].double() for w in weights.experts(expert, expert + 1).dequantized())
        rows = swiglu(x[tokens] @ w13.T, shape.swiglu_limit, shape.activation) @ w2.T
        out.index_add_(0, tokens, rows * batch.topk_weights[tokens, slots].double()[:, None])
    return out


def quantized_moe(
    batch: MoeBatch,
    weights: LayerWeights,
    shape: MoeShape,
    row_format_per_rank: Sequence[RowFormat] | RowFormat = RowFormat.BF16,
) -> torch.Tensor:
    """[n, hidden] bf16: the layer with every rounding of the protocol. weights: all experts of the layer.

    row_format_per_rank: format of the rows that each owner rank sends back, as a reply reports it.
    """
    x = _dispatched_rows(batch)

    def expert_rows(expert: int, rows: torch.Tensor) -> torch.Tensor:
        # float64 sums: an accumulation order of its own, so that no backend is favoured.
        w13, w2 = (w[0].double() for w in weights.experts(expert, expert + 1).dequantized())
        inner = swiglu((rows.double() @ w13.T).float(), shape.swiglu_limit, shape.activation)
        return (_mxfp8_round(inner).double() @ w2.T).float()

    return _combined(x, batch, shape, row_format_per_rank, expert_rows)


def identity_moe(
    batch: MoeBatch,
    shape: MoeShape,
    row_format_per_rank: Sequence[RowFormat] | RowFormat = RowFormat.BF16,
) -> torch.Tensor:
    """[n, hidden] bf16: transport only. Bitwise for rows that MXFP8 holds exactly and power-of-two weights."""
    x = _dispatched_rows(batch)
    return _combined(x, batch, shape, row_format_per_rank, lambda expert, rows: rows)


def _combined(
    x: torch.Tensor,
    batch: MoeBatch,
    shape: MoeShape,
    row_format_per_rank: Sequence[RowFormat] | RowFormat,
    expert_rows: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    if isinstance(row_format_per_rank, RowFormat):
        row_format_per_rank = [row_format_per_rank] * shape.num_ranks
    if len(row_format_per_rank) != shape.num_ranks:
        wanted = f"one format for each of {shape.num_ranks} owner ranks"
        raise InvalidArgumentError(must_be("row_format_per_rank", wanted, list(row_format_per_rank)))
    routed = torch.zeros(*batch.topk_ids.shape, shape.hidden)
    for expert, tokens, slots in _by_expert(batch.topk_ids):
        rows = expert_rows(expert, x[tokens])
        weight = batch.topk_weights[tokens, slots][:, None]
        if row_format_per_rank[shape.owner_rank(expert)] is RowFormat.FP8:
            routed[tokens, slots] = _mxfp8_round(rows * weight)
        else:
            routed[tokens, slots] = rows.bfloat16().float() * weight
    out = torch.zeros_like(x)
    for slot in range(shape.num_topk):
        out += routed[:, slot]  # zero where nobody serves the slot
    return out.bfloat16()


def _mxfp8_round(x: torch.Tensor) -> torch.Tensor:
    return mx.dequantize_mxfp8(*mx.quantize_mxfp8(x))


def _by_expert(topk_ids: torch.Tensor) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """(expert, token indices, slots) of every expert that is named; -1 is nobody."""
    return [
        (expert, *(topk_ids == expert).nonzero(as_tuple=True))
        for expert in topk_ids.unique().tolist()
        if expert >= 0
    ]
