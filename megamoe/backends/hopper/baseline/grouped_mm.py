"""Experts in bf16 through torch's grouped matmul."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from megamoe.backends.hopper.baseline.layer import Baseline
from megamoe.backends.hopper.baseline.routes import Routes
from megamoe.shape import MoeShape


class GroupedMm(Baseline):
    """w13 bf16 [experts, 2 * intermediate, hidden], gate rows first; w2 bf16 [experts, hidden, intermediate]."""

    def __init__(self, shape: MoeShape, w13: torch.Tensor, w2: torch.Tensor) -> None:
        super().__init__(shape)
        self.w13, self.w2 = w13, w2

    @classmethod
    def random(cls, shape: MoeShape, device: torch.device, seed: int) -> GroupedMm:
        """Weights that keep outputs near unit variance."""
        generator = torch.Generator(device).manual_seed(seed)

        def weights(rows: int, columns: int) -> torch.Tensor:
            out = torch.empty(
                (shape.num_experts_per_rank, rows, columns), dtype=torch.bfloat16, device=device
            )
            return out.normal_(0, columns**-0.5, generator=generator)

        return cls(
            shape, weights(2 * shape.intermediate, shape.hidden), weights(shape.hidden, shape.intermediate)
        )

    def experts(self, received: torch.Tensor, routes: Routes) -> torch.Tensor:
        if not len(received):
            return received
        both = torch._grouped_mm(received[routes.by_expert], self.w13.transpose(-2, -1), offs=routes.ends)
        gate, up = both.chunk(2, dim=-1)
        if limit := self.shape.swiglu_limit:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        rows = torch._grouped_mm(silu(gate) * up, self.w2.transpose(-2, -1), offs=routes.ends)
        out = torch.empty_like(rows)
        out[routes.by_expert] = rows
        return out
