"""large_m's GEMMs: compact's, but for tiles of GEMM1 that have run early, and GEMM2 begins before GEMM1 has ended.

Thread blocks of GEMM2 come in as those of GEMM1 go. So GEMM2 does not wait for the launch before it, but for the
counters of entries; what these count was released by those who wrote it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.backends.hopper.board import BoardWord
from megamoe.backends.hopper.device import flags, gemm1, gemm2, sync, tiles
from megamoe.backends.hopper.device import wgmma_loop as tiled
from megamoe.backends.hopper.device.chain import after_previous_gluon

LINE: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
EARLY: gl.constexpr = gl.constexpr(BoardWord.EARLY)


@gluon.jit(do_not_specialize=["own_rank"])
def large_m_gemm1_kernel(
    control, bases, board_at, entries, box256, box128, box64, box32, image_out, units, out_factor, limit, own_rank,
    NUM_RANKS: gl.constexpr, DONE: gl.constexpr, TAKEN: gl.constexpr, OF_WIDTH: gl.constexpr,
    COLUMNS_OUT: gl.constexpr, CHUNKS: gl.constexpr, GROUPS: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """board_at, entries: of large_m_kernel. DONE to OF_WIDTH: offsets, see board.BoardLayout."""
    after_previous_gluon()
    if gl.load(control + flags.FAILED) == 0:
        rank = gl.arange(0, NUM_RANKS, layout=LINE)
        tiles.run_all(
            tiled.boxes_of(box256, box128, box64, box32), units, out_factor, entries, board_at + OF_WIDTH,
            board_at + DONE, board_at + TAKEN, gl.load(board_at + EARLY), (control, bases, rank, own_rank),
            gemm1.finish_part, (image_out, limit), CHUNKS, GROUPS, TILES, 0, COLUMNS_OUT,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["own_rank"])
def large_m_gemm2_kernel(
    control, bases, board_at, entries, box256, box128, box64, box32, row_address, row_weight, units, out_factor,
    num_indexed, own_rank,
    NUM_RANKS: gl.constexpr, DONE: gl.constexpr, TAKEN: gl.constexpr, OF_WIDTH: gl.constexpr,
    HIDDEN: gl.constexpr, CHUNKS: gl.constexpr, GROUPS: gl.constexpr, GROUPS1: gl.constexpr, TILES: gl.constexpr,
    FP8: gl.constexpr,
):  # fmt: skip
    """num_indexed: thread blocks of large_m_kernel that wrote the tables, before the launch before this one."""
    sync.await_count(control + sync.INDEXED, num_indexed)
    rank = gl.arange(0, NUM_RANKS, layout=LINE)
    tiles.run_all(
        tiled.boxes_of(box256, box128, box64, box32), units, out_factor, entries, board_at + OF_WIDTH,
        board_at + DONE, board_at + TAKEN, 0, (control, bases, rank, own_rank),
        gemm2.finish_part, (row_address, row_weight), CHUNKS, GROUPS, TILES, GROUPS1, (HIDDEN, FP8),
    )  # fmt: skip
    # Only for the launch after this one, which may rely on the launch before it having ended.
    after_previous_gluon()
