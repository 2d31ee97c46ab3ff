"""Both baselines are the same layer: torch's experts and those of triton_kernels on the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megamoe.backends.hopper.baseline.grouped_mm import GroupedMm
from megamoe.backends.hopper.baseline.mxfp4 import Mxfp4
from megamoe.backends.hopper.baseline.routes import routes_of
from megamoe.mx import dequantize_mxfp4
from megamoe.reference import relative_l2
from megamoe.routing import route
from megamoe.shape import MoeShape

SHAPE = MoeShape(hidden=1024, intermediate=512, num_experts=16, num_topk=4, num_ranks=1, swiglu_limit=2.0)


@pytest.mark.needs_triton_kernels
@pytest.mark.parametrize("tokens", [1, 16, 100, 1000])
def test_experts_of_both_baselines_agree(tokens: int, pytestconfig: pytest.Config) -> None:
    device = torch.device("cuda", 0)
    generator = torch.Generator(device).manual_seed(3)

    def draw(low: int, high: int, rows: int, width: int) -> torch.Tensor:
        size = (SHAPE.num_experts, rows, width)
        return torch.randint(low, high, size, dtype=torch.uint8, device=device, generator=generator)

    w13 = draw(0, 256, 1024, 512), draw(118, 122, 1024, 32)
    w2 = draw(0, 256, 1024, 256), draw(118, 122, 1024, 16)
    dense = [dequantize_mxfp4(*matrix).bfloat16() for matrix in (w13, w2)]
    layers = [GroupedMm(SHAPE, *dense), Mxfp4(SHAPE, w13, w2, Path(pytestconfig.option.triton_kernels))]
    routes = routes_of(SHAPE, route(SHAPE, "zipf", [tokens], seed=1), 0, device)
    x = torch.randn((tokens, SHAPE.hidden), device=device, generator=generator).bfloat16()
    plain, mxfp4 = (layer.layer(x, routes, lambda rows, *_: rows) for layer in layers)
    assert relative_l2(mxfp4, plain) < 1e-2
