"""All ranks of a group in one process, as references see them, and a rank's rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megamoe.backends.hopper import record
from megamoe.backends.hopper.buffers import RankBuffers
from megamoe.backends.hopper.record import Word
from megamoe.layout import CACHE_LINE_BYTES, FlagKind


@dataclass(frozen=True)
class Group:
    """All ranks of a group in one process: their heaps (uint8) and buffers, in rank order."""

    heaps: Sequence[torch.Tensor]
    ranks: Sequence[RankBuffers]

    def word(self, rank: int, word: int) -> int:
        return int(self.ranks[rank].control[word])

    def region(self, rank: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A view of a rank's heap."""
        count = dtype.itemsize
        for size in shape:
            count *= size
        return self.heaps[rank][offset : offset + count].view(dtype).view(shape)

    def meta(self, rank: int) -> torch.Tensor:
        layout = self.ranks[rank].layout
        shape = (layout.max_rows_received, layout.meta_words)
        return self.region(rank, self.word(rank, Word.META_OFFSET), shape, torch.int32)

    def payload(self, rank: int) -> torch.Tensor:
        layout = self.ranks[rank].layout
        shape = (layout.max_rows_received, layout.row_bytes)
        return self.region(rank, self.word(rank, Word.ROWS_OFFSET), shape, torch.uint8)

    def counts(self, rank: int) -> torch.Tensor:
        layout = self.ranks[rank].layout
        shape = (layout.num_ranks, layout.counts_words)
        return self.region(rank, self.word(rank, Word.COUNTS_OFFSET), shape, torch.int32)

    def results(self, rank: int) -> torch.Tensor:
        """[C, num_topk, result_bytes] uint8."""
        layout = self.ranks[rank].layout
        shape = (layout.capacity, layout.bundle.shape.num_topk, layout.result_bytes)
        return self.region(rank, self.word(rank, Word.COMBINE_OFFSET), shape, torch.uint8)

    def flags(self, rank: int, kind: FlagKind) -> torch.Tensor:
        """[num_ranks] int64: what each source posted here."""
        offset = self.word(rank, Word.FLAGS_OFFSET) + kind * CACHE_LINE_BYTES
        return self.region(rank, offset, (self.ranks[rank].layout.num_ranks,), torch.int64)

    def post(self, rank: int, kind: FlagKind, infos: Sequence[int]) -> None:
        for dst, info in enumerate(infos):
            value = self.word(rank, Word.EPOCH) | (info | record.POSTED) << 32
            self.flags(dst, kind)[rank] = value - (1 << 64)


@dataclass(frozen=True)
class Batch:
    """A rank's rows as stages take them."""

    codes: torch.Tensor
    scales: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
