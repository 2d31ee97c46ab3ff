"""Checks that a running process makes of itself. Imports the oracle, lazily, and no backend.

A wrong weight shuffle gives plausible numbers and a model that slowly says nonsense. So when weights are bound, one
expert is run through the backend's own layout and compared with the oracle before the binding takes effect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from megamoe.batch import MoeBatch
from megamoe.errors import BindingError, must_be
from megamoe.shape import MoeShape
from megamoe.weights import LayerWeights

ExpertRows = Callable[[int, torch.Tensor], torch.Tensor]
"""(local expert, rows [m, hidden] bf16) -> that expert's answer [m, hidden], any float type, on the host."""

_NUM_ROWS = 8
_BOUND = 2e-2
"""Relative L2 over fewer than 64 rows: twice the bound of the protocol's tolerances."""


def check_expert(weights: LayerWeights, shape: MoeShape, expert_rows: ExpertRows, *, slot_idx: int) -> None:
    """Compare one expert of `weights` as the backend computes it with the oracle. Raises BindingError.

    The expert is the middle one of the rank, so that a layout that is only right for the first is found. Weights
    that make non-finite numbers out of plain rows say nothing about the layout and are let through.
    """
    from megamoe.reference import quantized_moe, relative_l2

    expert = shape.num_experts_per_rank // 2
    generator = torch.Generator().manual_seed(slot_idx)
    rows = torch.randn(_NUM_ROWS, shape.hidden, generator=generator).bfloat16()
    batch = MoeBatch(
        rows, torch.zeros(_NUM_ROWS, 1, dtype=torch.int32), torch.ones(_NUM_ROWS, 1, dtype=torch.float32)
    )
    alone = replace(shape, num_experts=1, num_topk=1, num_ranks=1)
    want = quantized_moe(batch, weights.experts(expert, expert + 1), alone)
    if not bool(want.isfinite().all()):
        return
    difference = relative_l2(expert_rows(expert, rows).bfloat16(), want)
    if not difference <= _BOUND:
        raise BindingError(
            must_be(
                f"local expert {expert} of slot {slot_idx} as the backend laid it out",
                f"within relative L2 {_BOUND} of the oracle",
                f"{difference:.3g}",
            )
        )
