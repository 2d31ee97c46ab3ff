"""The control block: everything about one sub-step that a kernel reads from memory instead of from its arguments.

64 words of int64 in device memory. The host writes the first half, the request, into pinned memory, from where the
sub-step's first kernel takes it (device code's control.py). Captured graphs therefore hold no epoch, row count or
tensor address: they can be replayed for any launch of their path and binding. The second half, the status, is what
kernels write: failure, who is missing, what was refused, and counts; the last kernel tells it to the host.
"""

from __future__ import annotations

from enum import IntEnum

from megamoe.layout import INFO_ERROR, INFO_FP8, INFO_ROWS_MASK, MAX_RANKS, POSTED

__all__ = [
    "FIRST_STATUS",
    "INFO_ERROR",
    "INFO_FP8",
    "INFO_ROWS_MASK",
    "MAX_RANKS",
    "NUM_REQUEST_WORDS",
    "NUM_WORDS",
    "POSTED",
    "Word",
]

NUM_WORDS = 64


class Word(IntEnum):
    """Words of the control block. Offsets are bytes from a rank's heap base, of the buffer that the launch uses."""

    EPOCH = 0
    NUM_ROWS = 1
    INFO = 2
    TIMEOUT_NS = 3
    CAPACITY = 4
    HIDDEN_PTR = 5
    SF_PTR = 6
    IDS_PTR = 7
    WEIGHTS_PTR = 8
    OUT_PTR = 9
    FLAGS_OFFSET = 10
    COUNTS_OFFSET = 11
    META_OFFSET = 12
    ROWS_OFFSET = 13
    COMBINE_OFFSET = 14
    ABORTS_OFFSET = 15
    ROWS_PER_RANK = 16
    """Agreed rows of each rank: MAX_RANKS words."""

    IDS_SRC = 24
    """Where ids lie on the host; the first kernel brings them to IDS_PTR. 0: they are there."""
    WEIGHTS_SRC = 25

    FAILED = 32
    """1 once a wait of this launch ended without its flags."""
    MISSING = 33
    """Mask of ranks that did not come."""
    FAILED_KIND = 34
    FAILED_SRC = 35
    """Whose flag was waited for; -1: a peer gave the launch up."""
    FAILED_SEEN = 36
    REFUSED = 37
    """Mask of ranks that joined with the error bit."""
    FP8 = 38
    """Mask of owner ranks whose rows are FP8."""
    ROWS_RECEIVED = 39
    PADDED_ROWS = 40
    DROPPED_SLOTS = 41
    BYTES_SENT = 42
    STARTED_NS = 44
    """Of the GPU's clock: when the request was taken, and when the status was told."""
    ENDED_NS = 45

    DISPATCHED = 48
    """Thread blocks of a launch that have come so far: device code's sync.py."""
    INDEXED = 49
    EXPANDED = 50
    MULTIPLIED = 51
    RETURNED = 52
    ANSWERED = 53
    TICKET = 54
    """Tiles that small_m's thread blocks have drawn: of the ring, else streaming ones of GEMM2."""


FIRST_STATUS = int(Word.FAILED)
NUM_REQUEST_WORDS = Word.WEIGHTS_SRC + 1
