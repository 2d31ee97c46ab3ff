"""large_m's board: what thread blocks of its launches tell each other, in device memory of the rank.

Rows are laid out in items of ITEM_TOKENS tokens, which are handed out by tickets. GEMM tiles are dealt out beforehand,
as compact's are: a thread block only looks whether the rows of their entries have come, or their intermediate. The
quantize launch zeroes everything up to `tables`.
"""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.backends.hopper.plan import MAX_BLOCK_N, GemmPlan
from megamoe.backends.hopper.tables import TableSizes
from megamoe.shape import MoeShape

ITEM_TOKENS = 8
ROWS_TOGETHER = 4
"""Of an item, whose loads are under way together."""
SECTIONS = 8
"""Parts of a source's rows that it reports as sent, one after the other, in its payload flag."""
PATIENCE_NS = 20_000
"""A thread block that has found nothing to move for so long runs a tile early, if there is one whose rows are there."""
MAX_WIDTHS = 8
"""Of tiles: as many as a thread block's 256 threads have TILES_IN_SIGHT of."""
TILES_IN_SIGHT = 32
"""Of each width, a thread block's next tiles, for all of which it looks together."""
PLACE_SHIFT = 12
"""In a row's metadata: local expert in the low bits, above them its place among the source's rows of that expert."""
MAX_EXPERTS_PER_RANK = 1 << PLACE_SHIFT


class BoardWord:
    """int32 words at the head of the board."""

    SEND = 0
    """Next item of this rank's rows to be sent."""
    REPORTED = 1
    """Sections reported so far."""
    COMPLETE = 2
    """Entries whose rows have all come."""
    EARLY = 3
    """Tiles of GEMM1 that have run while rows were late."""
    EXPAND = 8
    """Per source: the next of its items to be laid out (MAX_RANKS words)."""
    SENT = 16
    """Items sent of every section."""
    ENTRIES = 32
    """Begin of the lists with one word an entry."""


EXPERT_WORDS = 6
"""Of an expert in the tables: its first row, rows before its last two tiles, the width of the first of these, the entry
of its first widest tile, and those of its last two."""


@dataclass(frozen=True, kw_only=True)
class BoardLayout:
    """Word offsets of the lists: rows arrived and tiles of GEMM1 done of every entry; whether a tile of GEMM1 has run
    early, num_groups of them an entry; then the tables that the first thread blocks write: where a source's rows of an
    expert begin; EXPERT_WORDS lists with a word an expert; for every width the number of its entries and the first
    one."""

    max_entries: int
    num_ranks: int
    num_experts: int
    num_groups: int

    @property
    def arrived(self) -> int:
        return BoardWord.ENTRIES

    @property
    def done(self) -> int:
        return self.arrived + self.max_entries

    @property
    def taken(self) -> int:
        return self.done + self.max_entries

    @property
    def tables(self) -> int:
        return self.taken + self.max_entries * self.num_groups

    @property
    def of_width(self) -> int:
        return self.tables + self.num_experts * (self.num_ranks + EXPERT_WORDS)

    @property
    def num_words(self) -> int:
        return self.of_width + 2 * MAX_WIDTHS


def own_tiles(block: int, num_blocks: int, tiles_before: int, num_tiles: int) -> range:
    """Of a width with num_tiles tiles, and tiles_before of the widths before it, those of a thread block: thread blocks
    take turns through all widths (device code: tiles.own_tile)."""
    return range((block - tiles_before) % num_blocks, num_tiles, num_blocks)


def board_layout(sizes: TableSizes) -> BoardLayout:
    return BoardLayout(
        max_entries=sizes.max_tiled_entries,
        num_ranks=sizes.shape.num_ranks,
        num_experts=sizes.shape.num_experts_per_rank,
        num_groups=sizes.gemm1_groups,
    )


def plan_large_m(
    shape: MoeShape, max_rows: int, *, batch_invariant: bool = False, fp8_rows: bool = False
) -> GemmPlan:
    """Tiles of the persistent launch, the same for every step: one thread block a multiprocessor, as wide as memory
    allows."""
    return GemmPlan(stream_max_rows=0, block_n=128 if fp8_rows else MAX_BLOCK_N)
