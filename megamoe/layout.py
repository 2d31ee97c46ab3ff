"""Byte map of one rank's symmetric heap: the only source of sizes and offsets. Allocates nothing.

Every rank derives the same map from the same bundle, so an offset is an address on all of them. Payload and combine
regions exist twice (double-buffered by sequence parity) and are shared by all layers and all paths: one launch runs
at a time, so the largest runtime sizes them and smaller runtimes use a front part. `path_regions` says what each path
alone would need; `regions` is what is really there. All offsets are Python integers: no 32-bit limit anywhere.

Capacity is worst-case safe: a source sends each of its at most C tokens at most once to a destination, so
num_ranks x C payload rows hold any legal routing (also all routes to one rank), and each (token, slot) of a source has
its own place in the combine region.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

from megamoe.bundle import Bundle, Path
from megamoe.errors import ConfigError, must_be
from megamoe.shape import MX_BLOCK

NUM_BUFFERS = 2
"""Payload and combine regions: the launch under way and the one that a faster peer may already have begun."""

PAGE_BYTES = 4096
CACHE_LINE_BYTES = 64
WIDE_BYTES = 16
"""Rows are multiples of this, so that they move as 16-byte elements."""

MAX_RANKS = 8


class FlagKind(IntEnum):
    """Flag lines of a protocol slot, in the order in which a launch posts them.

    ROWS: all rows of yours that I own are back (large_m, ahead of the end). RETURN: I am done with this launch.
    """

    COUNTS = 0
    PAYLOAD = 1
    ROWS = 2
    RETURN = 3
    CLOSE = 4


FLAG_BYTES = 8
"""A flag is the launch's epoch in the low half and info in the high half, written with one store."""
POSTED = 1 << 31
"""Set in every info: a zeroed word is never taken for a flag of epoch 0."""
INFO_ERROR = 1 << 30
"""The source joined with zero rows because its caller's call was refused."""
INFO_FP8 = 1 << 29
"""Result rows of this owner are FP8 with the routing weight applied."""
INFO_ROWS_MASK = (1 << 24) - 1
"""Of a payload flag: rows that its source sent."""


def ranks_in(mask: int) -> list[int]:
    """Ranks whose bits are set, in ascending order."""
    return [rank for rank in range(MAX_RANKS) if mask >> rank & 1]


