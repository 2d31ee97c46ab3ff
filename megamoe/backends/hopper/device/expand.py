"""Expand: the payload rows of every expert as bf16 token operands, in the order in which its GEMM kernel reads them.

An e4m3 code times its E8M0 scale is exact in bf16, so this is a change of layout, not of numbers. For the streaming
kernel a block of 16 rows is [chunk][8 rows][4 pieces][lane][16 B], lane 4g + t holding 8 of K of row g's block t a
piece; for the tiled kernel rows are row-major with K permuted inside each 128 (see wgmma_loop.py). Both take the
same bytes. Columns past the row's end are zeros: weights there are zero, but zero times garbage need not be.

A thread makes 16 bytes of the image, its place, of four pairs of codes: pairs that follow each other for the
streaming kernel, one of each of the four groups of 32 for the tiled one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megamoe.backends.hopper import plan
from megamoe.backends.hopper.device import chain
from megamoe.backends.hopper.device.dispatch import aligned
from megamoe.backends.hopper.device.work import STREAM_FLAG
from megamoe.backends.hopper.record import Word

ROWS_OFFSET = tl.constexpr(int(Word.ROWS_OFFSET))
ROWS = tl.constexpr(plan.BLOCK_ROWS)
NUM_BLOCKS = tl.constexpr(plan.Counter.NUM_BLOCKS)
SCALED_PAIR = tl.constexpr(
    "{.reg .b32 pair; .reg .b16 a, b; .reg .f32 x, y;\n"
    "cvt.rn.f16x2.e4m3x2 pair, $1;\nmov.b32 {a, b}, pair;\ncvt.f32.f16 x, a;\ncvt.f32.f16 y, b;\n"
    "mul.f32 x, x, $2;\nmul.f32 y, y, $2;\ncvt.rn.bf16x2.f32 $0, y, x;}"
)
"""Two e4m3 codes times a scale, as a pair of bf16. Converted singly to bf16 they take an eighth of the rate."""
EXPAND_COLUMNS = 512
"""Columns that a thread block expands at a time (PIECE in kernels): four chunks."""


@triton.jit
def payload_of(control, bases, own_rank):
    """The rows that have come to this rank."""
    return aligned(tl.load(bases + own_rank) + tl.load(control + ROWS_OFFSET))


@triton.jit
def bf16_words(codes, exponents):
    """codes: int16, two codes each; exponents: their E8M0 bytes. Returns pairs of bf16."""
    exponent = exponents.to(tl.int32)
    # 2^(exponent - 127), of which 0 is the subnormal. 255 gives infinity: codes beside it are zero, and zero times
    # infinity is the NaN that is wanted.
    scale = tl.where(exponent == 0, 0x00400000, exponent << 23).to(tl.float32, bitcast=True)
    return tl.inline_asm_elementwise(
        SCALED_PAIR, "=r,h,f", [codes, scale], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _store_places(image, place, pair, codes, exponents, mask):
    """codes [places, 4]."""
    tl.store(image + place * 4 + pair, bf16_words(codes, exponents), mask=mask)


@triton.jit
def _expand_streaming(
    image, payload, slots, rows, block, first, place, pair,
    HIDDEN: tl.constexpr, ROW_BYTES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Places in the order chunk, half, piece of 8 k, g, t."""
    row = place // 128 % 2 * 8 + place // 4 % 8
    column = first + place // 256 * 128 + place % 4 * 32 + place // 32 % 4 * 8
    inside = (row < rows) & (column < HIDDEN)
    slot = tl.load(slots + row, mask=inside, other=0).to(tl.int64)
    codes_at = payload.to(tl.pointer_type(tl.int16)) + slot * (ROW_BYTES // 2) + column // 8 * 4
    codes = tl.load(codes_at + pair, mask=inside, other=0)
    exponents = tl.load(payload + slot * ROW_BYTES + HIDDEN + column // 32, mask=inside, other=0)
    start = (block * COLUMNS + first).to(tl.int64) * (ROWS // 8)
    _store_places(image, start + place, pair, codes, exponents, row < ROWS)


@triton.jit
def _expand_tiled(
    image, payload, slots, rows, block, first, place, pair,
    HIDDEN: tl.constexpr, ROW_BYTES: tl.constexpr, COLUMNS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Places in the order row, chunk, two of K."""
    row = place // (PIECE // 8)
    group = (first // 128 + place % (PIECE // 8) // 16) * 4 + pair
    inside = row < rows
    slot = tl.load(slots + row, mask=inside, other=0).to(tl.int64)
    mask = inside & (group < HIDDEN // 32)
    codes_at = payload.to(tl.pointer_type(tl.int16)) + slot * (ROW_BYTES // 2)
    codes = tl.load(codes_at + group * 16 + place % 16, mask=mask, other=0)
    exponents = tl.load(payload + slot * ROW_BYTES + HIDDEN + group, mask=mask, other=0)
    start = (block * ROWS + row).to(tl.int64) * (COLUMNS // 8) + first // 8 + place % (PIECE // 8)
    _store_places(image, start, pair, codes, exponents, inside)


@triton.jit
def expand_piece(
    image, payload, row_slot, block_info, block, first, place, pair,
    HIDDEN: tl.constexpr, ROW_BYTES: tl.constexpr, COLUMNS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """One block of 16 rows, the PIECE columns from `first` on. image: int32 words. place [2 * PIECE, 1], pair [1, 4]:
    indices in the caller's layout."""
    info = tl.load(block_info + block)
    slots = row_slot + block * ROWS
    rows = info & 0xFF
    if info >= STREAM_FLAG:
        _expand_streaming(image, payload, slots, rows, block, first, place, pair, HIDDEN, ROW_BYTES, COLUMNS)
    else:
        _expand_tiled(
            image, payload, slots, rows, block, first, place, pair, HIDDEN, ROW_BYTES, COLUMNS, PIECE
        )


@triton.jit(do_not_specialize=["own_rank"])
def expand_kernel(
    control, bases, image, row_slot, block_info, work,
    own_rank, HIDDEN: tl.constexpr, ROW_BYTES: tl.constexpr, COLUMNS: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """Persistent over (16 rows, PIECE columns). image: bf16 [padded rows, COLUMNS], as int32."""
    chain.after_previous()
    payload = payload_of(control, bases, own_rank)
    num_items = tl.load(work + NUM_BLOCKS) * (COLUMNS // PIECE)
    place = tl.arange(0, 2 * PIECE)[:, None]
    pair = tl.arange(0, 4)[None, :]
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        block = tl.full((), 0, tl.int32) + item // (COLUMNS // PIECE)
        first = item % (COLUMNS // PIECE) * PIECE
        expand_piece(
            image, payload, row_slot, block_info, block, first, place, pair,
            HIDDEN, ROW_BYTES, COLUMNS, PIECE,
        )  # fmt: skip
