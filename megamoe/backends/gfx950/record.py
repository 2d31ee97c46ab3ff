"""The control block: everything about one sub-step that kernels read from memory instead of from their arguments.

Words of int64 in device memory, written by the host before the first kernel of a launch. Captured graphs therefore hold
no epoch, row count or tensor address and can be replayed for any launch of their path and binding. The words from
STATUS on are what kernels write back: failure, who is missing, who refused, and counts.
"""

from __future__ import annotations

from enum import IntEnum

from megamoe.layout import INFO_ERROR, INFO_FP8, INFO_ROWS_MASK, MAX_RANKS, POSTED

__all__ = [
    "AUTO",
    "BOARD_BYTES",
    "COPY_BYTES",
    "FIRST_STATUS",
    "INFO_ERROR",
    "INFO_FP8",
    "INFO_ROWS_MASK",
    "LAST_STATUS",
    "MAX_CHUNK",
    "MAX_RANKS",
    "NUM_DIES",
    "NUM_WORDS",
    "POSTED",
    "RESULT_INDEX_BITS",
    "SEGMENT_BYTES",
    "Word",
]

AUTO = 2
"""Format of result rows, beside 0 = bf16 and 1 = FP8: each owner chooses by what it received."""
NUM_DIES = 8
"""Dies (XCD) of an MI355X, with an L2 each; workgroups are dealt to them in turn."""

RESULT_INDEX_BITS = 20
"""A routed row names its source rank above these bits and token * num_topk + slot in them (8192 x 32 fit in 18)."""


SEGMENT_BYTES = 4 * 2 * MAX_RANKS
"""Of an expert in large_m, for each source: where its rows begin, and what takes such a row to its pair."""
COPY_BYTES = 8192
"""Bytes that a wave which copies rows has on their way at once: a whole row of DeepSeek-V4-Pro."""
MAX_CHUNK = 8
"""Tiles of a chunk of GEMM2 in large_m at most: of an expert with 16 tiles or more; with fewer 4, 2 or 1, so that
chunks are enough."""
BOARD_BYTES = 4 * 8
"""A place of large_m's board, one for each m-tile (see kernels/board.py)."""


class Word(IntEnum):
    """Words of the control block. Offsets are bytes from a rank's heap base, of the buffer that the launch uses."""

    EPOCH = 0
    NUM_ROWS = 1
    INFO = 2
    """Info bits that this rank sets in all its flags."""
    TIMEOUT_TICKS = 3
    """Longest wait, in ticks of the device's constant clock (100 MHz on MI355X)."""
    CAPACITY = 4
    HIDDEN_PTR = 5
    SF_PTR = 6
    """Scales of rows that came quantized; 0: the rows are bf16."""
    IDS_PTR = 7
    WEIGHTS_PTR = 8
    OUT_PTR = 9
    FLAGS_OFFSET = 10
    COUNTS_OFFSET = 11
    META_OFFSET = 12
    ROWS_OFFSET = 13
    COMBINE_OFFSET = 14
    ABORTS_OFFSET = 15
    SOURCES = 16
    """Mask of ranks whose rows fixed_slot waits for: those that bring some by the agreed counts. All ranks where the
    last launch used the same buffer: nobody then overwrites a flag that a rank of that launch has yet to see."""
    HEAVY_ROWS = 17
    """small_m: routed rows from which an owner is heavy (see kernels/small_m.py)."""
    HEAVY_EXPERT_ROWS = 18
    """small_m: rows of one expert from which its owner is."""

    FAILED = 32
    """1 once a wait of this launch ended without its flags: kernels that follow send nothing."""
    MISSING = 33
    """Mask of ranks that did not come."""
    FAILED_KIND = 34
    FAILED_SEEN = 35
    """The flag of the first missing rank as it was."""
    REFUSED = 36
    """Mask of ranks that joined with the error bit."""
    FP8 = 37
    """Mask of owner ranks whose rows are FP8."""
    ROWS_SENT = 38
    """Payload rows written to other ranks."""
    ROWS_RETURNED = 39
    """Result rows written to other ranks."""
    DONE_EPOCH = 40
    """The epoch of the last launch that combine finished, with POSTED above it."""
    ARRIVALS = 41
    """Workgroups of the running kernel that have arrived; the last one sets it back to 0."""
    MET = 42
    """Workgroups that have met in the middle of the launch's one kernel that does so."""
    MULTIPLIED = 43
    """Workgroups of small_m that have sent all result rows of theirs."""

    # large_m. Words that many workgroups change at a time lie in cache lines of their own.
    LISTED = 48
    """Workgroups that have sent their lists of rows."""
    SENT = 49
    """Workgroups that have sent their rows to a destination: a word each for MAX_RANKS."""
    TICKETS_1 = 64
    """Units of GEMM1 that workgroups have taken."""
    TICKETS_2 = 80
    READY = 96
    """Tiles published to GEMM1 in the low half, chunks published to GEMM2 above, bit 63 once no more come."""
    FINISHED = 112
    """Units of GEMM2 done, of tiles with rows of a source: a word each for MAX_RANKS, and one for all tiles."""
    EXPECTED = 128
    """What FINISHED comes to."""


FIRST_STATUS = int(Word.FAILED)
LAST_STATUS = int(Word.DONE_EPOCH)
NUM_WORDS = 144
