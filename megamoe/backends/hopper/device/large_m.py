"""large_m: after the quantize launch, a persistent launch that has rows where GEMM1 reads them.

A thread block does whatever can be done: lay out rows of a source that have come, say where rows of its own belong,
and where there has been nothing to move for a while, run tiles of GEMM1 early whose rows are there (tiles.py): a late
source holds up only entries with rows of its own. The launch ends when all rows have moved.

Thread blocks decide alike in all their threads: what is read while others write it passes through an atomic or
through a reduction over all threads.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.backends.hopper import board, plan
from megamoe.backends.hopper.board import BoardWord
from megamoe.backends.hopper.device import (
    arrivals,
    dispatch,
    flags,
    gemm1,
    identity,
    layout,
    move,
    tiles,
)
from megamoe.backends.hopper.device import wgmma_loop as tiled
from megamoe.backends.hopper.device.chain import after_previous_gluon

WARPS: gl.constexpr = gl.constexpr(8)
LINE: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
NUM_LANES: gl.constexpr = gl.constexpr(256)
PLACES: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [8, 1], [1, 0]))
"""[16-byte places, 4 words]"""
BY_PLACE: gl.constexpr = gl.constexpr(gl.SliceLayout(1, PLACES.value))
IN_PLACE: gl.constexpr = gl.constexpr(gl.SliceLayout(0, PLACES.value))
BLOCKS: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [8, 1], [1, 0]))
"""[MX blocks, 32]"""
BY_BLOCK: gl.constexpr = gl.constexpr(gl.SliceLayout(1, BLOCKS.value))
IN_BLOCK: gl.constexpr = gl.constexpr(gl.SliceLayout(0, BLOCKS.value))
EXPERT_WORDS: gl.constexpr = gl.constexpr(board.EXPERT_WORDS)
ITEM_TOKENS: gl.constexpr = gl.constexpr(board.ITEM_TOKENS)
SEND: gl.constexpr = gl.constexpr(BoardWord.SEND)
PATIENCE_NS: gl.constexpr = gl.constexpr(board.PATIENCE_NS)
COMPLETE: gl.constexpr = gl.constexpr(BoardWord.COMPLETE)
EXPAND: gl.constexpr = gl.constexpr(BoardWord.EXPAND)


@gluon.jit
def _return_entries(
    state, lane, of_width, control, bases, entries, row_slot, row_address, row_weight, block_info, own_rank,
    INDEX: gl.constexpr, NUM_WIDTHS: gl.constexpr, HIDDEN: gl.constexpr, ROW_BYTES: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Identity experts: instead of both GEMMs, the rows of complete entries go back as they came. See tiles.run."""
    payload = move.payload_of(control, bases, own_rank)
    PIECES: gl.constexpr = (HIDDEN + 511) // 512
    unit = gl.arange(0, 256, layout=BY_BLOCK)
    within = gl.arange(0, 32, layout=IN_BLOCK)[None, :]
    number = tiles.next_of(state, lane, INDEX)
    worked = (number < tiles.NONE).to(gl.int32)
    while number < tiles.NONE:
        _, entry, _ = tiles.own_tile(number, INDEX, of_width, NUM_WIDTHS, 1)
        words = entries + entry * plan.ENTRY_WORDS
        first, rows = gl.load(words + 1) // identity.ROWS, gl.load(words + 2)
        for item in range((rows + 15) // identity.ROWS * PIECES):
            identity.return_piece(
                payload, row_slot, row_address, row_weight, block_info, first + item // PIECES, item % PIECES * 16,
                unit, within, HIDDEN, ROW_BYTES, FP8,
            )  # fmt: skip
        state = tiles.taken(state, lane, INDEX, number)
        number = tiles.next_of(state, lane, INDEX)
    return state, worked


@gluon.jit(do_not_specialize=["own_rank"])
def large_m_kernel(
    control, bases, board_at, places, image, middle, box256, box128, box64, box32,
    row_slot, row_address, row_weight, block_info, entries, units, out_factor, limit, own_rank,
    ARRIVED: gl.constexpr, DONE: gl.constexpr, TAKEN: gl.constexpr, TABLES: gl.constexpr,
    NUM_RANKS: gl.constexpr, NUM_TOPK: gl.constexpr, EXPERTS_PER_RANK: gl.constexpr, BINS: gl.constexpr,
    HIDDEN: gl.constexpr, ROW_BYTES: gl.constexpr, META_WORDS: gl.constexpr, COUNTS_WORDS: gl.constexpr,
    RESULT_STRIDE: gl.constexpr, RESULT_BYTES: gl.constexpr, IMAGE_WIDE: gl.constexpr,
    CHUNKS: gl.constexpr, CHUNKS_OUT: gl.constexpr, GROUPS: gl.constexpr, TILES: gl.constexpr, WIDTHS: gl.constexpr,
    CUTS: gl.constexpr, FP8: gl.constexpr, IDENTITY: gl.constexpr,
):  # fmt: skip
    """board_at: see board.BoardLayout, whose offsets are ARRIVED to TABLES. places: of the quantize launch.
    image, middle: operands of GEMM1 and GEMM2; box*: the image's TMA descriptors for boxes of so many rows. entries:
    int32 [entries, 4]: expert, first image row, rows, unused. TILES: width, stages and chunks ahead of
    each. IMAGE_WIDE: 16-byte places of an image row, rounded up to a power of two."""
    after_previous_gluon()
    rank = gl.arange(0, NUM_RANKS, layout=LINE)
    lane = gl.arange(0, NUM_LANES, layout=LINE)
    place = gl.arange(0, IMAGE_WIDE, layout=BY_PLACE)[:, None]
    quad = gl.arange(0, 4, layout=IN_PLACE)[None, :]
    tables = board_at + TABLES
    layout.lay_out_experts(
        control, bases, entries, block_info, tables, rank, gl.arange(0, BINS, layout=LINE), lane, own_rank,
        NUM_RANKS, EXPERTS_PER_RANK, COUNTS_WORDS, WIDTHS, CUTS,
    )  # fmt: skip
    ok = gl.atomic_or(control + flags.FAILED, 0, sem="relaxed", scope="gpu") == 0
    of_width = tables + EXPERTS_PER_RANK * (NUM_RANKS + EXPERT_WORDS)
    state = tiles.first_state(lane)
    # Entries of identity experts are one tile each.
    NUM_GROUPS: gl.constexpr = 1 if IDENTITY else GROUPS
    num_rows = gl.load(control + dispatch.NUM_ROWS).to(gl.int32)
    if ok & (num_rows == 0) & (gl.program_id(0) == 0):
        flags.post(control, bases, flags.PAYLOAD_FLAG, gl.load(control + dispatch.INFO), own_rank, rank)
    boxes = tiled.boxes_of(box256, box128, box64, box32)
    held_src = gl.to_tensor(NUM_RANKS)
    held_item = gl.to_tensor(0)
    sending = (num_rows > 0).to(gl.int32)
    started = flags.now_ns()
    alive = ok.to(gl.int32)
    moved = gl.to_tensor(0)
    while alive != 0:
        worked = gl.to_tensor(0)
        if moved == 0:
            src, left = arrivals.look(control, bases, board_at, lane, own_rank, NUM_RANKS)
            if (held_src == NUM_RANKS) & (src < NUM_RANKS):
                held_item = gl.atomic_add(board_at + EXPAND + src, 1, sem="relaxed", scope="gpu")
                held_src = src
            # Others may have taken all that had come: then this one is kept until it comes.
            here, expected = arrivals.rows_of(control, bases, lane, held_src, own_rank, NUM_RANKS)
            if (held_src < NUM_RANKS) & (held_item * ITEM_TOKENS < here):
                worked = gl.to_tensor(1)
                flags.fence_system()
                gl.thread_barrier()
                while held_item * ITEM_TOKENS < here:
                    move.expand_item(
                        control, bases, board_at, image.to(gl.pointer_type(gl.int32)), row_slot, row_address,
                        row_weight, entries, ARRIVED, tables, held_src, held_item, here, place, quad, lane, own_rank,
                        NUM_RANKS, NUM_TOPK, EXPERTS_PER_RANK, HIDDEN, ROW_BYTES, META_WORDS, RESULT_STRIDE,
                        RESULT_BYTES, CHUNKS * 128, WIDTHS[0],
                    )  # fmt: skip
                    held_item = gl.atomic_add(board_at + EXPAND + held_src, 1, sem="relaxed", scope="gpu")
            elif (held_src < NUM_RANKS) & (held_item * ITEM_TOKENS >= expected):
                worked = gl.to_tensor(1)
                held_src = gl.to_tensor(NUM_RANKS)
            elif sending != 0:
                worked = gl.to_tensor(1)
                item = gl.atomic_add(board_at + SEND, 1, sem="relaxed", scope="gpu")
                if item * ITEM_TOKENS < num_rows:
                    move.send_item(
                        control, bases, board_at, places, item, lane, rank, own_rank,
                        NUM_RANKS, NUM_TOPK, EXPERTS_PER_RANK, META_WORDS,
                    )  # fmt: skip
                else:
                    sending = gl.to_tensor(0)
            elif (left == 0) & (held_src == NUM_RANKS):
                moved = gl.to_tensor(1)
        if worked == 0:
            unfinished = gl.to_tensor(0)
            # Where there is a GEMM1 launch behind this one, what has not run early runs there.
            if IDENTITY | (moved == 0):
                unfinished = gl.to_tensor(1)
                patient = gl.max((flags.now_ns() - started < PATIENCE_NS + 0 * lane).to(gl.int32), axis=0)
                complete = gl.atomic_or(board_at + COMPLETE, 0, sem="relaxed", scope="gpu")
                if (moved != 0) | ((patient == 0) & (complete > 0)):
                    arrived = board_at + ARRIVED
                    state, unfinished = tiles.look(
                        state, lane, arrived, entries, of_width, len(TILES), NUM_GROUPS, 0
                    )
                    for i in gl.static_range(len(TILES)):
                        if (worked == 0) | IDENTITY:
                            if IDENTITY:
                                state, ran = _return_entries(
                                    state, lane, of_width, control, bases, entries, row_slot, row_address, row_weight,
                                    block_info, own_rank, i, len(TILES), HIDDEN, ROW_BYTES, FP8,
                                )  # fmt: skip
                            else:
                                state, ran = tiles.run_early(
                                    state, lane, arrived, board_at, entries, of_width, tiled.parts(boxes, WIDTHS[i]),
                                    units, out_factor, gemm1.finish_part, (middle, limit), i, len(TILES), TILES[i][0],
                                    TILES[i][1], TILES[i][2], CHUNKS, GROUPS, DONE, TAKEN, CHUNKS_OUT * 128,
                                )  # fmt: skip
                            worked = worked | ran
            if worked == 0:
                if (moved != 0) & (unfinished == 0):
                    alive = gl.to_tensor(0)
                else:
                    alive = arrivals.go_on(control, bases, lane, rank, started, own_rank, NUM_RANKS)
        if worked != 0:
            started = flags.now_ns()
