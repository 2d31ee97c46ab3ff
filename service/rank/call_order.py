"""The total order of layer calls: what each sequence is, claimed once for all ranks, and what became of it.

The first rank that begins a sequence claims it for its (lease, plan, layer); ranks that say otherwise, or whose call
was refused, find out here and join the claimed call with zero rows and their error bit. A sequence that nobody
began can be given up, which consumes it on all ranks. Ranks without a caller read what they have to follow.
Nothing here waits: between ranks that are called, the runtime's own flags do.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from megamoe import PlanId
from megamoe.errors import StaleCallError
from service.board.board import Board
from service.board.layout import ERROR_BYTES, ORDER_BYTES, ORDER_SLOTS, order_at, pack_error, unpack_error
from service.messages import ErrorReply
from service.ring.step_codec import plan_id_of

_SLOT = struct.Struct("<QIIQQIq")  # sequence, state, refusing ranks, lease, step, micro-batch, layer
_ERROR_AT = 64
_REFUSALS_AT = _ERROR_AT + ERROR_BYTES
assert _REFUSALS_AT + 8 * ERROR_BYTES <= ORDER_BYTES


class CallId(NamedTuple):
    """What must be the same on all ranks about one sequence: the lease, the plan and the layer."""

    lease_serial: int
    plan_id: PlanId
    layer_idx: int

    def __str__(self) -> str:
        return f"layer {self.layer_idx} of plan {self.plan_id}"


class SlotState(IntEnum):
    FREE = 0
    CLAIMED = 1
    GIVEN_UP = 2


_CLAIMED = int(SlotState.CLAIMED)


class Slot(NamedTuple):
    """What the board knows of one sequence. error: why it was given up."""

    sequence: int
    state: SlotState
    call: CallId
    refusing: int
    error: ErrorReply | None


class CallOrder:
    """The sequence slots of a board, for one rank."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board = board
        self._rank = rank
        self._at = [order_at(board.num_ranks, board.max_micro_batches, idx) for idx in range(ORDER_SLOTS)]

    def _read(self, sequence: int) -> Slot | None:
        """The slot if it is about this sequence; None if the sequence is untouched or long gone. Under the lock."""
        buf, at = self._board.buf, self._at[sequence % ORDER_SLOTS]
        held, state, refusing, serial, step_id, micro_batch_idx, layer_idx = _SLOT.unpack_from(buf, at)
        if held != sequence or state == SlotState.FREE:
            return None
        call = CallId(serial, plan_id_of(self._board.generation, step_id, micro_batch_idx), layer_idx)
        error = unpack_error(buf, at + _ERROR_AT) if state == SlotState.GIVEN_UP else None
        return Slot(sequence, SlotState(state), call, refusing, error)

    def _write(self, sequence: int, state: int, call: CallId | None, refusing: int) -> None:
        serial, step_id, micro_batch_idx, layer_idx = 0, 0, 0, -1
        if call is not None:
            plan_id = call.plan_id
            serial, layer_idx = call.lease_serial, call.layer_idx
            step_id, micro_batch_idx = plan_id.step_id, plan_id.micro_batch_idx
        _SLOT.pack_into(
            self._board.buf,
            self._at[sequence % ORDER_SLOTS],
            sequence,
            state,
            refusing,
            serial,
            step_id,
            micro_batch_idx,
            layer_idx,
        )

    def read(self, sequence: int) -> Slot | None:
        """What became of a sequence; None if it is untouched, or so long ago that the board forgot."""
        if sequence > self._board.highest_sequence:
            return None
        with self._board.locked():
            return self._read(sequence)

    def oldest(self) -> int:
        """The lowest sequence that the board still remembers or that comes next."""
        return max(self._board.highest_sequence - ORDER_SLOTS + 1, 0)

    def join(self, sequence: int, call: CallId) -> tuple[Slot, ErrorReply | None] | None:
        """Begin a sequence: claim it, or find it claimed or given up by another rank.

        Returns None when it is claimed for this call. Else the slot and, if it is claimed for another call than ours,
        the error with which this rank must join that call. Raises StaleCallError when the sequence is long gone.
        """
        board, at = self._board, self._at[sequence % ORDER_SLOTS]
        # Claimed for just this call: seen without the lock, since whatever is half written is not equal in all fields.
        if _SLOT.unpack_from(board.buf, at)[:2] == (sequence, _CLAIMED):
            claimed = self._read(sequence)
            if claimed is not None and claimed.state is SlotState.CLAIMED and claimed.call == call:
                return None
        with board.locked():
            highest = board.highest_sequence
            if sequence > highest:
                self._write(sequence, _CLAIMED, call, 0)
                board.highest_sequence = sequence
                return None
            slot = self._read(sequence)
            if slot is None:
                raise StaleCallError(f"sequence {sequence} is done: the group is at {highest}")
            if slot.state is SlotState.GIVEN_UP:
                return slot, None
            if slot.call == call:
                return None
            error = ErrorReply(
                code="agreement",
                message=f"sequence {sequence} must be the same call on all ranks: {slot.call}, got {call}",
            )
            return self._refuse(slot, error), error

    def refuse(self, sequence: int, error: ErrorReply) -> Slot:
        """This rank's call of `sequence` is refused: announce it on the claimed call, or give the sequence up.

        Returns the slot: CLAIMED = this rank must join slot.call with its error bit; GIVEN_UP = slot.error is the
        answer of every rank. Raises StaleCallError when the sequence is long gone.
        """
        board = self._board
        with board.locked():
            slot = self._read(sequence)
            if slot is not None:
                return slot if slot.state is SlotState.GIVEN_UP else self._refuse(slot, error)
            if sequence <= board.highest_sequence:
                raise StaleCallError(f"sequence {sequence} is done: the group is at {board.highest_sequence}")
            slot = self._give_up(sequence, _said_by(self._rank, error))
        board.ring_all()
        return slot

    def _refuse(self, slot: Slot, error: ErrorReply) -> Slot:
        at = self._at[slot.sequence % ORDER_SLOTS]
        pack_error(self._board.buf, at + _REFUSALS_AT + self._rank * ERROR_BYTES, error)
        refusing = slot.refusing | 1 << self._rank
        self._write(slot.sequence, slot.state, slot.call, refusing)
        return Slot(slot.sequence, slot.state, slot.call, refusing, None)

    def refusal(self, sequence: int) -> ErrorReply:
        """The error that every rank answers for a call that some ranks refused: their sentences in rank order."""
        with self._board.locked():
            slot = self._read(sequence)
            if slot is not None and slot.error is not None:
                return slot.error
            refusing = 0 if slot is None else slot.refusing
            at = self._at[sequence % ORDER_SLOTS] + _REFUSALS_AT
            said = [
                (rank, unpack_error(self._board.buf, at + rank * ERROR_BYTES))
                for rank in range(self._board.num_ranks)
                if refusing >> rank & 1
            ]
        if not said:
            return ErrorReply(
                code="peer_refused", message=f"a rank refused sequence {sequence} without a word"
            )
        parts = [_said_by(rank, error).message for rank, error in said]
        return ErrorReply(code=said[0][1].code, message="; ".join(parts))

    def give_up(self, sequence: int, error: ErrorReply, *, first: int | None = None) -> ErrorReply | None:
        """Consume a sequence on all ranks. The first error wins; returns the one that every rank answers.

        first: leave it (None) when some rank has begun a sequence from here on; that rank's own timeout ends it.
        Sequences below that nobody began are given up with it.
        """
        board = self._board
        with board.locked():
            slot = self._read(sequence)
            if slot is not None and slot.state is SlotState.GIVEN_UP:
                return slot.error
            if first is not None and board.highest_sequence >= first:
                return None
            if slot is None and sequence <= board.highest_sequence:
                return error  # so long ago that nobody can ask any more
            for earlier in range(max(board.highest_sequence + 1, sequence - ORDER_SLOTS + 1), sequence):
                self._give_up(earlier, error)
            self._give_up(sequence, error)
        board.ring_all()
        return error

    def _give_up(self, sequence: int, error: ErrorReply) -> Slot:
        self._write(sequence, SlotState.GIVEN_UP, None, 0)
        pack_error(self._board.buf, self._at[sequence % ORDER_SLOTS] + _ERROR_AT, error)
        self._board.highest_sequence = max(self._board.highest_sequence, sequence)
        return Slot(sequence, SlotState.GIVEN_UP, CallId(0, PlanId(0, 0, 0), -1), 0, error)


def _said_by(rank: int, error: ErrorReply) -> ErrorReply:
    return ErrorReply(
        code=error.code, message=f"rank {rank} refused: {error.message}", missing_ranks=error.missing_ranks
    )
