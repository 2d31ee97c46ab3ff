"""All ranks of a group in one process, taking turns: stage after stage, each for all ranks, without ever waiting.

Runs the torch references on any device, or the kernels on one stream of one GPU, over the same buffers. The protocol
is the real one (slots, counts, flags, double buffers); only its overlap is missing. Tests use it to compare every
stage of the kernels with its reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megamoe import mx
from megamoe.backends import Launch
from megamoe.backends.hopper import references
from megamoe.backends.hopper.buffers import (
    BoundLayer,
    RankBuffers,
    allocate_heap,
    control_words,
    packs_densely,
)
from megamoe.backends.hopper.plan import GemmPlan
from megamoe.backends.hopper.references import Batch, Group
from megamoe.backends.hopper.served import gemm_plan
from megamoe.batch import MoeBatch
from megamoe.bundle import Bundle, Path
from megamoe.layout import plan_layout
from megamoe.path import SubStep

IDENTITY = BoundLayer(None, None)
_TIMEOUT_NS = 2_000_000_000


@dataclass
class Lockstep:
    """A group of virtual ranks and, where a stage is to run as a kernel, its launches by rank."""

    bundle: Bundle
    device: torch.device
    kernels: Sequence[Any] = ()
    """megamoe.backends.hopper.kernels.Kernels of each rank; empty: references only."""
    group: Group = field(init=False)

    def __post_init__(self) -> None:
        layout = plan_layout(self.bundle, num_slots=1)
        heaps = [allocate_heap(layout, self.device) for _ in range(layout.num_ranks)]
        addresses = [heap.data_ptr() for heap in heaps]
        ranks = [
            RankBuffers(layout, rank=rank, heap_addresses=addresses, device=self.device)
            for rank in range(layout.num_ranks)
        ]
        self.group = Group(heaps, ranks)

    @property
    def num_ranks(self) -> int:
        return self.bundle.shape.num_ranks

    def forward(
        self,
        batches: Sequence[MoeBatch],
        layers: Sequence[BoundLayer],
        path: Path,
        epoch: int,
        gemms: GemmPlan | None = None,
    ) -> list[torch.Tensor]:
        """Outputs [n, hidden] bf16 of all ranks, on the group's device. path: fixed_slot or compact. gemms: None =
        those that are served."""
        counts = tuple(batch.num_rows for batch in batches)
        capacity = min(c for c in self.bundle.capacities(path) if c >= max(counts))
        sub_step = SubStep.whole(path, capacity, counts)
        launch = Launch(
            slot_idx=0,
            epoch=epoch,
            buffer_idx=epoch & 1,
            sub_step=sub_step,
            closing=False,
            refused=False,
            deadline_s=0.0,
        )
        device_batches = [_on(batch, self.device) for batch in batches]
        outs = [
            torch.full(
                (batch.num_rows, self.bundle.shape.hidden), float("nan"), device=self.device
            ).bfloat16()
            for batch in batches
        ]
        for rank, (batch, out) in enumerate(zip(device_batches, outs, strict=True)):
            words = control_words(self.group.ranks[rank].layout, launch, batch, out, _TIMEOUT_NS)
            self.group.ranks[rank].control.copy_(torch.tensor(words, dtype=torch.int64))
        gemms = gemms or gemm_plan(self.bundle, path, max(counts))
        compact = packs_densely(path)
        if self.kernels:
            self._kernels(device_batches, layers, gemms, capacity, compact)
            return outs
        return self._references([_quantized(batch) for batch in device_batches], layers, gemms, compact)

    def _references(
        self, batches: Sequence[Batch], layers: Sequence[BoundLayer], gemms: GemmPlan, compact: bool
    ) -> list[torch.Tensor]:
        group, ranks = self.group, range(self.num_ranks)
        row_format = self.bundle.deployment.combine_row_format
        for rank in ranks if compact else ():
            references.prepare(group, rank, batches[rank])
        for rank in ranks:
            references.dispatch(group, rank, batches[rank], compact=compact)
        for rank in ranks:
            own = layers[rank].gemms(gemms)
            references.index(group, rank, own, compact=compact)
            if layers[rank].w13 is None:
                references.identity(group, rank, row_format)
            elif own.is_fp8:
                references.expand_fp8(group, rank)
                references.gemm1_fp8(group, rank, layers[rank])
                references.regroup(group, rank)
                references.gemm2_fp8(group, rank, layers[rank])
            else:
                references.expand(group, rank)
                references.gemm1(group, rank, layers[rank])
                references.gemm2(group, rank, layers[rank], row_format)
            references.post_return(group, rank, row_format)
        return [references.combine(group, rank, batches[rank], row_format) for rank in ranks]

    def _kernels(
        self,
        batches: Sequence[MoeBatch],
        layers: Sequence[BoundLayer],
        gemms: GemmPlan,
        capacity: int,
        compact: bool,
    ) -> None:
        most = max(batch.num_rows for batch in batches)
        for kernels in self.kernels if compact else ():
            kernels.prepare()
        for kernels, batch in zip(self.kernels, batches, strict=True):
            kernels.dispatch(most, compact=compact, quantized=batch.hidden_states_sf is not None)
        for kernels, layer in zip(self.kernels, layers, strict=True):
            own = layer.gemms(gemms)
            kernels.index(own, capacity, compact=compact)
            if layer.w13 is None:
                kernels.identity()
            else:
                kernels.expand(own)
                kernels.gemm1(layer, own)
                kernels.gemm2(layer, own)
            kernels.post_return()
        for kernels in self.kernels:
            kernels.combine(most, post=False)


def _on(batch: MoeBatch, device: torch.device) -> MoeBatch:
    scales = batch.hidden_states_sf
    return MoeBatch(
        batch.hidden_states.to(device),
        batch.topk_ids.to(device),
        batch.topk_weights.to(device),
        None if scales is None else scales.to(device),
    )


def _quantized(batch: MoeBatch) -> Batch:
    if batch.hidden_states_sf is None:
        codes, scales = references.quantize(batch.hidden_states)
    else:
        scales = batch.hidden_states_sf
        bad = (scales == mx.SCALE_NAN).repeat_interleave(mx.BLOCK, dim=1)
        codes = batch.hidden_states.masked_fill(bad, 0)
    return Batch(codes, scales, batch.topk_ids, batch.topk_weights)
