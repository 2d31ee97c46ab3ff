"""What moves in small_m: rows to their owners, tables, operands, results home; in Gluon's layouts.

The stages themselves are those of the other paths; what is here is their indices. Whoever moves is one of `movers`
groups of WARPS warps, number `me`: a thread block, or a warpgroup of one.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.backends.hopper.device import combine, dispatch, expand, flags, identity, index, sync

PIECE: gl.constexpr = gl.constexpr(1024)
"""Columns of dispatch and combine."""
SUB_PIECE: gl.constexpr = gl.constexpr(512)
"""Columns of 16 rows of expand."""


@gluon.constexpr_function
def line(warps):
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.constexpr_function
def lanes(each, warps):
    """(token, slot) pairs that the index stage looks at together, `each` a thread."""
    return gl.BlockedLayout([each], [32], [warps], [0])


@gluon.constexpr_function
def by_block(warps):
    """[MX blocks] of [MX blocks, 32]."""
    return gl.SliceLayout(1, gl.BlockedLayout([1, 4], [4, 8], [warps, 1], [1, 0]))


@gluon.constexpr_function
def in_block(warps):
    return gl.SliceLayout(0, by_block(warps).parent)


@gluon.constexpr_function
def by_place(warps):
    """[places] of [16-byte places of an image, 4 words]."""
    return gl.SliceLayout(1, gl.BlockedLayout([1, 4], [32, 1], [warps, 1], [1, 0]))


@gluon.constexpr_function
def in_place(warps):
    return gl.SliceLayout(0, by_place(warps).parent)


@gluon.constexpr_function
def bins_layout(bins, warps):
    """All bins in every warp: sums over them stay inside it."""
    return gl.BlockedLayout([max(bins // 32, 1)], [32], [warps], [0])


@gluon.jit
def _piece(item, PIECES: gl.constexpr, WARPS: gl.constexpr):
    """Token of an item of dispatch or combine; its MX blocks and columns."""
    block = item % PIECES * (PIECE // 32) + gl.arange(0, PIECE // 32, layout=by_block(WARPS))
    column = block[:, None] * 32 + gl.arange(0, 32, layout=in_block(WARPS))[None, :]
    return item // PIECES, block, column


@gluon.jit
def send_rows(
    control, bases, rank, own_rank, me, movers,
    NUM_RANKS: gl.constexpr, NUM_TOPK: gl.constexpr, EXPERTS_PER_RANK: gl.constexpr,
    HIDDEN: gl.constexpr, ROW_BYTES: gl.constexpr, META_WORDS: gl.constexpr, META_BLOCK: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """This rank's rows to their owners; the last mover posts the payload flags."""
    num_rows = gl.load(control + dispatch.NUM_ROWS).to(gl.int32)
    ids = gl.load(control + dispatch.IDS_PTR).to(gl.pointer_type(gl.int32))
    weights = gl.load(control + dispatch.WEIGHTS_PTR).to(gl.pointer_type(gl.int32))
    quantized = gl.load(control + dispatch.SF_PTR) != 0
    first_slot = own_rank * gl.load(control + dispatch.CAPACITY).to(gl.int32) + 0 * rank
    word = gl.arange(0, META_BLOCK, layout=line(WARPS))
    PIECES: gl.constexpr = (HIDDEN + PIECE - 1) // PIECE
    for item in range(me, num_rows * PIECES, movers):
        token, block, column = _piece(item, PIECES, WARPS)
        if quantized:
            codes, scales = dispatch.quantized_row(control, token, block, column, HIDDEN)
        else:
            codes, scales = dispatch.plain_row(control, token, column, HIDDEN)
        dispatch.send_piece(
            control, bases, control, first_slot, codes, scales, ids, weights, token, item % PIECES, block, column,
            word, rank, own_rank,
            NUM_RANKS, NUM_TOPK, EXPERTS_PER_RANK, HIDDEN, ROW_BYTES, META_WORDS, False,
        )  # fmt: skip
    senders = gl.minimum(gl.maximum(num_rows * PIECES, 1), movers)
    if me < senders:
        if sync.arrive(control + sync.DISPATCHED) == senders - 1:
            info = gl.load(control + dispatch.NUM_ROWS) | gl.load(control + dispatch.INFO)
            flags.post(control, bases, flags.PAYLOAD_FLAG, info, own_rank, rank)


