"""What large_m moves, an item of ITEM_TOKENS tokens at a time: rows to their owners, and at the owners rows to the
places where GEMM1 reads them.

Rows lie in slots reserved for (source, token), so that they may leave before anybody has counted. Beside a row stand
the places that its source has counted out (count.py); with the table of where every source's rows of an expert begin,
an owner lays a row out without looking at any other, and sees when an entry of the GEMMs is complete.

`place`, `quad`, `lane`: indices in the caller's layouts; [places, 1], [1, 4] and [ITEM_TOKENS * 16].
"""

from __future__ import annotations

import triton
import triton.language as tl

from megamoe.backends.hopper import board
from megamoe.backends.hopper.device import flags, sync
from megamoe.backends.hopper.device.count import PLACE_SHIFT
from megamoe.backends.hopper.device.dispatch import (
    BYTES_SENT,
    CAPACITY,
    DROPPED_SLOTS,
    IDS_PTR,
    INFO,
    META_OFFSET,
    NUM_ROWS,
    ROWS_OFFSET,
    WEIGHTS_PTR,
    aligned,
)
from megamoe.backends.hopper.device.expand import bf16_words, payload_of
from megamoe.backends.hopper.device.index import COMBINE_OFFSET

ITEM_TOKENS = tl.constexpr(board.ITEM_TOKENS)
SECTIONS = tl.constexpr(board.SECTIONS)
EXPERT_MASK = tl.constexpr(board.MAX_EXPERTS_PER_RANK - 1)
SENT = tl.constexpr(board.BoardWord.SENT)
REPORTED = tl.constexpr(board.BoardWord.REPORTED)
TAIL1 = tl.constexpr(board.BoardWord.TAIL1)


