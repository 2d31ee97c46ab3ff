"""The board: one shared-memory segment on which the ranks of a group meet.

Owns the segment, its lock, and what belongs to no table on it: how far the group is, when a rank last got on, whether
the group is down. The tables are lease.py's, agreement.py's and call_order.py's. Whatever must be decided once for all
ranks is written under `locked()` (lock.py). Counters that only hurry a reader up (version, highest sequence) are read
without it. Refuses a board of another layout.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable

from megamoe import SharedSegment, full_fence
from megamoe.errors import InvalidArgumentError, must_be
from service.board import layout
from service.board.lock import BoardLock
from service.messages import ErrorReply
from service.ring.bell import AWAKE_AT, BELL_AT, BUSY_AT, CONTROL_BELL_AT, SUPERVISOR, Bell


class Board:
    """One process's view of the board. Thread-safe except where a method says otherwise."""

    def __init__(self, segment: SharedSegment, writer_id: int) -> None:
        self.segment = segment
        self.buf = segment.buf
        magic, num_ranks, max_micro_batches, generation = layout.HEAD.unpack_from(self.buf)
        if magic != layout.MAGIC:
            raise InvalidArgumentError(must_be("board magic", hex(layout.MAGIC), hex(magic)))
        self.num_ranks: int = num_ranks
        self.max_micro_batches: int = max_micro_batches
        self.generation: int = generation
        self.writer_id = writer_id
        self._version = segment.word(layout.VERSION_AT)
        self._down = segment.word(layout.DOWN_AT)
        self._u64 = segment.buf.cast("Q")
        self._lock = BoardLock(segment, self._u64, writer_id)
        ranks_at = [layout.rank_at(rank) for rank in range(num_ranks)]
        self._traffic = [(at + layout.TRAFFIC_AT) // 8 for at in ranks_at]
        self._progress = [(at + layout.PROGRESS_AT) // 8 for at in ranks_at]
        self._bells = [Bell(segment, layout.rank_at(rank), writer_id) for rank in range(num_ranks)]

    @classmethod
    def create(
        cls,
        group_name: str,
        *,
        num_ranks: int,
        max_micro_batches: int,
        generation: int,
        first_sequence: int = 1,
    ) -> Board:
        """Allocate the board of a group. first_sequence: the first sequence of the generation, at least 1.

        Raises HeapError when /dev/shm is short or a board of this name exists.
        """
        for name, value, most in (
            ("num_ranks", num_ranks, layout.MAX_RANKS),
            ("max_micro_batches", max_micro_batches, layout.MAX_MICRO_BATCHES),
            ("first_sequence", first_sequence, 2**63),
        ):
            if not 1 <= value <= most:
                raise InvalidArgumentError(must_be(name, f"from 1 to {most}", value))
        segment = SharedSegment.create(
            board_name(group_name), layout.board_bytes(num_ranks, max_micro_batches)
        )
        struct.pack_into("<Q", segment.buf, layout.HIGHEST_SEQUENCE_AT, first_sequence - 1)
        struct.pack_into("<Q", segment.buf, layout.LOCK_OWNER_AT, SUPERVISOR)
        layout.HEAD.pack_into(segment.buf, 0, layout.MAGIC, num_ranks, max_micro_batches, generation)
        return cls(segment, SUPERVISOR)

    @classmethod
    def attach(cls, group_name: str, writer_id: int, *, timeout_s: float = 10.0) -> Board:
        """The board of a running group, for rank writer_id (or SUPERVISOR, or a ring's producer)."""
        deadline = time.monotonic() + timeout_s
        segment = SharedSegment.attach(board_name(group_name), timeout_s=timeout_s)
        while layout.HEAD.unpack_from(segment.buf)[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.001)  # its creator is between allocating and describing it
        return cls(segment, writer_id)

    def close(self) -> None:
        """Drop this mapping. Safe to call twice."""
        self._lock.close()
        self._u64.release()
        self.segment.close()

    def unlink(self) -> None:
        """Remove the board's name. Safe to call twice."""
        self.segment.unlink()

    # ------------------------------------------------------------------------------ lock and words

    def locked(self) -> BoardLock:
        """Hold the board: for the few microseconds in which something is decided for all ranks.

        Raises UnavailableError naming the owner if the lock stays taken for 5 s (its process is stopped).
        """
        return self._lock

    @property
    def version(self) -> int:
        """Changes whenever the lease or any intent on the board changes."""
        return self._version.load()

    @property
    def lease_version(self) -> int:
        """Changes with the lease."""
        return self._u64[layout.LEASE_VERSION_AT // 8]

    def intent_version(self, micro_batch_idx: int) -> int:
        """Changes with the intents of a micro-batch."""
        return self._u64[layout.INTENT_VERSIONS_AT // 8 + micro_batch_idx]

    def bump_lease(self) -> None:
        """Tell readers that the lease changed. Under the lock only."""
        self._u64[layout.LEASE_VERSION_AT // 8] += 1
        self._version.store(self._version.load() + 1)

    def bump_intents(self, micro_batch_idx: int) -> None:
        """Tell readers that the intents of a micro-batch changed. Under the lock only."""
        self._u64[layout.INTENT_VERSIONS_AT // 8 + micro_batch_idx] += 1
        self._version.store(self._version.load() + 1)

    @property
    def highest_sequence(self) -> int:
        """The highest sequence that any rank began or gave up."""
        return self._u64[layout.HIGHEST_SEQUENCE_AT // 8]

    @highest_sequence.setter
    def highest_sequence(self, value: int) -> None:
        self._u64[layout.HIGHEST_SEQUENCE_AT // 8] = value

    def raise_sequence(self, next_sequence: int) -> None:
        """Let the next sequence be at least this: before the first lease only."""
        with self.locked():
            self.highest_sequence = max(self.highest_sequence, next_sequence - 1)

    @property
    def highest_step(self) -> int:
        """The highest step id that any rank brought to any micro-batch."""
        return self._u64[layout.HIGHEST_STEP_AT // 8]

    @highest_step.setter
    def highest_step(self, value: int) -> None:
        self._u64[layout.HIGHEST_STEP_AT // 8] = value

    # ------------------------------------------------------------------------------ ranks

    def ring(self, ranks: Iterable[int], *, control: bool = True) -> None:
        """Wake the step loops of ranks; with control also those that are inside a layer call."""
        for rank in ranks:
            self._bells[rank](control)

    def ring_all(self) -> None:
        self.ring(range(self.num_ranks))

    def bell(self, rank: int) -> Bell:
        """The bell of one rank, rung by this process."""
        return self._bells[rank]

    def doorbell(self, rank: int) -> tuple[int, int]:
        """(offset of the doorbell word, offset of the control word) of a rank in the segment."""
        at = layout.rank_at(rank)
        return at + BELL_AT, at + CONTROL_BELL_AT

    def set_busy(self, rank: int, busy: bool) -> None:
        """Say that a rank's device thread is inside a layer call: control bells must then wake its other thread."""
        self.buf[layout.rank_at(rank) + BUSY_AT] = busy
        full_fence()  # what is read next is not read before this store is seen

    def set_awake(self, rank: int, awake: bool) -> None:
        """Say whether a rank's loop looks at its doorbell before it sleeps: then nobody needs to wake it."""
        self.buf[layout.rank_at(rank) + AWAKE_AT] = awake
        full_fence()

    def mark_progress(self, rank: int) -> None:
        """This rank finished a layer call or a plan just now."""
        self._u64[self._progress[rank]] = time.monotonic_ns()

    def last_progress_s(self, rank: int) -> float:
        """time.monotonic() of the rank's last progress, 0.0 = none yet."""
        return self._u64[self._progress[rank]] * 1e-9

    def mark_traffic(self, rank: int, now_ns: int) -> None:
        """This rank heard of the lease holder."""
        self._u64[self._traffic[rank]] = now_ns

    def last_traffic_ns(self) -> int:
        """When any rank last heard of the holder, monotonic nanoseconds."""
        return max(self._u64[at] for at in self._traffic)

    # ------------------------------------------------------------------------------ the group is down

    def post_down(self, error: ErrorReply) -> None:
        """The group cannot serve (a rank died, a loop failed): every rank answers this to everything. First wins."""
        with self.locked():
            if not self._down.load():
                layout.pack_error(self.buf, layout.DOWN_ERROR_AT, error)
                self._down.store(1)
        self.ring_all()

    @property
    def down(self) -> ErrorReply | None:
        """Why the group is down, or None."""
        return layout.unpack_error(self.buf, layout.DOWN_ERROR_AT) if self._down.load() else None


def board_name(group_name: str) -> str:
    return f"{group_name}-board"
