"""All ranks of a group in this process, with weights and launches that can be captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megamoe.backends import Launch
from megamoe.backends.hopper.buffers import (
    BoundLayer,
    RankBuffers,
    allocate_heap,
    control_words,
    packs_densely,
)
from megamoe.backends.hopper.floors import Rates, measure_rates
from megamoe.backends.hopper.fp8 import RowScales
from megamoe.backends.hopper.kernels import Device, Kernels
from megamoe.backends.hopper.packing import PackedMatrix, pack_w2, pack_w13
from megamoe.backends.hopper.plan import GemmPlan, devices_of_ranks
from megamoe.backends.hopper.record import FIRST_STATUS, NUM_WORDS, Word
from megamoe.backends.hopper.served import reach_peers
from megamoe.batch import MoeBatch
from megamoe.bundle import Deployment, Path, RowFormat, plan_bundle
from megamoe.layout import plan_layout
from megamoe.path import SubStep
from megamoe.shape import MoeShape

CAPACITIES = (512, 8192)
"""Of the groups that time decode and prefill."""


def deployment_of(shape: MoeShape, capacity: int, row_format: RowFormat = RowFormat.BF16) -> Deployment:
    """What is timed for steps of up to `capacity` tokens a rank."""
    return Deployment(
        shape=shape,
        backend="hopper",
        max_tokens_per_rank=capacity,
        fixed_slot_max=min(capacity, CAPACITIES[0]),
        small_m_capacities=(min(capacity, CAPACITIES[0]),),
        # Beyond what a step can have: decode sizes are not for large_m.
        large_m_capacity=capacity if capacity > CAPACITIES[0] else 2 * capacity,
        large_m_min_tokens=1024,
        combine_row_format=row_format,
    )


def random_packed(shape: MoeShape, device: torch.device, seed: int) -> BoundLayer:
    """Random codes and plausible scales, packed."""
    generator = torch.Generator(device=device).manual_seed(seed)
    experts, hidden, inter = shape.num_experts_per_rank, shape.hidden, shape.intermediate
    made = []
    for rows, columns in ((2 * inter, hidden), (hidden, inter)):
        codes = torch.randint(
            0, 256, (experts, rows, columns // 2), dtype=torch.uint8, device=device, generator=generator
        )
        # Codes have a standard deviation of 3: scales around 1 / (3 sqrt(K)) keep outputs near unit variance.
        scales = torch.randint(
            117, 121, (experts, rows, columns // 32), dtype=torch.uint8, device=device, generator=generator
        )
        made += [codes, scales]
    return BoundLayer(pack_w13(made[0], made[1]), pack_w2(made[2], made[3]))


def rolled(layer: BoundLayer) -> BoundLayer:
    """Another set of weights of the same kind: experts in another order, in memory of their own."""
    assert layer.w13 is not None
    assert layer.w2 is not None

    def roll(matrix: PackedMatrix) -> PackedMatrix:
        return replace(
            matrix,
            units=matrix.units.roll(1, 0).contiguous(),
            out_factor=matrix.out_factor.roll(1, 0).contiguous(),
            fp8=RowScales(matrix.fp8.base.roll(1, 0), matrix.fp8.factor.roll(1, 0)) if matrix.fp8 else None,
        )

    return BoundLayer(roll(layer.w13), roll(layer.w2), layer.version + 1)


class GroupBench:
    """All ranks of a group in this process, with weights, and launches that can be captured.

    Ranks that have a GPU to themselves hold two weight sets that take turns; ranks that share one hold a set each,
    which together fit no cache. rates: of this machine; measured here where they are not given.
    """

    def __init__(
        self,
        shape: MoeShape,
        capacity: int,
        row_format: RowFormat = RowFormat.BF16,
        rates: Rates | None = None,
    ) -> None:
        self.shape = shape
        self.bundle = plan_bundle(deployment_of(shape, capacity, row_format))
        layout = plan_layout(self.bundle, num_slots=1)
        numbers = devices_of_ranks(shape.num_ranks, torch.cuda.device_count())
        self.devices = [torch.device("cuda", number) for number in numbers]
        self.rates = rates or measure_rates(self.devices)
        heaps = [allocate_heap(layout, device) for device in self.devices]
        addresses = [heap.data_ptr() for heap in heaps]
        self.ranks: list[RankBench] = []
        for rank, device in enumerate(self.devices):
            reach_peers(heaps, device)
            buffers = RankBuffers(layout, rank=rank, heap_addresses=addresses, device=device)
            sms = torch.cuda.get_device_properties(device).multi_processor_count
            kernels = Kernels(buffers, Device(sms, numbers.count(numbers[rank])), row_format)
            self.ranks.append(RankBench(heaps[rank], kernels))
        latest: dict[torch.device, BoundLayer] = {}
        for rank_bench, device in zip(self.ranks, self.devices, strict=True):
            with torch.cuda.device(device):
                for _ in range(2 if self.devices.count(device) == 1 else 1):
                    before = latest.get(device)
                    latest[device] = rolled(before) if before else random_packed(shape, device, seed=1)
                    rank_bench.layers.append(latest[device])
        self._epoch = 0

    @property
    def ranks_a_gpu(self) -> int:
        return max(self.devices.count(device) for device in self.devices)

    def take(self, routes: Sequence[tuple[torch.Tensor, torch.Tensor]], path: Path, num_calls: int) -> None:
        """Make these routes (ids, weights of every rank) with random rows the batch of the launches that follow, of
        which a captured graph will hold num_calls."""
        counts = tuple(len(ids) for ids, _ in routes)
        self.path = path
        self.counts = counts
        for rank, (rank_bench, device) in enumerate(zip(self.ranks, self.devices, strict=True)):
            generator = torch.Generator(device=device).manual_seed(rank)
            x = torch.randn(counts[rank], self.shape.hidden, device=device, generator=generator).bfloat16()
            ids, weights = routes[rank]
            rank_bench.batch = MoeBatch(x, ids.to(device), weights.to(device))
            rank_bench.out = torch.full_like(x, float("nan"))
            rank_bench.pinned = torch.zeros((num_calls, NUM_WORDS), dtype=torch.int64, pin_memory=True)
        self.new_epochs()

    def new_epochs(self) -> None:
        """Control blocks with epochs that no launch has had; nothing may be under way."""
        sub_step = SubStep.whole(self.path, self.bundle.deployment.max_tokens_per_rank, self.counts)
        for call in range(len(self.ranks[0].pinned)):
            self._epoch += 1
            launch = Launch(
                slot_idx=0,
                epoch=self._epoch,
                buffer_idx=self._epoch & 1,
                sub_step=sub_step,
                closing=False,
                refused=False,
                deadline_s=0.0,
            )
            for rank_bench in self.ranks:
                words = control_words(
                    rank_bench.kernels.buffers.layout, launch, rank_bench.batch, rank_bench.out, 1_000_000_000
                )
                rank_bench.pinned[call] = torch.tensor(words, dtype=torch.int64)

    def check(self) -> None:
        """Raises RuntimeError when the last launch gave up or left an output unwritten."""
        for device in set(self.devices):
            torch.cuda.synchronize(device)
        for rank, rank_bench in enumerate(self.ranks):
            control = rank_bench.kernels.buffers.control.tolist()
            if control[Word.FAILED] or bool(torch.isnan(rank_bench.out.float()).any()):
                status = control[FIRST_STATUS : FIRST_STATUS + 8]
                raise RuntimeError(f"rank {rank} failed or left outputs unwritten: status {status}")


class RankBench:
    """One rank of a GroupBench."""

    def __init__(self, heap: torch.Tensor, kernels: Kernels) -> None:
        self.heap = heap
        self.kernels = kernels
        self.layers: list[BoundLayer] = []
        self.batch = MoeBatch(torch.empty(0), torch.empty(0), torch.empty(0))
        self.out = torch.empty(0)
        self.pinned = torch.empty(0)

    def before_gemms(self, path: Path, gemms: GemmPlan, call: int = 0) -> None:
        compact = packs_densely(path)
        buffers = self.kernels.buffers
        self.kernels.take(self.batch.num_rows, self.pinned[call])
        if compact:
            self.kernels.prepare()
        self.kernels.dispatch(self.batch.num_rows, compact=compact, quantized=False)
        self.kernels.index(gemms, buffers.layout.capacity, compact=compact)
        self.kernels.expand(gemms)

    def layer(self, path: Path, gemms: GemmPlan, call: int) -> None:
        """One whole sub-step; weight sets take turns."""
        layer = self.layers[call % len(self.layers)]
        if path in (Path.SMALL_M, Path.LARGE_M):
            self.kernels.take(self.batch.num_rows, self.pinned[call])
        else:
            self.before_gemms(path, gemms, call)
        if path is Path.SMALL_M:
            self.kernels.small_m(layer, gemms)
        elif path is Path.LARGE_M:
            self.kernels.quantize(self.batch.num_rows)
            self.kernels.large_m(layer, gemms)
        else:
            self.kernels.gemm1(layer, gemms)
            self.kernels.gemm2(layer, gemms)
            self.kernels.combine(self.batch.num_rows)
        self.kernels.tell()
