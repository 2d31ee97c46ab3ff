"""Weights on their way into L2 before the thread block that multiplies with them may begin."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.backends.hopper import packing, plan
from megamoe.backends.hopper.device import stream_loop as stream
from megamoe.backends.hopper.device import wgmma_loop as tiled

UNITS: gl.constexpr = gl.constexpr(24)
"""104 KB a thread block: 27 MB for all of an H200, as much as stays in L2 beside the rest."""
NUM_TILED: gl.constexpr = gl.constexpr(plan.Counter.NUM_TILED_ENTRIES)
UNIT_BYTES: gl.constexpr = gl.constexpr(packing.UNIT_BYTES)
PREFETCH: gl.constexpr = gl.constexpr(
    f"""{{
.reg .pred p;
setp.lt.s32 p, $1, {UNITS.value};
@p cp.async.bulk.prefetch.L2.global [$2], {packing.UNIT_BYTES};
mov.u32 $0, 0;
}}"""
)


@gluon.jit
def _begin(address, tid):
    """The first UNITS units of a tile whose weights begin at an address, one a thread."""
    unit = address + tid.to(gl.int64) * UNIT_BYTES
    gl.inline_asm_elementwise(PREFETCH, "=r,r,l", [tid, unit], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def first_tile(
    units,
    stream_work,
    tiled_work,
    work,
    first,
    stop,
    GROUPS: gl.constexpr,
    CHUNKS: gl.constexpr,
    LINE: gl.constexpr,
):
    """Begin to fetch what this thread block will read first: its streaming tiles `first` to `stop`, or if it has none
    its tiled ones."""
    tid = gl.arange(0, 32 * gl.num_warps(), layout=LINE)
    if first < stop:
        _begin(stream.tile_address(units.to(gl.int64), stream_work, first, GROUPS, CHUNKS), tid)
    elif gl.program_id(0) < gl.load(work + NUM_TILED) * GROUPS:
        _, at = tiled.tile_origin(units, tiled_work, gl.program_id(0), GROUPS, CHUNKS)
        _begin(at, tid)
