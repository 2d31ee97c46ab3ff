"""What has come of every source, as large_m's thread blocks see it. `lane`: arange over all threads."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.backends.hopper import board
from megamoe.backends.hopper.board import BoardWord
from megamoe.backends.hopper.device import flags

ITEM_TOKENS: gl.constexpr = gl.constexpr(board.ITEM_TOKENS)
EXPAND: gl.constexpr = gl.constexpr(BoardWord.EXPAND)


@gluon.jit
def look(control, bases, board_at, lane, own_rank, NUM_RANKS: gl.constexpr):
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
def rows_of(control, bases, lane, src, own_rank, NUM_RANKS: gl.constexpr):
    """Rows of a source that have come, and all that it brings."""
    rank = gl.minimum(lane, NUM_RANKS - 1)
    line = gl.load(bases + own_rank) + flags.flag_line(control, flags.PAYLOAD_FLAG)
    words = gl.load(flags.word64(line + 8 * rank), volatile=True)
    arrived, expected = flags.arrived_rows(control, words, rank)
    mine = (lane < NUM_RANKS) & (rank == src)
    return gl.sum(gl.where(mine, arrived, 0), axis=0), gl.sum(gl.where(mine, expected, 0), axis=0)


@gluon.jit
def go_on(control, bases, lane, rank, started, own_rank, NUM_RANKS: gl.constexpr):
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
