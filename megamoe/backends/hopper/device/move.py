"""What large_m moves, an item of ITEM_TOKENS tokens at a time: what stands beside rows to their owners, and at the
owners rows to the places where GEMM1 reads them.

Rows have left before (count.py). Beside a row stand the places that its source has counted out; with the table of where
every source's rows of an expert begin, an owner lays a row out without looking at any other, and sees when an entry of
the GEMMs is complete.

`place`, `quad`, `lane`: indices in the caller's layouts; [16-byte places of an image row, 1], [1, 4] and
[ITEM_TOKENS * 16].
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
    WEIGHTS_PTR,
)
from megamoe.backends.hopper.device.expand import bf16_words, payload_of
from megamoe.backends.hopper.device.index import COMBINE_OFFSET
from megamoe.backends.hopper.device.work import ENTRY_WORDS

ITEM_TOKENS = tl.constexpr(board.ITEM_TOKENS)
SECTIONS = tl.constexpr(board.SECTIONS)
TOGETHER = tl.constexpr(board.ROWS_TOGETHER)
EXPERT_MASK = tl.constexpr(board.MAX_EXPERTS_PER_RANK - 1)
SENT = tl.constexpr(board.BoardWord.SENT)
REPORTED = tl.constexpr(board.BoardWord.REPORTED)
COMPLETE = tl.constexpr(board.BoardWord.COMPLETE)


@triton.jit
def owner_of(ids, at, mask, NUM_RANKS: tl.constexpr, EXPERTS_PER_RANK: tl.constexpr):
    """Rank that owns the expert in a slot, -1 for none."""
    expert = tl.load(ids + at, mask=mask, other=-1)
    valid = (expert >= 0) & (expert < NUM_RANKS * EXPERTS_PER_RANK)
    return tl.where(valid, tl.maximum(expert, 0) // EXPERTS_PER_RANK, -1)


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
    control, bases, board_at, places, item, lane, rank, own_rank,
    NUM_RANKS: tl.constexpr, NUM_TOPK: tl.constexpr, EXPERTS_PER_RANK: tl.constexpr, META_WORDS: tl.constexpr,
):  # fmt: skip
    """What stands beside an item's rows, and that they have come."""
    num_rows = tl.load(control + NUM_ROWS).to(tl.int32)
    ids = tl.load(control + IDS_PTR).to(tl.pointer_type(tl.int32))
    first = item * ITEM_TOKENS
    stop = tl.minimum(first + ITEM_TOKENS, num_rows)
    dropped = _send_meta(
        control, bases, places, ids, first, stop, lane, own_rank, NUM_RANKS, NUM_TOPK, EXPERTS_PER_RANK, META_WORDS
    )  # fmt: skip
    sent = (stop - first) * (META_WORDS * 4 * (NUM_RANKS - 1))
    tl.atomic_add(control + BYTES_SENT, sent.to(tl.int64), sem="relaxed")
    tl.atomic_add(control + DROPPED_SLOTS, dropped.to(tl.int64), sem="relaxed")
    report_section(control, bases, board_at, first, num_rows, own_rank, rank)


@triton.jit
def _rows_of(meta, source_first, token, stop, NUM_TOPK: tl.constexpr, META_WORDS: tl.constexpr):
    """Image row for every slot of a token, -1 for none. All loads of a kind are under way together."""
    placed = ()
    for slot in tl.static_range(NUM_TOPK):
        placed = placed + (tl.load(meta + token * META_WORDS + 1 + slot, mask=token < stop, other=-1),)
    rows = ()
    for slot in tl.static_range(NUM_TOPK):
        begin = tl.load(source_first + (placed[slot] & EXPERT_MASK), mask=placed[slot] >= 0, other=0)
        rows = rows + (tl.where(placed[slot] >= 0, begin + (placed[slot] >> PLACE_SHIFT), -1),)
    return rows


