"""small_m: a whole sub-step in one launch, for few rows.

All thread blocks are on the device at once and go through the stages together. Inside a rank they wait for each other
by counters (sync.py); ranks wait only for the flags of those whose rows they need. Slots are reserved, as on
fixed_slot, so that rows travel before anybody has counted anything. While rows are being expanded, the weights that
come next are already on their way into L2.

The stages themselves are those of the other paths; what is here is their indices in Gluon's layouts.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.backends.hopper import plan
from megamoe.backends.hopper.device import (
    combine,
    dispatch,
    expand,
    flags,
    identity,
    index,
    sync,
)
from megamoe.backends.hopper.device import small_m_gemms as gemms
from megamoe.backends.hopper.device.chain import after_previous_gluon

LINE: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [32], [plan.SMALL_M.warps], [0]))
LANES: gl.constexpr = gl.constexpr(gl.BlockedLayout([8], [32], [plan.SMALL_M.warps], [0]))
NUM_THREADS: gl.constexpr = gl.constexpr(32 * plan.SMALL_M.warps)
NUM_LANES: gl.constexpr = gl.constexpr(8 * 32 * plan.SMALL_M.warps)
"""(token, slot) pairs that the index stage looks at together."""
BLOCKS: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [plan.SMALL_M.warps, 1], [1, 0]))
"""[MX blocks, 32]"""
BY_BLOCK: gl.constexpr = gl.constexpr(gl.SliceLayout(1, BLOCKS.value))
IN_BLOCK: gl.constexpr = gl.constexpr(gl.SliceLayout(0, BLOCKS.value))
PLACES: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [plan.SMALL_M.warps, 1], [1, 0]))
"""[16-byte places of an image, 4 words]"""
BY_PLACE: gl.constexpr = gl.constexpr(gl.SliceLayout(1, PLACES.value))
IN_PLACE: gl.constexpr = gl.constexpr(gl.SliceLayout(0, PLACES.value))
PIECE: gl.constexpr = gl.constexpr(1024)
"""Columns of dispatch and combine."""
SUB_PIECE: gl.constexpr = gl.constexpr(512)
"""Columns of 16 rows of expand."""


@gluon.constexpr_function
def bins_layout(bins):
    """All bins in every warp: sums over them stay inside it."""
    return gl.BlockedLayout([max(bins // 32, 1)], [32], [plan.SMALL_M.warps], [0])


@gluon.jit
def _piece(item, PIECES: gl.constexpr):
    """Token of an item of dispatch or combine; its MX blocks and columns."""
    block = item % PIECES * (PIECE // 32) + gl.arange(0, PIECE // 32, layout=BY_BLOCK)
    column = block[:, None] * 32 + gl.arange(0, 32, layout=IN_BLOCK)[None, :]
    return item // PIECES, block, column


@gluon.jit
def _send(
    control, bases, rank, own_rank,
    NUM_RANKS: gl.constexpr, NUM_TOPK: gl.constexpr, EXPERTS_PER_RANK: gl.constexpr,
    HIDDEN: gl.constexpr, ROW_BYTES: gl.constexpr, META_WORDS: gl.constexpr, META_BLOCK: gl.constexpr,
):  # fmt: skip
    """This rank's rows to their owners; the last thread block posts the payload flags."""
    num_rows = gl.load(control + dispatch.NUM_ROWS).to(gl.int32)
    ids = gl.load(control + dispatch.IDS_PTR).to(gl.pointer_type(gl.int32))
    weights = gl.load(control + dispatch.WEIGHTS_PTR).to(gl.pointer_type(gl.int32))
    quantized = gl.load(control + dispatch.SF_PTR) != 0
    first_slot = own_rank * gl.load(control + dispatch.CAPACITY).to(gl.int32) + 0 * rank
    word = gl.arange(0, META_BLOCK, layout=LINE)
    PIECES: gl.constexpr = (HIDDEN + PIECE - 1) // PIECE
    for item in range(gl.program_id(0), num_rows * PIECES, gl.num_programs(0)):
        token, block, column = _piece(item, PIECES)
        if quantized:
            codes, scales = dispatch.quantized_row(control, token, block, column, HIDDEN)
        else:
            codes, scales = dispatch.plain_row(control, token, column, HIDDEN)
        dispatch.send_piece(
            control, bases, control, first_slot, codes, scales, ids, weights, token, item % PIECES, block, column,
            word, rank, own_rank,
            NUM_RANKS, NUM_TOPK, EXPERTS_PER_RANK, HIDDEN, ROW_BYTES, META_WORDS, False,
        )  # fmt: skip
    senders = gl.minimum(gl.maximum(num_rows * PIECES, 1), gl.num_programs(0))
    if gl.program_id(0) < senders:
        if sync.arrive(control + sync.DISPATCHED) == senders - 1:
            info = gl.load(control + dispatch.NUM_ROWS) | gl.load(control + dispatch.INFO)
            flags.post(control, bases, flags.PAYLOAD_FLAG, info, own_rank, rank)


