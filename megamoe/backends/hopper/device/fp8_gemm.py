"""The FP8 GEMM as a whole: a persistent grid, two warpgroups that multiply and a loading warp beside them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.backends.hopper import plan
from megamoe.backends.hopper.device import fp8_loop as loop

REGISTERS: gl.constexpr = gl.constexpr(plan.FP8_REGISTERS)
NUM_WIDTHS: gl.constexpr = gl.constexpr(len(plan.FP8_WIDTHS))


@gluon.jit
def _tile(
    memory, slot, phase, turn, consumer: gl.constexpr, entry, group, row_base, row_factor, rest,
    finish: gl.constexpr, STATIC: gl.constexpr, PIECES: gl.constexpr,
    CHUNKS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup's unit of one tile. What the end needs is loaded then: registers are short before."""
    unit = group * 2 + consumer
    thread = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    at = row_base + gl.load(entry) * (GROUPS * 128) + unit * 64 + (thread // 32 * 16 + thread % 32 // 4)
    base_g = gl.load(at).to(gl.int32)
    base_8 = gl.load(at + 8).to(gl.int32)
    acc, slot, phase, turn = loop.multiply(
        memory, slot, phase, turn, consumer, base_g, base_8, PIECES, CHUNKS, STAGES
    )
    rows_of_unit = gl.arange(0, 64, layout=gl.SliceLayout(1, loop.accumulator_layout()))
    factor = gl.load(row_factor + gl.load(entry) * (GROUPS * 128) + unit * 64 + rows_of_unit)[:, None]
    row = gl.load(entry + 1)
    rows = gl.load(entry + 2)
    for piece in gl.static_range(PIECES):
        finish(acc[piece] * factor, rest, row + piece * loop.PIECE, rows - piece * loop.PIECE, unit, STATIC)
    return slot, phase, turn


@gluon.jit
def consume(
    memory, work, num_tiles, num_programs, row_base, row_factor, rest, finish: gl.constexpr, consumer: gl.constexpr,
    STATIC: gl.constexpr, CHUNKS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup's unit of every tile. finish: what is done with a piece of its sums, given `rest` and STATIC."""
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    turn = gl.to_tensor(1 - consumer)
    for tile in range(gl.program_id(0), num_tiles, num_programs):
        entry = work + tile // GROUPS * 4
        pieces = loop.num_pieces(gl.load(entry + 2))
        if pieces == 4:
            slot, phase, turn = _tile(
                memory, slot, phase, turn, consumer, entry, tile % GROUPS, row_base, row_factor, rest,
                finish, STATIC, 4, CHUNKS, GROUPS, STAGES,
            )  # fmt: skip
        elif pieces == 3:
            slot, phase, turn = _tile(
                memory, slot, phase, turn, consumer, entry, tile % GROUPS, row_base, row_factor, rest,
                finish, STATIC, 3, CHUNKS, GROUPS, STAGES,
            )  # fmt: skip
        else:
            slot, phase, turn = _tile(
                memory, slot, phase, turn, consumer, entry, tile % GROUPS, row_base, row_factor, rest,
                finish, STATIC, 2, CHUNKS, GROUPS, STAGES,
            )  # fmt: skip


@gluon.jit
def run(
    tokens, scales, words, weight_scales, work, num_entries, num_programs, row_base, row_factor, rest,
    finish: gl.constexpr, STATIC: gl.constexpr, CHUNKS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The whole kernel. work: int32 [entries, 4]: expert, first row, rows (up to 256), unused; num_entries: of every
    width. row_base uint8, row_factor fp32 [E, GROUPS * 128]: fp8.RowScales."""
    num_tiles = gl.to_tensor(0)
    for i in gl.static_range(NUM_WIDTHS):
        num_tiles += gl.load(num_entries + i) * GROUPS
    if gl.program_id(0) < num_tiles:
        memory = loop.open_ring(tokens, scales, words, weight_scales, STAGES)
        sources = (tokens, scales, words, weight_scales)
        gl.warp_specialize(
            [
                (consume, (
                    memory, work, num_tiles, num_programs, row_base, row_factor, rest, finish, gl.constexpr(0), STATIC,
                    CHUNKS, GROUPS, STAGES,
                )),
                (consume, (
                    memory, work, num_tiles, num_programs, row_base, row_factor, rest, finish, gl.constexpr(1), STATIC,
                    CHUNKS, GROUPS, STAGES,
                )),
                (loop.feed, (memory, sources, work, num_tiles, num_programs, CHUNKS, GROUPS, STAGES)),
            ],
            [4, 1], [REGISTERS, 24],
        )  # fmt: skip
