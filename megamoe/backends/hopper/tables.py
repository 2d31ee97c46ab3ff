"""How large a rank's private tables are, and what the index stage must write into them."""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.backends.hopper.packing import ROW_GROUP, padded_columns, padded_rows
from megamoe.backends.hopper.plan import (
    BLOCK_ROWS,
    COUNTER_WORDS,
    ENTRY_WORDS,
    INDEX_PART,
    MAX_BLOCK_N,
    MIN_BLOCK_N,
    STREAM_LIMIT,
    GemmPlan,
    next_power_of_2,
    stream_entries,
)
from megamoe.backends.hopper.widths import tile_rows
from megamoe.shape import MoeShape


@dataclass(frozen=True, kw_only=True)
class TableSizes:
    """Sizes of one rank's private tables for a runtime of `capacity` tokens per source rank."""

    shape: MoeShape
    capacity: int

    @property
    def max_routed_rows(self) -> int:
        """Every slot of every token of every source may name this rank."""
        return self.shape.num_ranks * self.capacity * self.shape.num_topk

    @property
    def padded_rows(self) -> int:
        """Rows of routed tables and images: each expert's start at a multiple of BLOCK_ROWS, and the last tile may
        read MAX_BLOCK_N rows whoever's they are."""
        experts = min(self.shape.num_experts_per_rank, self.max_routed_rows)
        rows = self.max_routed_rows + experts * (BLOCK_ROWS - 1)
        return -(-rows // BLOCK_ROWS) * BLOCK_ROWS + MAX_BLOCK_N

    @property
    def num_blocks(self) -> int:
        return self.padded_rows // BLOCK_ROWS

    @property
    def max_stream_entries(self) -> int:
        return self.shape.num_experts_per_rank * -(-STREAM_LIMIT // BLOCK_ROWS)

    @property
    def max_tiled_entries(self) -> int:
        return self.shape.num_experts_per_rank + self.max_routed_rows // MIN_BLOCK_N

    @property
    def part_count_words(self) -> int:
        """Rows of every expert in every part of the rows that may come."""
        parts = -(-self.shape.num_ranks * self.capacity // INDEX_PART)
        return parts * next_power_of_2(self.shape.num_experts_per_rank + 1)

    @property
    def stream_offset(self) -> int:
        """First word of the streaming kernel's entries in the work table."""
        return COUNTER_WORDS

    @property
    def tiled_offset(self) -> int:
        return self.stream_offset + ENTRY_WORDS * self.max_stream_entries

    @property
    def work_words(self) -> int:
        return self.tiled_offset + ENTRY_WORDS * self.max_tiled_entries

    @property
    def image_columns(self) -> int:
        """K of GEMM1: hidden, padded."""
        return padded_columns(self.shape.hidden)

    @property
    def middle_columns(self) -> int:
        """K of GEMM2: intermediate, padded."""
        return padded_columns(self.shape.intermediate)

    @property
    def gemm1_groups(self) -> int:
        """Row groups of w13: gate and up rows of the padded intermediate."""
        return 2 * self.middle_columns // ROW_GROUP

    @property
    def gemm2_groups(self) -> int:
        return padded_rows(self.shape.hidden) // ROW_GROUP

    @property
    def num_bytes(self) -> int:
        """Bytes of all private tables and images."""
        images = 2 * self.padded_rows * (self.image_columns + self.middle_columns)
        rows = self.padded_rows * (4 + 4 + 8) + 4 * self.num_blocks
        tables = self.work_words + self.part_count_words + self.capacity * self.shape.num_ranks
        return images + rows + 4 * tables


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Entries of one expert, as the index stage must write them. widths: of the tiles for `rows`; streaming: none."""

    first_row: int
    rows: tuple[int, ...]
    streaming: bool
    widths: tuple[int, ...] = ()


def expert_entries(rows_per_expert: list[int], plan: GemmPlan) -> list[Expected]:
    """Where each expert's rows lie and how they are cut: what the index stage computes on the device."""
    out = []
    first_row = 0
    for count in rows_per_expert:
        streaming = count <= plan.stream_max_rows
        widths = () if streaming else tile_rows(count, plan.widths)
        cuts = stream_entries(count) if streaming else _filled(count, widths)
        out.append(Expected(first_row=first_row, rows=cuts, streaming=streaming, widths=widths))
        first_row += -(-count // BLOCK_ROWS) * BLOCK_ROWS
    return out


def _filled(count: int, widths: tuple[int, ...]) -> tuple[int, ...]:
    """Rows in each tile."""
    begins = [sum(widths[:number]) for number in range(len(widths))]
    return tuple(min(width, count - begin) for width, begin in zip(widths, begins, strict=True))
