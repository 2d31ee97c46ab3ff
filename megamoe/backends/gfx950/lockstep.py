"""Emulated ranks driven by one thread: every rank's kernels are queued, then the device runs them all. For tests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import TracebackType
from typing import Any

import torch

from megamoe.backends import Launch
from megamoe.backends.gfx950.backend import Gfx950Backend
from megamoe.backends.gfx950.device.emulated import EmulatedGroup
from megamoe.backends.gfx950.emulator import DeviceConfig
from megamoe.batch import MoeBatch, SubStepReport
from megamoe.bundle import Deployment, Path, plan_bundle
from megamoe.layout import plan_layout
from megamoe.path import SubStep
from megamoe.routing import route
from megamoe.shape import MoeShape
from megamoe.weights import LayerWeights, random_layer_weights, shard

NUM_CUS = 16
"""Compute units of the emulated devices unless asked otherwise: small grids leave fewer waves to watch."""


def shape_of(hidden: int = 256, intermediate: int = 128, **settings: Any) -> MoeShape:
    """A small shape with the sources' top-6 and SwiGLU limit."""
    wanted: dict[str, Any] = dict(num_experts=32, num_topk=6, num_ranks=8, num_layers=2, swiglu_limit=10.0)
    return MoeShape(hidden=hidden, intermediate=intermediate, **{**wanted, **settings})


def emulated(shape: MoeShape, **settings: Any) -> Deployment:
    """The emulated profile of the protocol (fixed_slot 32, compact 64) at a shape."""
    wanted: dict[str, Any] = dict(
        backend="gfx950", gfx950_emulated=True, max_tokens_per_rank=64, fixed_slot_max=32, small_m_capacities=(8, 16),
        large_m_capacity=64, large_m_min_tokens=48,
    )  # fmt: skip
    return Deployment(shape=shape, **{**wanted, **settings})


@lru_cache(maxsize=8)
def layer_weights(shape: MoeShape, layer_idx: int = 0) -> LayerWeights:
    """All experts of a layer."""
    return random_layer_weights(shape, seed=11, layer_idx=layer_idx)


def batches_of(
    shape: MoeShape,
    rows: Sequence[int],
    distribution: str = "uniform",
    *,
    seed: int = 0,
    exact: bool = False,
    **routing: float,
) -> list[MoeBatch]:
    """One batch a rank. exact: rows that MXFP8 holds exactly, and power-of-two weights."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for count, (ids, weights) in zip(
        rows, route(shape, distribution, rows, seed=seed, **routing), strict=True
    ):
        if exact:
            x = torch.randint(-15, 16, (count, shape.hidden), generator=generator).bfloat16()
            weights = torch.exp2(torch.randint(-3, 2, weights.shape, generator=generator).float())
        else:
            x = torch.randn(count, shape.hidden, generator=generator).bfloat16()
        out.append(MoeBatch.of(shape, x, ids, weights))
    return out


@dataclass
class Ranks:
    """A group of backends on emulated devices. Use it as a context."""

    deployment: Deployment
    checked: bool = True
    seed: int = 0
    num_cus: int = NUM_CUS
    use_graphs: bool = True
    backends: list[Gfx950Backend] = field(init=False)

    def __post_init__(self) -> None:
        shape = self.deployment.shape
        bundle = plan_bundle(self.deployment)
        settings: dict[str, Any] = dict(num_ranks=shape.num_ranks, seed=self.seed, num_cus=self.num_cus)
        config = DeviceConfig.checked(**settings) if self.checked else DeviceConfig(**settings)
        self.group = EmulatedGroup(shape.num_ranks, plan_layout(bundle).num_bytes, config)
        self.backends = [
            Gfx950Backend(bundle, self.group.device(rank), use_graphs=self.use_graphs)
            for rank in range(shape.num_ranks)
        ]

    @property
    def shape(self) -> MoeShape:
        return self.deployment.shape

    def bind(self, slot_idx: int = 0, layer_idx: int = 0) -> LayerWeights:
        """Bind a layer's experts on all ranks; returns all of them."""
        weights = layer_weights(self.shape, layer_idx)
        for rank, backend in enumerate(self.backends):
            backend.bind(slot_idx, shard(weights, self.shape, rank))
        return weights

    def bind_identity(self, slot_idx: int = 0) -> None:
        for backend in self.backends:
            backend.bind_identity(slot_idx)

    def begin(
        self,
        path: Path,
        batches: Sequence[MoeBatch],
        *,
        epoch: int = 0,
        slot_idx: int = 0,
        refusing: Sequence[int] = (),
        ranks: Sequence[int] | None = None,
        stages: Sequence[str] | None = None,
        timeout_s: float = 100.0,
    ) -> list[torch.Tensor]:
        """Queue a sub-step (or some stages of it) on all (or some) ranks; returns their outputs, to be filled by
        `finish`."""
        counts = tuple(batch.num_rows for batch in batches)
        capacity = plan_bundle(self.deployment).capacities(path)[-1]
        sub_step = SubStep.whole(path, capacity, counts)
        outs = []
        for rank, backend in enumerate(self.backends):
            batch = MoeBatch.empty(self.shape) if rank in refusing else batches[rank]
            outs.append(torch.full((batch.num_rows, self.shape.hidden), float("nan"), dtype=torch.bfloat16))
            if ranks is not None and rank not in ranks:
                continue
            launch = Launch(
                slot_idx=slot_idx, epoch=epoch % 2**32, buffer_idx=epoch & 1, sub_step=sub_step, closing=False,
                refused=rank in refusing, deadline_s=time.monotonic() + timeout_s,
            )  # fmt: skip
            backend.begin(launch, batch, outs[rank])
            for stage in backend.stages(path) if stages is None else stages:
                backend.launch(stage)
        return outs

    def run(
        self, path: Path, batches: Sequence[MoeBatch], **settings: Any
    ) -> tuple[list[torch.Tensor], list[SubStepReport]]:
        """One sub-step on all ranks."""
        outs = self.begin(path, batches, **settings)
        return outs, [backend.finish() for backend in self.backends]

    def schedule(self, seed: int) -> None:
        """Another order of waves from now on."""
        self.group.devices.schedule(seed)

    def reports(self) -> list[str]:
        """What the detectors found."""
        return [report.text for report in self.group.devices.reports()]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.group.devices.close()