@gluon.jit
def _list_rows(
    control, bases, row_slot, row_address, row_weight, block_info, work,
    stream_offset, tiled_offset, stream_max_rows, rank, own_rank,
    NUM_RANKS: gl.constexpr, NUM_TOPK: gl.constexpr, EXPERTS_PER_RANK: gl.constexpr, META_WORDS: gl.constexpr,
    RESULT_STRIDE: gl.constexpr, RESULT_BYTES: gl.constexpr, WIDTHS: gl.constexpr, CUTS: gl.constexpr,
    SLOTS: gl.constexpr, BINS: gl.constexpr,
):  # fmt: skip
    """Payload that has come -> tables. Returns when all of them are there."""
    me = gl.program_id(0)
    if me < EXPERTS_PER_RANK:
        rows_from, first_slot = index.rows_by_source(control, bases, own_rank, rank, NUM_RANKS, 0, False)
        lane = gl.arange(0, NUM_LANES, layout=LANES)
        bins: gl.constexpr = bins_layout(BINS)
        bin_idx = gl.arange(0, BINS, layout=bins)
        some = gl.arange(0, 32, layout=LINE)
        for expert in range(me, EXPERTS_PER_RANK, gl.num_programs(0)):
            index.index_expert(
                control, bases, row_slot, row_address, row_weight, block_info, work, work,
                stream_offset, tiled_offset, stream_max_rows, expert, 0, rows_from, first_slot,
                rank, lane, bin_idx, some, own_rank,
                NUM_RANKS, NUM_TOPK, EXPERTS_PER_RANK, META_WORDS, RESULT_STRIDE, RESULT_BYTES,
                WIDTHS, CUTS, SLOTS, 1, bins,
            )  # fmt: skip
        sync.arrive(control + sync.INDEXED)
    sync.await_count(control + sync.INDEXED, gl.minimum(EXPERTS_PER_RANK, gl.num_programs(0)))


