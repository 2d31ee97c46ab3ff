"""The board: one shared-memory segment on which the ranks of a group meet, and the bells that wake their loops.

Owns the bytes, the lock and the bells; what the entries mean is said by lease.py, agreement.py and call_order.py,
each with a table of its own on the board. Whatever must be decided once for all ranks is written under `locked()`
(flock on the segment, which the kernel releases when a process dies; about 1.2 us uncontended on the 2-core
reference machine). Counters that only hurry a reader up (version, highest sequence) are read without it.
Refuses a board of another layout; a lock that stays taken is an UnavailableError naming who has it.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megamoe import PlanId, SharedSegment
from megamoe.errors import InvalidArgumentError, UnavailableError, must_be
from service.messages import ErrorReply
from service.ring_codec import cut_text

MAX_RANKS = 8
SUPERVISOR = 31
"""Writer id of the process that watches over the ranks; a rank's own id is its number."""
FIRST_RING_WRITER = 32
"""Writer id of the producer of ring i is this + i: every writer of a bell stores values of its own."""

_MAGIC = 0x4D4F4542_0001
_HEAD = struct.Struct("<QQQQ")  # magic, num_ranks, max_micro_batches, generation
_VERSION_AT, _LOCK_OWNER_AT, _HIGHEST_SEQUENCE_AT, _HIGHEST_STEP_AT, _DOWN_AT = 128, 192, 256, 320, 1024
_LEASE_VERSION_AT, _INTENT_VERSIONS_AT = 384, 512
_RANKS_AT, _RANK_BYTES = 4096, 512
_BELL_AT, _CONTROL_BELL_AT, _BUSY_AT, _PROGRESS_AT, _TRAFFIC_AT = 0, 64, 128, 192, 200
MAX_MICRO_BATCHES = 32

_LOCK_SPIN = 50
_LOCK_TIMEOUT_S = 5.0

_ERROR = struct.Struct("<HHI32s")  # code length, text length, missing ranks, code
MAX_ERROR_TEXT_BYTES = 600
ERROR_BYTES = _ERROR.size + MAX_ERROR_TEXT_BYTES


def pack_error(buf: memoryview, at: int, error: ErrorReply) -> None:
    """Write an error into ERROR_BYTES of the board; the sentence is cut to MAX_ERROR_TEXT_BYTES."""
    code, text = error.code.encode(), cut_text(error.message, MAX_ERROR_TEXT_BYTES)
    missing = sum(1 << rank for rank in error.missing_ranks)
    _ERROR.pack_into(buf, at, len(code), len(text), missing, code)
    buf[at + _ERROR.size : at + _ERROR.size + len(text)] = text


def unpack_error(buf: memoryview, at: int) -> ErrorReply:
    code_len, text_len, missing, code = _ERROR.unpack_from(buf, at)
    return ErrorReply(
        code=code[:code_len].decode(),
        message=bytes(buf[at + _ERROR.size : at + _ERROR.size + text_len]).decode(),
        missing_ranks=tuple(rank for rank in range(MAX_RANKS) if missing >> rank & 1),
    )


@dataclass(frozen=True)
class CallId:
    """What must be the same on all ranks about one sequence: the lease, the plan and the layer."""

    lease_serial: int
    plan_id: PlanId
    layer_idx: int

    def __str__(self) -> str:
        return f"layer {self.layer_idx} of plan {self.plan_id}"


class Bell:
    """Wakes one rank's step loop. A doorbell for everything, and a second one that is heard during a layer call.

    Several writers store to one word without atomic operations. Each stores only values of its own (id in the high
    byte), so no store can restore the value at which the sleeper looked before it slept.
    """

    __slots__ = ("_busy", "_control", "_counter", "_word", "_writer_id")

    def __init__(self, board: Board, rank: int, writer_id: int) -> None:
        at = _RANKS_AT + rank * _RANK_BYTES
        self._word = board.segment.word(at + _BELL_AT)
        self._control = board.segment.word(at + _CONTROL_BELL_AT)
        self._busy = board.segment.word(at + _BUSY_AT)
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


