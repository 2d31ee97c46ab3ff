"""small_m's GEMMs: both in one launch, with a meeting of all thread blocks in between.

Streaming tiles are shared as by the other paths' kernels. While slower thread blocks finish GEMM1, the weights that a
block multiplies with next are already on their way.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.backends.hopper import plan
from megamoe.backends.hopper.device import gemm1, gemm2, prefetch, stream_tiles, sync, turns
from megamoe.backends.hopper.device import stream_loop as stream

WARPS: gl.constexpr = gl.constexpr(plan.SMALL_M.warps)
OCCUPANCY: gl.constexpr = gl.constexpr(plan.SMALL_M.occupancy)
LINE: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [32], [plan.SMALL_M.warps], [0]))
NUM_TILED: gl.constexpr = gl.constexpr(plan.Counter.NUM_TILED_ENTRIES)


@gluon.jit
def _all_came(known, entry, rest):
    """stream_tiles' gate of both GEMMs: tokens are there when all thread blocks have arrived at a counter."""
    sync.await_count(rest[0], gl.num_programs(0))
    return known + (1 << 30)


@gluon.jit
def _stream1(
    control, middle, w13, w13_factor, image, work, limit, first, stop, beyond,
    CHUNKS: gl.constexpr, CHUNKS_OUT: gl.constexpr, GROUPS: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    stream_tiles.tiles(
        w13, w13_factor, image, work, first, stop, OCCUPANCY, beyond, _all_came, (control + sync.EXPANDED,),
        gemm1.finish_stream, (middle, limit), CHUNKS_OUT, CHUNKS, GROUPS, WARPS, HALVES,
    )  # fmt: skip


@gluon.jit
def _stream2(
    control, row_address, row_weight, w2, w2_factor, middle, work, first, stop,
    HIDDEN: gl.constexpr, CHUNKS: gl.constexpr, GROUPS: gl.constexpr, FP8: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    stream_tiles.tiles(
        w2, w2_factor, middle, work, first, stop, OCCUPANCY, stream_tiles.nothing(), _all_came,
        (control + sync.MULTIPLIED,), gemm2.finish_stream, (row_address, row_weight), (HIDDEN, FP8),
        CHUNKS, GROUPS, WARPS, HALVES,
    )  # fmt: skip


@gluon.jit
def _address_of(units, work, first, stop, halved, GROUPS: gl.constexpr, CHUNKS: gl.constexpr):
    """Of the weights of the streaming tile `first`; 0 if it does not exist."""
    at = stream_tiles.nothing()
    if first < stop:
        if halved:
            at = stream.tile_address(units.to(gl.int64), work, first, GROUPS, CHUNKS, 1)
        else:
            at = stream.tile_address(units.to(gl.int64), work, first, GROUPS, CHUNKS, 2)
    return at


@gluon.jit
def _share(work, num_slots, GROUPS: gl.constexpr, CHUNKS: gl.constexpr):
    """Of a GEMM: whether its streaming tiles are halved, this thread block's first one, and the end of its range."""
    halved = stream_tiles.can_halve(CHUNKS, WARPS) & turns.halved(work, gl.num_programs(0), GROUPS)
    first, stop = turns.tile_range(work, gl.program_id(0), num_slots, stream_tiles.tiles_of(GROUPS, 2))
    if halved:
        first, stop = turns.tile_range(work, gl.program_id(0), num_slots, stream_tiles.tiles_of(GROUPS, 1))
    return halved, first, stop


@gluon.jit
def share_of(
    work, num_slots,
    GROUPS1: gl.constexpr, GROUPS2: gl.constexpr, CHUNKS1: gl.constexpr, CHUNKS2: gl.constexpr,
):  # fmt: skip
    """This thread block's part of the work, as `begin` and `multiply` take it: of each GEMM whether its streaming tiles
    are halved, its first one and their end; then the number of tiled entries."""
    num_tiled = gl.load(work + NUM_TILED)
    halved1, first1, stop1 = _share(work, num_slots, GROUPS1, CHUNKS1)
    halved2, first2, stop2 = _share(work, num_slots, GROUPS2, CHUNKS2)
    gemm1_share = (halved1, first1, stop1)
    gemm2_share = (halved2, first2, stop2)
    return gemm1_share, gemm2_share, num_tiled


@gluon.jit
def begin(share, w13, stream_work, tiled_work, GROUPS: gl.constexpr, CHUNKS: gl.constexpr):
    """The weights with which this thread block begins, into L2."""
    halved, first, stop = share[0]
    if halved:
        prefetch.stream_tile(w13, stream_work, first, stop, GROUPS, CHUNKS, 1, LINE)
    else:
        prefetch.stream_tile(w13, stream_work, first, stop, GROUPS, CHUNKS, 2, LINE)
    if first >= stop:
        prefetch.tiled_tile(w13, tiled_work, gl.program_id(0), share[2] * GROUPS, GROUPS, CHUNKS, LINE)


@gluon.jit
def multiply(
    share, control, image, middle, image_tokens, middle_tokens, row_address, row_weight,
    work, stream_work, tiled_work, w13, w13_factor, w2, w2_factor, limit,
    HIDDEN: gl.constexpr, CHUNKS1: gl.constexpr, CHUNKS2: gl.constexpr, GROUPS1: gl.constexpr,
    GROUPS2: gl.constexpr, TILES: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Both GEMMs, from when this thread block has expanded its share of the rows."""
    gemm1_share, gemm2_share, num_tiled = share
    halved1, first1, stop1 = gemm1_share
    halved2, first2, stop2 = gemm2_share
    # TMA reads tokens only where the tiled kernel has work.
    has_tiles = num_tiled != 0
    if has_tiles:
        sync.fence_proxies()
    sync.arrive(control + sync.EXPANDED)
    # Registers and L2 go on with GEMM2's first weights where GEMM1's end.
    beyond = _address_of(w2, stream_work, first2, stop2, halved2, GROUPS2, CHUNKS2)
    if halved1:
        _stream1(
            control, middle, w13, w13_factor, image, stream_work, limit, first1, stop1, beyond, CHUNKS1, CHUNKS2,
            GROUPS1, 1,
        )  # fmt: skip
    else:
        _stream1(
            control, middle, w13, w13_factor, image, stream_work, limit, first1, stop1, beyond, CHUNKS1, CHUNKS2,
            GROUPS1, 2,
        )  # fmt: skip
    if has_tiles | (first1 >= stop1):
        # Who has no tile waits too: none may come to the end, where a wait can fail, while others still have to see
        # that no wait has failed so far.
        sync.await_count(control + sync.EXPANDED, gl.num_programs(0))
    if has_tiles:
        sync.fence_proxies()
        gemm1.tiled_tiles(
            middle, w13, w13_factor, (image_tokens,), tiled_work, work + NUM_TILED, limit,
            gl.num_programs(0), CHUNKS1, CHUNKS2, GROUPS1, TILES, True,
        )  # fmt: skip
        sync.fence_proxies()
    sync.arrive(control + sync.MULTIPLIED)
    if halved2:
        _stream2(
            control, row_address, row_weight, w2, w2_factor, middle, stream_work, first2, stop2,
            HIDDEN, CHUNKS2, GROUPS2, FP8, 1,
        )  # fmt: skip
    else:
        _stream2(
            control, row_address, row_weight, w2, w2_factor, middle, stream_work, first2, stop2,
            HIDDEN, CHUNKS2, GROUPS2, FP8, 2,
        )  # fmt: skip
    if has_tiles:
        prefetch.tiled_tile(w2, tiled_work, gl.program_id(0), num_tiled * GROUPS2, GROUPS2, CHUNKS2, LINE)
        sync.await_count(control + sync.MULTIPLIED, gl.num_programs(0))
        sync.fence_proxies()
        gemm2.tiled_tiles(
            row_address, row_weight, w2, w2_factor, (middle_tokens,), tiled_work, work + NUM_TILED,
            gl.num_programs(0), HIDDEN, CHUNKS2, GROUPS2, FP8, TILES, True,
        )  # fmt: skip