@gluon.jit
def _identity(
    control, bases, row_slot, row_address, row_weight, block_info, work, own_rank,
    HIDDEN: gl.constexpr, ROW_BYTES: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    payload = expand.payload_of(control, bases, own_rank)
    PIECES: gl.constexpr = (HIDDEN + SUB_PIECE - 1) // SUB_PIECE
    unit = gl.arange(0, expand.ROWS * (SUB_PIECE // 32), layout=BY_BLOCK)
    within = gl.arange(0, 32, layout=IN_BLOCK)[None, :]
    for item in range(gl.program_id(0), gl.load(work + expand.NUM_BLOCKS) * PIECES, gl.num_programs(0)):
        identity.return_piece(
            payload, row_slot, row_address, row_weight, block_info, item // PIECES,
            item % PIECES * (SUB_PIECE // 32), unit, within, HIDDEN, ROW_BYTES, FP8,
        )  # fmt: skip


@gluon.jit
def _expand(
    control, bases, image, row_slot, block_info, work, own_rank,
    HIDDEN: gl.constexpr, ROW_BYTES: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    payload = expand.payload_of(control, bases, own_rank)
    words = image.to(gl.pointer_type(gl.int32))
    PIECES: gl.constexpr = COLUMNS // SUB_PIECE
    place = gl.arange(0, 2 * SUB_PIECE, layout=BY_PLACE)[:, None]
    pair = gl.arange(0, 4, layout=IN_PLACE)[None, :]
    for item in range(gl.program_id(0), gl.load(work + expand.NUM_BLOCKS) * PIECES, gl.num_programs(0)):
        expand.expand_piece(
            words, payload, row_slot, block_info, item // PIECES, item % PIECES * SUB_PIECE, place, pair,
            HIDDEN, ROW_BYTES, COLUMNS, SUB_PIECE,
        )  # fmt: skip


@gluon.jit
def _sum(
    control, bases, rank, own_rank,
    NUM_RANKS: gl.constexpr, NUM_TOPK: gl.constexpr, EXPERTS_PER_RANK: gl.constexpr,
    HIDDEN: gl.constexpr, RESULT_STRIDE: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Wait for all owners' results, and add up this rank's rows."""
    num_rows = gl.load(control + combine.NUM_ROWS).to(gl.int32)
    PIECES: gl.constexpr = (HIDDEN + PIECE - 1) // PIECE
    ok = gl.to_tensor(False)
    # Each that has something to sum looks for itself: a round of counting less.
    if gl.program_id(0) < gl.maximum(num_rows * PIECES, 1):
        ok, words = flags.wait(control, bases, flags.RETURN_FLAG, (1 << NUM_RANKS) - 1, own_rank, rank)
        if ok & (gl.program_id(0) == 0):
            combine.note_peers(control, words, rank)
    if ok:
        ids = gl.load(control + combine.IDS_PTR).to(gl.pointer_type(gl.int32))
        weights = gl.load(control + combine.WEIGHTS_PTR).to(gl.pointer_type(gl.float32))
        out = dispatch.aligned(gl.load(control + combine.OUT_PTR)).to(gl.pointer_type(gl.bfloat16))
        results = combine.results_of(control, bases, own_rank)
        for item in range(gl.program_id(0), num_rows * PIECES, gl.num_programs(0)):
            token, block, column = _piece(item, PIECES)
            combine.sum_piece(
                control, results, ids, weights, out, token.to(gl.int64), block, column,
                NUM_RANKS, NUM_TOPK, EXPERTS_PER_RANK, HIDDEN, RESULT_STRIDE, FP8,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["own_rank", "stream_max_rows", "num_slots"])
def small_m_kernel(
    control, bases, image, middle, image_tokens, middle_tokens,
    row_slot, row_address, row_weight, block_info, work, stream_offset, tiled_offset, stream_max_rows,
    w13, w13_factor, w2, w2_factor, limit, num_slots, own_rank,
    NUM_RANKS: gl.constexpr, NUM_TOPK: gl.constexpr, EXPERTS_PER_RANK: gl.constexpr,
    HIDDEN: gl.constexpr, ROW_BYTES: gl.constexpr, META_WORDS: gl.constexpr, META_BLOCK: gl.constexpr,
    RESULT_STRIDE: gl.constexpr, RESULT_BYTES: gl.constexpr, SLOTS: gl.constexpr, BINS: gl.constexpr,
    CHUNKS1: gl.constexpr, CHUNKS2: gl.constexpr, GROUPS1: gl.constexpr, GROUPS2: gl.constexpr,
    TILES: gl.constexpr, WIDTHS: gl.constexpr, CUTS: gl.constexpr, FP8: gl.constexpr, IDENTITY: gl.constexpr,
):  # fmt: skip
    """Tables, images and entries are those of the other paths (buffers.py, plan.py); *_tokens: TMA descriptors of the
    images. num_slots: multiprocessors of this rank, each with OCCUPANCY thread blocks. Suffixes 1 and 2: of GEMM1 and
    GEMM2."""
    after_previous_gluon()
    rank = gl.arange(0, NUM_RANKS, layout=LINE)
    _send(
        control, bases, rank, own_rank, NUM_RANKS, NUM_TOPK, EXPERTS_PER_RANK, HIDDEN, ROW_BYTES, META_WORDS,
        META_BLOCK,
    )  # fmt: skip
    _list_rows(
        control, bases, row_slot, row_address, row_weight, block_info, work, stream_offset, tiled_offset,
        stream_max_rows, rank, own_rank, NUM_RANKS, NUM_TOPK, EXPERTS_PER_RANK, META_WORDS, RESULT_STRIDE,
        RESULT_BYTES, WIDTHS, CUTS, SLOTS, BINS,
    )  # fmt: skip
    if gl.load(control + flags.FAILED, volatile=True) == 0:
        if IDENTITY:
            _identity(
                control, bases, row_slot, row_address, row_weight, block_info, work, own_rank, HIDDEN, ROW_BYTES, FP8
            )  # fmt: skip
        else:
            stream_work = work + stream_offset
            tiled_work = work + tiled_offset
            share = gemms.share_of(work, num_slots, GROUPS1, GROUPS2, CHUNKS1, CHUNKS2)
            gemms.begin(share, w13, stream_work, tiled_work, GROUPS1, CHUNKS1)
            _expand(
                control, bases, image, row_slot, block_info, work, own_rank, HIDDEN, ROW_BYTES, CHUNKS1 * 128
            )
            gemms.multiply(
                share, control, image, middle, image_tokens, middle_tokens, row_address, row_weight,
                work, stream_work, tiled_work, w13, w13_factor, w2, w2_factor, limit,
                HIDDEN, CHUNKS1, CHUNKS2, GROUPS1, GROUPS2, max(2 * BINS, NUM_THREADS), TILES, FP8,
            )  # fmt: skip
    last = sync.arrive(control + sync.RETURNED) == gl.num_programs(0) - 1
    if last & (gl.load(control + flags.FAILED, volatile=True) == 0):
        flags.post(control, bases, flags.RETURN_FLAG, combine.return_info(control, FP8), own_rank, rank)
    _sum(control, bases, rank, own_rank, NUM_RANKS, NUM_TOPK, EXPERTS_PER_RANK, HIDDEN, RESULT_STRIDE, FP8)
