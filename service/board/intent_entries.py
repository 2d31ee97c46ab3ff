"""The bytes of StepIntents on the board: a few entries per rank and micro-batch, and the key of each.

Keys lie side by side, apart from the entries: what there is to decide about most entries is decided by their keys.
Everything here is read and written under the board's lock. What the marks mean together is agreement.py's business.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from megamoe import Phase, PlanId, StepIntent
from service.board.admission import RankLoad
from service.board.board import Board
from service.board.layout import (
    ERROR_BYTES,
    INTENT_BYTES,
    KEY_BYTES,
    MAX_RANKS,
    NUM_ENTRIES,
    intent_at,
    keys_at,
    pack_error,
    unpack_error,
)
from service.messages import ErrorReply

_KEY = struct.Struct("<QQQ")  # lease serial, step id, mark: of every entry of a micro-batch, side by side
_ENTRY = struct.Struct("<BBBBQQQIIQ8I")
"""phase, dtype, draining, has counts, weights, placement, policy, rows, queued calls, open rows, counts."""
_ERROR_AT = 128
assert _KEY.size == KEY_BYTES
assert _ENTRY.size <= _ERROR_AT
assert _ERROR_AT + ERROR_BYTES <= INTENT_BYTES

_PHASES = tuple(Phase)
DTYPES = ("bfloat16", "mxfp8")


# Marks: what there is to say about an entry without reading it (plain ints: this is read for every step).
POSTED = 1
FAILED = 2
SETTLED = 4  # its rank knows the outcome
CALLED = 8  # its rank's own caller brought it
HAS_COUNTS = 16


class Key(NamedTuple):
    """Where an entry lies, whose step it is, and its mark."""

    rank: int
    entry_idx: int
    serial: int
    step_id: int
    mark: int


class Entries:
    """The entries of a board."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._all_keys = struct.Struct(f"<{3 * board.num_ranks * NUM_ENTRIES}Q")

    def words(self, micro_batch_idx: int) -> tuple[int, ...]:
        """(serial, step id, mark) of all entries of a micro-batch in one row, by rank and entry; zeros if unused."""
        at = keys_at(self._board.num_ranks, micro_batch_idx)
        return self._all_keys.unpack_from(self._board.buf, at)

    def of_step(self, serial: int, plan_id: PlanId) -> dict[int, Key]:
        """The entries of a step, by rank."""
        words, step_id = self.words(plan_id.micro_batch_idx), plan_id.step_id
        return {
            idx // NUM_ENTRIES: key_of(words, idx)
            for idx, theirs in enumerate(words[1::3])
            if theirs == step_id and words[3 * idx] == serial
        }

    def write_key(self, micro_batch_idx: int, key: Key) -> None:
        at = keys_at(self._board.num_ranks, micro_batch_idx)
        at += (key.rank * NUM_ENTRIES + key.entry_idx) * _KEY.size
        _KEY.pack_into(self._board.buf, at, key.serial, key.step_id, key.mark)

    def _entry_at(self, micro_batch_idx: int, key: Key) -> int:
        return intent_at(self._board.num_ranks, micro_batch_idx, key.rank, key.entry_idx)

    def write(self, intent: StepIntent, load: RankLoad, key: Key) -> None:
        counts = intent.num_rows_per_rank
        _ENTRY.pack_into(
            self._board.buf,
            self._entry_at(intent.plan_id.micro_batch_idx, key),
            _PHASES.index(intent.phase),
            DTYPES.index(intent.dtype),
            intent.draining,
            counts is not None,
            intent.weights_version,
            intent.placement_version,
            intent.policy_version,
            intent.num_rows,
            load.queued_calls,
            load.open_rows,
            *(counts or ()),
            *(0,) * (MAX_RANKS - len(counts or ())),
        )

    def read(self, micro_batch_idx: int, key: Key) -> tuple[StepIntent, RankLoad]:
        board = self._board
        phase, dtype, draining, has_counts, weights, placement, policy, rows, queued, open_rows, *counts = (
            _ENTRY.unpack_from(board.buf, self._entry_at(micro_batch_idx, key))
        )
        intent = StepIntent(
            rank=key.rank,
            num_ranks=board.num_ranks,
            plan_id=PlanId(board.generation, key.step_id, micro_batch_idx),
            num_rows=rows,
            phase=_PHASES[phase],
            dtype=DTYPES[dtype],
            weights_version=weights,
            placement_version=placement,
            policy_version=policy,
            draining=bool(draining),
            num_rows_per_rank=tuple(counts[: board.num_ranks]) if has_counts else None,
        )
        return intent, RankLoad(queued_calls=queued, open_rows=open_rows)

    def error(self, micro_batch_idx: int, keys: Iterable[Key]) -> ErrorReply | None:
        """The error that some rank wrote for a step; whoever came later copied it."""
        for key in keys:
            if key.mark & FAILED:
                return unpack_error(self._board.buf, self._entry_at(micro_batch_idx, key) + _ERROR_AT)
        return None

    def set_error(self, micro_batch_idx: int, key: Key, error: ErrorReply) -> None:
        pack_error(self._board.buf, self._entry_at(micro_batch_idx, key) + _ERROR_AT, error)


def key_of(words: tuple[int, ...], idx: int) -> Key:
    serial, step_id, mark = words[3 * idx : 3 * idx + 3]
    return Key(idx // NUM_ENTRIES, idx % NUM_ENTRIES, serial, step_id, mark)
