"""GEMM1: rows times gate and up weights, SwiGLU in fp32, straight to MXFP8, laid out as GEMM2's token operand.

The intermediate is rounded to MXFP8 (e4m3 times E8M0 per 32 features) and stored as the bf16 value of that, which is
exact: GEMM2 needs no decode, and the numbers are those of an MXFP8 intermediate.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.backends.hopper.device import stream_loop as stream
from megamoe.backends.hopper.device import stream_tiles
from megamoe.backends.hopper.device import wgmma_loop as tiled
from megamoe.backends.hopper.device.chain import after_previous_gluon
from megamoe.backends.hopper.device.mx_gluon import mxfp8_rounded, mxfp8_rounded_columns
from megamoe.backends.hopper.device.stream_loop import TOKEN_BLOCK_BYTES, TOKEN_CHUNK_BYTES

FEATURES: gl.constexpr = gl.constexpr(64)
"""Features of a tile of 128 packed rows: two MX blocks."""


@gluon.jit
def swiglu(gate, up, limit):
    """act(min(gate, limit)) * clamp(up, -limit, limit); limit is infinite where there is none."""
    # Comparisons, not minimum and maximum: those would turn a NaN into the limit.
    gate = gl.where(gate > limit, limit, gate)
    up = gl.where(up > limit, limit, gl.where(up < 0.0 - limit, 0.0 - limit, up))
    return gate / (1.0 + gl.exp(0.0 - gate)) * up


@gluon.jit
def _store_stream(
    acc, factor, limit, image, block, group, rows, CHUNKS_OUT: gl.constexpr, WARPS: gl.constexpr,
    BLOCKS: gl.constexpr, HALVES: gl.constexpr, FIRST: gl.constexpr, COUNT: gl.constexpr,
):  # fmt: skip
    """Sum, SwiGLU, round, and store a tile's features of COUNT blocks of 8 tokens into GEMM2's image."""
    features: gl.constexpr = FEATURES // 2 * HALVES
    layout: gl.constexpr = stream.sum_layout(WARPS // HALVES, COUNT, features, WARPS)
    gate = stream.sum_groups(stream.half_rows(acc, 0, WARPS, BLOCKS, HALVES, FIRST, COUNT), layout) * factor
    up = stream.sum_groups(stream.half_rows(acc, 1, WARPS, BLOCKS, HALVES, FIRST, COUNT), layout) * factor
    value = mxfp8_rounded(swiglu(gate, up, limit), 8 * COUNT, features).to(gl.bfloat16)
    out: gl.constexpr = gl.SliceLayout(0, layout)
    value = gl.convert_layout(value, out)
    token = FIRST * 8 + gl.arange(0, 8 * COUNT, layout=gl.SliceLayout(1, out))
    feature = group * features + gl.arange(0, features, layout=gl.SliceLayout(0, out))
    # chunk, 32-block t and position in it -> where stream.multiply looks for it
    column = (feature // 128) * (TOKEN_CHUNK_BYTES // 2) + (feature // 32 % 4) * 8
    column += (feature % 32 // 8) * 256 + feature % 8
    row = token // 16 * (CHUNKS_OUT * (TOKEN_CHUNK_BYTES // 2)) + token % 16 // 8 * (TOKEN_BLOCK_BYTES // 2)
    row += token % 8 * 32
    base = image + block.to(gl.int64) * (CHUNKS_OUT * (TOKEN_CHUNK_BYTES // 2))
    gl.store(base + row[:, None] + column[None, :], value, mask=(token < rows)[:, None])


@gluon.jit
def finish_stream(
    acc, factor, block, group, rows, entry, rest, CHUNKS_OUT: gl.constexpr,
    WARPS: gl.constexpr, BLOCKS: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """A streaming tile into GEMM2's image, see stream.tiles."""
    image, limit = rest
    count: gl.constexpr = 1 if BLOCKS == 1 else 2
    for first in gl.static_range(0, BLOCKS, count):
        _store_stream(
            acc, factor, limit, image, block, group, rows, CHUNKS_OUT, WARPS, BLOCKS, HALVES, first,
            count if first + count <= BLOCKS else 1,
        )  # fmt: skip


