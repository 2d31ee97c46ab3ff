"""Carries StepIntents between ranks: a few entries per rank and micro-batch on the board.

Decides nothing itself: `megamoe.agree` and `admission.admit` are pure functions of what lies there. What this file
owns is that all ranks look at the same thing: an outcome is complete entries of all ranks, or an error that was
written into some rank's entry before they were complete. Entries change only under the board's lock, and a rank
overwrites an entry only when every rank that has one for the same step knows the outcome. Timeouts name the ranks
whose intent is missing; the sentence of the rank that gives up first is the one that all ranks answer, also ranks
that come late.

Steps of a micro-batch are brought in order by each caller, but a rank without rows (counts vector) may be brought in
late by others, so steps overlap a little: hence more than two entries.
"""

from __future__ import annotations

from dataclasses import dataclass

from megamoe import PlanId, StepIntent, StepPlan, agree
from megamoe.errors import MegaMoeError
from service.board.admission import AdmissionLimits, RankLoad, admit
from service.board.board import Board
from service.board.intent_entries import CALLED, FAILED, HAS_COUNTS, POSTED, SETTLED, Entries, Key, key_of
from service.board.layout import NUM_ENTRIES
from service.messages import ErrorReply


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
        self._entries = Entries(board)

    # ------------------------------------------------------------------------------ writing

    def post(
        self,
        serial: int,
        intent: StepIntent,
        load: RankLoad,
        *,
        called: bool,
        refused: ErrorReply | None = None,
    ) -> bool:
        """Put this rank's intent on the board and wake whoever that concerns; `settle` tells the outcome.

        called: this rank's own caller brought it. refused: the caller's intent is wrong; all ranks of this step get
        that error. Returns False, having done nothing, while every entry is still needed by some rank.
        """
        board, plan_id = self._board, intent.plan_id
        micro_batch_idx, counts = plan_id.micro_batch_idx, intent.num_rows_per_rank
        others = [rank for rank in range(board.num_ranks) if rank != self._rank]
        with board.locked():
            entry_idx = self._free_entry(micro_batch_idx)
            if entry_idx is None:
                return False
            theirs = self._entries.of_step(serial, plan_id)
            mark = POSTED | (CALLED if called else 0)
            mark |= HAS_COUNTS if counts is not None else 0
            key = Key(self._rank, entry_idx, serial, plan_id.step_id, mark)
            self._entries.write(intent, load, key)
            if refused is not None:
                self._entries.set_error(micro_batch_idx, key, refused)
                key = key._replace(mark=mark | FAILED)
            self._entries.write_key(micro_batch_idx, key)
            board.highest_step = max(board.highest_step, plan_id.step_id)
            board.bump_intents(micro_batch_idx)
        missing = [rank for rank in others if rank not in theirs]
        if refused is not None or not missing:
            board.ring(others)
        elif counts is not None:
            # Ranks that nobody calls must bring their entry themselves. The others come when they are called.
            board.ring(rank for rank in missing if not counts[rank])
        return True

    def _free_entry(self, micro_batch_idx: int) -> int | None:
        """An entry of this rank that was never used, or the one of the earliest step that nobody needs any more."""
        words = self._entries.words(micro_batch_idx)
        first = self._rank * NUM_ENTRIES
        mine = [key_of(words, idx) for idx in range(first, first + NUM_ENTRIES)]
        for key in mine:
            if not key.mark:
                return key.entry_idx
        needed = {
            (words[3 * idx], words[3 * idx + 1])
            for idx, mark in enumerate(words[2::3])
            if mark and not mark & SETTLED
        }
        free = [key for key in mine if (key.serial, key.step_id) not in needed]
        return min(free, key=lambda key: (key.serial, key.step_id)).entry_idx if free else None

    def _passed(self, serial: int, plan_id: PlanId, entries: dict[int, Key]) -> ErrorReply | None:
        """A rank whose caller brought a later step without this one never brings it, unless it need not be called."""
        micro_batch_idx, step_id = plan_id.micro_batch_idx, plan_id.step_id
        words = self._entries.words(micro_batch_idx)
        later = {
            idx // NUM_ENTRIES: theirs
            for idx, theirs in enumerate(words[1::3])
            if theirs > step_id and words[3 * idx] == serial and words[3 * idx + 2] & CALLED
        }
        for rank, later_step in later.items():
            if rank in entries or rank == self._rank or self._uncalled(micro_batch_idx, entries, rank):
                continue
            return ErrorReply(
                code="agreement",
                message=f"step {step_id} of micro-batch {micro_batch_idx} must be brought by all ranks in turn, got "
                f"step {later_step} from rank {rank} without it",
            )
        return None

    def _uncalled(self, micro_batch_idx: int, entries: dict[int, Key], rank: int) -> bool:
        """Whether a counts vector says that a rank takes part without being called."""
        for key in entries.values():
            if key.mark & HAS_COUNTS:
                counts = self._entries.read(micro_batch_idx, key)[0].num_rows_per_rank
                if counts is not None and not counts[rank]:
                    return True
        return False

    def mark_settled(self, serial: int, plan_id: PlanId) -> None:
        """This rank does not wait for the outcome of a step any more."""
        with self._board.locked():
            mine = self._entries.of_step(serial, plan_id).get(self._rank)
            if mine is not None:
                self._settle_key(plan_id.micro_batch_idx, mine)

    def _settle_key(self, micro_batch_idx: int, key: Key, more: int = 0) -> None:
        self._entries.write_key(micro_batch_idx, key._replace(mark=key.mark | SETTLED | more))

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
        board, micro_batch_idx = self._board, plan_id.micro_batch_idx
        found_here = False
        with board.locked():
            entries = self._entries.of_step(serial, plan_id)
            mine = entries[self._rank]
            failed = self._entries.error(micro_batch_idx, entries.values())
            missing = [rank for rank in range(board.num_ranks) if rank not in entries]
            if failed is None and missing:
                failed = self._passed(serial, plan_id, entries)
                if failed is None and waited_s is not None:
                    failed = _timeout(plan_id, waited_s, missing)
                if failed is None:
                    return None
                found_here = True
            if failed is not None:
                # Late ranks find the error in any entry of the step and answer the same.
                self._entries.set_error(micro_batch_idx, mine, failed)
                self._settle_key(micro_batch_idx, mine, FAILED)
                if found_here:
                    board.bump_intents(micro_batch_idx)
            else:
                self._settle_key(micro_batch_idx, mine)
                brought = [
                    self._entries.read(micro_batch_idx, entries[rank]) for rank in range(board.num_ranks)
                ]
        if found_here:
            board.ring_all()
        return failed or self._agree(brought)

    def _agree(self, brought: list[tuple[StepIntent, RankLoad]]) -> Outcome:
        try:
            plan = agree([intent for intent, _ in brought], max_step_rows=self._max_step_rows)
            admit([load for _, load in brought], plan.max_rows, self._limits)
        except MegaMoeError as error:
            return ErrorReply.of(error)
        return Agreed(plan, any(intent.num_rows_per_rank is not None for intent, _ in brought))

    def uncalled_step(self, serial: int, micro_batch_idx: int) -> tuple[PlanId, tuple[int, ...], str] | None:
        """The lowest step that others wait for, whose counts vector says that this rank is not called.

        Returns (plan id, counts vector, dtype).
        """
        with self._board.locked():
            words = self._entries.words(micro_batch_idx)
            waiting = [
                key_of(words, idx)
                for idx, mark in enumerate(words[2::3])
                if mark & (HAS_COUNTS | SETTLED) == HAS_COUNTS and words[3 * idx] == serial
            ]
            if not waiting:
                return None
            first = 3 * self._rank * NUM_ENTRIES
            mine = words[first + 1 : first + 3 * NUM_ENTRIES : 3]
            for key in sorted(waiting, key=lambda key: key.step_id):
                if key.step_id in mine:
                    continue
                intent, _ = self._entries.read(micro_batch_idx, key)
                counts = intent.num_rows_per_rank
                if counts is not None and not counts[self._rank]:
                    return intent.plan_id, counts, intent.dtype
        return None


def _timeout(plan_id: PlanId, waited_s: float, missing: list[int]) -> ErrorReply:
    who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    return ErrorReply(
        code="peer_timeout",
        message=f"plan {plan_id} must be agreed within {waited_s:g} s, got no intent of {who}",
        missing_ranks=tuple(missing),
    )
