"""The board's lock, bells and entries; admission's pure rules."""

from __future__ import annotations

import multiprocessing
import os
import signal
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamoe import Phase, PlanId, StepIntent
from megamoe.errors import HeapError, InvalidArgumentError, OverloadedError, UnavailableError
from service.board import lock as lock_module
from service.board.admission import AdmissionLimits, RankLoad, admit
from service.board.agreement import Agreed, IntentTable
from service.board.board import Board
from service.board.layout import ERROR_BYTES, pack_error, rank_at, unpack_error
from service.messages import ErrorReply
from service.ring.bell import FIRST_RING_WRITER, SUPERVISOR, Bell
from tests.service.simulation import deployment

_SPAWN = multiprocessing.get_context("spawn")
_SCRATCH = 2048
"""Bytes of the board's head page that nothing uses."""


@pytest.fixture
def board(group_name: str) -> Iterator[Board]:
    made = Board.create(group_name, num_ranks=4, max_micro_batches=2, generation=5)
    yield made
    made.close()
    made.close()
    made.unlink()
    made.unlink()


def _count(group_name: str, rank: int, num_turns: int) -> None:
    board = Board.attach(group_name, rank)
    for _ in range(num_turns):
        with board.locked():
            (value,) = struct.unpack_from("<Q", board.buf, _SCRATCH)
            struct.pack_into("<Q", board.buf, _SCRATCH, value + 1)
    board.close()