@triton.jit
def owner_of(ids, at, mask, NUM_RANKS: tl.constexpr, EXPERTS_PER_RANK: tl.constexpr):
    """Rank that owns the expert in a slot, -1 for none."""
    expert = tl.load(ids + at, mask=mask, other=-1)
    valid = (expert >= 0) & (expert < NUM_RANKS * EXPERTS_PER_RANK)
    return tl.where(valid, tl.maximum(expert, 0) // EXPERTS_PER_RANK, -1)


@triton.jit
def _send_rows(
    control, bases, rows, ids, first, stop, place, quad, own_rank,
    NUM_RANKS: tl.constexpr, NUM_TOPK: tl.constexpr, EXPERTS_PER_RANK: tl.constexpr,
    ROW_BYTES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """16-byte pieces of rows to every rank that owns one of their experts. Returns bytes to peers."""
    SOME: tl.constexpr = place.shape[0] // WIDE
    piece = place % WIDE
    begun = 0 * place
    for part in range(0, ITEM_TOKENS, SOME):
        token = first + part + place // WIDE
        inside = (token < stop) & (piece < ROW_BYTES // 16)
        owners = 0 * place
        for slot in tl.static_range(NUM_TOPK):
            owner = owner_of(ids, token * NUM_TOPK + slot, inside, NUM_RANKS, EXPERTS_PER_RANK)
            owners = owners | tl.where(owner >= 0, 1 << tl.maximum(owner, 0), 0)
        within = piece * 4 + quad
        data = tl.load(
            rows + token.to(tl.int64) * (ROW_BYTES // 4) + within, mask=inside & (owners != 0), other=0
        )
        at = (own_rank * tl.load(control + CAPACITY).to(tl.int32) + token).to(tl.int64) * (
            ROW_BYTES // 4
        ) + within
        for dst in tl.static_range(NUM_RANKS):
            slots = aligned(tl.load(bases + dst) + tl.load(control + ROWS_OFFSET)).to(
                tl.pointer_type(tl.int32)
            )
            mine = inside & (((owners >> dst) & 1) == 1)
            tl.store(slots + at, data, mask=mine)
            if dst != own_rank:
                begun += (mine & (piece == 0)).to(tl.int32)
    return tl.sum(tl.reshape(begun, [place.shape[0]])) * ROW_BYTES


@triton.jit
def _send_meta(
    control, bases, places, ids, first, stop, lane, own_rank,
    NUM_RANKS: tl.constexpr, NUM_TOPK: tl.constexpr, EXPERTS_PER_RANK: tl.constexpr, META_WORDS: tl.constexpr,
):  # fmt: skip
    """What stands beside rows, of all tokens to all ranks: token, places (-1 unless they are the destination's),
    weights. Returns slots that name nobody."""
    dropped = 0 * lane
    weights = tl.load(control + WEIGHTS_PTR).to(tl.pointer_type(tl.int32))
    begin = own_rank * tl.load(control + CAPACITY).to(tl.int32)
    for start in tl.static_range(0, ITEM_TOKENS * META_WORDS, lane.shape[0]):
        token = first + (start + lane) // META_WORDS
        word = (start + lane) % META_WORDS
        inside = token < tl.minimum(stop, first + ITEM_TOKENS)
        is_id = inside & (word >= 1) & (word <= NUM_TOPK)
        is_weight = inside & (word > NUM_TOPK) & (word <= 2 * NUM_TOPK)
        slot = token * NUM_TOPK + word - 1
        owner = owner_of(ids, slot, is_id, NUM_RANKS, EXPERTS_PER_RANK)
        placed = tl.load(places + slot, mask=is_id & (owner >= 0), other=-1)
        weight = tl.load(weights + slot - NUM_TOPK, mask=is_weight, other=0)
        dropped += (is_id & (owner < 0)).to(tl.int32)
        for dst in tl.static_range(NUM_RANKS):
            value = tl.where(is_id, tl.where(owner == dst, placed, -1), tl.where(word == 0, token, weight))
            meta = (tl.load(bases + dst) + tl.load(control + META_OFFSET)).to(tl.pointer_type(tl.int32))
            tl.store(meta + (begin + token).to(tl.int64) * META_WORDS + word, value, mask=inside)
    return tl.sum(dropped)


@triton.jit
def report_section(control, bases, board_at, first, num_rows, own_rank, rank):
    """Count an item as sent; whoever completes a section reports it to all, after the sections before it."""
    size = ((num_rows + SECTIONS - 1) // SECTIONS + ITEM_TOKENS - 1) // ITEM_TOKENS * ITEM_TOKENS
    section = first // size
    stop = tl.minimum((section + 1) * size, num_rows)
    items = (stop - section * size + ITEM_TOKENS - 1) // ITEM_TOKENS
    if sync.arrive(board_at + SENT + section) == items - 1:
        # Items were handed out in order: who sends the sections before is at work and waits for nobody.
        while tl.atomic_or(board_at + REPORTED, 0, sem="acquire", scope="gpu") != section:
            pass
        info = tl.load(control + INFO) | stop.to(tl.int64)
        flags.post(control, bases, flags.PAYLOAD_FLAG, info, own_rank, rank)
        tl.debug_barrier()
        tl.atomic_xchg(board_at + REPORTED, section + 1, sem="release", scope="gpu")


@triton.jit
def send_item(
    control, bases, board_at, rows, places, item, place, quad, lane, rank, own_rank,
    NUM_RANKS: tl.constexpr, NUM_TOPK: tl.constexpr, EXPERTS_PER_RANK: tl.constexpr,
    ROW_BYTES: tl.constexpr, META_WORDS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """rows: of this rank, quantized, int32 words [n, ROW_BYTES / 4]. WIDE: their 16-byte pieces, rounded up to a power
    of two."""
    num_rows = tl.load(control + NUM_ROWS).to(tl.int32)
    ids = tl.load(control + IDS_PTR).to(tl.pointer_type(tl.int32))
    first = item * ITEM_TOKENS
    stop = tl.minimum(first + ITEM_TOKENS, num_rows)
    sent = _send_rows(
        control, bases, rows, ids, first, stop, place, quad, own_rank, NUM_RANKS, NUM_TOPK, EXPERTS_PER_RANK,
        ROW_BYTES, WIDE,
    )  # fmt: skip
    dropped = _send_meta(
        control, bases, places, ids, first, stop, lane, own_rank, NUM_RANKS, NUM_TOPK, EXPERTS_PER_RANK, META_WORDS
    )  # fmt: skip
    sent += (stop - first) * (META_WORDS * 4 * (NUM_RANKS - 1))
    tl.atomic_add(control + BYTES_SENT, sent.to(tl.int64), sem="relaxed")
    tl.atomic_add(control + DROPPED_SLOTS, dropped.to(tl.int64), sem="relaxed")
    report_section(control, bases, board_at, first, num_rows, own_rank, rank)


@triton.jit
def _lay_out(
    image, payload, meta, source_first, first, stop, place, quad,
    NUM_TOPK: tl.constexpr, HIDDEN: tl.constexpr, ROW_BYTES: tl.constexpr, META_WORDS: tl.constexpr,
    COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rows as bf16 operands of the tiled kernel (expand.py), each decoded once and stored for every slot."""
    SOME: tl.constexpr = place.shape[0] // WIDE
    within = place % WIDE
    group = within // 16 * 4 + quad
    for part in range(0, ITEM_TOKENS, SOME):
        token = first + part + place // WIDE
        inside = (token < stop) & (within * 8 < COLUMNS)
        words_at = meta + token * META_WORDS + 1
        wanted = token < 0
        for slot in tl.static_range(NUM_TOPK):
            wanted = wanted | (tl.load(words_at + slot, mask=inside, other=-1) >= 0)
        mask = inside & wanted & (group < HIDDEN // 32)
        row = token.to(tl.int64) * ROW_BYTES
        codes = tl.load(
            (payload + row).to(tl.pointer_type(tl.int16)) + (group * 16 + within % 16), mask=mask, other=0
        )
        exponents = tl.load(payload + row + HIDDEN + group, mask=mask, other=0)
        words = bf16_words(codes, exponents)
        for slot in tl.static_range(NUM_TOPK):
            placed = tl.load(words_at + slot, mask=inside, other=-1)
            mine = inside & (placed >= 0)
            begin = tl.load(source_first + (placed & EXPERT_MASK), mask=mine, other=0)
            at = (begin + (placed >> PLACE_SHIFT)).to(tl.int64) * (COLUMNS // 2)
            tl.store(image + at + (within * 4 + quad), words, mask=mine)


@triton.jit
def expand_item(
    control, bases, board_at, image, row_slot, row_address, row_weight, entries, queue, arrived, tables,
    src, item, num_arrived, place, quad, lane, own_rank,
    NUM_RANKS: tl.constexpr, NUM_TOPK: tl.constexpr, EXPERTS_PER_RANK: tl.constexpr, HIDDEN: tl.constexpr,
    ROW_BYTES: tl.constexpr, META_WORDS: tl.constexpr, RESULT_STRIDE: tl.constexpr, RESULT_BYTES: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rows of a source that have come, to where GEMM1 reads them; entries that are now complete, into its queue.
    image: int32 words [padded rows, COLUMNS / 2]. tables: see BoardLayout."""
    begin = src * tl.load(control + CAPACITY).to(tl.int32)
    first = item * ITEM_TOKENS
    stop = tl.minimum(first + ITEM_TOKENS, num_arrived)
    meta = (tl.load(bases + own_rank) + tl.load(control + META_OFFSET)).to(tl.pointer_type(tl.int32))
    meta += begin.to(tl.int64) * META_WORDS
    payload = payload_of(control, bases, own_rank) + begin.to(tl.int64) * ROW_BYTES
    source_first = tables + src * EXPERTS_PER_RANK
    _lay_out(
        image, payload, meta, source_first, first, stop, place, quad,
        NUM_TOPK, HIDDEN, ROW_BYTES, META_WORDS, COLUMNS, WIDE,
    )  # fmt: skip
    SLOTS: tl.constexpr = lane.shape[0] // ITEM_TOKENS
    token, slot = first + lane // SLOTS, lane % SLOTS
    inside = (token < stop) & (slot < NUM_TOPK)
    words_at = meta + token * META_WORDS + 1 + slot
    placed = tl.load(words_at, mask=inside, other=-1)
    mine = inside & (placed >= 0)
    expert = placed & EXPERT_MASK
    row = tl.load(source_first + expert, mask=mine, other=0) + (placed >> PLACE_SHIFT)
    weight = tl.load(words_at + NUM_TOPK, mask=mine, other=0)
    home = tl.load(bases + src) + tl.load(control + COMBINE_OFFSET)
    tl.store(row_slot + row, begin + token, mask=mine)
    tl.store(row_address + row, home + (token * NUM_TOPK + slot).to(tl.int64) * RESULT_STRIDE, mask=mine)
    tl.store(row_weight + row, weight.to(tl.float32, bitcast=True), mask=mine)
    if src != own_rank:
        back = tl.sum(mine.to(tl.int32)).to(tl.int64) * RESULT_BYTES
        tl.atomic_add(control + BYTES_SENT, back, sem="relaxed")
    first_row = tables + NUM_RANKS * EXPERTS_PER_RANK
    into = row - tl.load(first_row + expert, mask=mine, other=0)
    entry = tl.load(first_row + EXPERTS_PER_RANK + expert, mask=mine, other=0) + into // BLOCK_N
    rows = tl.load(entries + entry * 4 + 2, mask=mine, other=0)
    sync.fence_proxies()
    tl.debug_barrier()
    before = tl.atomic_add(board_at + arrived + entry, 1 + 0 * entry, mask=mine, sem="acq_rel", scope="gpu")
    last = mine & (before == rows - 1)
    position = tl.atomic_add(
        board_at + TAIL1 + 0 * entry, 1 + 0 * entry, mask=last, sem="relaxed", scope="gpu"
    )
    position = tl.where(last, position, 0)
    tl.atomic_xchg(board_at + queue + position, entry + 1, mask=last, sem="release", scope="gpu")
