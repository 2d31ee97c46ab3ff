"""Instructions of one unit of each GEMM at the tuned shape, counted on the emulator and kept in counts.json.

A unit is one m-tile times one tile of columns, all of K. `python -m megamoe.backends.gfx950.model --count` measures.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from megamoe.shape import MoeShape

if TYPE_CHECKING:
    from megamoe.backends.gfx950.emulator.report import Traffic

RECORD = FilePath(__file__).with_name("counts.json")
TILES = (32, 64, 128)
HIDDEN, INTERMEDIATE = 7168, 3072
"""The shape of the record: DeepSeek-V4-Pro. At others counts are scaled by K."""


@dataclass(frozen=True)
class UnitCount:
    """Wave instructions of one unit, by the pipe that runs them, and bytes.

    matrix, vector, scalar, memory, lds: wave instructions of all waves. lds_bytes: read and written. waves: of a
    workgroup. weight_bytes, row_bytes: loaded. k: elements along K.
    """

    waves: int
    matrix: int
    vector: int
    scalar: int
    memory: int
    lds: int
    lds_bytes: int
    weight_bytes: int
    row_bytes: int
    k: int

    @property
    def instructions(self) -> int:
        return self.matrix + self.vector + self.scalar + self.memory + self.lds


@cache
def unit_counts() -> dict[tuple[str, int], UnitCount]:
    """The record: (kernel, rows of a tile) -> counts."""
    record = json.loads(RECORD.read_text())
    return {(one.pop("kernel"), one.pop("block_m")): UnitCount(**one) for one in record}


def by_pipe(traffic: Traffic) -> dict[str, int]:
    """Executed wave instructions by pipe."""
    prefixes = {"v_mfma": "matrix", "v_": "vector", "s_": "scalar", "ds_": "lds"}
    sums = dict.fromkeys((*prefixes.values(), "memory"), 0)
    for name, count in traffic.executed.items():
        pipe = next((pipe for prefix, pipe in prefixes.items() if name.startswith(prefix)), "memory")
        sums[pipe] += count
    return sums


def measure(kernel: str, block_m: int, hidden: int = HIDDEN, intermediate: int = INTERMEDIATE) -> UnitCount:
    """Run one full unit of gemm1 or gemm2 (K = hidden or intermediate) on an emulated device."""
    import torch

    from megamoe.backends import Launch
    from megamoe.backends.gfx950.device.emulated import WEIGHTS_CLASS, EmulatedGroup, EmulatedStream
    from megamoe.backends.gfx950.emulator import DeviceConfig
    from megamoe.backends.gfx950.launches import PackedMemory, RankLaunches, alone_specs
    from megamoe.backends.gfx950.lockstep import emulated
    from megamoe.backends.gfx950.plan import COLUMNS_1, COLUMNS_2, plan_launch
    from megamoe.backends.gfx950.shuffle import pack_layer
    from megamoe.batch import MoeBatch
    from megamoe.bundle import Path, plan_bundle
    from megamoe.layout import plan_layout
    from megamoe.path import SubStep
    from megamoe.weights import random_layer_weights

    waves = 8 if block_m == 64 else 4
    first = kernel == "gemm1"
    shape = MoeShape(
        hidden=hidden if first else COLUMNS_2 * waves, intermediate=COLUMNS_1 * waves if first else intermediate,
        num_experts=1, num_topk=1, num_ranks=1, swiglu_limit=10.0,
    )  # fmt: skip
    layout = plan_layout(plan_bundle(emulated(shape, max_tokens_per_rank=256, large_m_capacity=256)))
    group = EmulatedGroup(1, layout.num_bytes, DeviceConfig(num_cus=8))
    try:
        launches = RankLaunches(group.device(0), layout, fp8=False)
        w13, w2 = (
            PackedMemory.upload(launches.device, one, "w")
            for one in pack_layer(random_layer_weights(shape, seed=5), shape)
        )
        ids = torch.zeros(block_m, 1, dtype=torch.int32)
        batch = MoeBatch.of(shape, torch.zeros(block_m, shape.hidden).bfloat16(), ids, torch.ones(block_m, 1))
        sub_step = SubStep.whole(Path.COMPACT, 256, (block_m,))
        launch = Launch(
            slot_idx=0, epoch=1, buffer_idx=0, sub_step=sub_step, closing=False, refused=False,
            deadline_s=time.monotonic() + 60,
        )  # fmt: skip
        launches.begin(launch, batch, 10**12)
        records = torch.zeros(block_m, 4, dtype=torch.int32)
        records[:, 0] = records[:, 1] = torch.arange(block_m)
        launches.experts.write(torch.tensor([[block_m, 0, 0, 0]], dtype=torch.int32))
        launches.row_table.write(records)
        plan = replace(plan_launch(shape, block_m, 1), block_m=block_m, gemm1_groups=1, gemm2_groups=1)
        code = launches.load(alone_specs(layout, block_m=block_m, fp8=False)[kernel])
        (launches.gemm1 if first else launches.gemm2)(code, plan, w13 if first else w2)
        launches.device.stream.synchronize(60.0)
        stream = launches.device.stream
        assert isinstance(stream, EmulatedStream)
        (handle,) = stream.take_handles()
        traffic = handle.traffic
    finally:
        group.devices.close()
    weights = traffic.loaded(WEIGHTS_CLASS)
    return UnitCount(
        waves=plan.gemm_threads // 64, **by_pipe(traffic), lds_bytes=sum(traffic.lds_bytes), weight_bytes=weights,
        row_bytes=int(traffic.bytes[0].sum()) - weights, k=hidden if first else intermediate,
    )  # fmt: skip


def write_record() -> None:
    """Measure all units again."""
    record = [
        {"kernel": kernel, "block_m": block_m, **asdict(measure(kernel, block_m))}
        for kernel in ("gemm1", "gemm2")
        for block_m in TILES
    ]
    RECORD.write_text("[\n" + ",\n".join(json.dumps(one) for one in record) + "\n]\n")
    unit_counts.cache_clear()
