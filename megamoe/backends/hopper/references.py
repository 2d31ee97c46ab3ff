"""Each stage in plain torch, under the name of its kernel: what the kernels are tested against, on any device.

They read and write the same buffers as the kernels, for all ranks of a group held in one process; ranks take turns,
so flags are written but never waited for. Written for clarity: loops over ranks, tokens and experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megamoe import mx
from megamoe.backends.hopper import packing, record
from megamoe.backends.hopper.buffers import BoundLayer, RankBuffers
from megamoe.backends.hopper.plan import (
    BLOCK_ROWS,
    COUNTER_WORDS,
    ENTRY_WORDS,
    STREAM_COSTS,
    Counter,
    GemmPlan,
    expert_entries,
)
from megamoe.backends.hopper.record import Word
from megamoe.bundle import RowFormat
from megamoe.layout import CACHE_LINE_BYTES, FlagKind

STREAM_FLAG = 1 << 8


@dataclass(frozen=True)
class Group:
    """All ranks of a group in one process: their heaps (uint8) and buffers, in rank order."""

    heaps: Sequence[torch.Tensor]
    ranks: Sequence[RankBuffers]

    def word(self, rank: int, word: int) -> int:
        return int(self.ranks[rank].control[word])

    def region(self, rank: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A view of a rank's heap."""
        count = dtype.itemsize
        for size in shape:
            count *= size
        return self.heaps[rank][offset : offset + count].view(dtype).view(shape)

    def meta(self, rank: int) -> torch.Tensor:
        layout = self.ranks[rank].layout
        shape = (layout.max_rows_received, layout.meta_words)
        return self.region(rank, self.word(rank, Word.META_OFFSET), shape, torch.int32)

    def payload(self, rank: int) -> torch.Tensor:
        layout = self.ranks[rank].layout
        shape = (layout.max_rows_received, layout.row_bytes)
        return self.region(rank, self.word(rank, Word.ROWS_OFFSET), shape, torch.uint8)

    def counts(self, rank: int) -> torch.Tensor:
        layout = self.ranks[rank].layout
        shape = (layout.num_ranks, layout.counts_words)
        return self.region(rank, self.word(rank, Word.COUNTS_OFFSET), shape, torch.int32)

    def results(self, rank: int) -> torch.Tensor:
        """[C, num_topk, result_bytes] uint8."""
        layout = self.ranks[rank].layout
        shape = (layout.capacity, layout.bundle.shape.num_topk, layout.result_bytes)
        return self.region(rank, self.word(rank, Word.COMBINE_OFFSET), shape, torch.uint8)

    def flags(self, rank: int, kind: FlagKind) -> torch.Tensor:
        """[num_ranks] int64: what each source posted here."""
        offset = self.word(rank, Word.FLAGS_OFFSET) + kind * CACHE_LINE_BYTES
        return self.region(rank, offset, (self.ranks[rank].layout.num_ranks,), torch.int64)

    def post(self, rank: int, kind: FlagKind, infos: Sequence[int]) -> None:
        for dst, info in enumerate(infos):
            value = self.word(rank, Word.EPOCH) | (info | record.POSTED) << 32
            self.flags(dst, kind)[rank] = value - (1 << 64)


@dataclass(frozen=True)
class Batch:
    """A rank's rows as stages take them."""

    codes: torch.Tensor
    scales: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


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


def _received(group: Group, rank: int, src: int, first: int, *, compact: bool) -> tuple[int, int]:
    """(first slot, rows) of what a source sent here. first: for compact, the sum of earlier sources' rows."""
    if compact:
        return first, int(group.counts(rank)[src, rank])
    if not group.word(rank, Word.ROWS_PER_RANK + src):
        # A rank without rows is not waited for: what its flag says may be of an older launch.
        return 0, 0
    info = int(group.flags(rank, FlagKind.PAYLOAD)[src]) >> 32
    return src * group.word(rank, Word.CAPACITY), info & record.INFO_ROWS_MASK


def _routed_rows(group: Group, rank: int, *, compact: bool) -> tuple[torch.Tensor, ...]:
    """Of all routed rows in order (source, token, slot): local expert, payload slot, result address, weight."""
    buffers = group.ranks[rank]
    shape, num_topk = buffers.shape, buffers.shape.num_topk
    meta = group.meta(rank)
    parts = []
    first = 0
    for src in range(shape.num_ranks):
        first, count = _received(group, rank, src, first, compact=compact)
        words = meta[first : first + count]
        local = words[:, 1 : 1 + num_topk] - rank * shape.num_experts_per_rank
        row, slot = ((local >= 0) & (local < shape.num_experts_per_rank)).nonzero(as_tuple=True)
        results = int(buffers.bases[src]) + group.word(rank, Word.COMBINE_OFFSET)
        address = results + (words[row, 0].long() * num_topk + slot) * buffers.layout.result_bytes
        weight = words[row, 1 + num_topk + slot].view(torch.float32)
        parts.append((local[row, slot], first + row, address, weight))
        first += count
    return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))


