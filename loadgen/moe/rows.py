"""The rows that a simulated attention tier sends: made once, then only sliced, so that sending costs the tier nothing.

Hidden states are random bf16; expert ids and weights come from a routing model. What a rank sends depends only on
(seed, step, layer, rank): the same in any order of execution.
"""

from __future__ import annotations

import torch

from loadgen.moe.routing_model import MIN_POOL_ROWS, Drift, RoutingModel, mixed
from megamoe import MoeShape

RankRows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(hidden_states [n, hidden] bf16, topk_ids [n, num_topk] int32, topk_weights [n, num_topk] fp32) of one rank."""


class RowSource:
    """Pools of rows for every layer. max_rows: the most rows that one rank sends in a step.

    Raises ConfigError when max_rows is below 1 or the routing is unknown.
    """

    def __init__(
        self,
        shape: MoeShape,
        num_layers: int,
        max_rows: int,
        *,
        seed: int = 42,
        distribution: str = "uniform",
        drift: Drift | None = None,
    ) -> None:
        self._seed = seed
        self._routing = RoutingModel(shape, num_layers, max_rows, distribution, seed=seed, drift=drift)
        self._num_rows = max(2 * max_rows, MIN_POOL_ROWS)
        generator = torch.Generator().manual_seed(seed + 1)
        self._hidden = torch.randn(self._num_rows, shape.hidden, generator=generator).to(torch.bfloat16)

    def batches(
        self, step_idx: int, layer_idx: int, num_rows_per_rank: tuple[int, ...]
    ) -> list[RankRows | None]:
        """What every rank sends for a layer of a step; None for a rank without rows. Views, not copies."""
        return [
            self._slice(step_idx, layer_idx, rank, num_rows) if num_rows else None
            for rank, num_rows in enumerate(num_rows_per_rank)
        ]

    def _slice(self, step_idx: int, layer_idx: int, rank: int, num_rows: int) -> RankRows:
        first = mixed(self._seed, step_idx, layer_idx, rank) % (self._num_rows - num_rows + 1)
        ids, weights = self._routing.slice(step_idx, layer_idx, rank, num_rows)
        return self._hidden[first : first + num_rows], ids, weights
