"""small_m's GEMMs: both in one launch, without a meeting of all thread blocks in between.

Thread blocks take turns on tiles, first on all of GEMM1, then on all of GEMM2: streaming ones, then tiled ones. Tiles
are in the order of their entries, so that all blocks work on few entries at a time, and a streaming tile of GEMM2 waits
for GEMM1 of its entry only: the entry counts its tiles. Both blocks of a multiprocessor begin with neighbouring tiles,
which share tokens in L1. Streaming tiles of GEMM2 after a block's first are drawn by tickets: blocks differ in speed by
a tenth. The tiled kernel, which has the few hot experts, waits for all of its tiles of GEMM1.
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
DONE: gl.constexpr = gl.constexpr(plan.ENTRY_DONE)
ENTRY_WORDS: gl.constexpr = gl.constexpr(plan.ENTRY_WORDS)


@gluon.jit
def _expanded(known, entry, rest):
    """stream_tiles' gate of GEMM1: tokens are there when all thread blocks have expanded their share."""
    sync.await_count(rest[0], gl.num_programs(0))
    return known + (1 << 30)


@gluon.jit
def _multiplied(known, entry, rest):
    """stream_tiles' gate of GEMM2: an entry's tokens are there when all of its tiles of GEMM1 are."""
    work, num_entries, tiles, place = rest
    sync.await_word(work + entry * ENTRY_WORDS + DONE, tiles)
    # Later entries are looked at together, one a thread or more: what the minimum is over then goes through shared
    # memory, so that all warps return the same. Each for itself would see another moment.
    gl.static_assert(place.shape[0] >= 32 * WARPS)
    later = gl.minimum(place, num_entries - 1)
    done = sync.acquire(work + later * ENTRY_WORDS + DONE)
    return gl.min(gl.where((done < tiles) & (later > entry), later, num_entries), axis=0)


