"""The ring GEMM as a whole: which program takes which row groups, its warpgroups, and the loading warp beside them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.backends.hopper import plan
from megamoe.backends.hopper.device import ring_loop as ring

REGISTERS: gl.constexpr = gl.constexpr(plan.RING_REGISTERS)


@gluon.jit
def _group_at(cost, num_wide, COSTS: gl.constexpr):
    """As plan.ring_group_at."""
    beyond = cost - num_wide * COSTS[1]
    return gl.where(beyond < 0, cost // COSTS[1], num_wide + beyond // COSTS[0])


@gluon.jit
def group_range(counters, num_programs, COSTS: gl.constexpr, GROUPS: gl.constexpr):
    """This program's row groups [first, stop), counted over all entries, wide ones first: all programs' cost the same.
    counters: numbers of wide and of narrow entries."""
    num_wide = gl.load(counters) * GROUPS
    total = num_wide * COSTS[1] + gl.load(counters + 1) * (GROUPS * COSTS[0])
    pid = gl.program_id(0)
    # Up to 2^20 groups of a cost of some 10: times a program's number they may pass 2^31.
    first = (total.to(gl.int64) * pid // num_programs).to(gl.int32)
    stop = (total.to(gl.int64) * (pid + 1) // num_programs).to(gl.int32)
    return _group_at(first, num_wide, COSTS), _group_at(stop, num_wide, COSTS)


@gluon.jit
def consume(
    memory, work, out_factor, rest, first, stop, finish: gl.constexpr, consumer: gl.constexpr, STATIC: gl.constexpr,
    CHUNKS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """A warpgroup's row group of every tile. finish: what is done with the sums, given `rest` and STATIC."""
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    narrow: gl.constexpr = memory[0].shape[1]
    group = first
    while group < stop:
        count = ring.groups_at(group, stop, GROUPS)
        if consumer < count:
            entry = work + group // GROUPS * 4
            factor = gl.load(out_factor + gl.load(entry))
            row = gl.load(entry + 1)
            rows = gl.load(entry + 2)
            mine = group % GROUPS + consumer
            if rows > narrow:
                acc0, acc1, more0, more1, slot, phase = ring.multiply(
                    memory, slot, phase, consumer, True, CHUNKS, STAGES, HALVES
                )
                finish(acc0, acc1, factor, rest, row, rows, mine, STATIC)
                finish(more0, more1, factor, rest, row + narrow, rows - narrow, mine, STATIC)
            else:
                acc0, acc1, more0, more1, slot, phase = ring.multiply(
                    memory, slot, phase, consumer, False, CHUNKS, STAGES, HALVES
                )
                finish(acc0, acc1, factor, rest, row, rows, mine, STATIC)
        else:
            slot, phase = ring.skip(memory, slot, phase, CHUNKS, STAGES)
        group += count


@gluon.jit
def run(
    tokens, more_tokens, words, scales, work, counters, num_programs, out_factor, rest,
    finish: gl.constexpr, STATIC: gl.constexpr, CHUNKS: gl.constexpr, GROUPS: gl.constexpr,
    STAGES: gl.constexpr, HALVES: gl.constexpr, COSTS: gl.constexpr,
):  # fmt: skip
    """The whole kernel: three warpgroups and the loading warp."""
    first, stop = group_range(counters, num_programs, COSTS, GROUPS)
    if first < stop:
        memory = ring.open_ring(tokens, more_tokens, words, scales, STAGES)
        sources = (tokens, more_tokens, words, scales)
        gl.warp_specialize(
            [
                (consume, (
                    memory, work, out_factor, rest, first, stop, finish, gl.constexpr(0), STATIC,
                    CHUNKS, GROUPS, STAGES, HALVES,
                )),
                (consume, (
                    memory, work, out_factor, rest, first, stop, finish, gl.constexpr(1), STATIC,
                    CHUNKS, GROUPS, STAGES, HALVES,
                )),
                (consume, (
                    memory, work, out_factor, rest, first, stop, finish, gl.constexpr(2), STATIC,
                    CHUNKS, GROUPS, STAGES, HALVES,
                )),
                (ring.feed, (memory, sources, work, first, stop, CHUNKS, GROUPS, STAGES)),
            ],
            [4, 4, 1], [REGISTERS, REGISTERS, 24],
        )  # fmt: skip
