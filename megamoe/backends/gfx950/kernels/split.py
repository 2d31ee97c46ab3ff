"""How small_m divides its matrix products: by die, by expert, and whether weights are read more than once."""

import flydsl.expr as fx

from megamoe.backends.gfx950.kernels import tile
from megamoe.backends.gfx950.kernels.lang import WAVE, control_int, larger, max_of_lanes, uniform, wide, words
from megamoe.backends.gfx950.record import NUM_DIES, Word


def is_heavy(control, experts, num_experts):
    """Whether this rank received so many rows, or so many of one expert, that its weights are read more than once."""
    lane = fx.thread_idx.x % WAVE
    most = fx.Int32(0)
    for first in range(0, num_experts, WAVE):
        known = lane + first < num_experts
        at = known.select(lane + first, fx.Int32(0))
        most = larger(most, fx.generic_load(words(experts) + at * 4))
    most = max_of_lanes(most, 16)
    for distance in (16, 32):
        most = larger(most, fx.shuffle_xor(most, distance, WAVE))
    last = fx.generic_load(wide(experts) + (num_experts - 1) * 4, count=4)
    total = last[0] + last[1]
    many = total >= control_int(control, Word.HEAVY_ROWS)
    return uniform(
        (many | (most >= control_int(control, Word.HEAVY_EXPERT_ROWS))).select(fx.Int32(1), fx.Int32(0))
    )


def share(num_units, num_groups):
    """(first, end, step) of this workgroup's units. Neighbours, which read the same rows or weights, go to one die of
    the device and so to one L2: workgroups are dealt to the dies in turn."""
    num_dies = (num_groups < NUM_DIES).select(num_groups, fx.Int32(NUM_DIES))
    die, place = fx.block_idx.x % num_dies, fx.block_idx.x // num_dies
    first, end = num_units * die // num_dies, num_units * (die + 1) // num_dies
    return first + place, end, (num_groups - die + num_dies - 1) // num_dies


def find_unit(experts, unit, num_n, num_experts, block_m):
    """(expert, first routed row, index of the expert's last row from there on, m-tile, n-tile) of a unit.

    An expert's units lie together, those of the same columns side by side: its tiles read the same weights."""
    expert = tile.find_expert(experts, unit // num_n, num_experts)
    record = fx.generic_load(wide(experts) + expert * 4, count=4)
    count, row_base, tile_base = uniform(record[0]), uniform(record[1]), uniform(record[2])
    num_tiles = (count + (block_m - 1)) // block_m
    within = unit - tile_base * num_n
    n_tile, m = uniform(within // num_tiles), uniform(within % num_tiles)
    return expert, row_base + m * block_m, count - m * block_m - 1, tile_base + m, n_tile
