"""small_m: a whole sub-step in one launch, for few rows.

All thread blocks are on the device at once and go through the stages together. Inside a rank they wait for each other
by counters (sync.py); ranks wait only for the flags of those whose rows they need. Slots are reserved, as on
fixed_slot, so that rows travel before anybody has counted anything. While rows are being expanded, the weights that
come next are already on their way into L2.

Rows move in small_m_moves.py; the GEMMs are in small_m_gemms.py. Where the ring serves, small_m_ring.py is the launch.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.backends.hopper import plan
from megamoe.backends.hopper.device import combine, flags, sync
from megamoe.backends.hopper.device import small_m_gemms as gemms
from megamoe.backends.hopper.device import small_m_moves as moves
from megamoe.backends.hopper.device.chain import after_previous_gluon

WARPS: gl.constexpr = gl.constexpr(plan.SMALL_M.warps)
NUM_THREADS: gl.constexpr = gl.constexpr(32 * plan.SMALL_M.warps)
PAIRS: gl.constexpr = gl.constexpr(8)
"""(token, slot) pairs a thread that the index stage looks at together."""


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
    rank = gl.arange(0, NUM_RANKS, layout=moves.line(WARPS))
    me = gl.program_id(0)
    movers = gl.num_programs(0)
    moves.send_rows(
        control, bases, rank, own_rank, me, movers, NUM_RANKS, NUM_TOPK, EXPERTS_PER_RANK, HIDDEN, ROW_BYTES,
        META_WORDS, META_BLOCK, WARPS,
    )  # fmt: skip
    moves.list_rows(
        control, bases, row_slot, row_address, row_weight, block_info, work, stream_offset, tiled_offset,
        stream_max_rows, rank, own_rank, me, movers, NUM_RANKS, NUM_TOPK, EXPERTS_PER_RANK, META_WORDS, RESULT_STRIDE,
        RESULT_BYTES, WIDTHS, CUTS, SLOTS, BINS, PAIRS, WARPS,
    )  # fmt: skip
    if gl.load(control + flags.FAILED, volatile=True) == 0:
        if IDENTITY:
            moves.return_unchanged(
                control, bases, row_slot, row_address, row_weight, block_info, work, own_rank, me, movers, HIDDEN,
                ROW_BYTES, FP8, WARPS,
            )  # fmt: skip
        else:
            stream_work = work + stream_offset
            tiled_work = work + tiled_offset
            share = gemms.share_of(work, num_slots, GROUPS1, GROUPS2, CHUNKS1, CHUNKS2)
            gemms.begin(share, w13, stream_work, tiled_work, GROUPS1, CHUNKS1)
            moves.expand_rows(
                control, bases, image, row_slot, block_info, work, own_rank, me, movers, HIDDEN, ROW_BYTES,
                CHUNKS1 * 128, WARPS,
            )  # fmt: skip
            gemms.multiply(
                share, control, image, middle, image_tokens, middle_tokens, row_address, row_weight,
                work, stream_work, tiled_work, w13, w13_factor, w2, w2_factor, limit,
                HIDDEN, CHUNKS1, CHUNKS2, GROUPS1, GROUPS2, max(2 * BINS, NUM_THREADS), TILES, FP8,
            )  # fmt: skip
    last = sync.arrive(control + sync.RETURNED) == movers - 1
    if last & (gl.load(control + flags.FAILED, volatile=True) == 0):
        flags.post(control, bases, flags.RETURN_FLAG, combine.return_info(control, FP8), own_rank, rank)
    moves.sum_rows(
        control, bases, rank, own_rank, me, movers, NUM_RANKS, NUM_TOPK, EXPERTS_PER_RANK, HIDDEN, RESULT_STRIDE, FP8,
        WARPS,
    )  # fmt: skip
