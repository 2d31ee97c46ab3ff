"""Carries StepIntents between ranks: two alternating entries per rank and micro-batch on the board.

Decides nothing itself: `megamoe.agree` and `admission.admit` are pure functions of what lies there. What this file
owns is that all ranks look at the same thing: an outcome is complete entries of all ranks, or an error that was
written into some rank's entry before they were complete. Entries change only under the board's lock, and a rank
overwrites an entry only when every rank that needs it has settled it. Timeouts name the ranks whose intent is
missing; the sentence of the rank that gives up first is the one that all ranks answer, also ranks that come late.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from megamoe import Phase, PlanId, StepIntent, StepPlan, agree
from megamoe.errors import MegaMoeError
from service.admission import AdmissionLimits, RankLoad, admit
from service.board import ERROR_BYTES, INTENT_BYTES, Board, error_of, intent_at, pack_error, unpack_error
from service.messages import ErrorReply

_ENTRY = struct.Struct("<BBBBQQQQQIIQ8I")
"""state, phase, dtype, flags, lease, step, weights, placement, policy, rows, queued calls, open rows, counts."""
_KEY, _KEY_AT = struct.Struct("<QQ"), 4
_ERROR_AT = 128
assert _ENTRY.size <= _ERROR_AT and _ERROR_AT + ERROR_BYTES <= INTENT_BYTES  # noqa: PT018

_POSTED, _FAILED = 1, 2
_DRAINING, _HAS_COUNTS = 1, 2
_PHASES = tuple(Phase)
DTYPES = ("bfloat16", "mxfp8")


@dataclass(frozen=True)
class Entry:
    """One rank's entry as it lies on the board."""

    failed: ErrorReply | None
    lease_serial: int
    intent: StepIntent
    load: RankLoad

    @property
    def step_id(self) -> int:
        return self.intent.plan_id.step_id


@dataclass(frozen=True)
class Agreed:
    """A plan that all ranks hold. has_counts: some rank's caller sent the whole counts vector."""

    plan: StepPlan
    has_counts: bool


Outcome = Agreed | ErrorReply


