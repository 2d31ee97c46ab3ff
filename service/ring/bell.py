"""Bells: how any process on the host wakes a rank's step loop, at any moment, without losing a ring.

Owns the ids that tell apart who rings. The words lie on the board, in a block of each rank; a co-located caller maps
the page of these blocks and nothing else of the board.
"""

from __future__ import annotations

import itertools

from megamoe import SharedSegment, full_fence

SUPERVISOR = 31
"""Writer id of the process that watches over the ranks; a rank's own id is its number."""
FIRST_RING_WRITER = 32
"""Writer id of the producer of ring i is this + i: every writer of a bell stores values of its own."""
NUM_RING_WRITERS = 256 - FIRST_RING_WRITER

BELL_AT, CONTROL_BELL_AT, BUSY_AT, AWAKE_AT = 0, 64, 128, 160
"""In the block of a rank: the doorbell, the bell that is heard during a layer call, whether one is under way, and
whether the loop looks at its doorbell before it sleeps the next time (then nobody needs to wake it)."""


class Bell:
    """Wakes one rank's step loop. A doorbell for everything, and a second one that is heard during a layer call.

    Several writers store to one word without atomic operations. Each stores only values of its own (id in the high
    byte), so no store can restore the value at which the sleeper looked before it slept.
    """

    __slots__ = ("_awake", "_busy", "_control", "_counter", "_word", "_writer_id")

    def __init__(self, segment: SharedSegment, block_at: int, writer_id: int) -> None:
        """block_at: where the rank's block lies in the segment (board.layout.rank_at)."""
        self._word = segment.word(block_at + BELL_AT)
        self._control = segment.word(block_at + CONTROL_BELL_AT)
        self._busy = segment.word(block_at + BUSY_AT)
        self._awake = segment.word(block_at + AWAKE_AT)
        self._writer_id = writer_id << 24
        self._counter = itertools.count(1)

    def __call__(self, control: bool) -> None:
        value = self._writer_id | (next(self._counter) & 0xFFFFFF)
        self._word.store(value)
        if control:
            self._control.store(value)
        full_fence()  # what follows is not read before what stands above is stored
        if not self._awake.load():
            self._word.wake_all()
        if control and self._busy.load():
            self._control.wake_all()