def index(group: Group, rank: int, gemms: GemmPlan, *, compact: bool) -> None:
    """Routed rows by expert in order (source, token, slot), and the GEMMs' work entries."""
    buffers = group.ranks[rank]
    experts, slots, addresses, weights = _routed_rows(group, rank, compact=compact)
    counts = torch.bincount(experts, minlength=buffers.shape.num_experts_per_rank).tolist()
    stream: list[list[tuple[int, int, int, int]]] = [[] for _ in STREAM_COSTS]
    tiled: list[tuple[int, int, int, int]] = []
    for expert, cuts in enumerate(expert_entries(counts, gemms)):
        mine = (experts == expert).nonzero().flatten()
        first, last = cuts.first_row, cuts.first_row + len(mine)
        buffers.row_slot[first:last] = slots[mine].int()
        buffers.row_address[first:last] = addresses[mine]
        buffers.row_weight[first:last] = weights[mine]
        for start in range(0, len(mine), BLOCK_ROWS):
            block_rows = min(len(mine) - start, BLOCK_ROWS)
            buffers.block_info[(first + start) // BLOCK_ROWS] = block_rows | (
                STREAM_FLAG if cuts.streaming else 0
            )
        for number, count in enumerate(cuts.rows):
            if cuts.streaming:
                stream[(count - 1) // 8].append((expert, first // BLOCK_ROWS + number, count, 0))
            else:
                tiled.append((expert, first + number * gemms.block_n, count, 0))
    work = buffers.work
    for offset, entries in (
        (buffers.sizes.stream_offset, [entry for width in stream for entry in width]),
        (buffers.sizes.tiled_offset, tiled),
    ):
        flat = torch.tensor(entries, dtype=torch.int32).flatten()
        work[offset : offset + len(flat)] = flat.to(work.device)
    for width, listed in enumerate(stream):
        work[Counter.NUM_STREAM_ENTRIES + width] = len(listed)
    work[Counter.NUM_TILED_ENTRIES] = len(tiled)
    work[Counter.NUM_BLOCKS] = sum(-(-count // BLOCK_ROWS) for count in counts)
    work[Counter.NUM_ROUTED_ROWS] = sum(counts)


def expand(group: Group, rank: int) -> None:
    """Payload rows -> bf16 token operands, block by block."""
    buffers = group.ranks[rank]
    hidden, sf_bytes = buffers.shape.hidden, buffers.layout.sf_bytes
    payload = group.payload(rank)
    for block in range(int(buffers.work[Counter.NUM_BLOCKS])):
        info = int(buffers.block_info[block])
        count = info & 0xFF
        first = block * BLOCK_ROWS
        slots = buffers.row_slot[first : first + count].long()
        rows = torch.zeros(
            (BLOCK_ROWS, buffers.sizes.image_columns), dtype=torch.bfloat16, device=payload.device
        )
        codes, scales = payload[slots, :hidden], payload[slots, hidden : hidden + sf_bytes]
        rows[:count, :hidden] = mx.dequantize_mxfp8(codes, scales).bfloat16()
        if info >= STREAM_FLAG:
            buffers.image[first : first + BLOCK_ROWS] = packing.to_stream_order(rows)
        else:
            buffers.image[first : first + count] = packing.to_tiled_order(rows)[:count]


def entries_of(buffers: RankBuffers) -> list[tuple[bool, int, int, int]]:
    """(streaming, expert, first row, rows) of all work entries."""
    out = []
    counters = buffers.work[:COUNTER_WORDS].tolist()
    num_stream = sum(counters[Counter.NUM_STREAM_ENTRIES :][: len(STREAM_COSTS)])
    for streaming, offset, number in (
        (True, buffers.sizes.stream_offset, num_stream),
        (False, buffers.sizes.tiled_offset, counters[Counter.NUM_TILED_ENTRIES]),
    ):
        table = buffers.work[offset : offset + ENTRY_WORDS * number].view(number, ENTRY_WORDS)
        for expert, first, count, _ in table.tolist():
            out.append((streaming, expert, first * BLOCK_ROWS if streaming else first, count))
    return out


def _rows_of(image: torch.Tensor, streaming: bool, first: int, count: int) -> torch.Tensor:
    if streaming:
        blocks = range(first, first + count, BLOCK_ROWS)
        return torch.cat([packing.from_stream_order(image[row : row + BLOCK_ROWS]) for row in blocks])[:count]
    return packing.from_tiled_order(image[first : first + count])


def _expert(matrix: packing.PackedMatrix, expert: int) -> torch.Tensor:
    """fp32 [padded rows, padded columns] of one expert."""
    part = slice(expert, expert + 1)
    one = packing.PackedMatrix(
        matrix.units[part], matrix.out_factor[part], matrix.num_rows, matrix.num_columns
    )
    return packing.unpack_matrix(one)[0]


def gemm1(group: Group, rank: int, layer: BoundLayer) -> None:
    """Rows times gate and up, SwiGLU, MXFP8, as GEMM2's token operand."""
    assert layer.w13 is not None
    buffers = group.ranks[rank]
    shape = buffers.shape
    dense: dict[int, torch.Tensor] = {}
    for streaming, expert, first, count in entries_of(buffers):
        if expert not in dense:
            dense[expert] = _expert(layer.w13, expert)
        x = _rows_of(buffers.image, streaming, first, count).float()
        both = (x @ dense[expert].T).view(count, -1, 2, 8)
        gate, up = both[:, :, 0].flatten(1), both[:, :, 1].flatten(1)
        if shape.swiglu_limit:
            gate, up = gate.clamp(max=shape.swiglu_limit), up.clamp(-shape.swiglu_limit, shape.swiglu_limit)
        act = torch.nn.functional.silu if shape.activation == "silu" else torch.nn.functional.gelu
        h = mx.dequantize_mxfp8(*mx.quantize_mxfp8(act(gate) * up)).bfloat16()
        if streaming:
            padded = -(-count // BLOCK_ROWS) * BLOCK_ROWS
            rows = torch.zeros((padded, h.shape[1]), dtype=torch.bfloat16, device=h.device)
            rows[:count] = h
            for row in range(0, padded, BLOCK_ROWS):
                block = packing.to_stream_order(rows[row : row + BLOCK_ROWS])
                buffers.middle[first + row : first + row + BLOCK_ROWS] = block
        else:
            buffers.middle[first : first + count] = packing.to_tiled_order(h)


def _write_rows(group: Group, addresses: torch.Tensor, rows: torch.Tensor) -> None:
    """rows [n, bytes] uint8 to their addresses, in any rank's heap."""
    columns = torch.arange(rows.shape[1], device=rows.device)
    for memory in group.heaps:
        offset = addresses - memory.data_ptr()
        mine = ((offset >= 0) & (offset < memory.numel())).nonzero().flatten()
        memory[offset[mine, None] + columns] = rows[mine]


def _return(group: Group, rank: int, first: int, rows: torch.Tensor, row_format: RowFormat) -> None:
    """Result rows fp32 [n, hidden], the routed rows from `first` on, to their addresses."""
    buffers = group.ranks[rank]
    part = slice(first, first + len(rows))
    if row_format is RowFormat.FP8:
        packed = torch.cat(mx.quantize_mxfp8(rows * buffers.row_weight[part, None]), dim=1)
    else:
        packed = rows.bfloat16().view(torch.uint8)
    _write_rows(group, buffers.row_address[part], packed)


def gemm2(group: Group, rank: int, layer: BoundLayer, row_format: RowFormat) -> None:
    """Intermediate rows times the down projection, to their sources."""
    assert layer.w2 is not None
    buffers = group.ranks[rank]
    dense: dict[int, torch.Tensor] = {}
    for streaming, expert, first, count in entries_of(buffers):
        if expert not in dense:
            dense[expert] = _expert(layer.w2, expert)
        h = _rows_of(buffers.middle, streaming, first, count).float()
        _return(group, rank, first, (h @ dense[expert].T)[:, : buffers.shape.hidden], row_format)


def identity(group: Group, rank: int, row_format: RowFormat) -> None:
    """The payload rows themselves, to their sources."""
    buffers = group.ranks[rank]
    hidden, sf_bytes = buffers.shape.hidden, buffers.layout.sf_bytes
    payload = group.payload(rank)
    for _, _, first, count in entries_of(buffers):
        slots = buffers.row_slot[first : first + count].long()
        rows = mx.dequantize_mxfp8(payload[slots, :hidden], payload[slots, hidden : hidden + sf_bytes])
        _return(group, rank, first, rows, row_format)


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