class Board:
    """One process's view of the board. Thread-safe except where a method says otherwise."""

    def __init__(self, segment: SharedSegment, writer_id: int) -> None:
        self.segment = segment
        self.buf = segment.buf
        magic, num_ranks, max_micro_batches, generation = _HEAD.unpack_from(self.buf)
        if magic != _MAGIC:
            raise InvalidArgumentError(must_be("board magic", hex(_MAGIC), hex(magic)))
        self.num_ranks: int = num_ranks
        self.max_micro_batches: int = max_micro_batches
        self.generation: int = generation
        self.writer_id = writer_id
        self._fd = os.open(segment.path, os.O_RDWR)
        self._thread_lock = threading.Lock()
        self._barrier = threading.Lock()
        self._version = segment.word(_VERSION_AT)
        self._down = segment.word(_DOWN_AT)
        self._u64 = segment.buf.cast("Q")
        self._bells = [Bell(self, rank, writer_id) for rank in range(num_ranks)]

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
            ("num_ranks", num_ranks, MAX_RANKS),
            ("max_micro_batches", max_micro_batches, MAX_MICRO_BATCHES),
            ("first_sequence", first_sequence, 2**63),
        ):
            if not 1 <= value <= most:
                raise InvalidArgumentError(must_be(name, f"from 1 to {most}", value))
        segment = SharedSegment.create(board_name(group_name), _num_bytes(num_ranks, max_micro_batches))
        struct.pack_into("<Q", segment.buf, _HIGHEST_SEQUENCE_AT, first_sequence - 1)
        struct.pack_into("<Q", segment.buf, _LOCK_OWNER_AT, SUPERVISOR)
        _HEAD.pack_into(segment.buf, 0, _MAGIC, num_ranks, max_micro_batches, generation)
        return cls(segment, SUPERVISOR)

    @classmethod
    def attach(cls, group_name: str, writer_id: int, *, timeout_s: float = 10.0) -> Board:
        """The board of a running group, for rank writer_id (or SUPERVISOR, or a ring's producer)."""
        deadline = time.monotonic() + timeout_s
        segment = SharedSegment.attach(board_name(group_name), timeout_s=timeout_s)
        while _HEAD.unpack_from(segment.buf)[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.001)  # its creator is between allocating and describing it
        return cls(segment, writer_id)

    def close(self) -> None:
        """Drop this mapping. Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._u64.release()
            self.segment.close()

    def unlink(self) -> None:
        """Remove the board's name. Safe to call twice."""
        self.segment.unlink()

    # ------------------------------------------------------------------------------ lock and words

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the board: for the few microseconds in which something is decided for all ranks.

        Raises UnavailableError naming the owner if the lock stays taken for 5 s (its process is stopped).
        """
        with self._thread_lock:
            self._acquire()
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _acquire(self) -> None:
        deadline = 0.0
        for attempt in itertools.count():
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if attempt < _LOCK_SPIN:
                    os.sched_yield()
                    continue
                now = time.monotonic()
                deadline = deadline or now + _LOCK_TIMEOUT_S
                if now > deadline:
                    owner = self._u64[_LOCK_OWNER_AT // 8]
                    who = f"rank {owner}" if owner < MAX_RANKS else "the supervisor"
                    raise UnavailableError(
                        f"the group's board must be free within {_LOCK_TIMEOUT_S} s, got held by {who}"
                    ) from None
                time.sleep(0.0002)
            else:
                self._u64[_LOCK_OWNER_AT // 8] = self.writer_id
                return

    @property
    def version(self) -> int:
        """Changes whenever the lease or any intent on the board changes."""
        return self._version.load()

    @property
    def lease_version(self) -> int:
        """Changes with the lease."""
        return self._u64[_LEASE_VERSION_AT // 8]

    def intent_version(self, micro_batch_idx: int) -> int:
        """Changes with the intents of a micro-batch."""
        return self._u64[_INTENT_VERSIONS_AT // 8 + micro_batch_idx]

    def bump_lease(self) -> None:
        """Tell readers that the lease changed. Under the lock only."""
        self._u64[_LEASE_VERSION_AT // 8] += 1
        self._version.store(self._version.load() + 1)

    def bump_intents(self, micro_batch_idx: int) -> None:
        """Tell readers that the intents of a micro-batch changed. Under the lock only."""
        self._u64[_INTENT_VERSIONS_AT // 8 + micro_batch_idx] += 1
        self._version.store(self._version.load() + 1)

    @property
    def highest_sequence(self) -> int:
        """The highest sequence that any rank began or gave up."""
        return self._u64[_HIGHEST_SEQUENCE_AT // 8]

    @highest_sequence.setter
    def highest_sequence(self, value: int) -> None:
        self._u64[_HIGHEST_SEQUENCE_AT // 8] = value

    def raise_sequence(self, next_sequence: int) -> None:
        """Let the next sequence be at least this: before the first lease only."""
        with self.locked():
            self.highest_sequence = max(self.highest_sequence, next_sequence - 1)

    @property
    def highest_step(self) -> int:
        """The highest step id that any rank brought to any micro-batch."""
        return self._u64[_HIGHEST_STEP_AT // 8]

    @highest_step.setter
    def highest_step(self, value: int) -> None:
        self._u64[_HIGHEST_STEP_AT // 8] = value

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

    def producer_bell(self, rank: int, ring_idx: int) -> Bell:
        """The bell for the producer of a rank's ring ring_idx."""
        return Bell(self, rank, FIRST_RING_WRITER + ring_idx)

    def doorbell(self, rank: int) -> tuple[int, int]:
        """(offset of the doorbell word, offset of the control word) of a rank in the segment."""
        at = _RANKS_AT + rank * _RANK_BYTES
        return at + _BELL_AT, at + _CONTROL_BELL_AT

    def set_busy(self, rank: int, busy: bool) -> None:
        """Say that a rank's device thread is inside a layer call: control bells must then wake its other thread."""
        self.buf[_RANKS_AT + rank * _RANK_BYTES + _BUSY_AT] = busy
        with self._barrier:  # a locked instruction: what is read next is not read before this store is seen
            pass

    def mark_progress(self, rank: int) -> None:
        """This rank finished a layer call or a plan just now."""
        self._u64[(_RANKS_AT + rank * _RANK_BYTES + _PROGRESS_AT) // 8] = time.monotonic_ns()

    def last_progress_s(self, rank: int) -> float:
        """time.monotonic() of the rank's last progress, 0.0 = none yet."""
        return self._u64[(_RANKS_AT + rank * _RANK_BYTES + _PROGRESS_AT) // 8] * 1e-9

    def mark_traffic(self, rank: int, now_ns: int) -> None:
        """This rank heard of the lease holder."""
        self._u64[(_RANKS_AT + rank * _RANK_BYTES + _TRAFFIC_AT) // 8] = now_ns

    def last_traffic_ns(self) -> int:
        """When any rank last heard of the holder, monotonic nanoseconds."""
        first = (_RANKS_AT + _TRAFFIC_AT) // 8
        return max(self._u64[first + rank * _RANK_BYTES // 8] for rank in range(self.num_ranks))

    # ------------------------------------------------------------------------------ the group is down

    def post_down(self, error: ErrorReply) -> None:
        """The group cannot serve (a rank died, a loop failed): every rank answers this to everything. First wins."""
        with self.locked():
            if not self._down.load():
                pack_error(self.buf, _DOWN_AT + 64, error)
                self._down.store(1)
        self.ring_all()

    @property
    def down(self) -> ErrorReply | None:
        """Why the group is down, or None."""
        return unpack_error(self.buf, _DOWN_AT + 64) if self._down.load() else None


def board_name(group_name: str) -> str:
    return f"{group_name}-board"


# ------------------------------------------------------------------------------ where the tables lie

LEASE_BYTES = 512
INTENT_BYTES = 1024
NUM_ENTRIES = 8
"""Intents per rank and micro-batch that may be under way: one is the rule, more when ranks without rows are brought
into earlier steps late."""
ORDER_SLOTS = 128
"""Sequences that the board remembers; a power of two."""
ORDER_BYTES = 8192


def lease_at() -> int:
    return _RANKS_AT + MAX_RANKS * _RANK_BYTES


def keys_at(num_ranks: int, micro_batch_idx: int) -> int:
    """The keys of all entries of a micro-batch, by rank and entry."""
    return lease_at() + LEASE_BYTES + micro_batch_idx * num_ranks * NUM_ENTRIES * (24 + INTENT_BYTES)


def intent_at(num_ranks: int, micro_batch_idx: int, rank: int, entry_idx: int) -> int:
    """Entry entry_idx of a rank in a micro-batch."""
    at = keys_at(num_ranks, micro_batch_idx) + 24 * num_ranks * NUM_ENTRIES
    return at + (rank * NUM_ENTRIES + entry_idx) * INTENT_BYTES


def order_at(num_ranks: int, max_micro_batches: int, slot_idx: int) -> int:
    return keys_at(num_ranks, max_micro_batches) + slot_idx * ORDER_BYTES


def _num_bytes(num_ranks: int, max_micro_batches: int) -> int:
    return order_at(num_ranks, max_micro_batches, ORDER_SLOTS)
