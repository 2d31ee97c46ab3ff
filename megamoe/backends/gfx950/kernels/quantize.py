"""quantize: this rank's rows as MXFP8 in private staging memory, with token index, expert ids and weights beside them.

One wave quantizes 512 elements of a row: a lane 8 of them, four lanes a block. Scales are written in MFMA order.
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import const_expr
from flydsl.expr.typing import Vector as Vec

from megamoe.backends.gfx950.kernels.lang import (
    absolute_bits,
    bf16_pair,
    control_int,
    control_word,
    encode_four,
    larger,
    long,
    max_of_lanes,
    pointer,
    scale_of,
    sf_offset,
    wide,
    words,
)  # fmt: skip
from megamoe.backends.gfx950.record import Word

BLOCK = 64
ELEMENTS = 512


def encode_block(values):
    """This lane's 8 Float32, a quarter of an MX block -> (codes, E8M0 byte of the block)."""
    top = absolute_bits(values[0])
    for value in values[1:]:
        top = larger(top, absolute_bits(value))
    byte, reciprocal, finite = scale_of(max_of_lanes(top, 4))
    codes = [encode_four(values[4 * i : 4 * i + 4], reciprocal, finite) for i in range(2)]
    return Vec.from_elements(codes, fx.Int32), byte


def checked_block(codes, byte):
    """Codes that came quantized, with the scale NaN where a code of the block is NaN."""
    nan = fx.Int32(0)
    for i in range(2):
        for j in range(4):
            nan = (((codes[i] >> (8 * j)) & 0x7F) == 0x7F).select(fx.Int32(1), nan)
    return codes, (max_of_lanes(nan, 4) > 0).select(fx.Int32(0xFF), byte)


def quantized_block(hidden_ptr, sf_ptr, token, column, hidden, came_quantized):
    """(codes, E8M0 byte) of this lane's 8 elements of a row: of the bf16 row, or as it came. came_quantized: Python."""
    if came_quantized:
        codes = fx.generic_load(
            pointer(hidden_ptr + long(token) * hidden + long(column), fx.Int32, 8), count=2
        )
        at = pointer(sf_ptr + long(token) * (hidden // 32) + long(column // 32), fx.Uint8, 1)
        return checked_block(codes, fx.Int32(fx.generic_load(at, dtype=fx.Uint8)))
    packed = fx.generic_load(wide(hidden_ptr + (long(token) * hidden + long(column)) * 2), count=4)
    return encode_block([value for i in range(4) for value in bf16_pair(packed[i])])


@flyc.jit
def word_beside(ids_ptr, weights_ptr, token, lane, TOPK, NUM_EXPERTS):
    """Word `lane`, below 1 + 2 TOPK, of those beside a row: token index, expert ids (-1: none), routing weights."""
    word = token
    if lane > 0:
        if lane <= TOPK:
            expert = fx.generic_load(words(ids_ptr) + (token * TOPK + lane - 1))
            known = (expert >= 0) & (expert < NUM_EXPERTS)
            word = known.select(expert, fx.Int32(-1))
        else:
            word = fx.generic_load(words(weights_ptr) + (token * TOPK + lane - 1 - TOPK))
    return word


@flyc.kernel(known_block_size=[BLOCK, 1, 1])
def quantize_kernel(
    control: fx.Int64,
    rows: fx.Int64,
    meta: fx.Int64,
    num_groups: fx.Int32,
    HIDDEN: fx.Constexpr[int],
    ROW_BYTES: fx.Constexpr[int],
    META_WORDS: fx.Constexpr[int],
    TOPK: fx.Constexpr[int],
    NUM_EXPERTS: fx.Constexpr[int],
    QUANTIZED: fx.Constexpr[int],
):
    lane = fx.thread_idx.x
    num_rows = control_int(control, Word.NUM_ROWS)
    num_parts = (HIDDEN + ELEMENTS - 1) // ELEMENTS
    hidden_ptr = control_word(control, Word.HIDDEN_PTR)
    sf_ptr = control_word(control, Word.SF_PTR)
    ids_ptr = control_word(control, Word.IDS_PTR)
    weights_ptr = control_word(control, Word.WEIGHTS_PTR)
    for unit in range(fx.block_idx.x, num_rows * num_parts, num_groups):
        unit = fx.Int32(unit)
        token, part = unit // num_parts, unit % num_parts
        column = part * ELEMENTS + lane * 8
        block = column // 32
        row = rows + long(token) * ROW_BYTES
        codes_ptr = pointer(row + long(column), fx.Int32, 8)
        scale_ptr = pointer(row + long(HIDDEN) + long(sf_offset(block)), fx.Uint8, 1)
        first_lane = lane % 4 == 0
        if column < HIDDEN:
            codes, byte = quantized_block(hidden_ptr, sf_ptr, token, column, HIDDEN, QUANTIZED)
            fx.generic_store(codes_ptr, codes)
            if first_lane:
                fx.generic_store(scale_ptr, fx.Uint8(byte))
        # Scales of blocks that the row does not have: the last part's matrix instructions read them.
        if const_expr(HIDDEN % ELEMENTS != 0):
            if column >= HIDDEN:
                if first_lane:
                    fx.generic_store(scale_ptr, fx.Uint8(0))
        if part == 0:
            if lane < 1 + 2 * TOPK:
                word = word_beside(ids_ptr, weights_ptr, token, lane, TOPK, NUM_EXPERTS)
                fx.generic_store(words(meta) + (token * META_WORDS + lane), word)


@flyc.jit
def compile_kernel(
    HIDDEN: fx.Constexpr[int],
    ROW_BYTES: fx.Constexpr[int],
    META_WORDS: fx.Constexpr[int],
    TOPK: fx.Constexpr[int],
    NUM_EXPERTS: fx.Constexpr[int],
    QUANTIZED: fx.Constexpr[int],
):
    zero = fx.Int64(0)
    quantize_kernel(
        zero, zero, zero, fx.Int32(1), HIDDEN, ROW_BYTES, META_WORDS, TOPK, NUM_EXPERTS, QUANTIZED
    ).launch(grid=(1, 1, 1), block=(BLOCK, 1, 1))
