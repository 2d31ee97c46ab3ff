"""large_m's board: what thread blocks of one persistent launch tell each other, in device memory of the rank.

Every kind of work is handed out by tickets. Rows travel and are laid out in items of ITEM_TOKENS tokens; a GEMM tile
may run once its entry (an expert's next `block_n` rows) is complete, and complete entries stand in a queue, so that
tiles run in the order in which their rows arrived. The quantize launch zeroes everything up to `tables`.
"""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.backends.hopper.plan import MAX_BLOCK_N, GemmPlan
from megamoe.backends.hopper.tables import TableSizes
from megamoe.shape import MoeShape

ITEM_TOKENS = 8
SECTIONS = 8
"""Parts of a source's rows that it reports as sent, one after the other, in its payload flag."""
NARROW_ROWS = 128
"""Entries of up to so many rows are multiplied by a narrow tile, at two thirds of a wide one's time."""
HELPER_SHARE = 16
"""One thread block in so many moves rows before it multiplies: what is moved then costs the others no time."""
PLACE_SHIFT = 12
"""In a row's metadata: local expert in the low bits, above them its place among the source's rows of that expert."""
MAX_EXPERTS_PER_RANK = 1 << PLACE_SHIFT


class BoardWord:
    """int32 words at the head of the board."""

    SEND = 0
    """Next item of this rank's rows to be sent."""
    REPORTED = 1
    """Sections reported so far."""
    HEAD1 = 2
    HEAD2 = 3
    """Next tickets of GEMM1 and GEMM2."""
    TAIL1 = 4
    TAIL2 = 5
    """Entries in the two queues."""
    EXPAND = 8
    """Per source: the next of its items to be laid out (MAX_RANKS words)."""
    SENT = 16
    """Items sent of every section."""
    ENTRIES = 32
    """Begin of the lists with one word an entry."""


@dataclass(frozen=True, kw_only=True)
class BoardLayout:
    """Word offsets of the lists: rows arrived and tiles done of every entry, the queues (entry + 1 by position), then
    the tables that the first thread blocks write: where a source's rows of an expert begin, an expert's first row,
    its first entry, and the number of entries."""

    max_entries: int
    num_ranks: int
    num_experts: int

    @property
    def arrived(self) -> int:
        return BoardWord.ENTRIES

    @property
    def done(self) -> int:
        return self.arrived + self.max_entries

    @property
    def queue1(self) -> int:
        return self.done + self.max_entries

    @property
    def queue2(self) -> int:
        return self.queue1 + self.max_entries

    @property
    def tables(self) -> int:
        return self.queue2 + self.max_entries

    @property
    def num_words(self) -> int:
        return self.tables + self.num_experts * (self.num_ranks + 2) + 1


def board_layout(sizes: TableSizes) -> BoardLayout:
    return BoardLayout(
        max_entries=sizes.max_tiled_entries,
        num_ranks=sizes.shape.num_ranks,
        num_experts=sizes.shape.num_experts_per_rank,
    )


def plan_large_m(
    shape: MoeShape, max_rows: int, *, batch_invariant: bool = False, fp8_rows: bool = False
) -> GemmPlan:
    """Tiles of the persistent launch, the same for every step: one thread block a multiprocessor, as wide as memory
    allows; an expert's last rows may take a narrow tile (NARROW_ROWS)."""
    return GemmPlan(stream_max_rows=0, block_n=128 if fp8_rows else MAX_BLOCK_N)
