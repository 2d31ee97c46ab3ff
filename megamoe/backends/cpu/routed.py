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
    """

    rows: torch.Tensor
    meta: torch.Tensor
    owners: Int32Array

    def tokens_per_rank(self, num_ranks: int) -> list[Int64Array]:
        """Ascending token indices for each destination; a token appears at most once a destination."""
        num_rows = len(self.owners)
        wanted = np.zeros((num_rows, num_ranks + 1), dtype=bool)
        wanted[np.arange(num_rows)[:, None], self.owners] = (
            True  # -1 marks the last column, which nobody reads
        )
        return [np.flatnonzero(wanted[:, rank]) for rank in range(num_ranks)]


def owners_of(topk_ids: torch.Tensor, shape: MoeShape) -> Int32Array:
    """Owner rank of each (token, slot); -1 stays -1 (floor division)."""
    ids: Int32Array = topk_ids.numpy()
    return ids // np.int32(shape.num_experts_per_rank)


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
    src_rank: npt.NDArray[np.uint8]
    result_index: Int64Array
    weights: npt.NDArray[np.float32]
    rows_per_expert: Int64Array

    @property
    def num_rows(self) -> int:
        return len(self.payload_row)

    def by_source(self, num_ranks: int) -> list[Int64Array]:
        """For each source the positions of its rows, ascending."""
        order = np.argsort(self.src_rank, kind="stable")
        ends = np.cumsum(np.bincount(self.src_rank, minlength=num_ranks))
        return np.split(order, ends[:-1])


def routed_rows(layout: HeapLayout, rank: int, meta: torch.Tensor, blocks: Sequence[Received]) -> RoutedRows:
    """Find this rank's routed rows in the received blocks, which must be in order of source rank.

    meta: [max_rows_received, meta_words] int32, this rank's buffer.
    """
    shape = layout.bundle.shape
    num_topk = shape.num_topk
    words: Int32Array = meta.numpy()
    if len(blocks) == 1:
        found = words[blocks[0].first : blocks[0].first + blocks[0].num_rows]
    else:
        found = np.concatenate([words[:0], *(words[b.first : b.first + b.num_rows] for b in blocks)])
    first_expert = rank * shape.num_experts_per_rank
    # As unsigned numbers, -1 and everything else outside this rank's range are large.
    local = (found[:, 1 : 1 + num_topk] - np.int32(first_expert)).view(np.uint32)
    flat = np.flatnonzero(local < shape.num_experts_per_rank)
    key_type = np.uint8 if shape.num_experts_per_rank <= 256 else np.uint16
    experts = local.ravel()[flat].astype(key_type)
    order = flat[np.argsort(experts, kind="stable")]
    rows, slots = np.divmod(order, num_topk)
    sizes = [b.num_rows for b in blocks]
    starts = np.concatenate([np.arange(b.first, b.first + b.num_rows) for b in blocks] or [np.arange(0)])
    sources = np.repeat(np.array([b.src_rank for b in blocks], dtype=np.uint8), sizes)
    return RoutedRows(
        payload_row=starts[rows],
        src_rank=sources[rows],
        result_index=found[rows, 0].astype(np.int64) * num_topk + slots,
        weights=found[:, 1 + num_topk : 1 + 2 * num_topk].view(np.float32)[rows, slots],
        rows_per_expert=np.bincount(experts, minlength=shape.num_experts_per_rank),
    )
