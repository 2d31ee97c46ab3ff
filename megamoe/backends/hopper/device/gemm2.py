"""GEMM2: intermediate rows times the down projection, rounded once to the result format, stored at their sources.

Where a row goes is a ready address (its source's combine region, over NVLink if that is a peer), written by the
index stage; this stage therefore also is the way back.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.backends.hopper.device import stream_loop as stream
from megamoe.backends.hopper.device import stream_tiles
from megamoe.backends.hopper.device import wgmma_loop as tiled
from megamoe.backends.hopper.device.chain import after_previous_gluon
from megamoe.backends.hopper.device.mx_gluon import mx_exponents, power_of_two


@gluon.jit
def store_rows(
    y, row_address, row_weight, first_row, rows, first_feature, HIDDEN: gl.constexpr, FP8: gl.constexpr
):
    """y [tokens, width] fp32 -> result rows: bf16, or weighted and MXFP8 (codes, then scales from byte HIDDEN on)."""
    layout: gl.constexpr = y.type.layout
    num_tokens: gl.constexpr = y.type.shape[0]
    width: gl.constexpr = y.type.shape[1]
    token = gl.arange(0, num_tokens, layout=gl.SliceLayout(1, layout))
    feature = first_feature + gl.arange(0, width, layout=gl.SliceLayout(0, layout))
    inside = token < rows
    address = gl.load(row_address + first_row + token, mask=inside, other=0)
    # Rows begin at multiples of 16 bytes; told so, the compiler stores pieces of a row and not single values.
    row = gl.multiple_of(address.to(gl.pointer_type(gl.uint8)), 16)[:, None]
    mask = inside[:, None] & (feature < HIDDEN)[None, :]
    if FP8:
        weight = gl.load(row_weight + first_row + token, mask=inside, other=0.0)
        blocks = gl.reshape(y * weight[:, None], [num_tokens, width // 32, 32])
        exponent, bad = mx_exponents(blocks)
        scaled = blocks * power_of_two(254 - gl.expand_dims(exponent, 2))
        scaled = gl.where(gl.expand_dims(bad, 2), 0.0, scaled)
        codes = gl.reshape(scaled.to(gl.float8e4nv), [num_tokens, width]).to(gl.uint8, bitcast=True)
        gl.store(row + feature[None, :], gl.convert_layout(codes, layout), mask=mask)
        scale = gl.where(bad, 255, exponent).to(gl.uint8)
        by_token: gl.constexpr = gl.SliceLayout(1, scale.type.layout)
        by_block: gl.constexpr = gl.SliceLayout(0, scale.type.layout)
        block = first_feature // 32 + gl.arange(0, width // 32, layout=by_block)
        base = gl.convert_layout(address, by_token)[:, None] + (HIDDEN + block)[None, :]
        mask = gl.convert_layout(inside, by_token)[:, None] & (block * 32 < HIDDEN)[None, :]
        gl.store(base.to(gl.pointer_type(gl.uint8)), scale, mask=mask)
    else:
        gl.store(row.to(gl.pointer_type(gl.bfloat16)) + feature[None, :], y.to(gl.bfloat16), mask=mask)


@gluon.jit
def _store_stream(
    acc, factor, row_address, row_weight, block, group, rows, HIDDEN: gl.constexpr, FP8: gl.constexpr,
    WARPS: gl.constexpr, BLOCKS: gl.constexpr, HALVES: gl.constexpr, FIRST: gl.constexpr, COUNT: gl.constexpr,
):  # fmt: skip
    width: gl.constexpr = 64 * HALVES
    layout: gl.constexpr = stream.sum_layout(WARPS // HALVES, COUNT, width, WARPS)
    y = stream.sum_groups(stream.all_rows(acc, WARPS, BLOCKS, HALVES, FIRST, COUNT), layout) * factor
    store_rows(
        y, row_address, row_weight, block * 16 + FIRST * 8, rows - FIRST * 8, group * width, HIDDEN, FP8
    )


@gluon.jit
def finish_stream(
    acc, factor, block, group, rows, entry, rest, OPTIONS: gl.constexpr,
    WARPS: gl.constexpr, BLOCKS: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """A streaming tile to its rows' sources, see stream.tiles. OPTIONS: HIDDEN, FP8."""
    row_address, row_weight = rest
    # More warps, more partial sums: two blocks at once would take L1 from the tokens.
    count: gl.constexpr = 1 if BLOCKS == 1 or WARPS > 4 else 2
    for first in gl.static_range(0, BLOCKS, count):
        _store_stream(
            acc, factor, row_address, row_weight, block, group, rows, OPTIONS[0], OPTIONS[1], WARPS, BLOCKS, HALVES,
            first, count if first + count <= BLOCKS else 1,
        )  # fmt: skip


@gluon.jit
def gemm2_stream_kernel(
    row_address, row_weight, units, out_factor, image, work, counters, num_slots,
    HIDDEN: gl.constexpr, CHUNKS: gl.constexpr, GROUPS: gl.constexpr, FP8: gl.constexpr,
    OCCUPANCY: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    after_previous_gluon()
    stream_tiles.all_tiles(
        units, out_factor, image, work, counters, num_slots, finish_stream, (row_address, row_weight),
        (HIDDEN, FP8), CHUNKS, GROUPS, OCCUPANCY, WARPS,
    )  # fmt: skip


@gluon.jit
def finish_tiled(
    acc, factor, row_address, row_weight, first_row, group, rows, HIDDEN: gl.constexpr, FP8: gl.constexpr
):
    """Round a tile of 128 features and store its rows at their sources."""
    out: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    y = acc * factor
    if not FP8:
        # Rounded before it crosses shared memory: half the bytes.
        y = y.to(gl.bfloat16)
    y = gl.convert_layout(gl.permute(y, (1, 0)), out)
    store_rows(y, row_address, row_weight, first_row, rows, group * 128, HIDDEN, FP8)


@gluon.jit
def _finish_part(acc, factor, row, group, rows, rest, OPTIONS: gl.constexpr):
    row_address, row_weight = rest
    finish_tiled(acc, factor, row_address, row_weight, row, group, rows, OPTIONS[0], OPTIONS[1])


@gluon.jit
def tiled_tiles(
    row_address, row_weight, units, out_factor, boxes, work, num_entries, place, num_programs, HIDDEN: gl.constexpr,
    CHUNKS: gl.constexpr, GROUPS: gl.constexpr, FP8: gl.constexpr, TILES: gl.constexpr, CLOSES: gl.constexpr,
):  # fmt: skip
    """See tiled.persistent."""
    tiled.persistent(
        boxes, units, out_factor, work, num_entries, place, num_programs, _finish_part, (row_address, row_weight),
        CHUNKS, GROUPS, TILES, (HIDDEN, FP8), CLOSES,
    )  # fmt: skip


@gluon.jit
def gemm2_tiled_kernel(
    row_address, row_weight, units, out_factor, box256, box128, box64, box32, work, num_entries, num_programs,
    HIDDEN: gl.constexpr, CHUNKS: gl.constexpr, GROUPS: gl.constexpr, FP8: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    after_previous_gluon()
    tiled_tiles(
        row_address, row_weight, units, out_factor, tiled.boxes_of(box256, box128, box64, box32), work, num_entries,
        gl.program_id(0), num_programs, HIDDEN, CHUNKS, GROUPS, FP8, TILES, False,
    )  # fmt: skip
