"""The loading warp of small_m_ring.py: draws tiles, tells the warpgroups which, and brings weights and tokens."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from megamoe.backends.hopper import plan
from megamoe.backends.hopper.device import flags, ring_gemm, sync
from megamoe.backends.hopper.device import ring_loop as ring
from megamoe.backends.hopper.device import small_m_moves as moves
from megamoe.backends.hopper.device.chain import after_previous_gluon
from megamoe.backends.hopper.device.ring_gemm import tiles_of
from megamoe.backends.hopper.device.wgmma_loop import parts

CONSUMERS: gl.constexpr = gl.constexpr(plan.RING_CONSUMERS)
LAST: gl.constexpr = gl.constexpr(2)
"""Chunks before the end of a tile when the next one is asked for."""
DONE: gl.constexpr = gl.constexpr(plan.ENTRY_DONE)
ENTRY_WORDS: gl.constexpr = gl.constexpr(plan.ENTRY_WORDS)
NUM_TILED: gl.constexpr = gl.constexpr(plan.Counter.NUM_TILED_ENTRIES)


@gluon.jit
def _tell(memory, notes, slot, phase, tile, expert, row, rows):
    """Which tile begins in a slot, and its entry: to be said before its tokens are expected."""
    mbarrier.wait(memory[5].index(slot), phase ^ 1)
    i = gl.arange(0, 4, layout=moves.line(1))
    notes.index(slot).store(gl.where(i < 2, gl.where(i == 0, tile, expert), gl.where(i == 2, row, rows)))


@gluon.jit
def _entry(work, tile, GROUPS: gl.constexpr):
    """Of a tile of a GEMM, and its expert."""
    entry = work + tile // tiles_of(GROUPS) * ENTRY_WORDS
    return entry, gl.load(entry)


@gluon.jit
def _fill_ahead(
    memory, work, tile, words, scales, slot, phase,
    AHEAD: gl.constexpr, CHUNKS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A GEMM's first weights, before its tokens are there."""
    _, expert = _entry(work, tile, GROUPS)
    ring.fill_behind(
        memory, words, scales, slot, phase, expert * (GROUPS * CHUNKS * 2), tile % tiles_of(GROUPS) * CONSUMERS,
        AHEAD, CHUNKS, GROUPS, STAGES,
    )  # fmt: skip


@gluon.jit
def _feed_part(
    memory, boxes, words, scales, slot, phase, unit, group, row, rows, ahead, first: gl.constexpr, stop: gl.constexpr,
    CHUNKS: gl.constexpr, GROUPS: gl.constexpr, WIDTHS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    for i in gl.static_range(len(WIDTHS)):
        if ring_gemm.holds(rows, i, WIDTHS):
            slot, phase = ring.feed(
                memory, parts(boxes, WIDTHS[i]), words, scales, slot, phase, unit, group, row, ahead, first, stop,
                CHUNKS, GROUPS, STAGES,
            )  # fmt: skip
    return slot, phase


@gluon.jit
def _feed_tiles(
    memory, notes, boxes, words, scales, work, tile, begin, stop, ahead, slot, phase, control, thread, num_programs,
    needed, CHUNKS: gl.constexpr, GROUPS: gl.constexpr, WIDTHS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A GEMM's tiles, numbered from `begin` to `stop`, from `tile` on, whose first `ahead` chunks of weights are there.
    needed: tiles that an entry must have counted before its tokens are there."""
    SPLIT: gl.constexpr = max(CHUNKS - LAST, 0)
    while tile < stop:
        entry, expert = _entry(work, tile - begin, GROUPS)
        row = gl.load(entry + 1)
        rows = gl.load(entry + 2)
        unit = expert * (GROUPS * CHUNKS * 2)
        group = (tile - begin) % tiles_of(GROUPS) * CONSUMERS
        _tell(memory, notes, slot, phase, tile, expert, row, rows)
        if needed > 0:
            sync.await_word_warp(entry + DONE, needed)
            sync.fence_global_proxies()
        slot, phase = _feed_part(
            memory, boxes, words, scales, slot, phase, unit, group, row, rows, ahead, 0, SPLIT,
            CHUNKS, GROUPS, WIDTHS, STAGES,
        )  # fmt: skip
        ticket = sync.draw(control + sync.TICKET, thread)
        slot, phase = _feed_part(
            memory, boxes, words, scales, slot, phase, unit, group, row, rows, ahead, SPLIT, CHUNKS,
            CHUNKS, GROUPS, WIDTHS, STAGES,
        )  # fmt: skip
        tile = num_programs + sync.drawn(ticket)
        ahead = gl.to_tensor(0)
    return tile, slot, phase


@gluon.jit
def load(
    memory, notes, control, work, tiled_work, boxes1, boxes2, words1, scales1, words2, scales2, num_programs,
    CHUNKS1: gl.constexpr, CHUNKS2: gl.constexpr, GROUPS1: gl.constexpr, GROUPS2: gl.constexpr,
    EXPERTS_PER_RANK: gl.constexpr, WIDTHS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warp."""
    AHEAD1: gl.constexpr = min(STAGES, CHUNKS1)
    AHEAD2: gl.constexpr = min(STAGES, CHUNKS2)
    thread = gl.arange(0, 32, layout=moves.line(1))
    after_previous_gluon()
    sync.await_warp(control + sync.INDEXED, gl.minimum(EXPERTS_PER_RANK, CONSUMERS * num_programs))
    if gl.load(control + flags.FAILED, volatile=True) == 0:
        stop1 = ring_gemm.num_tiles(work + NUM_TILED, GROUPS1, WIDTHS)
        stop2 = stop1 + ring_gemm.num_tiles(work + NUM_TILED, GROUPS2, WIDTHS)
        slot = gl.to_tensor(0)
        phase = gl.to_tensor(0)
        tile = gl.program_id(0)
        if tile < stop1:
            _fill_ahead(
                memory, tiled_work, tile, words1, scales1, slot, phase, AHEAD1, CHUNKS1, GROUPS1, STAGES
            )
        # All come here before any can fail in a later wait: see flags.FAILED above.
        sync.arrive(control + sync.EXPANDED)
        sync.await_warp(control + sync.EXPANDED, (CONSUMERS + 1) * num_programs)
        sync.fence_global_proxies()
        tile, slot, phase = _feed_tiles(
            memory, notes, boxes1, words1, scales1, tiled_work, tile, 0, stop1, gl.to_tensor(AHEAD1), slot, phase,
            control, thread, num_programs, 0, CHUNKS1, GROUPS1, WIDTHS, STAGES,
        )  # fmt: skip
        if tile < stop2:
            _fill_ahead(
                memory,
                tiled_work,
                tile - stop1,
                words2,
                scales2,
                slot,
                phase,
                AHEAD2,
                CHUNKS2,
                GROUPS2,
                STAGES,
            )
        tile, slot, phase = _feed_tiles(
            memory, notes, boxes2, words2, scales2, tiled_work, tile, stop1, stop2, gl.to_tensor(AHEAD2), slot, phase,
            control, thread, num_programs, CONSUMERS * tiles_of(GROUPS1), CHUNKS2, GROUPS2, WIDTHS, STAGES,
        )  # fmt: skip
        _tell(memory, notes, slot, phase, stop2, 0, 0, 0)
        mbarrier.arrive(memory[4].index(slot), count=2)
