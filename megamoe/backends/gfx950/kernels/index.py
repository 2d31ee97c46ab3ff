"""The second half of dispatch: which routed rows each local expert has, in canonical order (src_rank, token, slot).

A workgroup takes an expert and looks at the ids beside all received rows twice: to count, which gives the expert's
place among all routed rows, and to write. Nothing is exchanged between workgroups.
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import gpu, range_constexpr, rocdl
from flydsl.expr.typing import Vector as Vec

from megamoe.backends.gfx950.kernels.lang import (
    WAVE,
    ballot,
    lanes_below,
    long,
    popcount,
    uniform,
    wide,
    words,
)
from megamoe.backends.gfx950.record import RESULT_INDEX_BITS

_GROUP = rocdl.SyncScope.Workgroup


def lds_of(num_experts, num_waves):
    """LDS of a workgroup: routed rows per expert, sums over the experts before, matches per wave."""

    @fx.struct
    class Lds:
        histogram: fx.Array[fx.Int32, num_experts, 4]
        sums: fx.Array[fx.Int32, 2, 4]
        matches: fx.Array[fx.Int32, num_waves, 4]

    return Lds


def locate(i, ends, capacity):
    """Received row i, in order of source: (its source rank, its payload row). ends: running sums of rows a source;
    capacity: slots of a source, None where rows lie densely."""
    src, start = fx.Int32(0), fx.Int32(0)
    for rank in range(1, len(ends)):
        beyond = i >= ends[rank - 1]
        src = beyond.select(fx.Int32(rank), src)
        start = beyond.select(ends[rank - 1], start)
    return src, i if capacity is None else src * capacity + i - start


@flyc.jit
def count_rows(
    lds, meta, expert, first_id, ends, capacity, tile_shift, NUM_EXPERTS, TOPK, META_WORDS, THREADS
):
    """(rows of the expert, rows of those before it, m-tiles of those before it). meta: address of the words beside
    rows; first_id: global id of the first of the NUM_EXPERTS experts that are counted."""
    thread = fx.thread_idx.x
    total = ends[-1]
    for at in range(thread, fx.Int32(NUM_EXPERTS), fx.Int32(THREADS)):
        fx.generic_store(lds.histogram.ptr + fx.Int32(at), fx.Int32(0))
    if thread < 2:
        fx.generic_store(lds.sums.ptr + thread, fx.Int32(0))
    gpu.barrier()
    for i in range(thread, total, fx.Int32(THREADS)):
        _, payload_row = locate(fx.Int32(i), ends, capacity)
        ids = words(meta + long(payload_row) * (META_WORDS * 4)) + 1
        for k in range_constexpr(TOPK):
            local = fx.generic_load(ids + k) - first_id
            if (local >= 0) & (local < NUM_EXPERTS):
                fx.atomic_add(lds.histogram.ptr + local, fx.Int32(1), syncscope=_GROUP)
    gpu.barrier()
    for at in range(thread, expert, fx.Int32(THREADS)):
        rows = fx.generic_load(lds.histogram.ptr + fx.Int32(at))
        fx.atomic_add(lds.sums.ptr, rows, syncscope=_GROUP)
        fx.atomic_add(lds.sums.ptr + 1, (rows + (1 << tile_shift) - 1) >> tile_shift, syncscope=_GROUP)
    gpu.barrier()
    count = uniform(fx.generic_load(lds.histogram.ptr + expert))
    row_base = uniform(fx.generic_load(lds.sums.ptr))
    tile_base = fx.generic_load(lds.sums.ptr + 1)
    return count, row_base, tile_base


@flyc.jit
def index_expert(
    lds,
    meta,
    experts,
    row_table,
    expert,
    first_id,
    ends,
    capacity,
    tile_shift,
    NUM_EXPERTS,
    TOPK,
    META_WORDS,
    THREADS,
):
    """Write expert's record (rows, first routed row, first m-tile, 0) and its rows (payload row, source and result
    index, weight, 0). meta: address of the words beside received rows; first_id: global id of local expert 0."""
    count, row_base, tile_base = count_rows(
        lds, meta, expert, first_id, ends, capacity, tile_shift, NUM_EXPERTS, TOPK, META_WORDS, THREADS
    )
    if fx.thread_idx.x == 0:
        fx.generic_store(
            wide(experts) + expert * 4, Vec.from_elements([count, row_base, tile_base, fx.Int32(0)], fx.Int32)
        )

    def store(at, payload_row, src, result, weight):
        record = [payload_row, (src << RESULT_INDEX_BITS) | result, weight, fx.Int32(0)]
        fx.generic_store(wide(row_table) + at * 4, Vec.from_elements(record, fx.Int32))

    if count > 0:
        write_rows(lds, meta, expert + first_id, row_base, ends, capacity, TOPK, META_WORDS, THREADS, store)
    gpu.barrier()


@flyc.jit
def write_rows(lds, meta, expert_id, row_base, ends, capacity, TOPK, META_WORDS, THREADS, store):
    """store(place, payload row, source, token * TOPK + slot, weight bits) for each row of an expert, in order, places
    from row_base on."""
    thread = fx.thread_idx.x
    wave = uniform(thread // WAVE)
    total = ends[-1]
    written = row_base
    for start in range(fx.Int32(0), total, fx.Int32(THREADS)):
        i = fx.Int32(start) + thread
        inside = i < total
        src, payload_row = locate(inside.select(i, fx.Int32(0)), ends, capacity)
        beside = words(meta + long(payload_row) * (META_WORDS * 4))
        token = fx.generic_load(beside)
        here = []
        before = fx.Int32(0)
        in_wave = fx.Int32(0)
        for k in range_constexpr(TOPK):
            match = inside & (fx.generic_load(beside + (1 + k)) == expert_id)
            mask = ballot(match)
            here.append(match)
            before = before + lanes_below(mask)
            in_wave = in_wave + popcount(mask)
        if thread % WAVE == 0:
            fx.generic_store(lds.matches.ptr + wave, in_wave)
        gpu.barrier()
        after = written
        for w in range_constexpr(THREADS // WAVE):
            matches = fx.generic_load(lds.matches.ptr + w)
            before = before + (wave > w).select(matches, fx.Int32(0))
            after = after + matches
        at = written + before
        for k in range_constexpr(TOPK):
            if here[k]:
                weight = fx.generic_load(beside + (1 + TOPK + k))
                store(at, payload_row, src, token * TOPK + k, weight)
            at = at + here[k].select(fx.Int32(1), fx.Int32(0))
        written = uniform(after)
        gpu.barrier()
