"""large_m: after the quantize launch, one persistent launch in which all stages overlap.

A thread block takes whatever can be done: a tile of GEMM1 whose rows are there, a tile of GEMM2 whose intermediate is,
rows of a source that have come, rows of its own that nobody has sent. Most prefer tiles; helpers, few, move rows
first, so that tiles never wait for memory. Nothing waits for a rank as a whole: a late source holds up only entries
with rows of its own. Result rows go back as tiles finish.

Thread blocks decide alike in all their threads: what is read while others write it passes through an atomic or
through a reduction over all threads.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.backends.hopper import board, plan, record
from megamoe.backends.hopper.board import BoardWord
from megamoe.backends.hopper.device import (
    combine,
    dispatch,
    flags,
    identity,
    layout,
    move,
    sync,
    tiles,
)
from megamoe.backends.hopper.device import wgmma_loop as tiled

WARPS: gl.constexpr = gl.constexpr(8)
LINE: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
NUM_LANES: gl.constexpr = gl.constexpr(256)
PLACES: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [8, 1], [1, 0]))
"""[16-byte places, 4 words]"""
NUM_PLACES: gl.constexpr = gl.constexpr(2048)
BY_PLACE: gl.constexpr = gl.constexpr(gl.SliceLayout(1, PLACES.value))
IN_PLACE: gl.constexpr = gl.constexpr(gl.SliceLayout(0, PLACES.value))
BLOCKS: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [8, 1], [1, 0]))
"""[MX blocks, 32]"""
BY_BLOCK: gl.constexpr = gl.constexpr(gl.SliceLayout(1, BLOCKS.value))
IN_BLOCK: gl.constexpr = gl.constexpr(gl.SliceLayout(0, BLOCKS.value))
MAX_RANKS: gl.constexpr = gl.constexpr(record.MAX_RANKS)
HELPER_SHARE: gl.constexpr = gl.constexpr(board.HELPER_SHARE)
ITEM_TOKENS: gl.constexpr = gl.constexpr(board.ITEM_TOKENS)
SEND: gl.constexpr = gl.constexpr(BoardWord.SEND)
HEAD1: gl.constexpr = gl.constexpr(BoardWord.HEAD1)
HEAD2: gl.constexpr = gl.constexpr(BoardWord.HEAD2)
EXPAND: gl.constexpr = gl.constexpr(BoardWord.EXPAND)


@gluon.jit
def _return_entries(
    control, bases, tile, entry, board_at, queue1, entries, num_tiles, row_slot, row_address, row_weight, block_info,
    own_rank, HIDDEN: gl.constexpr, ROW_BYTES: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Identity experts: instead of both GEMMs, the rows of complete entries go back as they came."""
    payload = move.payload_of(control, bases, own_rank)
    PIECES: gl.constexpr = (HIDDEN + 511) // 512
    unit = gl.arange(0, 256, layout=BY_BLOCK)
    within = gl.arange(0, 32, layout=IN_BLOCK)[None, :]
    while entry >= 0:
        words = entries + entry * plan.ENTRY_WORDS
        first, rows = gl.load(words + 1) // identity.ROWS, gl.load(words + 2)
        for item in range((rows + 15) // identity.ROWS * PIECES):
            identity.return_piece(
                payload, row_slot, row_address, row_weight, block_info, first + item // PIECES, item % PIECES * 16,
                unit, within, HIDDEN, ROW_BYTES, FP8,
            )  # fmt: skip
        tile = tiles.claim(board_at + HEAD1)
        entry = tiles.entry_of(board_at + queue1, tile, num_tiles, 1)
    return tile


@gluon.jit
def _look(control, bases, board_at, lane, own_rank, NUM_RANKS: gl.constexpr):
    """Which source has rows that nobody has taken, own rows first (NUM_RANKS: none), and how many sources still have
    rows to bring or to be taken."""
    rank = gl.minimum(lane, NUM_RANKS - 1)
    is_rank = lane < NUM_RANKS
    line = gl.load(bases + own_rank) + flags.flag_line(control, flags.PAYLOAD_FLAG)
    words = gl.load(flags.word64(line + 8 * rank), volatile=True)
    arrived, expected = flags.arrived_rows(control, words, rank)
    taken = gl.load(board_at + EXPAND + rank, volatile=True) * ITEM_TOKENS
    order = (rank - own_rank + NUM_RANKS) % NUM_RANKS
    first = gl.min(gl.where(is_rank & (taken < arrived), order, NUM_RANKS), axis=0)
    left = gl.sum((is_rank & (taken < expected)).to(gl.int32), axis=0)
    return gl.where(first == NUM_RANKS, NUM_RANKS, (first + own_rank) % NUM_RANKS), left


@gluon.jit
def _rows_of(control, bases, lane, src, own_rank, NUM_RANKS: gl.constexpr):
    """Rows of a source that have come, and all that it brings."""
    rank = gl.minimum(lane, NUM_RANKS - 1)
    line = gl.load(bases + own_rank) + flags.flag_line(control, flags.PAYLOAD_FLAG)
    words = gl.load(flags.word64(line + 8 * rank), volatile=True)
    arrived, expected = flags.arrived_rows(control, words, rank)
    mine = (lane < NUM_RANKS) & (rank == src)
    return gl.sum(gl.where(mine, arrived, 0), axis=0), gl.sum(gl.where(mine, expected, 0), axis=0)


@gluon.jit
def _go_on(control, bases, lane, rank, started, own_rank, NUM_RANKS: gl.constexpr):
    """Whether an idle thread block may go on looking: nobody gave the launch up, and there is time. 1 or 0."""
    own = gl.load(bases + own_rank)
    peer = gl.minimum(lane, NUM_RANKS - 1)
    is_rank = lane < NUM_RANKS
    epoch = gl.load(control + flags.EPOCH)
    given_up = gl.load(flags.word64(own + gl.load(control + flags.ABORTS_OFFSET) + 8 * peer), volatile=True)
    gone = gl.max((is_rank & (given_up < 0) & ((given_up & flags.LOW_HALF) == epoch)).to(gl.int32), axis=0)
    words = gl.load(
        flags.word64(own + flags.flag_line(control, flags.PAYLOAD_FLAG) + 8 * peer), volatile=True
    )
    arrived, expected = flags.arrived_rows(control, words, peer)
    lacking = gl.sum(gl.where(is_rank & (arrived < expected), 1 << peer, 0), axis=0)
    late = gl.max(
        (flags.now_ns() - started > gl.load(control + flags.TIMEOUT_NS) + 0 * given_up).to(gl.int32), axis=0
    )
    failed = gl.atomic_or(control + flags.FAILED, 0, sem="relaxed", scope="gpu") != 0
    if (failed == 0) & ((gone | late) != 0):
        # Nobody is missing and yet nothing can be done: this rank itself is at fault.
        lacking = gl.where(lacking == 0, 1 << own_rank, lacking)
        seen = gl.load(
            flags.word64(own + flags.flag_line(control, flags.PAYLOAD_FLAG) + 8 * rank), volatile=True
        )
        told = gl.load(flags.word64(own + gl.load(control + flags.ABORTS_OFFSET) + 8 * rank), volatile=True)
        flags.record_failure(
            control, bases, flags.PAYLOAD_FLAG, lacking, gone != 0, seen, told, own_rank, rank
        )
    return ((failed == 0) & ((gone | late) == 0)).to(gl.int32)


@gluon.jit
def _sum(
    control, bases, rank, own_rank,
    NUM_RANKS: gl.constexpr, NUM_TOPK: gl.constexpr, EXPERTS_PER_RANK: gl.constexpr,
    HIDDEN: gl.constexpr, RESULT_STRIDE: gl.constexpr, SUM_BLOCKS: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Wait for all owners' results, and add up this rank's rows, a row at a time."""
    if gl.program_id(0) == 0:
        ok, words = flags.wait(control, bases, flags.RETURN_FLAG, (1 << NUM_RANKS) - 1, own_rank, rank)
        if ok:
            combine.note_peers(control, words, rank)
        sync.arrive(control + sync.ANSWERED)
    sync.await_count(control + sync.ANSWERED, 1)
    if gl.atomic_or(control + flags.FAILED, 0, sem="relaxed", scope="gpu") == 0:
        ids = gl.load(control + combine.IDS_PTR).to(gl.pointer_type(gl.int32))
        weights = gl.load(control + combine.WEIGHTS_PTR).to(gl.pointer_type(gl.float32))
        out = dispatch.aligned(gl.load(control + combine.OUT_PTR)).to(gl.pointer_type(gl.bfloat16))
        results = combine.results_of(control, bases, own_rank)
        block = gl.arange(0, SUM_BLOCKS, layout=BY_BLOCK)
        column = block[:, None] * 32 + gl.arange(0, 32, layout=IN_BLOCK)[None, :]
        num_rows = gl.load(control + combine.NUM_ROWS).to(gl.int32)
        for token in range(gl.program_id(0), num_rows, gl.num_programs(0)):
            combine.sum_piece(
                control, results, ids, weights, out, token.to(gl.int64), block, column,
                NUM_RANKS, NUM_TOPK, EXPERTS_PER_RANK, HIDDEN, RESULT_STRIDE, FP8,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["own_rank"])
def large_m_kernel(
    control, bases, board_at, places, rows, image, middle, image_tokens, middle_tokens, image_narrow, middle_narrow,
    row_slot, row_address, row_weight, block_info, entries,
    w13, w13_factor, w2, w2_factor, limit, own_rank,
    ARRIVED: gl.constexpr, DONE: gl.constexpr, QUEUE1: gl.constexpr, QUEUE2: gl.constexpr, TABLES: gl.constexpr,
    NUM_RANKS: gl.constexpr, NUM_TOPK: gl.constexpr, EXPERTS_PER_RANK: gl.constexpr, BINS: gl.constexpr,
    HIDDEN: gl.constexpr, ROW_BYTES: gl.constexpr, META_WORDS: gl.constexpr, COUNTS_WORDS: gl.constexpr,
    RESULT_STRIDE: gl.constexpr, RESULT_BYTES: gl.constexpr, SEND_WIDE: gl.constexpr, IMAGE_WIDE: gl.constexpr,
    SUM_BLOCKS: gl.constexpr, CHUNKS1: gl.constexpr, CHUNKS2: gl.constexpr, GROUPS1: gl.constexpr,
    GROUPS2: gl.constexpr, AHEAD: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, NARROW_AHEAD: gl.constexpr,
    NARROW_STAGES: gl.constexpr, FP8: gl.constexpr, IDENTITY: gl.constexpr,
):  # fmt: skip
    """board_at: see board.BoardLayout, whose offsets are ARRIVED to TABLES. places, rows: of the quantize launch.
    image, middle: operands of GEMM1 and GEMM2; *_tokens, *_narrow: their TMA descriptors for both widths of tiles.
    entries: int32 [entries, 4]."""
    rank = gl.arange(0, NUM_RANKS, layout=LINE)
    lane = gl.arange(0, NUM_LANES, layout=LINE)
    place = gl.arange(0, NUM_PLACES, layout=BY_PLACE)[:, None]
    quad = gl.arange(0, 4, layout=IN_PLACE)[None, :]
    tables = board_at + TABLES
    layout.lay_out_experts(
        control, bases, entries, block_info, tables, rank, gl.arange(0, BINS, layout=LINE), lane, own_rank,
        NUM_RANKS, EXPERTS_PER_RANK, COUNTS_WORDS, BLOCK_N,
    )  # fmt: skip
    ok = gl.atomic_or(control + flags.FAILED, 0, sem="relaxed", scope="gpu") == 0
    num_entries = gl.load(tables + EXPERTS_PER_RANK * (NUM_RANKS + 2))
    num_rows = gl.load(control + dispatch.NUM_ROWS).to(gl.int32)
    if ok & (num_rows == 0) & (gl.program_id(0) == 0):
        flags.post(control, bases, flags.PAYLOAD_FLAG, gl.load(control + dispatch.INFO), own_rank, rank)
    FIRST_GROUPS: gl.constexpr = 1 if IDENTITY else GROUPS1
    num_tiles1 = num_entries * FIRST_GROUPS
    num_tiles2 = -1 if IDENTITY else num_entries * GROUPS2
    if not IDENTITY:
        ring, bars = tiled.empty_ring(image_tokens, STAGES)
        memory = (ring,)
        if BLOCK_N > tiles.NARROW:
            narrow_memory, narrow_bars = tiled.ring_within(ring, (image_narrow,), NARROW_STAGES)
        else:
            narrow_memory, narrow_bars = memory, bars
        rest1 = (middle, limit)
        rest2 = (row_address, row_weight)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    narrow_slot = gl.to_tensor(0)
    narrow_phase = gl.to_tensor(0)
    helps = gl.program_id(0) % HELPER_SHARE == 0
    tile1 = gl.to_tensor(-1)
    tile2 = gl.to_tensor(-1)
    held_src = gl.to_tensor(NUM_RANKS)
    held_item = gl.to_tensor(0)
    sending = (num_rows > 0).to(gl.int32)
    started = flags.now_ns()
    alive = ok.to(gl.int32)
    while alive != 0:
        worked = gl.to_tensor(0)
        src, left = _look(control, bases, board_at, lane, own_rank, NUM_RANKS)
        moved = (left == 0) & (held_src == NUM_RANKS) & (sending == 0)
        if (helps == 0) | moved:
            if tile1 < 0:
                tile1 = tiles.claim(board_at + HEAD1)
            entry = tiles.entry_of(board_at + QUEUE1, tile1, num_tiles1, FIRST_GROUPS)
            if entry >= 0:
                worked = gl.to_tensor(1)
                if IDENTITY:
                    tile1 = _return_entries(
                        control, bases, tile1, entry, board_at, QUEUE1, entries, num_tiles1, row_slot, row_address,
                        row_weight, block_info, own_rank, HIDDEN, ROW_BYTES, FP8,
                    )  # fmt: skip
                else:
                    tile1, slot, phase, narrow_slot, narrow_phase = tiles.gemm(
                        tile1, entry, slot, phase, narrow_slot, narrow_phase, memory, bars, narrow_memory, narrow_bars,
                        board_at, board_at + HEAD1, board_at + QUEUE1, entries, num_tiles1,
                        image_tokens, image_narrow, w13, w13_factor, tiles.finish1, rest1,
                        CHUNKS1, GROUPS1, AHEAD, STAGES, BLOCK_N, NARROW_AHEAD, NARROW_STAGES,
                        DONE, QUEUE2, CHUNKS2 * 128, HIDDEN, FP8,
                    )  # fmt: skip
            if not IDENTITY:
                if worked == 0:
                    if tile2 < 0:
                        tile2 = tiles.claim(board_at + HEAD2)
                    entry = tiles.entry_of(board_at + QUEUE2, tile2, num_tiles2, GROUPS2)
                    if entry >= 0:
                        worked = gl.to_tensor(1)
                        tile2, slot, phase, narrow_slot, narrow_phase = tiles.gemm(
                            tile2, entry, slot, phase, narrow_slot, narrow_phase, memory, bars, narrow_memory,
                            narrow_bars, board_at, board_at + HEAD2, board_at + QUEUE2, entries, num_tiles2,
                            middle_tokens, middle_narrow, w2, w2_factor, tiles.finish2, rest2,
                            CHUNKS2, GROUPS2, AHEAD, STAGES, BLOCK_N, NARROW_AHEAD, NARROW_STAGES,
                            DONE, QUEUE2, CHUNKS2 * 128, HIDDEN, FP8,
                        )  # fmt: skip
        if worked == 0:
            if (held_src == NUM_RANKS) & (src < NUM_RANKS):
                held_item = gl.atomic_add(board_at + EXPAND + src, 1, sem="relaxed", scope="gpu")
                held_src = src
            # Others may have taken all that had come: then this one is kept until it comes.
            here, expected = _rows_of(control, bases, lane, held_src, own_rank, NUM_RANKS)
            if (held_src < NUM_RANKS) & (held_item * ITEM_TOKENS < here):
                worked = gl.to_tensor(1)
                flags.fence_system()
                gl.thread_barrier()
                move.expand_item(
                    control, bases, board_at, image.to(gl.pointer_type(gl.int32)), row_slot, row_address, row_weight,
                    entries, QUEUE1, ARRIVED, tables, held_src, held_item, here, place, quad, lane, own_rank,
                    NUM_RANKS, NUM_TOPK, EXPERTS_PER_RANK, HIDDEN, ROW_BYTES, META_WORDS, RESULT_STRIDE, RESULT_BYTES,
                    CHUNKS1 * 128, BLOCK_N, IMAGE_WIDE,
                )  # fmt: skip
                held_src = gl.to_tensor(NUM_RANKS)
            elif (held_src < NUM_RANKS) & (held_item * ITEM_TOKENS >= expected):
                worked = gl.to_tensor(1)
                held_src = gl.to_tensor(NUM_RANKS)
            elif sending != 0:
                worked = gl.to_tensor(1)
                item = gl.atomic_add(board_at + SEND, 1, sem="relaxed", scope="gpu")
                if item * ITEM_TOKENS < num_rows:
                    move.send_item(
                        control, bases, board_at, rows, places, item, place, quad, lane, rank, own_rank,
                        NUM_RANKS, NUM_TOPK, EXPERTS_PER_RANK, ROW_BYTES, META_WORDS, SEND_WIDE,
                    )  # fmt: skip
                else:
                    sending = gl.to_tensor(0)
        if worked == 0:
            if moved & (tile1 >= num_tiles1) & (tile2 >= num_tiles2):
                alive = gl.to_tensor(0)
            else:
                alive = _go_on(control, bases, lane, rank, started, own_rank, NUM_RANKS)
        else:
            started = flags.now_ns()
    last = sync.arrive(control + sync.RETURNED) == gl.num_programs(0) - 1
    if last & (gl.atomic_or(control + flags.FAILED, 0, sem="relaxed", scope="gpu") == 0):
        flags.post(control, bases, flags.RETURN_FLAG, combine.return_info(control, FP8), own_rank, rank)
    _sum(
        control,
        bases,
        rank,
        own_rank,
        NUM_RANKS,
        NUM_TOPK,
        EXPERTS_PER_RANK,
        HIDDEN,
        RESULT_STRIDE,
        SUM_BLOCKS,
        FP8,
    )
