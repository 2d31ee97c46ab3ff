"""Which thread block takes which streaming tiles: plan.py's rules on the device. Numbers alone, in any layout.

`counters` [3]: numbers of entries of up to 8, 16 and 24 rows, in which order entries lie and their tiles are numbered.
TILES: of an entry.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megamoe.backends.hopper import plan

COST1 = tl.constexpr(plan.STREAM_COSTS[0])
COST2 = tl.constexpr(plan.STREAM_COSTS[1])
COST3 = tl.constexpr(plan.STREAM_COSTS[2])
HALVED_UP_TO = tl.constexpr(plan.HALVED_UP_TO)


@triton.jit
def num_entries(counters):
    return tl.load(counters) + tl.load(counters + 1) + tl.load(counters + 2)


@triton.jit
def halved(counters, num_programs, TILES: tl.constexpr):
    """As plan.halves_tiles."""
    tiles = tl.load(counters) * TILES
    rounds = (tiles + num_programs - 1) // num_programs
    half_rounds = (2 * tiles + num_programs - 1) // num_programs
    narrow = (tl.load(counters + 1) + tl.load(counters + 2)) == 0
    return narrow & (rounds <= HALVED_UP_TO) & (half_rounds < 2 * rounds)


@triton.jit
def _tile_at(cost, num1, num2):
    """Tile at a cost from the start, where num1 tiles of COST1 come first, then num2 of COST2, then those of COST3."""
    second = cost - num1 * COST1
    third = second - num2 * COST2
    beyond = tl.where(third < 0, num1 + second // COST2, num1 + num2 + third // COST3)
    return tl.where(second < 0, cost // COST1, beyond)


@triton.jit
def tile_range(counters, program, num_slots, TILES: tl.constexpr):
    """First tile and end of a program: programs of one multiprocessor (slot) share a contiguous range of equal cost
    (plan.stream_range) and take turns in it."""
    num1 = tl.load(counters) * TILES
    num2 = tl.load(counters + 1) * TILES
    total = num1 * COST1 + num2 * COST2 + tl.load(counters + 2) * (TILES * COST3)
    slot = program % num_slots
    first = _tile_at(total * slot // num_slots, num1, num2) + program // num_slots
    return first, _tile_at(total * (slot + 1) // num_slots, num1, num2)


@triton.jit
def place_of(program, num_slots, OCCUPANCY: tl.constexpr):
    """A program's place where all take turns: neighbours share a multiprocessor."""
    return program % num_slots * OCCUPANCY + program // num_slots


@triton.jit
def after(place, tiles, num_programs):
    """The place of the same program once that many tiles have been taken: the first tile that comes then is 0's."""
    return (place + num_programs - tiles % num_programs) % num_programs
