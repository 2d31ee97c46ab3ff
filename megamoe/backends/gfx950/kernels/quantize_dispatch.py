"""quantize and dispatch in one step (small_m): rows go from bf16 straight into their slots at their owners.

A wave quantizes 512 columns of a row once and stores them at every rank that owns one of its experts. Slots and ids are
those of fixed_slot (see dispatch.py). What stands beside a row stays here too, for combine.
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr.typing import Vector as Vec

from megamoe.backends.gfx950.kernels import flags
from megamoe.backends.gfx950.kernels.lang import (
    WAVE,
    ballot,
    control_int,
    control_word,
    long,
    pointer,
    uniform,
    words,
)
from megamoe.backends.gfx950.kernels.quantize import ELEMENTS, quantized_block, word_beside
from megamoe.backends.gfx950.record import Word


@flyc.jit
def send(
    control, bases, rank, meta, num_groups,
    HIDDEN, ROW_BYTES, META_WORDS, TOPK, NUM_EXPERTS, NUM_RANKS, THREADS,
):  # fmt: skip
    """This workgroup's parts of rows, one in num_groups."""
    lane = fx.thread_idx.x % WAVE
    num_waves = THREADS // WAVE
    wave = uniform(fx.block_idx.x * num_waves + fx.thread_idx.x // WAVE)
    num_parts = (HIDDEN + ELEMENTS - 1) // ELEMENTS
    num_units = control_int(control, Word.NUM_ROWS) * num_parts
    hidden_ptr, sf_ptr = control_word(control, Word.HIDDEN_PTR), control_word(control, Word.SF_PTR)
    ids_ptr, weights_ptr = control_word(control, Word.IDS_PTR), control_word(control, Word.WEIGHTS_PTR)
    meta_offset = control_word(control, Word.META_OFFSET)
    rows_offset = control_word(control, Word.ROWS_OFFSET)
    first_slot = rank * control_int(control, Word.CAPACITY)
    sent = fx.Int32(0)
    for unit in range(wave, num_units, num_groups * num_waves):
        unit = fx.Int32(unit)
        token, part = unit // num_parts, unit % num_parts
        column = part * ELEMENTS + lane * 8
        inside = column < HIDDEN
        at = inside.select(column, fx.Int32(HIDDEN - 8))
        codes, byte = Vec.filled(2, 0, fx.Int32), fx.Int32(0)
        if sf_ptr != 0:
            codes, byte = quantized_block(hidden_ptr, sf_ptr, token, at, HIDDEN, True)
        else:
            codes, byte = quantized_block(hidden_ptr, sf_ptr, token, at, HIDDEN, False)
        scales = scale_word(inside.select(byte, fx.Int32(0)), lane)
        beside = lane < 1 + 2 * TOPK
        word = word_beside(
            ids_ptr, weights_ptr, token, beside.select(lane, fx.Int32(0)), TOPK, NUM_RANKS * NUM_EXPERTS
        )
        with_meta = beside & (part == 0)
        if with_meta:
            fx.generic_store(words(meta) + (token * META_WORDS + lane), word)
        is_id = (lane >= 1) & (lane <= TOPK)
        for turn in range(fx.Int32(0), fx.Int32(NUM_RANKS), fx.Int32(1)):
            # Ranks begin with different destinations, and so do their rows.
            dst_rank = (fx.Int32(turn) + rank + token) % NUM_RANKS
            owned = is_id & (word >= dst_rank * NUM_EXPERTS) & (word < (dst_rank + 1) * NUM_EXPERTS)
            wanted = ballot(owned) != 0
            heap = flags.peer_heap(bases, dst_rank)
            slot = first_slot + token
            if with_meta:
                masked = (is_id & (owned == False)).select(fx.Int32(-1), word)  # noqa: E712
                fx.generic_store(words(heap + meta_offset) + (slot * META_WORDS + lane), masked)
            if wanted:
                row = heap + rows_offset + long(slot) * ROW_BYTES
                if inside:
                    fx.generic_store(pointer(row + long(column), fx.Int32, 8), codes, nontemporal=True)
                if (lane < 16) & (lane % 4 == 0):
                    fx.generic_store(words(row + long(HIDDEN + part * 16 + lane)), scales)
            counted = wanted & (part == 0) & (dst_rank != rank)
            sent = sent + counted.select(fx.Int32(1), fx.Int32(0))
    if (lane == 0) & (sent > 0):
        fx.atomic_add(words(control) + 2 * int(Word.ROWS_SENT), sent, syncscope=fx.rocdl.SyncScope.Agent)


def scale_word(byte, lane):
    """Scales of a part in MFMA order (see shuffle.py): lane 4 w of the first 16 gets word w of the four, from every
    block's byte in its four lanes."""
    word = byte << (lane // 16 * 8)
    for distance in (16, 32):
        word = word | fx.shuffle_xor(word, distance, WAVE)
    return word
