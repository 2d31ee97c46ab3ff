"""The streaming GEMM's tiles, one after the other: which, when their tokens are there, and what is done with sums."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.backends.hopper.device import stream_loop as stream
from megamoe.backends.hopper.device import sync, turns


@gluon.constexpr_function
def tiles_of(groups, halves):
    """Tiles of an entry, of 64 * halves rows each, with `groups` times 128 rows of weights."""
    return groups * 2 // halves


@gluon.constexpr_function
def can_halve(chunks, warps):
    """Whether K can be split among all warps of a thread block."""
    return chunks % warps == 0


@gluon.jit
def nothing():
    """The address of no weights."""
    return gl.to_tensor(0).to(gl.int64)


@gluon.jit
def _tile(
    words, scales, tid, chunks, at, factor, block, group, rows, entry, queue, finish, rest,
    OPTIONS: gl.constexpr, CHUNKS: gl.constexpr, WARPS: gl.constexpr, BLOCKS: gl.constexpr, HALVES: gl.constexpr,
    TICKETS: gl.constexpr,
):  # fmt: skip
    """Multiply a tile of an entry of up to 8 * BLOCKS rows and finish it; returns the next tile's first words and, if
    TICKETS, a ticket that has come meanwhile."""
    words, scales, acc = stream.multiply(words, scales, tid & 31, chunks, at, CHUNKS, WARPS, BLOCKS, HALVES)
    ticket = tid
    if TICKETS:
        ticket = sync.draw(queue, tid)
    finish(acc, factor, block, group, rows, entry, rest, OPTIONS, WARPS, BLOCKS, HALVES)
    return words, scales, ticket


@gluon.jit
def tiles(
    units, out_factor, image, work, first, stop, step, beyond, queue, gate, gate_rest, finish, rest,
    OPTIONS: gl.constexpr, CHUNKS: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr, HALVES: gl.constexpr,
    TICKETS: gl.constexpr,
):  # fmt: skip
    """Every step-th tile from `first` to `stop`, or if TICKETS the first one and then those from `step` on by tickets
    of `queue`. Tiles are (entry, 64 * HALVES rows of weights), all of entries of up to 8 rows if HALVES is 1. work:
    int32 [entries, 4]: expert, image block, rows, complete tiles. beyond: address of the weights that will be read
    after these, or nothing().

    gate(known, entry, gate_rest): before the first tile, and whenever `known` does not exceed a tile's entry: waits for
    the entry's tokens, and returns up to which entry, not included, later ones are known to have theirs. The tile's
    first weights are on their way by then.
    finish(sums, factor, block, group, rows, entry, rest, OPTIONS, WARPS, BLOCKS, HALVES): what is done with a tile's.
    """
    if HALVES == 2 or can_halve(CHUNKS, WARPS):
        threads: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        tid = gl.arange(0, 32 * WARPS, layout=threads)
        warp = tid >> 5
        lane = tid & 31
        per_entry: gl.constexpr = tiles_of(GROUPS, HALVES)
        if first < stop:
            base = units.to(gl.int64)
            own_unit = warp // HALVES * stream.UNITS_PER_CHUNK + warp % HALVES
            offset = (own_unit * stream.UNIT_BYTES + lane * 16).to(gl.int64)
            tokens = image.to(gl.int64) + (warp // HALVES * stream.TOKEN_CHUNK_BYTES + lane * 16).to(gl.int64)
            words, scales = stream.load_unit(
                stream.tile_address(base, work, first, GROUPS, CHUNKS, HALVES) + offset, lane
            )
            known = gl.to_tensor(0)
            tile = first
            following = first + step
            if TICKETS:
                following = step + sync.drawn(sync.draw(queue, tid))
            while tile < stop:
                if tile // per_entry >= known:
                    known = gate(known, tile // per_entry, gate_rest)
                entry = work + tile // per_entry * 4
                block = gl.load(entry + 1)
                rows = gl.load(entry + 2)
                factor = gl.load(out_factor + gl.load(entry))
                here = stream.tile_address(base, work, tile, GROUPS, CHUNKS, HALVES)
                more = following < stop
                there = stream.tile_address(
                    base, work, gl.where(more, following, tile), GROUPS, CHUNKS, HALVES
                )
                at = (here, gl.where(more, there, beyond), offset)
                chunks = tokens + block.to(gl.int64) * (CHUNKS * stream.TOKEN_CHUNK_BYTES)
                group = tile % per_entry
                if HALVES == 1:
                    words, scales, ticket = _tile(
                        words, scales, tid, chunks, at, factor, block, group, rows, entry, queue, finish, rest,
                        OPTIONS, CHUNKS, WARPS, 1, HALVES, TICKETS,
                    )  # fmt: skip
                elif rows > 16:
                    words, scales, ticket = _tile(
                        words, scales, tid, chunks, at, factor, block, group, rows, entry, queue, finish, rest,
                        OPTIONS, CHUNKS, WARPS, 3, HALVES, TICKETS,
                    )  # fmt: skip
                elif rows > 8:
                    words, scales, ticket = _tile(
                        words, scales, tid, chunks, at, factor, block, group, rows, entry, queue, finish, rest,
                        OPTIONS, CHUNKS, WARPS, 2, HALVES, TICKETS,
                    )  # fmt: skip
                else:
                    words, scales, ticket = _tile(
                        words, scales, tid, chunks, at, factor, block, group, rows, entry, queue, finish, rest,
                        OPTIONS, CHUNKS, WARPS, 1, HALVES, TICKETS,
                    )  # fmt: skip
                tile = following
                following += step
                if TICKETS:
                    following = step + sync.drawn(ticket)


@gluon.jit
def _no_gate(known, entry, rest):
    """Where all tokens are there before the launch."""
    return known + (1 << 30)


@gluon.jit
def all_tiles(
    units, out_factor, image, work, counters, num_slots, finish, rest, OPTIONS: gl.constexpr,
    CHUNKS: gl.constexpr, GROUPS: gl.constexpr, OCCUPANCY: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """This program's share of a launch with OCCUPANCY programs on each of num_slots multiprocessors."""
    if can_halve(CHUNKS, WARPS) & turns.halved(counters, num_slots * OCCUPANCY, GROUPS):
        first, stop = turns.tile_range(counters, gl.program_id(0), num_slots, tiles_of(GROUPS, 1))
        tiles(
            units, out_factor, image, work, first, stop, OCCUPANCY, nothing(), work, _no_gate, (work,), finish, rest,
            OPTIONS, CHUNKS, GROUPS, WARPS, 1, False,
        )  # fmt: skip
    else:
        first, stop = turns.tile_range(counters, gl.program_id(0), num_slots, tiles_of(GROUPS, 2))
        tiles(
            units, out_factor, image, work, first, stop, OCCUPANCY, nothing(), work, _no_gate, (work,), finish, rest,
            OPTIONS, CHUNKS, GROUPS, WARPS, 2, False,
        )  # fmt: skip
