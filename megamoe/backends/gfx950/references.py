"""Every kernel's reference of the same name, in plain torch: byte for byte where a kernel moves or encodes, else fp64.

Layouts are those of device memory: rows [codes, scales in MFMA order], words beside rows [token, ids, weights,
padding], records of experts [rows, first routed row, first m-tile, 0], records of routed rows [payload row, source and
result index, weight bits, 0].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megamoe import mx
from megamoe.backends.gfx950.plan import inner_bytes
from megamoe.backends.gfx950.record import MAX_CHUNK, MAX_RANKS, RESULT_INDEX_BITS
from megamoe.backends.gfx950.shuffle import plain_scales, row_scales
from megamoe.layout import HeapLayout
from megamoe.shape import MX_BLOCK
from megamoe.weights import LayerWeights


def encode_rows(x: torch.Tensor, row_bytes: int) -> torch.Tensor:
    """[m, k] float -> [m, row_bytes] uint8: codes, scales in MFMA order, zeros."""
    codes, scales = mx.quantize_mxfp8(x)
    row = torch.cat([codes, row_scales(scales)], dim=1)
    return torch.nn.functional.pad(row, (0, row_bytes - row.shape[1]))


def decode_rows(rows: torch.Tensor, k: int) -> torch.Tensor:
    """The inverse: [m, row_bytes] uint8 -> [m, k] float32."""
    scales = plain_scales(rows[:, k : k + 16 * -(-k // (16 * MX_BLOCK))].contiguous(), k // MX_BLOCK)
    return mx.dequantize_mxfp8(rows[:, :k].contiguous(), scales.contiguous())


def quantize(
    layout: HeapLayout, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [n, hidden] bf16, ids, weights [n, num_topk] -> (rows [n, row_bytes], words [n, meta_words] int32)."""
    n, num_experts = len(hidden), layout.bundle.shape.num_experts
    words = torch.zeros(n, layout.meta_words, dtype=torch.int32)
    words[:, 0] = torch.arange(n)
    num_topk = ids.shape[1]
    words[:, 1 : 1 + num_topk] = torch.where((ids >= 0) & (ids < num_experts), ids, -1)
    words[:, 1 + num_topk : 1 + 2 * num_topk] = weights.contiguous().view(torch.int32)
    return encode_rows(hidden, layout.row_bytes), words


