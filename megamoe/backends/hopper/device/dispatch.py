"""Dispatch: quantize this rank's rows to MXFP8 and store each once at every rank that owns one of its experts.

fixed_slot writes a row into the slot reserved for (source rank, token) and needs to know nothing before; all rows'
ids travel, so that what an older launch left in a slot is never taken for this launch's. compact waits for all
ranks' counts and packs rows densely. The last thread block to finish posts the payload flags.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megamoe.backends.hopper.device import chain, flags
from megamoe.backends.hopper.device.quantize import SCALE_NAN, quantize
from megamoe.backends.hopper.record import Word

NUM_ROWS = tl.constexpr(int(Word.NUM_ROWS))
INFO = tl.constexpr(int(Word.INFO))
CAPACITY = tl.constexpr(int(Word.CAPACITY))
HIDDEN_PTR = tl.constexpr(int(Word.HIDDEN_PTR))
SF_PTR = tl.constexpr(int(Word.SF_PTR))
IDS_PTR = tl.constexpr(int(Word.IDS_PTR))
WEIGHTS_PTR = tl.constexpr(int(Word.WEIGHTS_PTR))
COUNTS_OFFSET = tl.constexpr(int(Word.COUNTS_OFFSET))
META_OFFSET = tl.constexpr(int(Word.META_OFFSET))
ROWS_OFFSET = tl.constexpr(int(Word.ROWS_OFFSET))
BYTES_SENT = tl.constexpr(int(Word.BYTES_SENT))
DROPPED_SLOTS = tl.constexpr(int(Word.DROPPED_SLOTS))


@triton.jit
def aligned(address):
    """An address that is a multiple of 16 as a pointer to bytes. The compiler cannot know that it is one, and would
    move single elements."""
    return tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)


@triton.jit
def count_table(control, bases, own_rank, NUM_RANKS: tl.constexpr, COUNTS_WORDS: tl.constexpr):
    """[source, destination] int32 rows, as all ranks told this one."""
    own = (tl.load(bases + own_rank) + tl.load(control + COUNTS_OFFSET)).to(tl.pointer_type(tl.int32))
    rank = tl.arange(0, NUM_RANKS)
    return tl.load(own + rank[:, None] * COUNTS_WORDS + rank[None, :])


@triton.jit
def quantized_row(control, token, block, column, HIDDEN: tl.constexpr):
    """Codes [blocks, 32] and scales [blocks] of a piece of a row that came quantized."""
    row = tl.load(control + HIDDEN_PTR) + token.to(tl.int64) * HIDDEN
    sf = (tl.load(control + SF_PTR) + token.to(tl.int64) * (HIDDEN // 32)).to(tl.pointer_type(tl.uint8))
    scales = tl.load(sf + block, mask=block < HIDDEN // 32, other=0)
    codes = tl.load(aligned(row) + column, mask=column < HIDDEN, other=0)
    return tl.where((scales == SCALE_NAN)[:, None], 0, codes), scales


@triton.jit
def plain_row(control, token, column, HIDDEN: tl.constexpr):
    """The same of a bf16 row, quantized here."""
    row = aligned(tl.load(control + HIDDEN_PTR) + token.to(tl.int64) * (2 * HIDDEN))
    value = tl.load(row.to(tl.pointer_type(tl.bfloat16)) + column, mask=column < HIDDEN, other=0.0)
    return quantize(value.to(tl.float32))


@triton.jit
def _owners(ids, token, NUM_TOPK: tl.constexpr, NUM_RANKS: tl.constexpr, EXPERTS_PER_RANK: tl.constexpr):
    """Mask of the ranks that own an expert of the token, and how many of its slots name nobody."""
    mask = 0
    dropped = 0
    for slot in tl.static_range(NUM_TOPK):
        expert = tl.load(ids + token * NUM_TOPK + slot)
        valid = (expert >= 0) & (expert < NUM_RANKS * EXPERTS_PER_RANK)
        mask = mask | tl.where(valid, 1 << (tl.maximum(expert, 0) // EXPERTS_PER_RANK), 0)
        dropped += tl.where(valid, 0, 1)
    return mask, dropped


@triton.jit
def _store_meta(
    address, ids, weights, token, dst, word,
    NUM_TOPK: tl.constexpr, EXPERTS_PER_RANK: tl.constexpr, META_WORDS: tl.constexpr,
):  # fmt: skip
    """int32 words beside a row: token, ids (-1 unless they are the destination's), weights."""
    is_id = (word >= 1) & (word <= NUM_TOPK)
    is_weight = (word > NUM_TOPK) & (word <= 2 * NUM_TOPK)
    expert = tl.load(ids + token * NUM_TOPK + word - 1, mask=is_id, other=-1)
    first = dst * EXPERTS_PER_RANK
    expert = tl.where((expert >= first) & (expert < first + EXPERTS_PER_RANK), expert, -1)
    weight = tl.load(weights + token * NUM_TOPK + word - 1 - NUM_TOPK, mask=is_weight, other=0)
    value = tl.where(word == 0, token, tl.where(is_id, expert, weight))
    tl.store(address.to(tl.pointer_type(tl.int32)) + word, value, mask=word < META_WORDS)


@triton.jit
def send_piece(
    control, bases, token_index, first_slot, codes, scales, ids, weights, token, piece, block, column,
    word, rank, own_rank,
    NUM_RANKS: tl.constexpr, NUM_TOPK: tl.constexpr, EXPERTS_PER_RANK: tl.constexpr, HIDDEN: tl.constexpr,
    ROW_BYTES: tl.constexpr, META_WORDS: tl.constexpr, COMPACT: tl.constexpr,
):  # fmt: skip
    """A piece of a row to every rank that owns one of its experts; with the first piece, what stands beside the row.

    first_slot [NUM_RANKS]: of this source at each destination. block [blocks], column [blocks, 32], word [at least
    META_WORDS], rank [NUM_RANKS]: indices in the caller's layouts."""
    owners, dropped = _owners(ids, token, NUM_TOPK, NUM_RANKS, EXPERTS_PER_RANK)
    sent = 0
    for dst in tl.static_range(NUM_RANKS):
        slot = tl.sum(tl.where(rank == dst, first_slot, 0))
        mine = (owners >> dst) & 1
        if COMPACT:
            slot += tl.load(token_index + token * NUM_RANKS + dst)
        else:
            slot += token
        base = tl.load(bases + dst)
        if mine == 1:
            row = aligned(base + tl.load(control + ROWS_OFFSET) + slot.to(tl.int64) * ROW_BYTES)
            tl.store(row + column, codes, mask=column < HIDDEN)
            tl.store(row + HIDDEN + block, scales, mask=block < HIDDEN // 32)
        if (piece == 0) & ((mine == 1) | (not COMPACT)):
            meta = base + tl.load(control + META_OFFSET) + slot.to(tl.int64) * (META_WORDS * 4)
            _store_meta(meta, ids, weights, token, dst, word, NUM_TOPK, EXPERTS_PER_RANK, META_WORDS)
            if dst != own_rank:
                sent += mine * ROW_BYTES + META_WORDS * 4
    if piece == 0:
        tl.atomic_add(control + BYTES_SENT, sent.to(tl.int64), sem="relaxed")
        tl.atomic_add(control + DROPPED_SLOTS, dropped.to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["own_rank"])
def dispatch_kernel(
    control, bases, token_index, ticket,
    own_rank, NUM_RANKS: tl.constexpr, NUM_TOPK: tl.constexpr, EXPERTS_PER_RANK: tl.constexpr,
    HIDDEN: tl.constexpr, ROW_BYTES: tl.constexpr, META_WORDS: tl.constexpr, META_BLOCK: tl.constexpr,
    COUNTS_WORDS: tl.constexpr, BLOCK: tl.constexpr, COMPACT: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """Persistent over (token, piece of BLOCK columns). ticket: int32, zero, counts finished thread blocks."""
    chain.after_previous()
    num_rows = tl.load(control + NUM_ROWS).to(tl.int32)
    ids = tl.load(control + IDS_PTR).to(tl.pointer_type(tl.int32))
    weights = tl.load(control + WEIGHTS_PTR).to(tl.pointer_type(tl.int32))
    rank = tl.arange(0, NUM_RANKS)
    word = tl.arange(0, META_BLOCK)
    ok = True
    if COMPACT:
        ok, _ = flags.wait(control, bases, flags.COUNTS_FLAG, (1 << NUM_RANKS) - 1, own_rank, rank)
        table = count_table(control, bases, own_rank, NUM_RANKS, COUNTS_WORDS)
        first_slot = tl.sum(tl.where(rank[:, None] < own_rank, table, 0), axis=0)
        info = tl.sum(tl.where(rank[:, None] == own_rank, table, 0), axis=0).to(tl.int64)
    else:
        first_slot = own_rank * tl.load(control + CAPACITY).to(tl.int32) + 0 * rank
        info = tl.load(control + NUM_ROWS)
    if not ok:
        return
    PIECES: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    for item in range(tl.program_id(0), num_rows * PIECES, tl.num_programs(0)):
        token = item // PIECES
        piece = item % PIECES
        block = piece * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
        column = block[:, None] * 32 + tl.arange(0, 32)[None, :]
        if QUANTIZED:
            codes, scales = quantized_row(control, token, block, column, HIDDEN)
        else:
            codes, scales = plain_row(control, token, column, HIDDEN)
        send_piece(
            control, bases, token_index, first_slot, codes, scales, ids, weights, token, piece, block, column,
            word, rank, own_rank,
            NUM_RANKS, NUM_TOPK, EXPERTS_PER_RANK, HIDDEN, ROW_BYTES, META_WORDS, COMPACT,
        )  # fmt: skip
    tl.debug_barrier()
    finished = tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu")
    if finished == tl.num_programs(0) - 1:
        tl.store(ticket, 0)
        flags.post(control, bases, flags.PAYLOAD_FLAG, info | tl.load(control + INFO), own_rank, rank)
