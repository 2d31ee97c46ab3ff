"""combine: wait for every owner's return flag, then sum each token's rows in fp32 in ascending slot order, to bf16.

The row format is read per owner from its flag: bf16 rows are weighted here, FP8 rows were before they were quantized.
Slots without expert are skipped. A wave takes 512 columns of a token.
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import range_constexpr
from flydsl.expr.typing import Vector as Vec

from megamoe.backends.gfx950.kernels import flags
from megamoe.backends.gfx950.kernels.lang import (
    WAVE,
    as_float,
    bf16_pair,
    control_int,
    control_word,
    decode_four,
    long,
    pack_bf16,
    pointer,
    scale_value,
    uniform,
    wide,
    words,
)  # fmt: skip
from megamoe.backends.gfx950.record import INFO_ERROR, INFO_FP8, POSTED, Word
from megamoe.layout import FlagKind

THREADS = 256
NUM_WAVES = THREADS // WAVE
ELEMENTS = 512


@flyc.jit
def read_row(row, column, is_fp8, weight, HIDDEN):
    """8 Float32 of a result row, weighted."""
    values = [fx.Float32(0.0) for _ in range(8)]
    if is_fp8:
        codes = fx.generic_load(pointer(row + long(column), fx.Int32, 8), count=2)
        byte = fx.generic_load(pointer(row + long(HIDDEN) + long(column // 32), fx.Uint8, 1), dtype=fx.Uint8)
        scale = scale_value(fx.Int32(byte))
        values = [value * scale for i in range_constexpr(2) for value in decode_four(codes[i])]
    else:
        packed = fx.generic_load(wide(row + long(column) * 2), count=4)
        values = [value * weight for i in range_constexpr(4) for value in bf16_pair(packed[i])]
    return values


def owners_with(lds, bit, NUM_RANKS):
    """Mask of the ranks whose flags, as the last wait left them, have a bit."""
    mask = fx.Int32(0)
    for owner in range_constexpr(NUM_RANKS):
        info = uniform(fx.generic_load(lds.infos.ptr + owner))
        mask = mask | flags.has_bit(info, bit).select(fx.Int32(1 << owner), fx.Int32(0))
    return mask


def record_end(control, fp8, refused):
    """Say in the control block that all owners came, which sent FP8 rows and which refused. One thread."""
    status = pointer(control, fx.Int64, 8)
    fx.generic_store(status + int(Word.FP8), long(fp8))
    fx.generic_store(status + int(Word.REFUSED), long(refused))
    fx.generic_store(status + int(Word.DONE_EPOCH), control_word(control, Word.EPOCH) | (POSTED << 32))


@flyc.jit
def sum_tokens(
    control, heap, meta, fp8, num_groups, NUM_WAVES, HIDDEN, META_WORDS, TOPK, NUM_EXPERTS
):  # fmt: skip
    """This workgroup's tokens. fp8: mask of the owners whose rows are FP8; NUM_WAVES: of a workgroup."""
    lane = fx.thread_idx.x % WAVE
    wave = uniform(fx.block_idx.x * NUM_WAVES + fx.thread_idx.x // WAVE)
    num_parts = (HIDDEN + ELEMENTS - 1) // ELEMENTS
    rows = heap + control_word(control, Word.COMBINE_OFFSET)
    out = control_word(control, Word.OUT_PTR)
    for unit in range(wave, control_int(control, Word.NUM_ROWS) * num_parts, num_groups * NUM_WAVES):
        unit = fx.Int32(unit)
        token = unit // num_parts
        column = unit % num_parts * ELEMENTS + lane * 8
        if column < HIDDEN:
            total = [fx.Float32(0.0) for _ in range(8)]
            for k in range_constexpr(TOPK):
                beside = words(meta) + (token * META_WORDS + 1 + k)
                expert = uniform(fx.generic_load(beside))
                if expert >= 0:
                    weight = as_float(fx.generic_load(beside + TOPK))
                    row = rows + long(token * TOPK + k) * (2 * HIDDEN)
                    is_fp8 = ((fp8 >> (expert // NUM_EXPERTS)) & 1) == 1
                    values = read_row(row, column, is_fp8, weight, HIDDEN)
                    total = [total[i] + values[i] for i in range_constexpr(8)]
            packed = [pack_bf16(total[2 * i], total[2 * i + 1]) for i in range_constexpr(4)]
            fx.generic_store(
                wide(out + (long(token) * HIDDEN + long(column)) * 2), Vec.from_elements(packed, fx.Int32)
            )


@flyc.kernel(known_block_size=[THREADS, 1, 1])
def combine_kernel(
    control: fx.Int64,
    bases: fx.Int64,
    heap: fx.Int64,
    meta: fx.Int64,
    rank: fx.Int32,
    num_groups: fx.Int32,
    HIDDEN: fx.Constexpr[int],
    META_WORDS: fx.Constexpr[int],
    TOPK: fx.Constexpr[int],
    NUM_EXPERTS: fx.Constexpr[int],
    NUM_RANKS: fx.Constexpr[int],
):
    lds = fx.SharedAllocator().allocate(flags.FlagLds).peek()
    came = flags.wait(
        lds, control, bases, heap, rank, FlagKind.RETURN, fx.Int32((1 << NUM_RANKS) - 1), NUM_RANKS
    )
    if came == 1:
        fp8 = owners_with(lds, INFO_FP8, NUM_RANKS)
        if (fx.block_idx.x == 0) & (fx.thread_idx.x == 0):
            record_end(control, fp8, owners_with(lds, INFO_ERROR, NUM_RANKS))
        sum_tokens(control, heap, meta, fp8, num_groups, NUM_WAVES, HIDDEN, META_WORDS, TOPK, NUM_EXPERTS)


@flyc.jit
def compile_kernel(
    HIDDEN: fx.Constexpr[int],
    META_WORDS: fx.Constexpr[int],
    TOPK: fx.Constexpr[int],
    NUM_EXPERTS: fx.Constexpr[int],
    NUM_RANKS: fx.Constexpr[int],
):
    z, one = fx.Int64(0), fx.Int32(1)
    combine_kernel(z, z, z, z, one, one, HIDDEN, META_WORDS, TOPK, NUM_EXPERTS, NUM_RANKS).launch(
        grid=(1, 1, 1), block=(THREADS, 1, 1)
    )