class IntentTable:
    """The intents of a board, for one rank."""

    def __init__(self, board: Board, rank: int, *, max_step_rows: int, limits: AdmissionLimits) -> None:
        self._board = board
        self._rank = rank
        self._max_step_rows = max_step_rows
        self._limits = limits
        self._next_entry = [0] * board.max_micro_batches

    # ------------------------------------------------------------------------------ bytes

    def _write(self, serial: int, intent: StepIntent, load: RankLoad, failed: ErrorReply | None) -> None:
        micro_batch_idx = intent.plan_id.micro_batch_idx
        entry_idx = self._next_entry[micro_batch_idx]
        self._next_entry[micro_batch_idx] = 1 - entry_idx
        self._write_at(entry_idx, serial, intent, load, failed)

    def _write_at(
        self, entry_idx: int, serial: int, intent: StepIntent, load: RankLoad, failed: ErrorReply | None
    ) -> None:
        board = self._board
        at = intent_at(board.num_ranks, intent.plan_id.micro_batch_idx, self._rank, entry_idx)
        counts = intent.num_rows_per_rank
        _ENTRY.pack_into(
            board.buf,
            at,
            _POSTED if failed is None else _FAILED,
            _PHASES.index(intent.phase),
            DTYPES.index(intent.dtype),
            (_DRAINING if intent.draining else 0) | (_HAS_COUNTS if counts is not None else 0),
            serial,
            intent.plan_id.step_id,
            intent.weights_version,
            intent.placement_version,
            intent.policy_version,
            intent.num_rows,
            load.queued_calls,
            load.open_rows,
            *(counts or ()),
            *(0,) * (8 - len(counts or ())),
        )
        if failed is not None:
            pack_error(board.buf, at + _ERROR_AT, failed)
        board.highest_step = max(board.highest_step, intent.plan_id.step_id)
        board.bump_intents(intent.plan_id.micro_batch_idx)

    def _read(self, micro_batch_idx: int, rank: int, entry_idx: int) -> Entry | None:
        board = self._board
        at = intent_at(board.num_ranks, micro_batch_idx, rank, entry_idx)
        (
            state,
            phase,
            dtype,
            flags,
            serial,
            step_id,
            weights,
            placement,
            policy,
            rows,
            queued,
            open_rows,
            *counts,
        ) = _ENTRY.unpack_from(board.buf, at)
        if not state:
            return None
        intent = StepIntent(
            rank=rank,
            num_ranks=board.num_ranks,
            plan_id=PlanId(board.generation, step_id, micro_batch_idx),
            num_rows=rows,
            phase=_PHASES[phase],
            dtype=DTYPES[dtype],
            weights_version=weights,
            placement_version=placement,
            policy_version=policy,
            draining=bool(flags & _DRAINING),
            num_rows_per_rank=tuple(counts[: board.num_ranks]) if flags & _HAS_COUNTS else None,
        )
        failed = unpack_error(board.buf, at + _ERROR_AT) if state == _FAILED else None
        load = RankLoad(queued_calls=queued, open_rows=open_rows)
        return Entry(failed, serial, intent, load)

    def _key(self, micro_batch_idx: int, rank: int, entry_idx: int) -> tuple[int, int]:
        """(lease serial, step id) of an entry, without building it; (0, 0) if it was never written."""
        at = intent_at(self._board.num_ranks, micro_batch_idx, rank, entry_idx)
        serial, step_id = _KEY.unpack_from(self._board.buf, at + _KEY_AT)
        return serial, step_id

    def _of_step(self, serial: int, plan_id: PlanId, rank: int) -> Entry | None:
        wanted = (serial, plan_id.step_id)
        for entry_idx in (0, 1):
            if self._key(plan_id.micro_batch_idx, rank, entry_idx) == wanted:
                return self._read(plan_id.micro_batch_idx, rank, entry_idx)
        return None

    # ------------------------------------------------------------------------------ writing

    def can_post(self, micro_batch_idx: int) -> bool:
        """Whether the entry that the next post overwrites is settled on every rank that waits for it."""
        board = self._board
        with board.locked():
            old = self._read(micro_batch_idx, self._rank, self._next_entry[micro_batch_idx])
            if old is None:
                return True
            for rank in range(board.num_ranks):
                if (
                    rank != self._rank
                    and board.settled_step(rank, micro_batch_idx) < old.step_id
                    and self._of_step(old.lease_serial, old.intent.plan_id, rank) is not None
                ):
                    return False
        return True

    def post(
        self, serial: int, intent: StepIntent, load: RankLoad, *, refused: ErrorReply | None = None
    ) -> None:
        """Put this rank's intent on the board and wake whoever that concerns.

        refused: the caller's intent is wrong; all ranks of this step get that error. `settle` tells the outcome.
        """
        board, plan_id = self._board, intent.plan_id
        others = [rank for rank in range(board.num_ranks) if rank != self._rank]
        with board.locked():
            theirs = {rank: self._of_step(serial, plan_id, rank) for rank in others}
            failed = self._failure(theirs) or self._passed(serial, plan_id, theirs) or refused
            self._write(serial, intent, load, failed)
        missing = [rank for rank in others if theirs[rank] is None]
        counts = intent.num_rows_per_rank
        if failed is not None or not missing:
            board.ring(others)
        elif counts is not None:
            # Ranks that nobody calls must bring their entry themselves. The others come when they are called.
            board.ring(rank for rank in missing if not counts[rank])

    def _failure(self, entries: dict[int, Entry | None]) -> ErrorReply | None:
        return next((entry.failed for entry in entries.values() if entry and entry.failed), None)

    def _passed(self, serial: int, plan_id: PlanId, entries: dict[int, Entry | None]) -> ErrorReply | None:
        """A rank that is past this step without having brought an intent never will."""
        for rank, entry in entries.items():
            if entry is not None:
                continue
            keys = (self._key(plan_id.micro_batch_idx, rank, entry_idx) for entry_idx in (0, 1))
            later = [step_id for theirs, step_id in keys if theirs == serial and step_id > plan_id.step_id]
            if later:
                return ErrorReply(
                    code="agreement",
                    message=f"step {plan_id.step_id} of micro-batch {plan_id.micro_batch_idx} must be brought by "
                    f"all ranks in turn, got step {min(later)} from rank {rank} without it",
                )
        return None

    # ------------------------------------------------------------------------------ outcomes

    def settle(self, serial: int, plan_id: PlanId) -> Outcome | None:
        """The outcome of a step to which this rank has posted: the same on all ranks; None while ranks are missing."""
        return self._outcome(serial, plan_id, None)

    def withdraw(self, serial: int, plan_id: PlanId, waited_s: float) -> Outcome:
        """Give up waiting: the outcome after all if it is there, else an error that names the missing ranks."""
        outcome = self._outcome(serial, plan_id, waited_s)
        assert outcome is not None
        return outcome

    def _outcome(self, serial: int, plan_id: PlanId, waited_s: float | None) -> Outcome | None:
        board = self._board
        with board.locked():
            entries = {rank: self._of_step(serial, plan_id, rank) for rank in range(board.num_ranks)}
            mine = entries[self._rank]
            assert mine is not None, "a step is settled after posting to it: this is a bug"
            failed = self._failure(entries)
            missing = [rank for rank, entry in entries.items() if entry is None]
            found_here = failed is None
            if failed is None and missing:
                failed = self._passed(serial, plan_id, entries)
                if failed is None and waited_s is not None:
                    failed = ErrorReply(
                        code="peer_timeout",
                        message=f"plan {plan_id} must be agreed within {waited_s:g} s, got no intent of "
                        f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}",
                        missing_ranks=tuple(missing),
                    )
                if failed is None:
                    return None
            fresh = failed is not None and mine.failed is None
            if fresh:
                # Late ranks find the error in this rank's entry and answer the same.
                idx = 1 - self._next_entry[plan_id.micro_batch_idx]
                self._write_at(idx, serial, mine.intent, mine.load, failed)
        if fresh and found_here:
            board.ring_all()
        if failed is not None:
            return failed
        return self._agree([entry for entry in entries.values() if entry is not None])

    def _agree(self, entries: list[Entry]) -> Outcome:
        try:
            plan = agree([entry.intent for entry in entries], max_step_rows=self._max_step_rows)
            admit([entry.load for entry in entries], plan.max_rows, self._limits)
        except MegaMoeError as error:
            return error_of(error)
        return Agreed(plan, any(entry.intent.num_rows_per_rank is not None for entry in entries))

    def uncalled_step(
        self, serial: int, micro_batch_idx: int, above: int
    ) -> tuple[PlanId, tuple[int, ...], str] | None:
        """The lowest step above `above` that others brought with a counts vector in which this rank has no rows.

        Returns (plan id, counts vector, dtype).
        """
        found: StepIntent | None = None
        with self._board.locked():
            for rank in range(self._board.num_ranks):
                for entry_idx in (0, 1):
                    theirs, step_id = self._key(micro_batch_idx, rank, entry_idx)
                    if theirs != serial or step_id <= above or (found and step_id >= found.plan_id.step_id):
                        continue
                    entry = self._read(micro_batch_idx, rank, entry_idx)
                    counts = None if entry is None else entry.intent.num_rows_per_rank
                    if entry is not None and counts is not None and counts[self._rank] == 0:
                        found = entry.intent
        if found is None or found.num_rows_per_rank is None:
            return None
        return found.plan_id, found.num_rows_per_rank, found.dtype
