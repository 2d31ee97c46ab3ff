"""Tiles of large_m's GEMMs, dealt out beforehand as compact's are: thread blocks take turns, through all widths, the
widest first.

run_all is compact's loop with the little that GEMM2 needs to begin before GEMM1 has ended. Before it, while rows are
late, a thread block runs single tiles early: it has its next 32 tiles of every width in sight, one a thread (`state`),
looks for all of them at once whether their rows are there, and takes the first that are.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.backends.hopper import board, plan
from megamoe.backends.hopper.board import BoardWord
from megamoe.backends.hopper.device import arrivals, flags, sync
from megamoe.backends.hopper.device import wgmma_loop as tiled

LINE: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
EARLY: gl.constexpr = gl.constexpr(BoardWord.EARLY)
SIGHT: gl.constexpr = gl.constexpr(board.TILES_IN_SIGHT)
NONE: gl.constexpr = gl.constexpr(1 << 24)
"""No tile: more than any thread block has."""
ENTRY_WORDS: gl.constexpr = gl.constexpr(plan.ENTRY_WORDS)
LOOK: gl.constexpr = gl.constexpr("""{
.reg .pred p;
setp.ne.s32 p, $2, 0;
mov.u32 $0, 0;
@p ld.acquire.gpu.global.b32 $0, [$1];
}""")


@gluon.jit
def first_state(lane):
    """In thread 32 * width + j: twice the number of a tile among this thread block's of that width, j to begin with;
    plus 1 if it is known to be ready."""
    return lane % SIGHT * 2


@gluon.jit
def own_tile(number, width, of_width, NUM_WIDTHS: gl.constexpr, GROUPS: gl.constexpr):
    """A tile of this thread block by the index of its width and its number: (whether there is one, entry, row group).
    of_width: for every width the number of its entries and the first one. See board.own_tiles."""
    at = of_width + 2 * gl.where(width < NUM_WIDTHS, width, 0)
    num_entries = gl.load(at)
    first_entry = gl.load(at + 1)
    programs = gl.num_programs(0)
    turn = (gl.program_id(0) + programs - first_entry * GROUPS % programs) % programs
    tile = turn + number * programs
    exists = (width < NUM_WIDTHS) & (tile < num_entries * GROUPS)
    return exists, first_entry + tile // GROUPS, tile % GROUPS


@gluon.jit
def look(
    state,
    lane,
    counts,
    entries,
    of_width,
    NUM_WIDTHS: gl.constexpr,
    GROUPS: gl.constexpr,
    WANTED: gl.constexpr,
):
    """Which of the tiles in sight are ready: those whose entry's word in `counts` has come to WANTED (0: to its number
    of rows). Returns (state, 1 if there are tiles that have not run, else 0)."""
    exists, entry, _ = own_tile(state // 2, lane // SIGHT, of_width, NUM_WIDTHS, GROUPS)
    unknown = exists & (state % 2 == 0)
    at = gl.where(unknown, entry, 0)
    seen = gl.inline_asm_elementwise(
        LOOK,
        "=&r,l,r",
        [(counts + at).to(gl.int64), unknown.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    wanted = WANTED + 0 * at
    if WANTED == 0:
        wanted = gl.load(entries + at * ENTRY_WORDS + 2, mask=unknown, other=-1)
    sync.fence_global_proxies()
    gl.thread_barrier()
    return state + (unknown & (seen == wanted)).to(gl.int32), gl.max(exists.to(gl.int32), axis=0)


@gluon.jit
def next_of(state, lane, width: gl.constexpr):
    """Number of the first tile of a width that is known to be ready, NONE if none is."""
    return gl.min(gl.where((lane // SIGHT == width) & (state % 2 == 1), state // 2, NONE), axis=0)


@gluon.jit
def taken(state, lane, width: gl.constexpr, number):
    """The state after a tile has been taken: another one comes into sight in its place."""
    return gl.where(lane == width * SIGHT + number % SIGHT, (number + SIGHT) * 2, state)


@gluon.jit
def run_early(
    state, lane, counts, board_at, entries, of_width, tokens, units, out_factor, finish, rest,
    INDEX: gl.constexpr, NUM_WIDTHS: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
    CHUNKS: gl.constexpr, GROUPS: gl.constexpr, DONE: gl.constexpr, TAKEN: gl.constexpr, OPTIONS: gl.constexpr,
):  # fmt: skip
    """One tile of a width, if one is ready, while this rank waits for rows: its launch has no registers to spare, so
    that it takes a sixth longer than one of run_all. tokens: descriptors of a tile's parts. finish, rest, OPTIONS: see
    wgmma_loop.persistent. Returns (state, whether there was a tile)."""
    number = next_of(state, lane, INDEX)
    worked = (number < NONE).to(gl.int32)
    if number < NONE:
        words_off, scales_off = tiled.thread_offsets()
        _, entry, group = own_tile(number, INDEX, of_width, NUM_WIDTHS, GROUPS)
        state = taken(state, lane, INDEX, number)
        row, at = tiled.tile_origin(units, entries, entry * GROUPS + group, GROUPS, CHUNKS)
        memory, bars = tiled.new_ring(tokens, WIDTH, STAGES)
        tiled.fill_ahead(tokens, memory, bars, 0, row, STAGES)
        chunks = tiled.load_ahead(at + words_off, at + scales_off, AHEAD)
        acc, chunks, _slot, _phase = tiled.multiply(
            chunks, tokens, memory, bars, gl.to_tensor(0), gl.to_tensor(0), row, row, number < 0,
            at + words_off, at + scales_off, at + words_off, at + scales_off, CHUNKS, AHEAD, STAGES,
        )  # fmt: skip
        _finish(acc, tokens, out_factor, entries, entry * GROUPS + group, finish, rest, GROUPS, OPTIONS)
        tiled.close_ring(bars, STAGES)
        gl.store(board_at + TAKEN + (entry * GROUPS + group), 1)
        gl.atomic_add(board_at + EARLY, 1, sem="relaxed", scope="gpu")
        sync.fence_global_proxies()
        gl.thread_barrier()
        gl.atomic_add(board_at + DONE + entry, 1, sem="release", scope="gpu")
    return state, worked


@gluon.jit
def _finish(
    acc, tokens, out_factor, entries, tile, finish, rest, GROUPS: gl.constexpr, OPTIONS: gl.constexpr
):
    words = entries + tile // GROUPS * ENTRY_WORDS
    factor = gl.load(out_factor + gl.load(words))
    first_row = gl.load(words + 1)
    rows = gl.load(words + 2)
    for part in gl.static_range(len(tokens)):
        before = tiled.rows_before(tokens, part)
        finish(acc[part], factor, first_row + before, tile % GROUPS, rows - before, rest, OPTIONS)


@gluon.jit
def _not_taken(tile, stop, taken_at, has_early):
    """From a tile of this thread block on, the first that has not run early."""
    if has_early != 0:
        gone = gl.load(taken_at + tile, mask=tile < stop, other=0)
        while gone != 0:
            tile = tile + gl.num_programs(0)
            gone = gl.load(taken_at + tile, mask=tile < stop, other=0)
    return tile


@gluon.jit
def _await_entry(known, entry, done, num_entries, lane, waits_with, WANTED: gl.constexpr):
    """Until the first `known` entries, whose words in `done` have come to WANTED, include one: (known, 1), or 0 when
    the launch has been given up."""
    control, bases, rank, own_rank = waits_with
    alive = gl.to_tensor(1)
    if entry >= known:
        started = flags.now_ns()
        while (entry >= known) & (alive != 0):
            there = known + lane < num_entries
            at = done + gl.where(there, known + lane, 0)
            seen = gl.inline_asm_elementwise(
                LOOK, "=&r,l,r", [at.to(gl.int64), there.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1
            )
            sync.fence_global_proxies()
            known = known + gl.min(gl.where(there & (seen == WANTED), 256, lane), axis=0)
            if entry >= known:
                alive = arrivals.go_on(control, bases, lane, rank, started, own_rank, rank.shape[0])
    return known, alive


@gluon.jit
def _all_of_width(
    begin, stop, known, num_entries, lane, memory, tokens, units, out_factor, entries, done, taken_at, has_early,
    waits_with, finish, rest,
    CHUNKS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr, WANTED: gl.constexpr,
    OPTIONS: gl.constexpr,
):  # fmt: skip
    """See run_all: of the tiles [begin, stop), all of one width. Returns how many entries are known to be complete."""
    programs = gl.num_programs(0)
    first = begin + (gl.program_id(0) + programs - begin % programs) % programs
    tile = first
    if WANTED == 0:
        tile = _not_taken(first, stop, taken_at, has_early)
    elif first < stop:
        known, alive = _await_entry(known, first // GROUPS, done, num_entries, lane, waits_with, WANTED)
        tile = gl.where(alive != 0, first, stop)
    if tile < stop:
        words_off, scales_off = tiled.thread_offsets()
        row, at = tiled.tile_origin(units, entries, tile, GROUPS, CHUNKS)
        ring, bars = tiled.ring_within(memory, tokens, STAGES)
        tiled.fill_ahead(tokens, ring, bars, 0, row, STAGES)
        chunks = tiled.load_ahead(at + words_off, at + scales_off, AHEAD)
        slot = gl.to_tensor(0)
        phase = gl.to_tensor(0)
        while tile < stop:
            row, at = tiled.tile_origin(units, entries, tile, GROUPS, CHUNKS)
            next_tile = tile + programs
            if WANTED == 0:
                next_tile = _not_taken(next_tile, stop, taken_at, has_early)
            elif next_tile < stop:
                known, alive = _await_entry(
                    known, next_tile // GROUPS, done, num_entries, lane, waits_with, WANTED
                )
                next_tile = gl.where(alive != 0, next_tile, stop)
            more = next_tile < stop
            next_row, next_at = tiled.tile_origin(
                units, entries, gl.where(more, next_tile, tile), GROUPS, CHUNKS
            )
            acc, chunks, slot, phase = tiled.multiply(
                chunks, tokens, ring, bars, slot, phase, row, next_row, more,
                at + words_off, at + scales_off, next_at + words_off, next_at + scales_off, CHUNKS, AHEAD, STAGES,
            )  # fmt: skip
            _finish(acc, tokens, out_factor, entries, tile, finish, rest, GROUPS, OPTIONS)
            tile = next_tile
        tiled.close_ring(bars, STAGES)
    if WANTED == 0:
        # All of a width together: each by itself would be a wait for its stores.
        sync.fence_global_proxies()
        gl.thread_barrier()
        for some in range(first, stop, programs * 256):
            own = some + lane * programs
            mine = own < stop
            if has_early != 0:
                mine = mine & (gl.load(taken_at + own, mask=mine, other=0) == 0)
            gl.atomic_add(done + own // GROUPS, 1 + 0 * own, mask=mine, sem="release", scope="gpu")
    return known


@gluon.jit
def run_all(
    boxes, units, out_factor, entries, of_width, done, taken_at, has_early, waits_with, finish, rest,
    CHUNKS: gl.constexpr, GROUPS: gl.constexpr, TILES: gl.constexpr, WANTED: gl.constexpr, OPTIONS: gl.constexpr,
):  # fmt: skip
    """This thread block's tiles as wgmma_loop.persistent runs them, but for those that have run early. WANTED: 0 for
    GEMM1, which counts tiles at their entries in `done`; for GEMM2 the count that an entry's tiles wait for.
    waits_with: control, bases, rank, own_rank."""
    lane = gl.arange(0, 256, layout=LINE)
    ring_rows: gl.constexpr = tiled.most_rows(TILES)
    shape: gl.constexpr = [ring_rows // boxes[0].block_shape[0]] + boxes[0].block_shape
    memory = gl.allocate_shared_memory(gl.bfloat16, shape, boxes[0].layout)
    last = of_width + 2 * (len(TILES) - 1)
    num_entries = gl.load(last) + gl.load(last + 1)
    known = gl.to_tensor(0)
    begin = gl.to_tensor(0)
    for i in gl.static_range(len(TILES)):
        stop = begin + gl.load(of_width + 2 * i) * GROUPS
        known = _all_of_width(
            begin, stop, known, num_entries, lane, memory, tiled.parts(boxes, TILES[i][0]), units, out_factor, entries,
            done, taken_at, has_early, waits_with, finish, rest,
            CHUNKS, GROUPS, TILES[i][1], TILES[i][2], WANTED, OPTIONS,
        )  # fmt: skip
        begin = stop
