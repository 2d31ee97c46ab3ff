"""Byte map of the board: the one place that says what lies where, and how an error is written there.

A head page with the words of the group, each on a cache line of its own; then a block per rank, the lease, the intents
of every micro-batch, and the slots of the total order. Allocates nothing; what the entries mean is said by lease.py,
agreement.py and call_order.py.
"""

from __future__ import annotations

import struct

from service.messages import ErrorReply
from service.ring.step_codec import cut_text

MAX_RANKS = 8
MAX_MICRO_BATCHES = 32

MAGIC = 0x4D4F4542_0001  # layout version in the low half
HEAD = struct.Struct("<QQQQ")
"""magic, num_ranks, max_micro_batches, generation."""
VERSION_AT, LOCK_OWNER_AT, HIGHEST_SEQUENCE_AT, HIGHEST_STEP_AT, LEASE_VERSION_AT = 128, 192, 256, 320, 384
INTENT_VERSIONS_AT = 512
DOWN_AT, DOWN_ERROR_AT = 1024, 1088

RANKS_AT, _RANK_BYTES = 4096, 512
PROGRESS_AT, TRAFFIC_AT = 192, 200
"""In the block of a rank, behind the words of its bell."""

LEASE_AT, LEASE_BYTES = RANKS_AT + MAX_RANKS * _RANK_BYTES, 512
KEY_BYTES, INTENT_BYTES = 24, 1024
NUM_ENTRIES = 8
"""Intents per rank and micro-batch that may be under way: one is the rule, more when ranks without rows are brought
into earlier steps late."""
ORDER_SLOTS, ORDER_BYTES = 128, 8192
"""Sequences that the board remembers, a power of two; bytes of each."""


def rank_at(rank: int) -> int:
    return RANKS_AT + rank * _RANK_BYTES


def keys_at(num_ranks: int, micro_batch_idx: int) -> int:
    """The keys of all entries of a micro-batch, by rank and entry; the entries follow."""
    entries = micro_batch_idx * num_ranks * NUM_ENTRIES
    return LEASE_AT + LEASE_BYTES + entries * (KEY_BYTES + INTENT_BYTES)


def intent_at(num_ranks: int, micro_batch_idx: int, rank: int, entry_idx: int) -> int:
    """Entry entry_idx of a rank in a micro-batch."""
    at = keys_at(num_ranks, micro_batch_idx) + KEY_BYTES * num_ranks * NUM_ENTRIES
    return at + (rank * NUM_ENTRIES + entry_idx) * INTENT_BYTES


def order_at(num_ranks: int, max_micro_batches: int, slot_idx: int) -> int:
    return keys_at(num_ranks, max_micro_batches) + slot_idx * ORDER_BYTES


def board_bytes(num_ranks: int, max_micro_batches: int) -> int:
    """Of the whole segment."""
    return order_at(num_ranks, max_micro_batches, ORDER_SLOTS)


# ------------------------------------------------------------------------------ errors

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