@gluon.jit
def gemm1_stream_kernel(
    image_out, units, out_factor, image, work, counters, limit, num_slots,
    CHUNKS: gl.constexpr, CHUNKS_OUT: gl.constexpr, GROUPS: gl.constexpr,
    OCCUPANCY: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    after_previous_gluon()
    stream_tiles.all_tiles(
        units, out_factor, image, work, counters, num_slots, finish_stream, (image_out, limit), CHUNKS_OUT,
        CHUNKS, GROUPS, OCCUPANCY, WARPS,
    )  # fmt: skip


@gluon.jit
def finish_tiled(
    acc, factor, limit, image, first_row, group, rows, COLUMNS_OUT: gl.constexpr, BLOCK_N: gl.constexpr
):
    """SwiGLU in the thread (gate and up rows are 8 apart), then into GEMM2's image."""
    x = gl.permute(gl.reshape(acc * factor, [8, 2, 8, BLOCK_N]), [0, 2, 3, 1])  # warp, g, token, gate or up
    gate, up = gl.split(x)
    h = gl.reshape(swiglu(gate, up, limit), [2, 32, BLOCK_N])
    store_features(h, image, first_row, group, rows, COLUMNS_OUT, BLOCK_N, 8)


@gluon.jit
def store_features(
    h, image, first_row, group, rows, COLUMNS_OUT: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr
):
    """Round a tile's features h [2 MX blocks, 32, tokens] and store them into GEMM2's row-major image."""
    value = mxfp8_rounded_columns(h).to(gl.bfloat16)
    # feature 32 u + 4 j + 2 i + lo of block t = 2 * (group % 2) + u -> position 16 j + 8 i + 2 t + lo of its chunk:
    # of every 8 positions, 4 are this tile's
    value = gl.reshape(value, [2, 8, 2, 2, BLOCK_N])  # u, j, i, lo, token
    value = gl.reshape(gl.permute(value, [4, 1, 2, 0, 3]), [BLOCK_N, FEATURES])
    out: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    value = gl.convert_layout(value, out)
    token = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, out))
    place = gl.arange(0, FEATURES, layout=gl.SliceLayout(0, out))
    column = group // 2 * 128 + place // 4 * 8 + group % 2 * 4 + place % 4
    base = image + (first_row + token).to(gl.int64)[:, None] * COLUMNS_OUT
    gl.store(base + column[None, :], value, mask=(token < rows)[:, None])


@gluon.jit
def _finish_part(acc, factor, row, group, rows, rest, COLUMNS_OUT: gl.constexpr):
    image, limit = rest
    finish_tiled(acc, factor, limit, image, row, group, rows, COLUMNS_OUT, acc.type.shape[1])


@gluon.jit
def tiled_tiles(
    image_out, units, out_factor, boxes, work, num_entries, limit, place, num_programs, CHUNKS: gl.constexpr,
    CHUNKS_OUT: gl.constexpr, GROUPS: gl.constexpr, TILES: gl.constexpr, CLOSES: gl.constexpr,
):  # fmt: skip
    """See tiled.persistent."""
    tiled.persistent(
        boxes, units, out_factor, work, num_entries, place, num_programs, _finish_part, (image_out, limit),
        CHUNKS, GROUPS, TILES, CHUNKS_OUT * 128, CLOSES,
    )  # fmt: skip


@gluon.jit
def gemm1_tiled_kernel(
    image_out, units, out_factor, box256, box128, box64, box32, work, num_entries, limit, num_programs,
    CHUNKS: gl.constexpr, CHUNKS_OUT: gl.constexpr, GROUPS: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    after_previous_gluon()
    tiled_tiles(
        image_out, units, out_factor, tiled.boxes_of(box256, box128, box64, box32), work, num_entries, limit,
        gl.program_id(0), num_programs, CHUNKS, CHUNKS_OUT, GROUPS, TILES, False,
    )  # fmt: skip
