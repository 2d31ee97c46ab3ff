"""dispatch: this rank's rows into their owners' buffers, flags, and, as an owner, the rows of each local expert.

fixed_slot: row `token` of source rank s has slot s * capacity + token at every destination, and ids go to all ranks, so
that what an older launch left in a slot is never taken for this one's. compact: rows lie densely at the places that
prepare found. A row goes once to a rank, however many of its experts it names.
Two ranks never wait for each other's workgroups: a rank sends all before it waits. The grid must be co-resident.
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import const_expr, range_constexpr

from megamoe.backends.gfx950.kernels import flags, index
from megamoe.backends.gfx950.kernels.lang import (
    WAVE,
    ballot,
    control_int,
    control_word,
    long,
    uniform,
    wide,
    words,
)
from megamoe.backends.gfx950.record import COPY_BYTES, Word
from megamoe.layout import FlagKind

ALONE = 256
"""Work-items of a workgroup where dispatch is a launch of its own."""


@flyc.jit
def copy_row(source, target, ROW_BYTES):
    """One wave copies one row, 16 bytes a lane; all that COPY_BYTES holds is on its way before the first is stored."""
    lane = fx.thread_idx.x % WAVE
    for start in range_constexpr(0, ROW_BYTES, COPY_BYTES):
        places = [
            lane * 16 + at for at in range_constexpr(start, min(start + COPY_BYTES, ROW_BYTES), WAVE * 16)
        ]
        # Lanes past the end of the row load its begin, which is never stored.
        chunks = [
            fx.generic_load(wide(source + long((at < ROW_BYTES).select(at, fx.Int32(0)))), count=4)
            for at in places
        ]
        for i in range_constexpr(len(places)):
            if places[i] < ROW_BYTES:
                fx.generic_store(wide(target + long(places[i])), chunks[i], nontemporal=True)


@flyc.jit
def send(
    control, bases, rank, rows, meta, token_slots, sent_counts, num_groups,
    COMPACT, ROW_BYTES, META_WORDS, TOPK, NUM_EXPERTS, NUM_RANKS, THREADS,
):  # fmt: skip
    """A wave takes a (token, destination): what stands beside the row, and the row if it has an expert there."""
    lane = fx.thread_idx.x % WAVE
    num_waves = THREADS // WAVE
    wave = uniform(fx.block_idx.x * num_waves + fx.thread_idx.x // WAVE)
    num_rows = control_int(control, Word.NUM_ROWS)
    first_slot = rank * control_int(control, Word.CAPACITY)
    meta_offset, rows_offset = (
        control_word(control, Word.META_OFFSET),
        control_word(control, Word.ROWS_OFFSET),
    )
    failed = control_int(control, Word.FAILED)
    num_units = (failed == 0).select(num_rows * NUM_RANKS, fx.Int32(0))
    sent = fx.Int32(0)
    for unit in range(wave, num_units, num_groups * num_waves):
        unit = fx.Int32(unit)
        token = unit // NUM_RANKS
        # Ranks begin with different destinations.
        dst_rank = (unit + rank) % NUM_RANKS
        place = (lane < META_WORDS).select(lane, fx.Int32(0))
        word = fx.generic_load(words(meta) + (token * META_WORDS + place))
        is_id = (lane >= 1) & (lane <= TOPK)
        owned = is_id & (word >= dst_rank * NUM_EXPERTS) & (word < (dst_rank + 1) * NUM_EXPERTS)
        wanted = ballot(owned) != 0
        slot = first_slot + token
        if const_expr(COMPACT):
            slot = uniform(fx.generic_load(words(token_slots) + (token * NUM_RANKS + dst_rank)))
            slot = slot + uniform(fx.generic_load(words(sent_counts) + (NUM_RANKS + dst_rank)))
        heap = flags.peer_heap(bases, dst_rank)
        with_meta = lane < META_WORDS
        if const_expr(COMPACT):
            with_meta = with_meta & wanted
        if with_meta:
            beside = is_id & (owned == False)  # noqa: E712
            word = beside.select(fx.Int32(-1), word)
            fx.generic_store(words(heap + meta_offset) + (slot * META_WORDS + lane), word)
        if wanted:
            source = rows + long(token) * ROW_BYTES
            target = heap + rows_offset + long(slot) * ROW_BYTES
            copy_row(source, target, ROW_BYTES)
        counted = wanted & (dst_rank != rank)
        sent = sent + counted.select(fx.Int32(1), fx.Int32(0))
    if (lane == 0) & (sent > 0):
        fx.atomic_add(words(control) + 2 * int(Word.ROWS_SENT), sent, syncscope=fx.rocdl.SyncScope.Agent)


@flyc.jit
def announce(lds, control, bases, rank, sent_counts, num_groups, COMPACT, NUM_RANKS):
    """The last workgroup to have sent its rows posts the payload flags: how many rows came from here."""
    last = flags.arrive(lds, control, num_groups)
    if (last == 1) & (flags.has_failed(control) == 0):
        info = control_int(control, Word.NUM_ROWS)
        if const_expr(COMPACT):
            place = (fx.thread_idx.x < NUM_RANKS).select(fx.thread_idx.x, fx.Int32(0))
            info = fx.generic_load(words(sent_counts) + place)
        flags.post(control, bases, rank, FlagKind.PAYLOAD, info, NUM_RANKS)


def needed_sources(control, compact, num_ranks):
    """Mask of ranks whose payload is waited for. With slots, ranks without rows cannot hold up the others."""
    return fx.Int32((1 << num_ranks) - 1) if compact else control_int(control, Word.SOURCES)


def rows_of_sources(lds, needed, compact, num_ranks):
    """Running sums of the rows that the sources announced; 0 for those that were not waited for."""
    ends, total = [], fx.Int32(0)
    for src in range(num_ranks):
        announced = flags.rows_announced(uniform(fx.generic_load(lds.infos.ptr + src)))
        if not compact:
            announced = (((needed >> src) & 1) == 1).select(announced, fx.Int32(0))
        total = total + announced
        ends.append(total)
    return ends


@flyc.jit
def send_to_all(
    lds, control, bases, rank, rows, meta, num_senders, ROW_BYTES, META_WORDS, TOPK, NUM_EXPERTS, NUM_RANKS, THREADS
):  # fmt: skip
    """large_m: the first num_senders workgroups send rows to their slots, and flags as soon as a destination has all.

    Each destination has senders of its own, so that all links are busy at once. Fewer senders
    than ranks serve several destinations each, one after the other.
    """
    lane = fx.thread_idx.x % WAVE
    num_waves = THREADS // WAVE
    num_rows = control_int(control, Word.NUM_ROWS)
    first_slot = rank * control_int(control, Word.CAPACITY)
    rows_offset = control_word(control, Word.ROWS_OFFSET)
    sent = fx.Int32(0)
    for turn in range(fx.block_idx.x % NUM_RANKS, fx.Int32(NUM_RANKS), num_senders):
        turn = fx.Int32(turn)
        dst_rank = (turn + rank) % NUM_RANKS
        num_partners = (num_senders - 1 - turn % num_senders) // NUM_RANKS + 1
        heap = flags.peer_heap(bases, dst_rank)
        wave = uniform(fx.block_idx.x // NUM_RANKS * num_waves + fx.thread_idx.x // WAVE)
        for token in range(wave, num_rows, num_partners * num_waves):
            token = fx.Int32(token)
            is_id = lane < TOPK
            expert = fx.generic_load(words(meta) + (token * META_WORDS + 1 + is_id.select(lane, fx.Int32(0))))
            owned = (expert >= dst_rank * NUM_EXPERTS) & (expert < (dst_rank + 1) * NUM_EXPERTS)
            if ballot(is_id & owned) != 0:
                target = heap + rows_offset + long(first_slot + token) * ROW_BYTES
                copy_row(rows + long(token) * ROW_BYTES, target, ROW_BYTES)
                sent = sent + (dst_rank != rank).select(fx.Int32(1), fx.Int32(0))
        last = flags.arrive(lds, control, num_partners, int(Word.SENT) + dst_rank)
        if (last == 1) & (fx.thread_idx.x == 0):
            flags.post_to(control, bases, rank, FlagKind.PAYLOAD, num_rows, dst_rank)
    if (lane == 0) & (sent > 0):
        fx.atomic_add(words(control) + 2 * int(Word.ROWS_SENT), sent, syncscope=fx.rocdl.SyncScope.Agent)


@flyc.jit
def exchange(
    lds, tables, control, bases, heap, rows, meta, token_slots, sent_counts, experts, row_table, rank, tile_shift,
    num_groups, COMPACT, ROW_BYTES, META_WORDS, TOPK, NUM_EXPERTS, NUM_RANKS, THREADS,
):  # fmt: skip
    """Send, wait, and list the rows of this workgroup's experts, one in num_groups. Returns 1 if all sources came."""
    send(
        control, bases, rank, rows, meta, token_slots, sent_counts, num_groups,
        COMPACT, ROW_BYTES, META_WORDS, TOPK, NUM_EXPERTS, NUM_RANKS, THREADS,
    )  # fmt: skip
    announce(lds, control, bases, rank, sent_counts, num_groups, COMPACT, NUM_RANKS)
    needed = needed_sources(control, COMPACT, NUM_RANKS)
    came = flags.wait(lds, control, bases, heap, rank, FlagKind.PAYLOAD, needed, NUM_RANKS)
    if came == 1:
        ends = rows_of_sources(lds, needed, COMPACT, NUM_RANKS)
        capacity = None if COMPACT else control_int(control, Word.CAPACITY)
        beside = heap + control_word(control, Word.META_OFFSET)
        for expert in range(fx.block_idx.x, fx.Int32(NUM_EXPERTS), num_groups):
            index.index_expert(
                tables, beside, experts, row_table, fx.Int32(expert), rank * NUM_EXPERTS, ends, capacity, tile_shift,
                NUM_EXPERTS, TOPK, META_WORDS, THREADS,
            )  # fmt: skip
    return came


