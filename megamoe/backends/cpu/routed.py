"""Index arithmetic of routing, vectorized: which tokens go to which rank, and which rows an owner computes.

Both sides run on numpy views of int32 ids; nothing here loops over tokens. -1 and ids of other ranks fall out by
range checks, also when a row's memory still holds an older launch: such rows are never looked at as expert ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from megamoe.layout import HeapLayout
from megamoe.shape import MoeShape

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Outgoing:
    """This rank's rows, staged in private memory, and who gets them.

    rows: [n, row_bytes / 16] wide. meta: [n, meta_words] int32. owners: [n, num_topk] int32, -1 = nobody.
    dst_rank, token: one entry per (destination, token), by destination, then token; a token appears at most once a
    destination. rows_per_rank: how many each destination gets.
    """

    rows: torch.Tensor
    meta: torch.Tensor
    owners: Int32Array
    dst_rank: Int64Array
    token: Int64Array
    rows_per_rank: Int64Array

    @classmethod
    def of(cls, shape: MoeShape, topk_ids: torch.Tensor, rows: torch.Tensor, meta: torch.Tensor) -> Outgoing:
        num_ranks = shape.num_ranks
        owners: Int32Array = topk_ids.numpy() // np.int32(shape.num_experts_per_rank)  # -1 stays -1
        wanted = np.zeros((num_ranks + 1, len(owners)), dtype=np.bool_)
        wanted[owners, np.arange(len(owners))[:, None]] = True  # -1 marks the last row, which nobody reads
        dst_rank, token = wanted[:num_ranks].nonzero()
        return cls(rows, meta, owners, dst_rank, token, np.bincount(dst_rank, minlength=num_ranks))

    def dense_slots(self, bases: Int64Array) -> Int64Array:
        """Slots of all (destination, token) entries when each destination's are packed from its base on."""
        starts = np.cumsum(self.rows_per_rank) - self.rows_per_rank
        slots: Int64Array = np.arange(len(self.token)) + (bases - starts)[self.dst_rank]
        return slots


@dataclass(frozen=True)
class Received:
    """Payload rows of one source in this rank's buffer: slots [first, first + num_rows)."""

    src_rank: int
    first: int
    num_rows: int


@dataclass(frozen=True)
class RoutedRows:
    """The routed rows that this rank computes, expert after expert, each in order (src_rank, token, slot).

    payload_row: where the row's codes lie. result_index: token * num_topk + slot at its source. weights: float32
    routing weights. rows_per_expert: of the local experts. All arrays have one entry a routed row.
    """

    payload_row: Int64Array
    src_rank: Int64Array
    result_index: Int64Array
    weights: npt.NDArray[np.float32]
    rows_per_expert: Int64Array

    @property
    def num_rows(self) -> int:
        return len(self.payload_row)


def routed_rows(layout: HeapLayout, rank: int, words: Int32Array, blocks: Sequence[Received]) -> RoutedRows:
    """Find this rank's routed rows in the received blocks, which must be in order of source rank.

    words: [max_rows_received, meta_words] int32, what stands beside the rows in this rank's buffer.
    """
    shape = layout.bundle.shape
    num_topk, num_experts = shape.num_topk, shape.num_experts_per_rank
    sizes = np.array([block.num_rows for block in blocks], dtype=np.int64)
    firsts = np.array([block.first for block in blocks], dtype=np.int64)
    # Payload row of each received row, and of which source it is.
    payload_rows = np.arange(int(sizes.sum())) + (firsts - np.cumsum(sizes) + sizes).repeat(sizes)
    sources = np.array([block.src_rank for block in blocks], dtype=np.int64).repeat(sizes)
    found = words[payload_rows]
    # As unsigned numbers, -1 and everything else outside this rank's range are large.
    local = (found[:, 1 : 1 + num_topk] - np.int32(rank * num_experts)).view(np.uint32)
    flat = (local < num_experts).ravel().nonzero()[0]
    # Small keys are sorted by radix, several times faster than int32.
    experts = local.ravel()[flat].astype(np.uint8 if num_experts <= 256 else np.uint16)
    order = flat[experts.argsort(kind="stable")]
    rows = order // num_topk
    slots = order - rows * num_topk
    return RoutedRows(
        payload_row=payload_rows[rows],
        src_rank=sources[rows],
        result_index=found[rows, 0].astype(np.int64) * num_topk + slots,
        weights=found[rows, 1 + num_topk + slots].view(np.float32),
        rows_per_expert=np.bincount(experts, minlength=num_experts),
    )
