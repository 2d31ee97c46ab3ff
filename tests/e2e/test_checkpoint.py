"""A service that loads its weights from files gives the numbers of those weights."""

from __future__ import annotations

from pathlib import Path

import torch

from megamoe import MoeBatch, preset, random_layer_weights, save_layer
from megamoe.reference import QUANTIZED_REL_L2, quantized_moe, relative_l2, tolerance
from service.client import AsyncMoeGroup
from tests.e2e.harness import running


async def test_weights_come_from_the_checkpoint(tmp_path: Path) -> None:
    shape = preset("demo").with_ranks(2)
    weights = random_layer_weights(shape, seed=77)
    save_layer(tmp_path, 0, weights)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, shape.hidden, generator=generator).bfloat16()
    ids = torch.randint(0, shape.num_experts, (9, shape.num_topk), generator=generator, dtype=torch.int32)
    routing = torch.rand(9, shape.num_topk, generator=generator)
    with running("--num-ranks=2", "--num-layers=1", f"--checkpoint={tmp_path}") as service:
        async with AsyncMoeGroup.connect(service.front, holder="test") as moe, moe.step([9, 0]) as step:
            outs = await step.layer(0, [(x, ids, routing), None])
    want = quantized_moe(MoeBatch.of(shape, x, ids, routing), weights, shape)
    assert relative_l2(outs.hidden_states[0], want) <= tolerance(QUANTIZED_REL_L2, 9)
