"""Flags, progress and aborts between ranks: the only file of this backend that sleeps.

A flag is one 64-bit word per (slot, buffer, kind, source rank) in the receiver's segment, written with one store:
the 32-bit epoch in the low half, info in the high half. Waits compare the epoch for equality only, so generations may
wrap. A waiter sleeps on a futex over the epoch half, in slices: after each it looks whether a peer gave up.

Every rank keeps one progress word in its own segment (epoch, phase, buffer) that peers read. It serves three ends: a
timeout names the rank that is furthest behind instead of one that itself waits; a rank that comes late finds that
the group has gone on; and nobody writes into a payload buffer that a peer still reads from an earlier launch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from enum import IntEnum

from megamoe.backends.cpu.heap import Heap
from megamoe.errors import PeerTimeoutError
from megamoe.layout import NUM_BUFFERS, POSTED, FlagKind
from megamoe.shm import Word, fence

logger = logging.getLogger(__name__)

_MASK32 = 0xFFFFFFFF

_SLICE_S = 0.05
"""Longest sleep between looks at the abort line: bounds how late a rank notices that its peers gave up."""


class Phase(IntEnum):
    """How far a rank is in a launch; compared between ranks to find who holds the group up."""

    ENTERED = 1
    COUNTED = 2
    SENT = 3
    RETURNED = 4
    DONE = 5


class Signals:
    """Posts and waits of one rank. One launch at a time: `enter` sets slot, epoch and deadline for what follows."""

    def __init__(self, heap: Heap) -> None:
        layout = heap.layout
        self.rank = heap.rank
        self.num_ranks = layout.num_ranks
        self.peers = [peer for peer in range(self.num_ranks) if peer != self.rank]
        self.wait_s = 0.0
        """Time asleep or spinning since `enter`."""
        self._heap = heap
        self._u64 = [segment.buf.cast("Q") for segment in heap.segments]
        self._own = self._u64[self.rank]
        self._flags = [
            [
                [layout.flag_offset(slot, buffer_idx, kind, 0) // 8 for kind in FlagKind]
                for buffer_idx in range(NUM_BUFFERS)
            ]
            for slot in range(layout.num_slots)
        ]
        self._aborts = layout.region("aborts").offset // 8
        self._progress = layout.region("progress").offset // 8
        self._doorbells = [segment.word(layout.region("doorbell").offset) for segment in heap.segments]
        self._num_rings = 0
        self._words: dict[tuple[int, int], Word] = {}
        self._slot_idx = self._epoch = self._buffer_idx = 0
        self._lines = self._flags[0][0]
        self._deadline_s = 0.0

    # ------------------------------------------------------------------------------------- begin and end

    def enter(self, slot_idx: int, epoch: int, buffer_idx: int, deadline_s: float) -> None:
        """Begin a launch. Raises PeerTimeoutError when the group has already gone on without this rank."""
        self._slot_idx, self._epoch, self._buffer_idx = slot_idx, epoch, buffer_idx
        self._lines = self._flags[slot_idx][buffer_idx]
        self._deadline_s = deadline_s
        self.wait_s = 0.0
        self.advance(Phase.ENTERED)
        self.check_alive()

    def advance(self, phase: Phase) -> None:
        self._own[self._progress] = self._epoch | (POSTED | self._buffer_idx << 8 | phase) << 32

    def await_buffer_free(self) -> None:
        """Return when no peer is inside an earlier launch that uses this launch's buffer.

        In a run of consecutive sequences that is always so (finishing launch n-1 proves that every peer has left
        n-2); it can be otherwise after a skipped sequence, or after a timeout.
        """
        for peer in self.peers:
            while True:
                progress = self._u64[peer][self._progress]
                info = progress >> 32
                if not info or info & 0xFF == Phase.DONE or progress & _MASK32 == self._epoch:
                    break
                if info >> 8 & 1 != self._buffer_idx:
                    break
                # Nobody wakes us from a progress word: this wait is too rare to charge every launch for it.
                self._pause(peer, self._progress, progress & _MASK32, 0.002, "the end of its earlier launch")

    # ------------------------------------------------------------------------------------- posts

    def post(self, dst_rank: int, kind: FlagKind, info: int = 0, *, ring: bool = False) -> None:
        """Publish what was written before, then set this rank's flag at dst_rank and wake its waiter.

        ring: the receiver sleeps on its doorbell (it waits for any of several flags), not on the flag.
        """
        index = self._lines[kind] + self.rank
        fence()
        self._u64[dst_rank][index] = self._epoch | (info | POSTED) << 32
        if dst_rank == self.rank:
            return
        if ring:
            self._ring(dst_rank)
        else:
            self._word(dst_rank, index).wake_all()

    def _ring(self, dst_rank: int) -> None:
        """Store a value that the doorbell never held: then no order of stores by several ranks loses a wake."""
        self._num_rings = (self._num_rings + 1) & 0xFFFFFFF
        self._doorbells[dst_rank].store(self.rank << 28 | self._num_rings)
        self._doorbells[dst_rank].wake_all()

    def _word(self, rank: int, index: int) -> Word:
        word = self._words.get((rank, index))
        if word is None:
            word = self._words[rank, index] = self._heap.segments[rank].word(8 * index)
        return word

    # ------------------------------------------------------------------------------------- waits

    def seen(self, kind: FlagKind, src_rank: int) -> bool:
        """Whether src_rank's flag of this launch is there."""
        flag = self._own[self._lines[kind] + src_rank]
        return flag & _MASK32 == self._epoch and flag >> 63 == 1

    def info(self, kind: FlagKind, src_rank: int) -> int:
        """Info bits of a flag that is there."""
        return (self._own[self._lines[kind] + src_rank] >> 32) & ~POSTED

    def wait(self, kind: FlagKind, src_ranks: Iterable[int]) -> None:
        """Return when the flags of all src_ranks are there. Raises PeerTimeoutError."""
        for src_rank in src_ranks:
            index = self._lines[kind] + src_rank
            while not self.seen(kind, src_rank):
                self._pause(
                    src_rank, index, self._own[index] & _MASK32, _SLICE_S, f"its {kind.name.lower()} flag"
                )
        fence()

    def wait_any(self, ready: Callable[[], bool], missing: Callable[[], Iterable[int]]) -> None:
        """Return when `ready()`; for flags posted with ring=True. `missing()` names whom a timeout may blame."""
        started = time.perf_counter()
        doorbell = self._doorbells[self.rank]
        while True:
            rung = doorbell.load()
            if ready():
                break
            self.check_alive()
            left_s = self._deadline_s - time.monotonic()
            if left_s <= 0:
                self._give_up(list(missing()), "payload or results")
            doorbell.wait_while(rung, min(left_s, _SLICE_S))
        self.wait_s += time.perf_counter() - started

    def _pause(self, peer: int, index: int, value: int, slice_s: float, what: str) -> None:
        """Sleep one slice on a 64-bit word's low half (own flags, or a peer's progress)."""
        started = time.perf_counter()
        self.check_alive()
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            self._give_up([peer], what)
        home = peer if index == self._progress else self.rank
        self._word(home, index).wait_while(value, min(left_s, slice_s))
        self.wait_s += time.perf_counter() - started

    # ------------------------------------------------------------------------------------- giving up

    def check_alive(self) -> None:
        """Raise PeerTimeoutError when a peer gave this launch up, or when the group went on without this rank."""
        for poster in range(self.num_ranks):
            word = self._own[self._aborts + poster]
            if word and word & _MASK32 == self._epoch:
                raise self._timeout((word >> 32) & 0xFF, poster)
        # Once this rank's rows are on their way back, a peer may have all it needs and be in the next launch.
        if self._own[self._progress] >> 32 & 0xFF >= Phase.RETURNED:
            return
        for peer in self.peers:
            progress = self._u64[peer][self._progress]
            if progress and 0 < (progress - self._epoch) & _MASK32 < 1 << 31:
                raise self._timeout(1 << self.rank, peer)

    def check_in_time(self) -> None:
        """check_alive, and raise when this rank itself is past the deadline: its peers do not expect it any more,
        and their memory may belong to a later launch."""
        self.check_alive()
        if time.monotonic() > self._deadline_s:
            self._give_up([self.rank], "itself")

    def _give_up(self, missing: list[int], what: str) -> None:
        """Tell every rank that this launch is over, and why; then raise."""
        self.check_alive()
        behind = self._furthest_behind() or missing
        mask = sum(1 << rank for rank in behind)
        own = self._own[self._progress]
        logger.warning(
            "rank %d gave up slot %d: expected epoch %d, waited for %s of ranks %s, own phase %d, "
            "seen (epoch, phase) %s",
            self.rank, self._slot_idx, self._epoch, what, missing, own >> 32 & 0xFF,
            {rank: (word & _MASK32, word >> 32 & 0xFF) for rank, word in self._progress_words().items()},
        )  # fmt: skip
        self._post_abort(mask)
        raise self._timeout(mask, self.rank)

    def abort(self) -> None:
        """End this launch for all peers because this rank cannot go on."""
        self._post_abort(1 << self.rank)

    def _post_abort(self, mask: int) -> None:
        for peer in self.peers:
            self._u64[peer][self._aborts + self.rank] = self._epoch | (mask | POSTED) << 32
        for peer in self.peers:
            self._ring(peer)
            for line in self._lines:
                for src_rank in range(self.num_ranks):
                    self._word(peer, line + src_rank).wake_all()

    def _progress_words(self) -> dict[int, int]:
        return {peer: self._u64[peer][self._progress] for peer in self.peers}

    def _furthest_behind(self) -> list[int]:
        """Ranks that are further behind than this one: they hold the group up, whoever we happened to wait for."""

        def key(word: int) -> int:
            return word >> 32 & 0xFF if word and word & _MASK32 == self._epoch else 0

        keys = {peer: key(word) for peer, word in self._progress_words().items()}
        lowest = min(keys.values(), default=0)
        if lowest >= key(self._own[self._progress]):
            return []
        return [peer for peer, value in keys.items() if value == lowest]

    def _timeout(self, mask: int, poster: int) -> PeerTimeoutError:
        ranks = [rank for rank in range(self.num_ranks) if mask >> rank & 1]
        return PeerTimeoutError(
            f"ranks {ranks} did not come in time: rank {poster} gave up the launch of slot {self._slot_idx}, "
            f"epoch {self._epoch}",
            ranks,
        )