@flyc.kernel(known_block_size=[ALONE, 1, 1])
def dispatch_kernel(
    control: fx.Int64,
    bases: fx.Int64,
    heap: fx.Int64,
    rows: fx.Int64,
    meta: fx.Int64,
    token_slots: fx.Int64,
    sent_counts: fx.Int64,
    experts: fx.Int64,
    row_table: fx.Int64,
    rank: fx.Int32,
    tile_shift: fx.Int32,
    num_groups: fx.Int32,
    COMPACT: fx.Constexpr[int],
    ROW_BYTES: fx.Constexpr[int],
    META_WORDS: fx.Constexpr[int],
    TOPK: fx.Constexpr[int],
    NUM_EXPERTS: fx.Constexpr[int],
    NUM_RANKS: fx.Constexpr[int],
):
    """dispatch alone, for identity experts."""
    allocator = fx.SharedAllocator()
    lds = allocator.allocate(flags.FlagLds).peek()
    tables = allocator.allocate(index.lds_of(NUM_EXPERTS, ALONE // WAVE)).peek()
    exchange(
        lds, tables, control, bases, heap, rows, meta, token_slots, sent_counts, experts, row_table, rank, tile_shift,
        num_groups, COMPACT, ROW_BYTES, META_WORDS, TOPK, NUM_EXPERTS, NUM_RANKS, ALONE,
    )  # fmt: skip


@flyc.jit
def compile_kernel(
    COMPACT: fx.Constexpr[int],
    ROW_BYTES: fx.Constexpr[int],
    META_WORDS: fx.Constexpr[int],
    TOPK: fx.Constexpr[int],
    NUM_EXPERTS: fx.Constexpr[int],
    NUM_RANKS: fx.Constexpr[int],
):
    z, one = fx.Int64(0), fx.Int32(1)
    dispatch_kernel(
        z, z, z, z, z, z, z, z, z, one, one, one, COMPACT, ROW_BYTES, META_WORDS, TOPK, NUM_EXPERTS, NUM_RANKS
    ).launch(grid=(1, 1, 1), block=(ALONE, 1, 1))