@gluon.jit
def _finish1(
    acc, factor, block, group, rows, entry, rest, CHUNKS_OUT: gl.constexpr,
    NUM_WARPS: gl.constexpr, BLOCKS: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    gemm1.finish_stream(acc, factor, block, group, rows, entry, rest, CHUNKS_OUT, NUM_WARPS, BLOCKS, HALVES)
    sync.count_in(entry + DONE)


@gluon.jit
def _stream1(
    control, middle, w13, w13_factor, image, work, limit, first, stop, beyond,
    CHUNKS: gl.constexpr, CHUNKS_OUT: gl.constexpr, GROUPS: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    stream_tiles.tiles(
        w13, w13_factor, image, work, first, stop, gl.num_programs(0), beyond, control, _expanded,
        (control + sync.EXPANDED,), _finish1, (middle, limit), CHUNKS_OUT, CHUNKS, GROUPS, WARPS, HALVES, False,
    )  # fmt: skip


@gluon.jit
def _stream2(
    control, row_address, row_weight, w2, w2_factor, middle, work, num_entries, tiles1, first, stop,
    HIDDEN: gl.constexpr, CHUNKS: gl.constexpr, GROUPS: gl.constexpr, FP8: gl.constexpr, HALVES: gl.constexpr,
    ENTRIES: gl.constexpr,
):  # fmt: skip
    awaited = (work, num_entries, tiles1, gl.arange(0, ENTRIES, layout=LINE))
    stream_tiles.tiles(
        w2, w2_factor, middle, work, first, stop, gl.num_programs(0), stream_tiles.nothing(),
        control + sync.TICKET, _multiplied, awaited, gemm2.finish_stream, (row_address, row_weight),
        (HIDDEN, FP8), CHUNKS, GROUPS, WARPS, HALVES, True,
    )  # fmt: skip


@gluon.jit
def _halved(work, GROUPS: gl.constexpr, CHUNKS: gl.constexpr):
    """Whether a GEMM's streaming tiles are halved; how many an entry has."""
    halved = stream_tiles.can_halve(CHUNKS, WARPS) & turns.halved(work, gl.num_programs(0), GROUPS)
    return halved, gl.where(halved, stream_tiles.tiles_of(GROUPS, 1), stream_tiles.tiles_of(GROUPS, 2))


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
def share_of(
    work, num_slots,
    GROUPS1: gl.constexpr, GROUPS2: gl.constexpr, CHUNKS1: gl.constexpr, CHUNKS2: gl.constexpr,
):  # fmt: skip
    """This thread block's part of the work, as `begin` and `multiply` take it: of each GEMM whether its streaming tiles
    are halved, the first one, the end of all, and the first tiled one; then the numbers of streaming entries, of tiled
    ones, and of GEMM1's tiles of a streaming entry."""
    programs = gl.num_programs(0)
    num_entries = turns.num_entries(work)
    num_tiled = gl.load(work + NUM_TILED)
    halved1, tiles1 = _halved(work, GROUPS1, CHUNKS1)
    halved2, tiles2 = _halved(work, GROUPS2, CHUNKS2)
    first1 = turns.place_of(gl.program_id(0), num_slots, OCCUPANCY)
    tiled1 = turns.after(first1, num_entries * tiles1, programs)
    first2 = turns.after(tiled1, num_tiled * GROUPS1, programs)
    tiled2 = turns.after(first2, num_entries * tiles2, programs)
    gemm1_share = (halved1, first1, num_entries * tiles1, tiled1)
    gemm2_share = (halved2, first2, num_entries * tiles2, tiled2)
    return gemm1_share, gemm2_share, num_entries, num_tiled, tiles1


@gluon.jit
def begin(share, w13, stream_work, tiled_work, GROUPS: gl.constexpr, CHUNKS: gl.constexpr):
    """The weights with which this thread block begins, into L2."""
    halved, first, stop, tiled = share[0]
    if halved:
        prefetch.stream_tile(w13, stream_work, first, stop, GROUPS, CHUNKS, 1, LINE)
    else:
        prefetch.stream_tile(w13, stream_work, first, stop, GROUPS, CHUNKS, 2, LINE)
    if first >= stop:
        prefetch.tiled_tile(w13, tiled_work, tiled, share[3] * GROUPS, GROUPS, CHUNKS, LINE)


@gluon.jit
def multiply(
    share, control, image, middle, image_tokens, middle_tokens, row_address, row_weight,
    work, stream_work, tiled_work, w13, w13_factor, w2, w2_factor, limit,
    HIDDEN: gl.constexpr, CHUNKS1: gl.constexpr, CHUNKS2: gl.constexpr, GROUPS1: gl.constexpr,
    GROUPS2: gl.constexpr, ENTRIES: gl.constexpr, TILES: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Both GEMMs, from when this thread block has expanded its share of the rows. ENTRIES: at least as many as there
    are streaming ones."""
    gemm1_share, gemm2_share, num_entries, num_tiled, tiles1 = share
    halved1, first1, stop1, tiled1 = gemm1_share
    halved2, first2, stop2, tiled2 = gemm2_share
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
            middle, w13, w13_factor, (image_tokens,), tiled_work, work + NUM_TILED, limit, tiled1,
            gl.num_programs(0), CHUNKS1, CHUNKS2, GROUPS1, TILES, True,
        )  # fmt: skip
        sync.fence_proxies()
        sync.arrive(control + sync.MULTIPLIED)
    if halved2:
        _stream2(
            control, row_address, row_weight, w2, w2_factor, middle, stream_work, num_entries, tiles1, first2, stop2,
            HIDDEN, CHUNKS2, GROUPS2, FP8, 1, ENTRIES,
        )  # fmt: skip
    else:
        _stream2(
            control, row_address, row_weight, w2, w2_factor, middle, stream_work, num_entries, tiles1, first2, stop2,
            HIDDEN, CHUNKS2, GROUPS2, FP8, 2, ENTRIES,
        )  # fmt: skip
    if has_tiles:
        prefetch.tiled_tile(w2, tiled_work, tiled2, num_tiled * GROUPS2, GROUPS2, CHUNKS2, LINE)
        sync.await_count(control + sync.MULTIPLIED, gl.num_programs(0))
        sync.fence_proxies()
        gemm2.tiled_tiles(
            row_address, row_weight, w2, w2_factor, (middle_tokens,), tiled_work, work + NUM_TILED, tiled2,
            gl.num_programs(0), HIDDEN, CHUNKS2, GROUPS2, FP8, TILES, True,
        )  # fmt: skip
