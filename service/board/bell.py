"""Bells: how any process of a group wakes a rank's step loop, at any moment, without losing a ring.

Owns the ids that tell apart who rings. The words lie on the board.
"""

from __future__ import annotations

import itertools

from megamoe import SharedSegment
from service.board import layout

SUPERVISOR = 31
"""Writer id of the process that watches over the ranks; a rank's own id is its number."""
FIRST_RING_WRITER = 32
"""Writer id of the producer of ring i is this + i: every writer of a bell stores values of its own."""


class Bell:
    """Wakes one rank's step loop. A doorbell for everything, and a second one that is heard during a layer call.

    Several writers store to one word without atomic operations. Each stores only values of its own (id in the high
    byte), so no store can restore the value at which the sleeper looked before it slept.
    """

    __slots__ = ("_busy", "_control", "_counter", "_word", "_writer_id")

    def __init__(self, segment: SharedSegment, rank: int, writer_id: int) -> None:
        at = layout.rank_at(rank)
        self._word = segment.word(at + layout.BELL_AT)
        self._control = segment.word(at + layout.CONTROL_BELL_AT)
        self._busy = segment.word(at + layout.BUSY_AT)
        self._writer_id = writer_id << 24
        self._counter = itertools.count(1)

    def __call__(self, control: bool) -> None:
        value = self._writer_id | (next(self._counter) & 0xFFFFFF)
        self._word.store(value)
        if control:
            self._control.store(value)
        self._word.wake_all()  # a system call: what follows is not read before what stands above is stored
        if control and self._busy.load():
            self._control.wake_all()