@triton.jit
def _words_of(payload, token, rows, place, quad, HIDDEN: tl.constexpr, ROW_BYTES: tl.constexpr):
    """A row as bf16 operands of the tiled kernel (expand.py), if it has a place in the image."""
    wanted = rows[0] >= 0
    for slot in tl.static_range(1, len(rows)):
        wanted = wanted | (rows[slot] >= 0)
    group = place // 16 * 4 + quad
    mask = wanted & (group < HIDDEN // 32)
    row = payload + token.to(tl.int64) * ROW_BYTES
    codes = tl.load(row.to(tl.pointer_type(tl.int16)) + (group * 16 + place % 16), mask=mask, other=0)
    exponents = tl.load(row + HIDDEN + group, mask=mask, other=0)
    return bf16_words(codes, exponents)


@triton.jit
def _store_words(image, words, rows, place, quad, COLUMNS: tl.constexpr):
    for slot in tl.static_range(len(rows)):
        at = image + rows[slot].to(tl.int64) * (COLUMNS // 2)
        tl.store(at + (place * 4 + quad), words, mask=(rows[slot] >= 0) & (place * 8 < COLUMNS))


@triton.jit
def _lay_out(
    image, payload, meta, source_first, first, stop, place, quad,
    NUM_TOPK: tl.constexpr, HIDDEN: tl.constexpr, ROW_BYTES: tl.constexpr, META_WORDS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rows as bf16 operands, each decoded once and stored for every slot; loads of several are under way together."""
    for begin in range(0, ITEM_TOKENS, TOGETHER):
        rows = ()
        for i in tl.static_range(TOGETHER):
            rows = rows + (_rows_of(meta, source_first, first + begin + i, stop, NUM_TOPK, META_WORDS),)
        words = ()
        for i in tl.static_range(TOGETHER):
            words = words + (_words_of(payload, first + begin + i, rows[i], place, quad, HIDDEN, ROW_BYTES),)
        for i in tl.static_range(TOGETHER):
            _store_words(image, words[i], rows[i], place, quad, COLUMNS)


@triton.jit
def expand_item(
    control, bases, board_at, image, row_slot, row_address, row_weight, entries, arrived, tables,
    src, item, num_arrived, place, quad, lane, own_rank,
    NUM_RANKS: tl.constexpr, NUM_TOPK: tl.constexpr, EXPERTS_PER_RANK: tl.constexpr, HIDDEN: tl.constexpr,
    ROW_BYTES: tl.constexpr, META_WORDS: tl.constexpr, RESULT_STRIDE: tl.constexpr, RESULT_BYTES: tl.constexpr,
    COLUMNS: tl.constexpr, WIDEST: tl.constexpr,
):  # fmt: skip
    """Rows of a source that have come, to where GEMM1 reads them, counted at their entries.
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
        NUM_TOPK, HIDDEN, ROW_BYTES, META_WORDS, COLUMNS,
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
    of_expert = tables + NUM_RANKS * EXPERTS_PER_RANK + expert
    into = row - tl.load(of_expert, mask=mine, other=0)
    before_last = tl.load(of_expert + EXPERTS_PER_RANK, mask=mine, other=0)
    width = tl.load(of_expert + 2 * EXPERTS_PER_RANK, mask=mine, other=0)
    # Entries of the widest tiles before the last two follow each other, these two lie where their widths do.
    is_full = into < before_last
    which = tl.where(is_full, 3, tl.where(into < before_last + width, 4, 5))
    entry = tl.load(of_expert + which * EXPERTS_PER_RANK, mask=mine, other=0)
    entry += tl.where(is_full, into // WIDEST, 0)
    rows = tl.load(entries + entry * ENTRY_WORDS + 2, mask=mine, other=0)
    sync.fence_global_proxies()
    tl.debug_barrier()
    before = tl.atomic_add(board_at + arrived + entry, 1 + 0 * entry, mask=mine, sem="release", scope="gpu")
    complete = tl.sum((mine & (before == rows - 1)).to(tl.int32))
    if complete > 0:
        tl.atomic_add(board_at + COMPLETE, complete, sem="relaxed", scope="gpu")