def _align(num_bytes: int, to: int) -> int:
    return -(-num_bytes // to) * to


@dataclass(frozen=True, kw_only=True)
class Region:
    """num_bytes at `offset` of every rank's segment. path: who uses it, None = every path.

    shared_with: name of the region whose bytes these are, "" if it has its own.
    """

    name: str
    path: Path | None
    offset: int
    num_bytes: int
    shared_with: str = ""

    @property
    def stop(self) -> int:
        return self.offset + self.num_bytes


@dataclass(frozen=True, kw_only=True)
class HeapLayout:
    """The map of a bundle with `num_slots` protocol slots (one a layer). Build it with `plan_layout`."""

    bundle: Bundle
    num_slots: int

    # ------------------------------------------------------------------------------------------- row sizes

    @property
    def num_ranks(self) -> int:
        return self.bundle.shape.num_ranks

    @property
    def capacity(self) -> int:
        """C: tokens per source rank of the largest runtime."""
        return max(spec.capacity for spec in self.bundle.runtimes)

    @property
    def sf_bytes(self) -> int:
        """E8M0 scales of one row: hidden / 32."""
        return self.bundle.shape.hidden // MX_BLOCK

    @property
    def row_bytes(self) -> int:
        """One MXFP8 row on its way to an owner: hidden codes, hidden / 32 scales, padding to 16 bytes."""
        return _align(self.bundle.shape.hidden + self.sf_bytes, WIDE_BYTES)

    @property
    def meta_words(self) -> int:
        """int32 words beside a row: token index at its source, num_topk ids, num_topk fp32 weights, padding."""
        return _align(4 * (1 + 2 * self.bundle.shape.num_topk), WIDE_BYTES) // 4

    @property
    def result_bytes(self) -> int:
        """One result row on its way back: bf16, or e4m3 codes and scales, which need less."""
        return 2 * self.bundle.shape.hidden

    @property
    def counts_words(self) -> int:
        """int32 counts from one source: one per destination rank, or one per expert of the destination."""
        return _align(4 * max(self.num_ranks, self.bundle.shape.num_experts_per_rank), CACHE_LINE_BYTES) // 4

    @property
    def max_rows_received(self) -> int:
        """Payload rows that one rank can receive in a launch."""
        return self.num_ranks * self.capacity

    @property
    def max_routed_rows(self) -> int:
        """(token, slot) pairs that one rank can have to compute: every slot of every token."""
        return self.max_rows_received * self.bundle.shape.num_topk

    # --------------------------------------------------------------------------------------------- regions

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """What is allocated, without gaps that matter, in ascending order of offset."""
        sizes = [
            ("header", CACHE_LINE_BYTES),
            ("ready", CACHE_LINE_BYTES),
            ("progress", CACHE_LINE_BYTES),
            ("doorbell", CACHE_LINE_BYTES),
            ("aborts", CACHE_LINE_BYTES),
            ("flags", self.num_slots * NUM_BUFFERS * len(FlagKind) * CACHE_LINE_BYTES),
        ]
        for buffer_idx in range(NUM_BUFFERS):
            sizes += [
                (f"counts{buffer_idx}", self.num_ranks * self.counts_words * 4),
                (f"payload_meta{buffer_idx}", self.max_rows_received * self.meta_words * 4),
                (f"payload_rows{buffer_idx}", self.max_rows_received * self.row_bytes),
                (f"combine_rows{buffer_idx}", self._combine_bytes(self.capacity)),
            ]
        regions = []
        offset = 0
        for name, num_bytes in sizes:
            big = num_bytes >= PAGE_BYTES
            offset = _align(offset, PAGE_BYTES if big else CACHE_LINE_BYTES)
            regions.append(Region(name=name, path=None, offset=offset, num_bytes=num_bytes))
            offset += num_bytes
        return tuple(regions)

    @cached_property
    def path_regions(self) -> tuple[Region, ...]:
        """What each built path uses of the shared regions, at the capacity of its largest runtime."""
        used = []
        for path in Path:
            capacities = self.bundle.capacities(path)
            if not capacities:
                continue
            rows = self.num_ranks * capacities[-1]
            sizes = {
                "payload_meta": rows * self.meta_words * 4,
                "payload_rows": rows * self.row_bytes,
                "combine_rows": self._combine_bytes(capacities[-1]),
            }
            if path in (Path.COMPACT, Path.LARGE_M):
                sizes["counts"] = self.num_ranks * self.counts_words * 4
            for name, num_bytes in sizes.items():
                for buffer_idx in range(NUM_BUFFERS):
                    home = f"{name}{buffer_idx}"
                    offset = self.region(home).offset
                    used.append(
                        Region(name=home, path=path, offset=offset, num_bytes=num_bytes, shared_with=home)
                    )
        return tuple(used)

    @property
    def num_bytes(self) -> int:
        """Size of one rank's segment."""
        return _align(self.regions[-1].stop, PAGE_BYTES)

    @property
    def num_bytes_all_ranks(self) -> int:
        """What /dev/shm must hold: one segment a rank, all on one host."""
        return self.num_bytes * self.num_ranks

    def path_bytes(self, path: Path) -> int:
        """Bytes of the shared regions that `path` uses; 0 if it is not built."""
        return sum(region.num_bytes for region in self.path_regions if region.path is path)

    def max_scratch_bytes(self) -> int:
        """Private memory of one rank's GEMM stages at the worst legal routing; it grows as steps need it."""
        shape = self.bundle.shape
        intermediate = shape.intermediate + shape.intermediate // MX_BLOCK
        return self.max_routed_rows * (intermediate + self.result_bytes)

    @cached_property
    def _by_name(self) -> dict[str, Region]:
        return {region.name: region for region in self.regions}

    def region(self, name: str) -> Region:
        """The allocated region called `name` (double-buffered ones end in 0 or 1)."""
        return self._by_name[name]

    def flag_offset(self, slot_idx: int, buffer_idx: int, kind: FlagKind, src_rank: int) -> int:
        """Offset of the 64-bit flag that src_rank posts here: (epoch, info), epoch in the low half.

        Flags are double-buffered like payload: a peer may be one launch ahead, on the same slot, and must not
        overwrite what this rank has yet to see.
        """
        line = (slot_idx * NUM_BUFFERS + buffer_idx) * len(FlagKind) + kind
        return self.region("flags").offset + line * CACHE_LINE_BYTES + FLAG_BYTES * src_rank

    def _combine_bytes(self, capacity: int) -> int:
        return capacity * self.bundle.shape.num_topk * self.result_bytes


def plan_layout(bundle: Bundle, *, num_slots: int | None = None) -> HeapLayout:
    """The heap map of a bundle. num_slots: protocol slots, by default one per layer of the shape.

    Raises ConfigError when num_slots is not from 1 to num_layers.
    """
    slots = bundle.shape.num_layers if num_slots is None else num_slots
    if not 1 <= slots <= bundle.shape.num_layers:
        raise ConfigError(must_be("num_slots", f"from 1 to num_layers = {bundle.shape.num_layers}", slots))
    return HeapLayout(bundle=bundle, num_slots=slots)
