"""The fused paths at the capacities that deployments use, with as many rows as these hold, at a small width."""

from __future__ import annotations

import pytest
import torch

from megamoe.backends.gfx950.lockstep import Ranks, batches_of, emulated, shape_of
from megamoe.bundle import Path


@pytest.mark.parametrize("rows", [[512, 300, 0, 1, 512, 17, 256, 100], [250, 256, 3, 0, 256, 64, 1, 9]])
def test_small_m_at_256_and_512_tokens_a_rank(rows: list[int]) -> None:
    """Eight ranks, hot experts, all detectors: the bits of compact."""
    shape = shape_of(128, 128, num_ranks=8, num_experts=32, num_topk=2)
    deployment = emulated(shape, max_tokens_per_rank=512, small_m_capacities=(256, 512), large_m_capacity=512)
    with Ranks(deployment, seed=1) as ranks:
        ranks.bind()
        batches = batches_of(shape, rows, "zipf")
        compact, _ = ranks.run(Path.COMPACT, batches, epoch=0)
        small, _ = ranks.run(Path.SMALL_M, batches, epoch=1)
        assert torch.equal(torch.cat(small), torch.cat(compact))
        assert ranks.reports() == []


def test_large_m_at_8192_tokens_a_rank() -> None:
    """Two ranks, without detectors: the bits of compact, and no row left out."""
    shape = shape_of(128, 128, num_ranks=2, num_experts=8, num_topk=2)
    deployment = emulated(shape, max_tokens_per_rank=8192, large_m_capacity=8192)
    with Ranks(deployment, seed=1, checked=False) as ranks:
        ranks.bind()
        batches = batches_of(shape, [8192, 5000], "uniform")
        compact, _ = ranks.run(Path.COMPACT, batches, epoch=0)
        large, _ = ranks.run(Path.LARGE_M, batches, epoch=1)
        assert torch.equal(torch.cat(large), torch.cat(compact))
        assert large[0].shape == (8192, shape.hidden)
        assert large[0].any(dim=1).all()
