"""The rows that a simulated attention tier sends: made once, then only sliced, so that sending costs the tier nothing.

Hidden states are random bf16. Expert ids come from a named routing distribution, another draw for every layer, and
which slice of the pool a rank sends depends only on (seed, step, layer, rank): the same in any order of execution.
"""

from __future__ import annotations

import torch

from megamoe import MoeShape, route_rank
from megamoe.errors import ConfigError, must_be

RankRows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(hidden_states [n, hidden] bf16, topk_ids [n, num_topk] int32, topk_weights [n, num_topk] fp32) of one rank."""

MIN_POOL_ROWS = 4096
_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class RowSource:
    """Pools of rows for every layer. max_rows: the most rows that one rank sends in a step.

    Raises ConfigError when max_rows is below 1, InvalidArgumentError for an unknown distribution.
    """

    def __init__(
        self,
        shape: MoeShape,
        num_layers: int,
        max_rows: int,
        *,
        seed: int = 42,
        distribution: str = "uniform",
    ) -> None:
        if max_rows < 1:
            raise ConfigError(must_be("max_rows", "at least 1", max_rows))
        self._seed = seed
        self._num_rows = max(2 * max_rows, MIN_POOL_ROWS)
        generator = torch.Generator().manual_seed(seed)
        self._hidden = torch.randn(self._num_rows, shape.hidden, generator=generator).to(torch.bfloat16)
        base_ids, self._weights = route_rank(shape, distribution, self._num_rows, seed=seed, rank=0)
        self._ids = []
        for _ in range(num_layers):
            if distribution == "uniform":
                names = torch.randperm(shape.num_experts, generator=generator).to(torch.int32)
                self._ids.append(names[base_ids.long()].contiguous())
            else:
                # Distributions put their skew into the first rows of a batch: a slice must be like the whole.
                self._ids.append(base_ids[torch.randperm(self._num_rows, generator=generator)].contiguous())

    def batches(
        self, step_idx: int, layer_idx: int, num_rows_per_rank: tuple[int, ...]
    ) -> list[RankRows | None]:
        """What every rank sends for a layer of a step; None for a rank without rows. Views, not copies."""
        return [
            self._slice(step_idx, layer_idx, rank, num_rows) if num_rows else None
            for rank, num_rows in enumerate(num_rows_per_rank)
        ]

    def _slice(self, step_idx: int, layer_idx: int, rank: int, num_rows: int) -> RankRows:
        mixed = self._seed
        for part in (step_idx, layer_idx, rank):
            mixed = ((mixed ^ part) * _MIX + 1) & _MASK
            mixed ^= mixed >> 29
        first = mixed % (self._num_rows - num_rows + 1)
        rows = slice(first, first + num_rows)
        return self._hidden[rows], self._ids[layer_idx][rows], self._weights[rows]
