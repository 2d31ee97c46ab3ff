"""Rows to the owners of their experts, results back, and their sums."""

from __future__ import annotations

import torch

from megamoe import mx
from megamoe.backends.hopper import record
from megamoe.backends.hopper.record import Word
from megamoe.backends.hopper.references.group import Batch, Group
from megamoe.bundle import RowFormat
from megamoe.layout import FlagKind


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n, k] -> (codes [n, k] uint8, scales [n, k / 32] uint8)."""
    return mx.quantize_mxfp8(x)


def destinations(ids: torch.Tensor, num_ranks: int, experts_per_rank: int) -> torch.Tensor:
    """bool [n, num_ranks]: whether a token has an expert on a rank."""
    owner = torch.where(ids >= 0, ids // experts_per_rank, num_ranks).long()
    found = torch.zeros((len(ids), num_ranks + 1), dtype=torch.bool, device=ids.device)
    found.scatter_(1, owner, True)
    return found[:, :num_ranks]


def prepare(group: Group, rank: int, batch: Batch) -> None:
    """Counts to everyone, and each token's place among the rows for a destination."""
    buffers = group.ranks[rank]
    shape = buffers.shape
    goes = destinations(batch.ids, shape.num_ranks, shape.num_experts_per_rank)
    place = goes.int().cumsum(0, dtype=torch.int32) - 1
    index = torch.where(goes, place, -1).to(torch.int32)
    buffers.token_index[: index.numel()] = index.flatten()
    for dst in range(shape.num_ranks):
        group.counts(dst)[rank, : shape.num_ranks] = goes.sum(0)
    group.post(rank, FlagKind.COUNTS, [group.word(rank, Word.INFO)] * shape.num_ranks)


def dispatch(group: Group, rank: int, batch: Batch, *, compact: bool) -> None:
    """Rows and what stands beside them into the destinations' slots."""
    buffers = group.ranks[rank]
    shape, layout = buffers.shape, buffers.layout
    num_rows, num_topk, hidden = len(batch.ids), shape.num_topk, shape.hidden
    goes = destinations(batch.ids, shape.num_ranks, shape.num_experts_per_rank)
    infos = []
    for dst in range(shape.num_ranks):
        tokens = goes[:, dst].nonzero().flatten()
        first_id = dst * shape.num_experts_per_rank
        if compact:
            table = group.counts(rank)[:, : shape.num_ranks]
            first = int(table[:rank, dst].sum())
            slots = first + torch.arange(len(tokens), device=tokens.device)
            with_meta = tokens
            infos.append(len(tokens))
        else:
            first = rank * group.word(rank, Word.CAPACITY)
            slots = first + tokens
            with_meta = torch.arange(num_rows, device=tokens.device)
            infos.append(num_rows)
        row = group.payload(dst)
        row[slots, :hidden] = batch.codes[tokens]
        row[slots, hidden : hidden + layout.sf_bytes] = batch.scales[tokens]
        ids = batch.ids[with_meta]
        mine = (ids >= first_id) & (ids < first_id + shape.num_experts_per_rank)
        meta = torch.zeros((len(with_meta), layout.meta_words), dtype=torch.int32, device=ids.device)
        meta[:, 0] = with_meta
        meta[:, 1 : 1 + num_topk] = torch.where(mine, ids, -1)
        meta[:, 1 + num_topk : 1 + 2 * num_topk] = batch.weights[with_meta].view(torch.int32)
        group.meta(dst)[slots if compact else first + with_meta] = meta
    group.post(rank, FlagKind.PAYLOAD, [info | group.word(rank, Word.INFO) for info in infos])


def post_return(group: Group, rank: int, row_format: RowFormat) -> None:
    info = group.word(rank, Word.INFO) | (record.INFO_FP8 if row_format is RowFormat.FP8 else 0)
    group.post(rank, FlagKind.RETURN, [info] * group.ranks[rank].shape.num_ranks)


def combine(group: Group, rank: int, batch: Batch, row_format: RowFormat) -> torch.Tensor:
    """[n, hidden] bf16: fp32 sums of result rows in ascending slot order."""
    shape = group.ranks[rank].shape
    num_rows, hidden = len(batch.ids), shape.hidden
    results = group.results(rank)[:num_rows]
    total = torch.zeros((num_rows, hidden), dtype=torch.float32, device=results.device)
    for slot in range(shape.num_topk):
        row = results[:, slot]
        if row_format is RowFormat.FP8:
            value = mx.dequantize_mxfp8(row[:, :hidden], row[:, hidden : hidden + hidden // 32])
        else:
            value = row.contiguous().view(torch.bfloat16).float() * batch.weights[:, slot : slot + 1]
        total += torch.where(batch.ids[:, slot : slot + 1] >= 0, value, 0.0)
    return total.bfloat16()
