"""Combine at the source: fp32 sum of a token's result rows in ascending slot order, then bf16.

Rows are bf16 (weighted here) or FP8 (weighted by their owner before quantization), by owner rank. Multiplication and
addition are separate passes, so that no compiler may fuse them: the bits are the same however tokens are grouped.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megamoe import mx
from megamoe.backends.cpu.call import Call
from megamoe.backends.cpu.routed import Int64Array
from megamoe.bundle import RowFormat
from megamoe.shape import MX_BLOCK

_TOKENS = 64
"""Tokens summed together: one slot's fp32 rows fit the cache."""


def combine_tokens(call: Call, format_per_rank: Sequence[RowFormat], tokens: Int64Array | None) -> None:
    """Sum result rows into call.out, for all tokens or for the given ones (ascending indices).

    A -1 slot counts as a zero row of weight zero, whatever its memory holds.
    """
    outgoing = call.outgoing
    assert outgoing is not None
    n = call.batch.num_rows
    if not n or (tokens is not None and not len(tokens)):
        return
    shape = call.rank_context.layout.bundle.shape
    results = call.own_buffer.results[: n * shape.num_topk]
    owners = outgoing.owners
    weights = call.batch.topk_weights
    nobody = owners < 0
    if nobody.any():
        results.index_fill_(0, torch.from_numpy(np.flatnonzero(nobody)), 0.0)
        weights = weights.masked_fill(torch.from_numpy(nobody), 0.0)
    fp8_ranks = np.array([row_format is RowFormat.FP8 for row_format in format_per_rank] + [False])
    fp8 = torch.from_numpy(fp8_ranks[owners])
    rows = results.view(n, shape.num_topk, -1)
    count = n if tokens is None else len(tokens)
    for start in range(0, count, _TOKENS):
        stop = min(start + _TOKENS, count)
        if tokens is None:
            part = slice(start, stop)
            call.out[part] = _sum_rows(rows[part], weights[part], fp8[part])
        else:
            index = torch.from_numpy(tokens[start:stop])
            call.out[index] = _sum_rows(rows[index], weights[index], fp8[index]).bfloat16()


def _sum_rows(rows: torch.Tensor, weights: torch.Tensor, fp8: torch.Tensor) -> torch.Tensor:
    """rows [t, num_topk, result_bytes / 16] wide, weights [t, num_topk], fp8 [t, num_topk] bool -> [t, hidden] f32."""
    num_tokens, num_topk = weights.shape
    hidden = rows.shape[2] * rows.itemsize // 2
    any_fp8, all_fp8 = bool(fp8.any()), bool(fp8.all())
    total = torch.zeros((num_tokens, hidden), dtype=torch.float32)
    value = torch.empty_like(total)
    for slot in range(num_topk):
        row = rows[:, slot]
        if not all_fp8:
            value.copy_(row.view(torch.bfloat16))
            value.mul_(weights[:, slot : slot + 1])
        if any_fp8:
            u8 = row.view(torch.uint8)
            codes, sf = u8[:, :hidden], u8[:, hidden : hidden + hidden // MX_BLOCK]
            decoded = value if all_fp8 else torch.empty_like(total)
            mx.dequantize_mxfp8_into(decoded, codes, sf, nan_codes=False)
            if not all_fp8:
                value = torch.where(fp8[:, slot : slot + 1], decoded, value)
        total.add_(value)
    return total
