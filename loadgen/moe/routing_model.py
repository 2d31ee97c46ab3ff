"""Which experts the rows of a simulated tier name: pools of top-k ids, made once, of which every step takes slices.

`uniform` and the named skews are those of the library. `drift` is the nearest to traffic: every layer has experts of
its own that are popular, and their popularity moves slowly, so that a step looks like the one before and unlike one a
few minutes later. The pool's rows are drawn along one period of that movement and a step's place in the period decides
where its slices begin. Which rows a rank sends depends only on (seed, step, layer, rank).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from megamoe import DISTRIBUTIONS, MoeShape, route_rank
from megamoe.errors import ConfigError, must_be

DRIFT = "drift"
ROUTINGS = (*DISTRIBUTIONS, DRIFT)

MIN_POOL_ROWS = 4096
_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True)
class Drift:
    """How popularity moves. sigma: standard deviation of its logarithm over experts. period_steps: steps after which
    it comes round again. num_keyframes: independent popularities in a period, with smooth ways between them.
    jitter: how far around a step's place its ranks take their rows, as a share of the period.

    Chosen, not measured: at 384 experts and top-6, sigma 0.7 makes the hottest expert about five times as busy as the
    mean, and at 100 ms a step popularity is another after about half a minute. Raises ConfigError naming the field.
    """

    sigma: float = 0.7
    period_steps: int = 4096
    num_keyframes: int = 16
    jitter: float = 1 / 64

    def __post_init__(self) -> None:
        if self.sigma < 0:
            raise ConfigError(must_be("sigma", "at least 0", self.sigma))
        for name in ("period_steps", "num_keyframes"):
            if getattr(self, name) < 2:
                raise ConfigError(must_be(name, "at least 2", getattr(self, name)))
        if not 0 <= self.jitter <= 1:
            raise ConfigError(must_be("jitter", "from 0 to 1", self.jitter))


class RoutingModel:
    """Routes for every layer. max_rows: the most rows that one rank sends in a step.

    Raises ConfigError when max_rows is below 1 or the routing is unknown.
    """

    def __init__(
        self,
        shape: MoeShape,
        num_layers: int,
        max_rows: int,
        routing: str,
        *,
        seed: int = 42,
        drift: Drift | None = None,
    ) -> None:
        if max_rows < 1:
            raise ConfigError(must_be("max_rows", "at least 1", max_rows))
        if routing not in ROUTINGS:
            raise ConfigError(must_be("routing", f"one of {', '.join(ROUTINGS)}", repr(routing)))
        self._seed = seed
        self._drift = (drift or Drift()) if routing == DRIFT else None
        self._num_rows = max(4 * max_rows if self._drift else 2 * max_rows, MIN_POOL_ROWS)
        generator = torch.Generator().manual_seed(seed)
        ids, self.weights = self._base(shape, routing, generator)
        self.ids_per_layer = [self._layer(shape, routing, ids, generator) for _ in range(num_layers)]
        if self._drift:  # slices may run over the end of the period into its beginning
            self.weights = torch.cat([self.weights, self.weights[:max_rows]])
            self.ids_per_layer = [torch.cat([ids, ids[:max_rows]]) for ids in self.ids_per_layer]

    def slice(
        self, step_idx: int, layer_idx: int, rank: int, num_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(topk_ids [n, num_topk] int32, topk_weights [n, num_topk] fp32) of a rank: views, not copies."""
        first = self._first(step_idx, layer_idx, rank, num_rows)
        rows = slice(first, first + num_rows)
        return self.ids_per_layer[layer_idx][rows], self.weights[rows]

    def _first(self, step_idx: int, layer_idx: int, rank: int, num_rows: int) -> int:
        value = mixed(self._seed, step_idx, layer_idx, rank)
        if self._drift is None:
            return value % (self._num_rows - num_rows + 1)
        place = step_idx % self._drift.period_steps / self._drift.period_steps
        span = max(int(self._num_rows * self._drift.jitter), 1)
        return (int(place * self._num_rows) + value % span) % self._num_rows

    def _base(
        self, shape: MoeShape, routing: str, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        uniform, weights = route_rank(
            shape, routing if routing in DISTRIBUTIONS else "uniform", self._num_rows, seed=self._seed, rank=0
        )
        if self._drift is None:
            return uniform, weights
        # One cyclic way through independent keyframes; the weights' squares sum to 1, so sigma stays what it is.
        keys = torch.randn(self._drift.num_keyframes, shape.num_experts, generator=generator)
        at = torch.arange(self._num_rows) / self._num_rows * self._drift.num_keyframes
        before = at.long() % self._drift.num_keyframes
        angle = (at - at.floor())[:, None] * (math.pi / 2)
        scores = angle.cos() * keys[before] + angle.sin() * keys[(before + 1) % self._drift.num_keyframes]
        # The top k of popularity plus Gumbel noise are draws without replacement.
        races = torch.empty(scores.shape).exponential_(generator=generator)
        scores = self._drift.sigma * scores - races.log()
        return scores.topk(shape.num_topk, dim=-1).indices.to(torch.int32), weights

    def _layer(
        self, shape: MoeShape, routing: str, base: torch.Tensor, generator: torch.Generator
    ) -> torch.Tensor:
        """The base pool as this layer has it."""
        if routing in ("uniform", DRIFT):
            names = torch.randperm(shape.num_experts, generator=generator).to(torch.int32)
            ids = names[base.long()]
            if self._drift:
                start = int(torch.randint(self._num_rows, (1,), generator=generator))
                ids = ids.roll(start, dims=0)
            return ids.contiguous()
        # Distributions put their skew into the first rows of a batch: a slice must be like the whole.
        return base[torch.randperm(self._num_rows, generator=generator)].contiguous()


def mixed(seed: int, *parts: int) -> int:
    """A well-mixed 64-bit value of the parts: the same in any order of execution."""
    value = seed & _MASK
    for part in parts:
        value = ((value ^ part) * _MIX + 1) & _MASK
        value ^= value >> 29
    return value