def test_the_lock_excludes_processes_and_threads(group_name: str, board: Board) -> None:
    others = [_SPAWN.Process(target=_count, args=(group_name, rank, 1000)) for rank in range(2)]
    for process in others:
        process.start()
    threads = [threading.Thread(target=_count, args=(group_name, 2, 500)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for waiter in (*others, *threads):
        waiter.join(60)
    assert struct.unpack_from("<Q", board.buf, _SCRATCH) == (3500,)


def _take_and_hang(group_name: str) -> None:
    board = Board.attach(group_name, 3)
    with board.locked():
        struct.pack_into("<Q", board.buf, _SCRATCH, 1)
        time.sleep(60)


def test_a_stopped_owner_is_named_and_a_killed_one_lets_go(
    group_name: str, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module, "_TIMEOUT_S", 0.3)
    child = _SPAWN.Process(target=_take_and_hang, args=(group_name,))
    child.start()
    deadline = time.monotonic() + 60
    while not board.buf[_SCRATCH] and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(UnavailableError, match=r"free within 0\.3 s, got held by rank 3"), board.locked():
        pass
    os.kill(child.pid or 0, signal.SIGKILL)
    child.join(10)
    with board.locked():
        pass


def test_boards_that_do_not_fit(group_name: str, board: Board) -> None:
    for change in ({"num_ranks": 9}, {"max_micro_batches": 33}, {"first_sequence": 0}):
        sizes = {"num_ranks": 1, "max_micro_batches": 1, "generation": 1, **change}
        with pytest.raises(InvalidArgumentError, match=f"{next(iter(change))} must be from 1"):
            Board.create(group_name + "-x", **sizes)
    with pytest.raises(HeapError, match="exists already"):
        Board.create(group_name, num_ranks=4, max_micro_batches=2, generation=5)
    with pytest.raises(HeapError, match="is not there"):
        Board.attach(group_name + "-none", 0, timeout_s=0.01)
    board.buf[0] = 0
    with pytest.raises(InvalidArgumentError, match="board magic"):
        Board(board.segment, 0)


def test_no_wake_is_lost_between_many_writers(group_name: str, board: Board) -> None:
    """Each writer raises its own counter, then rings; the sleeper must see every counter at its end."""
    rank, num_writers, num_rings = 1, 4, 400
    at = _SCRATCH
    writers = [Board.attach(group_name, 32 + idx) for idx in range(num_writers)]

    def ring(idx: int) -> None:
        bell = writers[idx].bell(rank)
        for value in range(1, num_rings + 1):
            struct.pack_into("<Q", board.buf, at + 8 * idx, value)
            bell(False)
            if value % 16 == idx:
                time.sleep(0.0005)

    doorbell = board.segment.word(board.doorbell(rank)[0])
    threading.Timer(0.1, lambda: writers[0].bell(rank)(False)).start()
    started = time.monotonic()
    assert doorbell.wait_while(doorbell.load(), 20.0)
    assert time.monotonic() - started < 10.0, "a ring wakes, it does not only change the word"
    threads = [threading.Thread(target=ring, args=(idx,)) for idx in range(num_writers)]
    for thread in threads:
        thread.start()
    slept_too_long = 0
    while True:
        seen = doorbell.load()
        if struct.unpack_from(f"<{num_writers}Q", board.buf, at) == (num_rings,) * num_writers:
            break
        if not doorbell.wait_while(seen, 5.0):
            slept_too_long += 1
            break
    for thread in threads:
        thread.join()
    for writer in writers:
        writer.close()
    assert not slept_too_long


def test_a_writer_never_stores_what_another_did(group_name: str, board: Board) -> None:
    """Else a late store could bring back the value at which the sleeper looked, and hide a ring before it."""
    doorbell = board.segment.word(board.doorbell(0)[0])
    writers = [Board.attach(group_name, writer_id) for writer_id in (0, 3, SUPERVISOR)]
    bells = [writer.bell(0) for writer in writers] + [
        Bell(board.segment, rank_at(0), FIRST_RING_WRITER + idx) for idx in range(3)
    ]
    seen = []
    for _ in range(5):
        for bell in bells:
            doorbell.store(0)
            bell(True)
            seen.append(doorbell.load())
    assert len(set(seen)) == len(seen)
    for writer in writers:
        writer.close()


def test_control_bells_wake_the_stand_in_only_while_the_rank_is_busy(board: Board) -> None:
    control = board.segment.word(board.doorbell(2)[1])
    woken: list[float] = []

    def stand_in() -> None:
        control.wait_while(0, 0.4)
        woken.append(time.monotonic())

    for busy, quick in ((False, False), (True, True)):
        control.store(0)
        board.set_busy(2, busy)
        thread = threading.Thread(target=stand_in)
        thread.start()
        time.sleep(0.1)
        started = time.monotonic()
        board.ring([2])
        thread.join()
        assert (woken[-1] - started < 0.2) is quick
        assert control.load() != 0


@given(
    code=st.text("abc_", min_size=1, max_size=30),
    message=st.text(max_size=900),
    missing=st.sets(st.integers(0, 7)),
)
def test_errors_survive_the_board(code: str, message: str, missing: set[int]) -> None:
    buf = memoryview(bytearray(b"\xff" * (ERROR_BYTES + 8)))
    error = ErrorReply(code=code, message=message, missing_ranks=tuple(sorted(missing)))
    pack_error(buf, 4, error)
    got = unpack_error(buf, 4)
    assert (got.code, got.missing_ranks) == (error.code, error.missing_ranks)
    assert message.startswith(got.message)
    assert len(message.encode()) <= 600 or len(got.message.encode()) > 596
    assert bytes(buf[ERROR_BYTES + 4 :]) == b"\xff" * 4, "it stays inside its bytes"


def _table(board: Board, rank: int) -> IntentTable:
    limits = AdmissionLimits.of(deployment(4), max_micro_batches=2)
    return IntentTable(board, rank, max_step_rows=16, limits=limits)


def _intent(rank: int, step_id: int, counts: tuple[int, ...] | None = None, rows: int = 1) -> StepIntent:
    return StepIntent(
        rank=rank,
        num_ranks=4,
        plan_id=PlanId(5, step_id, 1),
        num_rows=rows,
        phase=Phase.DECODE if rows else Phase.IDLE,
        weights_version=2**40,
        num_rows_per_rank=counts,
    )


def test_an_entry_is_kept_until_every_rank_that_needs_it_knows_the_outcome(board: Board) -> None:
    tables = [_table(board, rank) for rank in range(4)]
    for step_id in range(1, 9):
        assert tables[0].post(1, _intent(0, step_id), RankLoad(), called=True)
    assert not tables[0].post(1, _intent(0, 9), RankLoad(), called=True), "eight steps are under way"
    for rank in (1, 2, 3):
        assert tables[rank].post(1, _intent(rank, 1), RankLoad(), called=True)
    plan_id = PlanId(5, 1, 1)
    for rank in (0, 1, 2):
        outcome = tables[rank].settle(1, plan_id)
        assert isinstance(outcome, Agreed)
        assert outcome.plan.weights_version == 2**40
        assert not tables[0].post(1, _intent(0, 9), RankLoad(), called=True), "rank 3 has not looked yet"
    tables[3].mark_settled(1, plan_id)
    assert tables[0].post(1, _intent(0, 9), RankLoad(), called=True)
    assert tables[0].settle(1, PlanId(5, 9, 1)) is None


def test_a_rank_without_rows_learns_which_step_waits_for_it(board: Board) -> None:
    tables = [_table(board, rank) for rank in range(4)]
    counts = (1, 0, 1, 1)
    assert tables[1].uncalled_step(1, 1) is None
    for step_id in (7, 6):
        tables[0].post(1, _intent(0, step_id, counts), RankLoad(), called=True)
    tables[2].post(1, _intent(2, 5), RankLoad(), called=True)
    assert tables[1].uncalled_step(1, 1) == (PlanId(5, 6, 1), counts, "bfloat16")
    assert tables[2].uncalled_step(1, 1) is None, "it has rows"
    assert tables[1].uncalled_step(2, 1) is None, "another lease"
    tables[1].post(1, _intent(1, 6, counts, 0), RankLoad(), called=False)
    assert tables[1].uncalled_step(1, 1) == (PlanId(5, 7, 1), counts, "bfloat16")
    tables[0].mark_settled(1, PlanId(5, 7, 1))
    assert tables[1].uncalled_step(1, 1) is None, "nobody waits for it any more"


def test_a_withdrawal_and_the_last_intent_exclude_each_other(board: Board) -> None:
    """Whichever comes first under the lock decides for all ranks."""
    tables = [_table(board, rank) for rank in range(4)]
    for step_id in (1, 2):
        for rank in range(3):
            tables[rank].post(1, _intent(rank, step_id), RankLoad(), called=True)
    tables[3].post(1, _intent(3, 1), RankLoad(), called=True)
    assert all(isinstance(table.withdraw(1, PlanId(5, 1, 1), 1.0), Agreed) for table in tables)
    error = tables[1].withdraw(1, PlanId(5, 2, 1), 1.0)
    assert isinstance(error, ErrorReply)
    assert error.missing_ranks == (3,)
    tables[3].post(1, _intent(3, 2), RankLoad(), called=True)
    assert {table.settle(1, PlanId(5, 2, 1)) for table in tables} == {error}


# ------------------------------------------------------------------------------ admission


LIMITS = AdmissionLimits(max_queued_calls=4, max_open_rows=10)


@pytest.mark.parametrize(
    ("loads", "rows", "error"),
    [
        ([RankLoad()], 100, None),
        ([RankLoad(open_rows=5)], 5, None),
        ([RankLoad(), RankLoad(open_rows=5)], 6, "rows of open plans on rank 1 .* = 10, got 11"),
        ([RankLoad(queued_calls=4)], 1, None),
        ([RankLoad(), RankLoad(queued_calls=5)], 1, "queued on rank 1 .* = 4, got 5"),
    ],
)
def test_admission_by_agreed_numbers(loads: list[RankLoad], rows: int, error: str | None) -> None:
    if error is None:
        admit(loads, rows, LIMITS)
        return
    with pytest.raises(OverloadedError, match=error):
        admit(loads, rows, LIMITS)


def test_limits_are_at_least_one() -> None:
    with pytest.raises(InvalidArgumentError, match="max_open_rows must be at least 1"):
        AdmissionLimits(max_queued_calls=1, max_open_rows=0)
