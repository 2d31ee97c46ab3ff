"""Which routed rows each expert has, cut into work entries, and their operands."""

from __future__ import annotations

import torch

from megamoe import mx
from megamoe.backends.hopper import packing, record
from megamoe.backends.hopper.buffers import RankBuffers
from megamoe.backends.hopper.plan import (
    BLOCK_ROWS,
    COUNTER_WORDS,
    ENTRY_WORDS,
    MAX_WIDTHS,
    STREAM_COSTS,
    Counter,
    GemmPlan,
)
from megamoe.backends.hopper.record import Word
from megamoe.backends.hopper.references.group import Group
from megamoe.backends.hopper.tables import expert_entries
from megamoe.layout import FlagKind

STREAM_FLAG = 1 << 8


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
    tiled: dict[int, list[tuple[int, int, int, int]]] = {width: [] for width in gemms.widths}
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
                begin = first + sum(cuts.rows[:number])
                tiled[cuts.widths[number]].append((expert, begin, count, 0))
    work = buffers.work
    for offset, entries in (
        (buffers.sizes.stream_offset, [entry for width in stream for entry in width]),
        (buffers.sizes.tiled_offset, [entry for listed in tiled.values() for entry in listed]),
    ):
        flat = torch.tensor(entries, dtype=torch.int32).flatten()
        work[offset : offset + len(flat)] = flat.to(work.device)
    for width, listed in enumerate(stream):
        work[Counter.NUM_STREAM_ENTRIES + width] = len(listed)
    work[Counter.NUM_TILED_ENTRIES :][:MAX_WIDTHS] = 0
    for number, listed in enumerate(tiled.values()):
        work[Counter.NUM_TILED_ENTRIES + number] = len(listed)
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
    num_tiled = sum(counters[Counter.NUM_TILED_ENTRIES :][:MAX_WIDTHS])
    for streaming, offset, number in (
        (True, buffers.sizes.stream_offset, num_stream),
        (False, buffers.sizes.tiled_offset, num_tiled),
    ):
        table = buffers.work[offset : offset + ENTRY_WORDS * number].view(number, ENTRY_WORDS)
        for expert, first, count, _ in table.tolist():
            out.append((streaming, expert, first * BLOCK_ROWS if streaming else first, count))
    return out
