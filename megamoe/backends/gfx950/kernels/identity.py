"""identity: experts that give a row back as it came. Stands in for both GEMMs where transport alone is tested."""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import const_expr

from megamoe.backends.gfx950.kernels import flags, results
from megamoe.backends.gfx950.kernels.lang import (
    WAVE,
    control_int,
    control_word,
    decode_four,
    long,
    max_of_lanes,
    pointer,
    scale_value,
    sf_offset,
    uniform,
    wide,
    words,
)  # fmt: skip
from megamoe.backends.gfx950.record import INFO_FP8, Word
from megamoe.layout import FlagKind

THREADS = 256
NUM_WAVES = THREADS // WAVE
ELEMENTS = 512


@flyc.jit
def give_back(control, bases, rows, combine_offset, record, part, rank, HIDDEN, ROW_BYTES, FP8):
    """One wave sends 512 columns of a payload row, the part-th, back as a result row. record: of the routed row."""
    lane = fx.thread_idx.x % WAVE
    column = part * ELEMENTS + lane * 8
    if column < HIDDEN:
        row = rows + long(record[0]) * ROW_BYTES
        codes = fx.generic_load(pointer(row + long(column), fx.Int32, 8), count=2)
        at = pointer(row + long(HIDDEN) + long(sf_offset(column // 32)), fx.Uint8, 1)
        scale = scale_value(fx.Int32(fx.generic_load(at, dtype=fx.Uint8)))
        values = [value * scale for i in range(2) for value in decode_four(codes[i])]
        out, src, weight = results.destination(bases, combine_offset, record, 2 * HIDDEN)
        if const_expr(FP8):
            values, byte, reciprocal, finite = results.block_scale(
                values, weight, lambda top: max_of_lanes(top, 4)
            )
            results.store_codes(out, column, values, reciprocal, finite)
            if lane % 4 == 0:
                results.store_scale(out, HIDDEN, column, byte)
        else:
            results.store_bf16(out, column, values)
        if (part == 0) & (lane == 0) & (src != rank):
            fx.atomic_add(
                words(control) + 2 * int(Word.ROWS_RETURNED),
                fx.Int32(1),
                syncscope=fx.rocdl.SyncScope.Agent,
            )


@flyc.kernel(known_block_size=[THREADS, 1, 1])
def identity_kernel(
    control: fx.Int64,
    bases: fx.Int64,
    heap: fx.Int64,
    experts: fx.Int64,
    row_table: fx.Int64,
    rank: fx.Int32,
    num_groups: fx.Int32,
    HIDDEN: fx.Constexpr[int],
    ROW_BYTES: fx.Constexpr[int],
    NUM_EXPERTS: fx.Constexpr[int],
    NUM_RANKS: fx.Constexpr[int],
    FP8: fx.Constexpr[int],
):
    wave = uniform(fx.block_idx.x * NUM_WAVES + fx.thread_idx.x // WAVE)
    lds = fx.SharedAllocator().allocate(flags.FlagLds).peek()
    num_parts = (HIDDEN + ELEMENTS - 1) // ELEMENTS
    last_record = fx.generic_load(wide(experts) + (NUM_EXPERTS - 1) * 4, count=4)
    failed = control_int(control, Word.FAILED)
    num_units = (failed == 0).select(uniform(last_record[0] + last_record[1]) * num_parts, fx.Int32(0))
    rows = heap + control_word(control, Word.ROWS_OFFSET)
    combine_offset = control_word(control, Word.COMBINE_OFFSET)
    for unit in range(wave, num_units, num_groups * NUM_WAVES):
        unit = fx.Int32(unit)
        record = fx.generic_load(wide(row_table) + unit // num_parts * 4, count=4)
        give_back(
            control, bases, rows, combine_offset, record, unit % num_parts, rank, HIDDEN, ROW_BYTES, FP8
        )
    last = flags.arrive(lds, control, num_groups)
    if (last == 1) & (failed == 0):
        flags.post(control, bases, rank, FlagKind.RETURN, fx.Int32(INFO_FP8 if FP8 else 0), NUM_RANKS)


@flyc.jit
def compile_kernel(
    HIDDEN: fx.Constexpr[int],
    ROW_BYTES: fx.Constexpr[int],
    NUM_EXPERTS: fx.Constexpr[int],
    NUM_RANKS: fx.Constexpr[int],
    FP8: fx.Constexpr[int],
):
    z, one = fx.Int64(0), fx.Int32(1)
    identity_kernel(z, z, z, z, z, one, one, HIDDEN, ROW_BYTES, NUM_EXPERTS, NUM_RANKS, FP8).launch(
        grid=(1, 1, 1), block=(THREADS, 1, 1)
    )