@gluon.jit
def list_rows(
    control, bases, row_slot, row_address, row_weight, block_info, work,
    stream_offset, tiled_offset, stream_max_rows, rank, own_rank, me, movers,
    NUM_RANKS: gl.constexpr, NUM_TOPK: gl.constexpr, EXPERTS_PER_RANK: gl.constexpr, META_WORDS: gl.constexpr,
    RESULT_STRIDE: gl.constexpr, RESULT_BYTES: gl.constexpr, WIDTHS: gl.constexpr, CUTS: gl.constexpr,
    SLOTS: gl.constexpr, BINS: gl.constexpr, EACH: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Payload that has come -> tables. Returns when all of them are there. EACH: (token, slot) pairs a thread that are
    looked at together."""
    if me < EXPERTS_PER_RANK:
        rows_from, first_slot = index.rows_by_source(control, bases, own_rank, rank, NUM_RANKS, 0, False)
        lane = gl.arange(0, EACH * 32 * WARPS, layout=lanes(EACH, WARPS))
        bins: gl.constexpr = bins_layout(BINS, WARPS)
        bin_idx = gl.arange(0, BINS, layout=bins)
        some = gl.arange(0, 32, layout=line(WARPS))
        for expert in range(me, EXPERTS_PER_RANK, movers):
            index.index_expert(
                control, bases, row_slot, row_address, row_weight, block_info, work, work,
                stream_offset, tiled_offset, stream_max_rows, expert, 0, rows_from, first_slot,
                rank, lane, bin_idx, some, own_rank,
                NUM_RANKS, NUM_TOPK, EXPERTS_PER_RANK, META_WORDS, RESULT_STRIDE, RESULT_BYTES,
                WIDTHS, CUTS, SLOTS, 1, bins,
            )  # fmt: skip
        sync.arrive(control + sync.INDEXED)
    sync.await_part(
        control + sync.INDEXED,
        gl.minimum(EXPERTS_PER_RANK, movers),
        gl.arange(0, 32 * WARPS, layout=line(WARPS)),
    )


@gluon.jit
def return_unchanged(
    control, bases, row_slot, row_address, row_weight, block_info, work, own_rank, me, movers,
    HIDDEN: gl.constexpr, ROW_BYTES: gl.constexpr, FP8: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    payload = expand.payload_of(control, bases, own_rank)
    PIECES: gl.constexpr = (HIDDEN + SUB_PIECE - 1) // SUB_PIECE
    unit = gl.arange(0, expand.ROWS * (SUB_PIECE // 32), layout=by_block(WARPS))
    within = gl.arange(0, 32, layout=in_block(WARPS))[None, :]
    for item in range(me, gl.load(work + expand.NUM_BLOCKS) * PIECES, movers):
        identity.return_piece(
            payload, row_slot, row_address, row_weight, block_info, item // PIECES,
            item % PIECES * (SUB_PIECE // 32), unit, within, HIDDEN, ROW_BYTES, FP8,
        )  # fmt: skip


@gluon.jit
def expand_rows(
    control, bases, image, row_slot, block_info, work, own_rank, me, movers,
    HIDDEN: gl.constexpr, ROW_BYTES: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    payload = expand.payload_of(control, bases, own_rank)
    words = image.to(gl.pointer_type(gl.int32))
    PIECES: gl.constexpr = COLUMNS // SUB_PIECE
    place = gl.arange(0, 2 * SUB_PIECE, layout=by_place(WARPS))[:, None]
    pair = gl.arange(0, 4, layout=in_place(WARPS))[None, :]
    for item in range(me, gl.load(work + expand.NUM_BLOCKS) * PIECES, movers):
        expand.expand_piece(
            words, payload, row_slot, block_info, item // PIECES, item % PIECES * SUB_PIECE, place, pair,
            HIDDEN, ROW_BYTES, COLUMNS, SUB_PIECE,
        )  # fmt: skip


@gluon.jit
def sum_rows(
    control, bases, rank, own_rank, me, movers,
    NUM_RANKS: gl.constexpr, NUM_TOPK: gl.constexpr, EXPERTS_PER_RANK: gl.constexpr,
    HIDDEN: gl.constexpr, RESULT_STRIDE: gl.constexpr, FP8: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Wait for all owners' results, and add up this rank's rows."""
    num_rows = gl.load(control + combine.NUM_ROWS).to(gl.int32)
    PIECES: gl.constexpr = (HIDDEN + PIECE - 1) // PIECE
    ok = gl.to_tensor(False)
    # Each that has something to sum looks for itself: a round of counting less.
    if me < gl.maximum(num_rows * PIECES, 1):
        ok, words = flags.wait(control, bases, flags.RETURN_FLAG, (1 << NUM_RANKS) - 1, own_rank, rank)
        if ok & (me == 0):
            combine.note_peers(control, words, rank)
    if ok:
        ids = gl.load(control + combine.IDS_PTR).to(gl.pointer_type(gl.int32))
        weights = gl.load(control + combine.WEIGHTS_PTR).to(gl.pointer_type(gl.float32))
        out = dispatch.aligned(gl.load(control + combine.OUT_PTR)).to(gl.pointer_type(gl.bfloat16))
        results = combine.results_of(control, bases, own_rank)
        for item in range(me, num_rows * PIECES, movers):
            token, block, column = _piece(item, PIECES, WARPS)
            combine.sum_piece(
                control, results, ids, weights, out, token.to(gl.int64), block, column,
                NUM_RANKS, NUM_TOPK, EXPERTS_PER_RANK, HIDDEN, RESULT_STRIDE, FP8,
            )  # fmt: skip
