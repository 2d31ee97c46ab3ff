"""The ring GEMM as a whole: which program takes which tiles, its warpgroups, and the loading warp beside them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.backends.hopper import plan
from megamoe.backends.hopper.device import ring_loop as ring
from megamoe.backends.hopper.device.chain import after_previous_gluon
from megamoe.backends.hopper.device.wgmma_loop import boxes_of, parts

REGISTERS: gl.constexpr = gl.constexpr(plan.RING_REGISTERS)
WHOLE_CHUNKS: gl.constexpr = gl.constexpr(plan.RING_WHOLE_CHUNKS)


@gluon.constexpr_function
def tiles_of(groups):
    """Tiles of an entry: as many row groups as there are consumers, in the last one what is left."""
    return -(-groups // ring.CONSUMERS.value)


@gluon.constexpr_function
def most_rows(widths, part):
    """Rows of the largest first or second (0: none has two) box of tiles of these widths."""
    firsts = [1 << (width.bit_length() - 1) for width in widths]
    return max(firsts) if part == 0 else max(width - first for width, first in zip(widths, firsts))


@gluon.jit
def tile_at(wave, num_programs):
    """This program's tile of a wave, see plan.ring_tile."""
    pid = gl.program_id(0)
    return wave * num_programs + gl.where(wave % 2 == 0, pid, num_programs - 1 - pid)


@gluon.jit
def num_tiles(counters, GROUPS: gl.constexpr, WIDTHS: gl.constexpr):
    """counters: entries of every width."""
    total = 0
    for i in gl.static_range(len(WIDTHS)):
        total += gl.load(counters + i, volatile=True)
    return total * tiles_of(GROUPS)


@gluon.jit
def holds(rows, i: gl.constexpr, WIDTHS: gl.constexpr):
    """Whether a width, of all widest first, is that of an entry with `rows` rows."""
    narrower: gl.constexpr = WIDTHS[i + 1] if i + 1 < len(WIDTHS) else 0
    return (rows > narrower) & (rows <= WIDTHS[i])


@gluon.jit
def load(
    memory, boxes, words, scales, work, counters, num_programs,
    CHUNKS: gl.constexpr, GROUPS: gl.constexpr, WIDTHS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warp. It does not wait for the launch before, which writes tokens, to bring weights: the tables that
    tell which are of a launch before that one. volatile: not from an L1 that is older than they are."""
    AHEAD: gl.constexpr = min(STAGES, CHUNKS)
    total = num_tiles(counters, GROUPS, WIDTHS)
    wave = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    ahead = gl.to_tensor(AHEAD)
    tile = tile_at(wave, num_programs)
    if tile < total:
        expert = gl.load(work + tile // tiles_of(GROUPS) * 4, volatile=True)
        group = tile % tiles_of(GROUPS) * ring.CONSUMERS
        unit = expert * (GROUPS * CHUNKS * 2)
        ring.fill_ahead(memory, words, scales, unit, group, AHEAD, CHUNKS, GROUPS)
    after_previous_gluon()
    while tile < total:
        entry = work + tile // tiles_of(GROUPS) * 4
        unit = gl.load(entry) * (GROUPS * CHUNKS * 2)
        row = gl.load(entry + 1)
        rows = gl.load(entry + 2)
        group = tile % tiles_of(GROUPS) * ring.CONSUMERS
        for i in gl.static_range(len(WIDTHS)):
            if holds(rows, i, WIDTHS):
                slot, phase = ring.feed(
                    memory, parts(boxes, WIDTHS[i]), words, scales, slot, phase, unit, group, row, ahead,
                    0, CHUNKS, CHUNKS, GROUPS, STAGES,
                )  # fmt: skip
        ahead = gl.to_tensor(0)
        wave += 1
        tile = tile_at(wave, num_programs)


@gluon.jit
def multiply_tile(
    memory, boxes, slot, phase, row, rows, group, factor, rest,
    finish: gl.constexpr, consumer: gl.constexpr, STATIC: gl.constexpr,
    CHUNKS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup's row group of a tile of the given boxes."""
    second: gl.constexpr = boxes[0].block_shape[0]
    HALVES: gl.constexpr = 2 if second <= WHOLE_CHUNKS else 1
    sums0, sums1, slot, phase = ring.multiply(memory, boxes, slot, phase, consumer, CHUNKS, STAGES, HALVES)
    # Past the expert's last row group there is nothing to store.
    left = gl.where(group < GROUPS, rows, 0)
    finish(sums0[0], sums1[0], factor, rest, row, left, group, STATIC)
    if len(boxes) == 2:
        finish(sums0[1], sums1[1], factor, rest, row + second, left - second, group, STATIC)
    return slot, phase


@gluon.jit
def consume(
    memory, boxes, work, counters, num_programs, out_factor, rest,
    finish: gl.constexpr, consumer: gl.constexpr, STATIC: gl.constexpr,
    CHUNKS: gl.constexpr, GROUPS: gl.constexpr, WIDTHS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup's row group of every tile. finish: what is done with the sums of a box, given `rest` and STATIC."""
    after_previous_gluon()
    total = num_tiles(counters, GROUPS, WIDTHS)
    wave = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    tile = tile_at(wave, num_programs)
    while tile < total:
        entry = work + tile // tiles_of(GROUPS) * 4
        rows = gl.load(entry + 2)
        row = gl.load(entry + 1)
        factor = gl.load(out_factor + gl.load(entry))
        group = tile % tiles_of(GROUPS) * ring.CONSUMERS + consumer
        for i in gl.static_range(len(WIDTHS)):
            if holds(rows, i, WIDTHS):
                slot, phase = multiply_tile(
                    memory, parts(boxes, WIDTHS[i]), slot, phase, row, rows, group, factor, rest,
                    finish, consumer, STATIC, CHUNKS, GROUPS, STAGES,
                )  # fmt: skip
        wave += 1
        tile = tile_at(wave, num_programs)


@gluon.jit
def run(
    box64, box32, box16, words, scales, work, counters, num_programs, out_factor, rest,
    finish: gl.constexpr, STATIC: gl.constexpr, CHUNKS: gl.constexpr, GROUPS: gl.constexpr,
    WIDTHS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The whole kernel: three warpgroups and the loading warp. box64, box32, box16: TMA descriptors of the token image,
    None where no width is made of such."""
    boxes = boxes_of(box64, box32, box16, None)
    FIRST: gl.constexpr = most_rows(WIDTHS, 0)
    SECOND: gl.constexpr = most_rows(WIDTHS, 1)
    memory = ring.open_ring(boxes, words, scales, FIRST, SECOND, STAGES)
    gl.warp_specialize(
        [
            (consume, (
                memory, boxes, work, counters, num_programs, out_factor, rest, finish, gl.constexpr(0), STATIC,
                CHUNKS, GROUPS, WIDTHS, STAGES,
            )),
            (consume, (
                memory, boxes, work, counters, num_programs, out_factor, rest, finish, gl.constexpr(1), STATIC,
                CHUNKS, GROUPS, WIDTHS, STAGES,
            )),
            (consume, (
                memory, boxes, work, counters, num_programs, out_factor, rest, finish, gl.constexpr(2), STATIC,
                CHUNKS, GROUPS, WIDTHS, STAGES,
            )),
            (load, (
                memory, boxes, words, scales, work, counters, num_programs,
                CHUNKS, GROUPS, WIDTHS, STAGES,
            )),
        ],
        [4, 4, 1], [REGISTERS, REGISTERS, 24],
    )  # fmt: skip
