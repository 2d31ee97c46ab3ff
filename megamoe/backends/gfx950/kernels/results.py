"""Result rows on their way back: where a routed row goes, and how it is written there: bf16, or FP8 weighted."""

import flydsl.expr as fx
from flydsl.expr import range_constexpr
from flydsl.expr.typing import Vector as Vec

from megamoe.backends.gfx950.kernels.lang import (
    absolute_bits,
    as_float,
    encode_four,
    larger,
    long,
    pack_bf16,
    pointer,
    scale_of,
    wide,
)  # fmt: skip
from megamoe.backends.gfx950.record import RESULT_INDEX_BITS


def destination(bases, combine_offset, record, result_bytes):
    """(address of a routed row's place at its source, source rank, weight) from its record of four words."""
    src = record[1] >> RESULT_INDEX_BITS
    result = record[1] & ((1 << RESULT_INDEX_BITS) - 1)
    heap = fx.generic_load(pointer(bases, fx.Int64, 8) + src)
    return heap + combine_offset + long(result) * result_bytes, src, as_float(record[2])


def store_bf16(row, column, values):
    """Consecutive Float32, a multiple of 8, as bf16 from `column` of the row on."""
    for i in range_constexpr(len(values) // 8):
        packed = [pack_bf16(values[8 * i + 2 * j], values[8 * i + 2 * j + 1]) for j in range(4)]
        at = row + long(column + 8 * i) * 2
        fx.generic_store(wide(at), Vec.from_elements(packed, fx.Int32), nontemporal=True)


def block_scale(values, weight, reduce):
    """Values times weight, and what divides their MX block: (values, E8M0 byte, reciprocal, finite).

    reduce: takes the lanes' maxima to that of the block."""
    values = [value * weight for value in values]
    top = absolute_bits(values[0])
    for i in range_constexpr(1, len(values)):
        top = larger(top, absolute_bits(values[i]))
    return (values, *scale_of(reduce(top)))


def store_codes(row, column, values, reciprocal, finite):
    """Consecutive Float32, a multiple of 4, as e4m3 from `column` of the row on."""
    codes = [encode_four(values[4 * i : 4 * i + 4], reciprocal, finite) for i in range(len(values) // 4)]
    fx.generic_store(
        pointer(row + long(column), fx.Int32, 4 * len(codes)),
        Vec.from_elements(codes, fx.Int32),
        nontemporal=True,
    )


def store_scale(row, hidden, column, byte):
    """The scale of the MX block at `column`, in plain order behind the row's codes."""
    fx.generic_store(pointer(row + long(hidden) + long(column // 32), fx.Uint8, 1), fx.Uint8(byte))
