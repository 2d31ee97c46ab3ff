"""Tiles of large_m's GEMMs as thread blocks take them: by tickets, from queues of complete entries, in two widths."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.backends.hopper import board, plan
from megamoe.backends.hopper.board import BoardWord
from megamoe.backends.hopper.device import gemm1, gemm2, sync
from megamoe.backends.hopper.device import wgmma_loop as tiled

NARROW: gl.constexpr = gl.constexpr(board.NARROW_ROWS)
TAIL2: gl.constexpr = gl.constexpr(BoardWord.TAIL2)


@gluon.jit
def claim(head):
    """The next tile, for this thread block alone. Neighbours go to thread blocks at the same time, so that these share
    tokens and weights in L2: taking several at once saves look-ups and costs more than that."""
    return gl.atomic_add(head, 1, sem="relaxed", scope="gpu")


@gluon.jit
def entry_of(queue, tile, num_tiles, GROUPS: gl.constexpr):
    """The entry of a tile, or -1 if it is not complete or the tile does not exist."""
    entry = gl.to_tensor(-1)
    if tile < num_tiles:
        entry = gl.atomic_or(queue + tile // GROUPS, 0, sem="acquire", scope="gpu") - 1
    return entry


@gluon.jit
def _origin(units, entries, entry, group, GROUPS: gl.constexpr, CHUNKS: gl.constexpr):
    """First token row, address of weights, expert and rows of an entry's tile."""
    words = entries + entry * plan.ENTRY_WORDS
    expert = gl.load(words)
    at = units.to(gl.int64) + (expert * GROUPS + group).to(gl.int64) * (CHUNKS * tiled.GROUP_BYTES)
    return gl.load(words + 1), at, expert, gl.load(words + 2)


@gluon.jit
def _is_wide(rows, WIDE: gl.constexpr):
    """Whether an entry with that many rows needs the wide tile; where there is but one width, all do."""
    return (rows > NARROW) | (WIDE <= NARROW)


@gluon.jit
def _tiles(
    tile, entry, wide, slot, phase, memory, bars, board_at, head, queue, entries, num_tiles,
    tokens, units, out_factor, finish, rest,
    CHUNKS: gl.constexpr, GROUPS: gl.constexpr, WIDE: gl.constexpr,
    AHEAD: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
    DONE: gl.constexpr, QUEUE2: gl.constexpr, COLUMNS_OUT: gl.constexpr, HIDDEN: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Tiles of a GEMM from a complete one on, as long as the next is complete and as wide. finish: what is done with a
    tile's sums, with the arguments `rest`. Returns (next tile, slot, phase)."""
    words_off, scales_off = tiled.thread_offsets()
    row, at, expert, rows = _origin(units, entries, entry, tile % GROUPS, GROUPS, CHUNKS)
    sync.fence_proxies()
    tiled.fill_ahead((tokens,), memory, bars, slot, row, STAGES)
    chunks = tiled.load_ahead(at + words_off, at + scales_off, AHEAD)
    more = entry >= 0
    while more:
        next_tile = claim(head)
        next_entry = entry_of(queue, next_tile, num_tiles, GROUPS)
        there = next_entry >= 0
        sync.fence_proxies()
        next_row, next_at, next_expert, next_rows = _origin(
            units, entries, gl.where(there, next_entry, entry), gl.where(there, next_tile, tile) % GROUPS,
            GROUPS, CHUNKS,
        )  # fmt: skip
        more = there & (_is_wide(next_rows, WIDE) == wide)
        acc, chunks, slot, phase = tiled.multiply(
            chunks, (tokens,), memory, bars, slot, phase, row, next_row, more,
            at + words_off, at + scales_off, next_at + words_off, next_at + scales_off,
            CHUNKS, AHEAD, STAGES,
        )  # fmt: skip
        finish(
            acc[0], gl.load(out_factor + expert), row, tile % GROUPS, rows, entry, board_at, rest, BLOCK_N, GROUPS,
            DONE, QUEUE2, COLUMNS_OUT, HIDDEN, FP8,
        )  # fmt: skip
        tile, entry, row, at, expert, rows = next_tile, next_entry, next_row, next_at, next_expert, next_rows
    return tile, slot, phase


@gluon.jit
def gemm(
    tile, entry, slot, phase, narrow_slot, narrow_phase, memory, bars, narrow_memory, narrow_bars,
    board_at, head, queue, entries, num_tiles, tokens, narrow_tokens, units, out_factor, finish, rest,
    CHUNKS: gl.constexpr, GROUPS: gl.constexpr, AHEAD: gl.constexpr, STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr, NARROW_AHEAD: gl.constexpr, NARROW_STAGES: gl.constexpr,
    DONE: gl.constexpr, QUEUE2: gl.constexpr, COLUMNS_OUT: gl.constexpr, HIDDEN: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """The tiles from one on, in the width that the entry needs. Returns (next tile, states of both rings)."""
    if _is_wide(gl.load(entries + entry * plan.ENTRY_WORDS + 2), BLOCK_N):
        tile, slot, phase = _tiles(
            tile, entry, True, slot, phase, memory, bars, board_at, head, queue, entries, num_tiles,
            tokens, units, out_factor, finish, rest, CHUNKS, GROUPS, BLOCK_N, AHEAD, STAGES, BLOCK_N,
            DONE, QUEUE2, COLUMNS_OUT, HIDDEN, FP8,
        )  # fmt: skip
    else:
        if BLOCK_N > NARROW:
            tile, narrow_slot, narrow_phase = _tiles(
                tile, entry, False, narrow_slot, narrow_phase, narrow_memory, narrow_bars, board_at, head, queue,
                entries, num_tiles, narrow_tokens, units, out_factor, finish, rest,
                CHUNKS, GROUPS, BLOCK_N, NARROW_AHEAD, NARROW_STAGES, NARROW,
                DONE, QUEUE2, COLUMNS_OUT, HIDDEN, FP8,
            )  # fmt: skip
    return tile, slot, phase, narrow_slot, narrow_phase


@gluon.jit
def finish1(
    acc, factor, row, group, rows, entry, board_at, rest, BLOCK_N: gl.constexpr, GROUPS: gl.constexpr,
    DONE: gl.constexpr, QUEUE2: gl.constexpr, COLUMNS_OUT: gl.constexpr, HIDDEN: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """SwiGLU into GEMM2's operand; an entry whose last tile this is goes into GEMM2's queue."""
    middle, limit = rest
    gemm1.finish_tiled(acc, factor, limit, middle, row, group, rows, COLUMNS_OUT, BLOCK_N)
    sync.fence_proxies()
    if sync.arrive(board_at + DONE + entry) == GROUPS - 1:
        position = gl.atomic_add(board_at + TAIL2, 1, sem="relaxed", scope="gpu")
        gl.atomic_xchg(board_at + QUEUE2 + position, entry + 1, sem="release", scope="gpu")


@gluon.jit
def finish2(
    acc, factor, row, group, rows, entry, board_at, rest, BLOCK_N: gl.constexpr, GROUPS: gl.constexpr,
    DONE: gl.constexpr, QUEUE2: gl.constexpr, COLUMNS_OUT: gl.constexpr, HIDDEN: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Result rows to their sources."""
    row_address, row_weight = rest
    gemm2.finish_tiled(acc, factor, row_address, row_weight, row, group, rows, HIDDEN, FP8)
