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

_CHUNK_BYTES = 1 << 19
"""fp32 rows of all slots of the tokens summed together: half of the L2 cache of one core (1 MiB, AMD EPYC 9004)."""


def combine_tokens(call: Call, format_per_rank: Sequence[RowFormat], tokens: Int64Array | None) -> None:
    """Sum result rows into call.out, for all tokens or for the given ones (ascending indices).

    A -1 slot counts as a zero row of weight zero, whatever its memory holds.
    """
    outgoing = call.outgoing
    assert outgoing is not None
    n = call.batch.num_rows
    count = n if tokens is None else len(tokens)
    if not count:
        return
    hidden, num_topk = call.shape.hidden, call.shape.num_topk
    results = call.buffer.results[call.rank][: n * num_topk]
    weights = call.batch.topk_weights
    nobody = outgoing.owners < 0
    if nobody.any():
        results.index_fill_(0, torch.from_numpy(np.flatnonzero(nobody)), 0.0)
        weights = weights.masked_fill(torch.from_numpy(nobody), 0.0)
    rows = results.view(n, num_topk, -1)
    fp8 = None
    if RowFormat.FP8 in format_per_rank:
        by_rank = np.array([row_format is RowFormat.FP8 for row_format in format_per_rank] + [False])
        fp8 = torch.from_numpy(by_rank[outgoing.owners])  # -1 takes the last entry
    step = max(_CHUNK_BYTES // (4 * hidden * num_topk), 1)
    for start in range(0, count, step):
        part = slice(start, min(start + step, count))
        index = part if tokens is None else torch.from_numpy(tokens[part])
        values = _weighted(rows[index], weights[index], None if fp8 is None else fp8[index])
        total = values[:, 0]
        for slot in range(1, num_topk):
            total.add_(values[:, slot])
        if tokens is None:
            call.out[part].copy_(total)
        else:
            call.out[index] = total.bfloat16()


def _weighted(rows: torch.Tensor, weights: torch.Tensor, fp8: torch.Tensor | None) -> torch.Tensor:
    """rows [t, num_topk, result_bytes / 16] wide, weights [t, num_topk], fp8 [t, num_topk] bool or None (no row is)
    -> weighted rows [t, num_topk, hidden] float32."""
    plain = rows.view(torch.bfloat16).float().mul_(weights.unsqueeze(-1))
    if fp8 is None:
        return plain
    num_tokens, num_topk, hidden = plain.shape
    u8 = rows.reshape(num_tokens * num_topk, -1).view(torch.uint8)
    decoded = torch.empty((num_tokens * num_topk, hidden), dtype=torch.float32)
    mx.dequantize_mxfp8_into(
        decoded, u8[:, :hidden], u8[:, hidden : hidden + hidden // MX_BLOCK], nan_codes=False
    )
    return torch.where(fp8.unsqueeze(-1), decoded.view(plain.shape), plain)
