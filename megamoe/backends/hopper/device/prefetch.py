"""Weights on their way into L2 before the thread block that multiplies with them may begin."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.backends.hopper import packing
from megamoe.backends.hopper.device import stream_loop as stream
from megamoe.backends.hopper.device import wgmma_loop as tiled

UNITS: gl.constexpr = gl.constexpr(24)
"""104 KB a thread block: 27 MB for all of an H200, as much as stays in L2 beside the rest."""
UNIT_BYTES: gl.constexpr = gl.constexpr(packing.UNIT_BYTES)
PREFETCH: gl.constexpr = gl.constexpr(
    f"""{{
.reg .pred p;
setp.lt.s32 p, $1, $3;
@p cp.async.bulk.prefetch.L2.global [$2], {packing.UNIT_BYTES};
mov.u32 $0, 0;
}}"""
)


@gluon.jit
def _begin(address, tid, UNITS_OF_TILE: gl.constexpr, STRIDE: gl.constexpr):
    """The first units of a tile whose weights begin at an address, one a thread."""
    unit = address + tid.to(gl.int64) * (STRIDE * UNIT_BYTES)
    count: gl.constexpr = min(UNITS, UNITS_OF_TILE)
    gl.inline_asm_elementwise(
        PREFETCH, "=r,r,l,r", [tid, unit, 0 * tid + count], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def stream_tile(
    units, stream_work, first, stop,
    GROUPS: gl.constexpr, CHUNKS: gl.constexpr, HALVES: gl.constexpr, LINE: gl.constexpr,
):  # fmt: skip
    """Begin to fetch the streaming tile that this thread block reads first, if it has one."""
    if first < stop:
        tid = gl.arange(0, 32 * gl.num_warps(), layout=LINE)
        address = stream.tile_address(units.to(gl.int64), stream_work, first, GROUPS, CHUNKS, HALVES)
        _begin(address, tid, CHUNKS * HALVES, stream.UNITS_PER_CHUNK // HALVES)


@gluon.jit
def tiled_tile(
    units, tiled_work, first, stop, GROUPS: gl.constexpr, CHUNKS: gl.constexpr, LINE: gl.constexpr
):
    """The same for the tiled kernel."""
    if first < stop:
        tid = gl.arange(0, 32 * gl.num_warps(), layout=LINE)
        _, at = tiled.tile_origin(units, tiled_work, first, GROUPS, CHUNKS)
        _begin(at, tid, CHUNKS * stream.UNITS_PER_CHUNK, 1)