def prepare(layout: HeapLayout, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank's words [n, meta_words] -> (token_slots [n, num_ranks], counts [num_ranks]): a token's place among those
    that a destination gets, -1 where it gets none."""
    shape = layout.bundle.shape
    ids = words[:, 1 : 1 + shape.num_topk]
    owners = torch.where(ids >= 0, ids // shape.num_experts_per_rank, -1)
    wanted = torch.stack([(owners == rank).any(1) for rank in range(shape.num_ranks)], dim=1)
    places = wanted.int().cumsum(0) - 1
    return torch.where(wanted, places, -1).int(), wanted.sum(0).int()


@dataclass(frozen=True)
class Dispatched:
    """What dispatch leaves on an owner. experts [E, 4] int32, row_table [m, 4] int32."""

    experts: torch.Tensor
    row_table: torch.Tensor


def dispatch(
    layout: HeapLayout,
    rank: int,
    words_per_rank: Sequence[torch.Tensor],
    *,
    capacity: int | None,
    tile_shift: int,
) -> Dispatched:
    """The records of owner `rank` from all ranks' words. capacity: of fixed_slot's runtime; None: compact."""
    shape = layout.bundle.shape
    first_id, num_topk = rank * shape.num_experts_per_rank, shape.num_topk
    rows: list[list[list[int]]] = [[] for _ in range(shape.num_experts_per_rank)]
    dense = 0
    for src, words in enumerate(words_per_rank):
        for token, line in enumerate(words.tolist()):
            mine = [
                k for k in range(num_topk) if first_id <= line[1 + k] < first_id + shape.num_experts_per_rank
            ]
            payload_row = dense if capacity is None else src * capacity + token
            dense += bool(mine)
            for k in mine:
                result = src << RESULT_INDEX_BITS | token * num_topk + k
                rows[line[1 + k] - first_id].append([payload_row, result, line[1 + num_topk + k], 0])
    records, row_base, tile_base = [], 0, 0
    for of_expert in rows:
        records.append([len(of_expert), row_base, tile_base, 0])
        row_base += len(of_expert)
        tile_base += (len(of_expert) + (1 << tile_shift) - 1) >> tile_shift
    table = [record for of_expert in rows for record in of_expert]
    return Dispatched(
        torch.tensor(records, dtype=torch.int32), torch.tensor(table, dtype=torch.int32).view(len(table), 4)
    )


def lists(layout: HeapLayout, words: torch.Tensor, owner: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a source's words [n, meta_words] come to for an owner in large_m: (rows of each of its experts [E], pairs
    (token * num_topk + slot, weight bits) [m, 2], expert after expert), all int32."""
    shape = layout.bundle.shape
    num_experts, num_topk = shape.num_experts_per_rank, shape.num_topk
    pairs: list[list[list[int]]] = [[] for _ in range(num_experts)]
    for token, line in enumerate(words.tolist()):
        for k in range(num_topk):
            expert = line[1 + k] - owner * num_experts
            if 0 <= expert < num_experts:
                pairs[expert].append([token * num_topk + k, line[1 + num_topk + k]])
    flat = [pair for of_expert in pairs for pair in of_expert]
    counts = torch.tensor([len(of_expert) for of_expert in pairs], dtype=torch.int32)
    return counts, torch.tensor(flat, dtype=torch.int32).view(len(flat), 2)


@dataclass(frozen=True)
class Tiling:
    """What large_m's director writes: experts [E, 4], segments [E, 2 MAX_RANKS], tiles [t] (words of the board)."""

    experts: torch.Tensor
    segments: torch.Tensor
    tiles: torch.Tensor

    def sources(self, tile: int) -> int:
        """Mask of the sources whose rows a tile holds."""
        return int(self.tiles[tile]) >> 8 & 0xFF


def tiling(layout: HeapLayout, counts: torch.Tensor, *, capacity: int, block_m: int) -> Tiling:
    """counts [num_ranks, E]: rows that each source brings to each expert of an owner; capacity: of the runtime."""
    num_ranks, num_experts = counts.shape
    part = capacity * layout.meta_words // 2
    before, starts = counts.cumsum(1) - counts, counts.cumsum(0) - counts
    segments = torch.zeros(num_experts, 2 * MAX_RANKS, dtype=torch.int32)
    segments[:, :num_ranks] = starts.T
    sources = torch.arange(num_ranks)[:, None]
    segments[:, MAX_RANKS : MAX_RANKS + num_ranks] = (before + part * sources - starts).T
    records, row_base = [], 0
    tiles: list[int] = []
    for expert in range(num_experts):
        rows = int(counts[:, expert].sum())
        num_tiles = -(-rows // block_m)
        records.append([rows, row_base, len(tiles), 0])
        chunk = max(min(num_tiles // 2, MAX_CHUNK), 1).bit_length() - 1
        for low in range(0, rows, block_m):
            mask = sum(
                1 << src
                for src in range(num_ranks)
                if counts[src, expert] and starts[src, expert] < low + block_m
                and starts[src, expert] + counts[src, expert] > low
            )  # fmt: skip
            tiles.append(expert << 16 | mask << 8 | chunk)
        row_base += rows
    return Tiling(torch.tensor(records, dtype=torch.int32), segments, torch.tensor(tiles, dtype=torch.int32))


def gemm1(
    rows: torch.Tensor, dispatched: Dispatched, weights: LayerWeights, hidden: int, limit: float
) -> torch.Tensor:
    """Payload rows [p, row_bytes] uint8 -> what gemm1 encodes, before it does: [m, intermediate] float32."""
    x = decode_rows(rows, hidden)[dispatched.row_table[:, 0].long()].double()
    out = []
    for expert, (count, base, _, _) in enumerate(dispatched.experts.tolist()):
        w13 = weights.experts(expert, expert + 1).dequantized()[0][0].double()
        gate, up = (x[base : base + count] @ w13.T).float().chunk(2, dim=-1)
        if limit:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        out.append(torch.nn.functional.silu(gate) * up)
    return torch.cat(out)


def gemm2(inner: torch.Tensor, dispatched: Dispatched, weights: LayerWeights) -> torch.Tensor:
    """Intermediate rows [m, intermediate] float32 (decoded) -> result rows [m, hidden] float32."""
    out = []
    for expert, (count, base, _, _) in enumerate(dispatched.experts.tolist()):
        w2 = weights.experts(expert, expert + 1).dequantized()[1][0].double()
        out.append((inner[base : base + count].double() @ w2.T).float())
    return torch.cat(out)


def identity(rows: torch.Tensor, dispatched: Dispatched, hidden: int) -> torch.Tensor:
    """Payload rows [p, row_bytes] uint8 -> result rows [m, hidden] float32: each routed row as it came."""
    return decode_rows(rows, hidden)[dispatched.row_table[:, 0].long()]


def result_rows(results: torch.Tensor, dispatched: Dispatched, *, fp8: bool) -> torch.Tensor:
    """Result rows [m, hidden] float32 as they are sent, [m, 2 hidden] uint8: bf16, or weighted codes and scales."""
    if not fp8:
        return results.bfloat16().view(torch.uint8)
    weights = dispatched.row_table[:, 2].contiguous().view(torch.float32)
    row = torch.cat(mx.quantize_mxfp8(results * weights[:, None]), dim=1)
    return torch.nn.functional.pad(row, (0, 2 * results.shape[1] - row.shape[1]))


def combine(
    layout: HeapLayout, words: torch.Tensor, rows: torch.Tensor, fp8_owners: Sequence[bool]
) -> torch.Tensor:
    """A source's words [n, meta_words] and combine region [n, num_topk, 2 hidden] uint8 -> [n, hidden] bf16."""
    shape = layout.bundle.shape
    out = torch.zeros(len(words), shape.hidden)
    sf = shape.hidden // MX_BLOCK
    for token in range(len(words)):
        for k in range(shape.num_topk):
            expert = int(words[token, 1 + k])
            if expert < 0:
                continue
            row = rows[token, k]
            if fp8_owners[shape.owner_rank(expert)]:
                codes, scales = row[None, : shape.hidden], row[None, shape.hidden : shape.hidden + sf]
                out[token] += mx.dequantize_mxfp8(codes.contiguous(), scales.contiguous())[0]
            else:
                weight = words[token, 1 + shape.num_topk + k].view(torch.float32)
                out[token] += row.view(torch.bfloat16).float() * weight
    return out.bfloat16()


def is_heavy(dispatched: Dispatched, min_rows: int, min_rows_of_expert: int) -> bool:
    """Whether small_m's owner with these lists received so many rows, or so many of one expert."""
    counts = dispatched.experts[:, 0]
    return bool(counts.sum() >= min_rows or counts.max() >= min_rows_of_expert)


def small_m(
    layout: HeapLayout,
    rows_per_rank: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    weights: LayerWeights,
    fp8_owners: Sequence[bool],
    *,
    capacity: int,
    tile_shift: int,
) -> list[torch.Tensor]:
    """All ranks' (hidden [n, hidden] bf16, ids, weights [n, num_topk]) through every stage -> [n, hidden] bf16 each.

    weights: all experts. fp8_owners: the owners that send FP8 rows."""
    shape = layout.bundle.shape
    staged = [quantize(layout, *one) for one in rows_per_rank]
    words = [beside for _, beside in staged]
    payload = torch.zeros(shape.num_ranks * capacity, layout.row_bytes, dtype=torch.uint8)
    for src, (rows, _) in enumerate(staged):
        payload[src * capacity : src * capacity + len(rows)] = rows
    regions = [
        torch.zeros(len(rows) * shape.num_topk, layout.result_bytes, dtype=torch.uint8) for rows, _ in staged
    ]
    for owner in range(shape.num_ranks):
        found = dispatch(layout, owner, words, capacity=capacity, tile_shift=tile_shift)
        first = owner * shape.num_experts_per_rank
        mine = weights.experts(first, first + shape.num_experts_per_rank)
        exact = gemm1(payload, found, mine, shape.hidden, shape.swiglu_limit)
        inner = decode_rows(encode_rows(exact, inner_bytes(shape.intermediate)), shape.intermediate)
        results = result_rows(gemm2(inner, found, mine), found, fp8=fp8_owners[owner])
        for row, place in zip(results, found.row_table[:, 1].tolist(), strict=True):
            regions[place >> RESULT_INDEX_BITS][place & (1 << RESULT_INDEX_BITS) - 1] = row
    return [
        combine(layout, beside, region.view(-1, shape.num_topk, layout.result_bytes), fp8_owners)
        for beside, region in zip(words, regions, strict=True)
    ]
