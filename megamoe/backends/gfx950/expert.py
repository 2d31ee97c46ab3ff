"""One expert alone, through both GEMM kernels and the packed weights: what a binding is checked with."""

from __future__ import annotations

import torch

from megamoe import mx
from megamoe.backends.gfx950.launches import PackedMemory, RankLaunches, alone_specs
from megamoe.backends.gfx950.plan import plan_launch
from megamoe.backends.gfx950.record import NUM_WORDS, Word
from megamoe.backends.gfx950.shuffle import row_scales
from megamoe.layout import CACHE_LINE_BYTES, FlagKind


def expert_rows(
    launches: RankLaunches,
    w13: PackedMemory,
    w2: PackedMemory,
    expert: int,
    rows: torch.Tensor,
    timeout_s: float,
) -> torch.Tensor:
    """Up to 8 rows [m, hidden] bf16 on the host -> the expert's answer [m, hidden] there, fp32.

    Uses the rank's tables: not while a sub-step is under way. All that GEMM2 takes for peers is private memory here.
    """
    layout, shape, device = launches.layout, launches.shape, launches.device
    m, hidden = len(rows), shape.hidden
    plan = plan_launch(shape, 1, device.num_compute_units)
    specs = alone_specs(layout, block_m=plan.block_m, fp8=launches.fp8)
    codes, sf = mx.quantize_mxfp8(rows)
    launches.rows.write(torch.cat([codes, row_scales(sf)], dim=1))
    # Every expert before this one has no rows and none of the tiles; every one after it begins behind them.
    records = torch.zeros(shape.num_experts_per_rank, 4, dtype=torch.int32)
    records[expert, 0] = m
    records[expert + 1 :, 1], records[expert + 1 :, 2] = m, 1
    launches.experts.write(records)
    table = torch.zeros(m, 4, dtype=torch.int32)
    table[:, 0] = table[:, 1] = torch.arange(m)
    table[:, 2] = torch.ones(m).view(torch.int32)
    launches.row_table.write(table)
    flags_at = m * layout.result_bytes
    alone = device.allocate(flags_at + len(FlagKind) * CACHE_LINE_BYTES, "one expert's answer")
    bases = device.allocate(8 * shape.num_ranks, "one expert's addresses")
    control = device.allocate(8 * NUM_WORDS, "one expert's control")
    bases.write(torch.full((shape.num_ranks,), alone.address, dtype=torch.int64))
    words = [0] * NUM_WORDS
    words[Word.FLAGS_OFFSET] = flags_at
    control.write(torch.tensor(words, dtype=torch.int64))
    tables = [launches.experts.address, launches.row_table.address]
    device.stream.launch(
        launches.load(specs["gemm1"]), plan.gemm1_groups, plan.gemm_threads,
        [control.address, launches.rows.address, *tables, w13.codes.address, w13.scales.address, launches.inner.address,
         plan.gemm1_groups],
    )  # fmt: skip
    device.stream.launch(
        launches.load(specs["gemm2"]), plan.gemm2_groups, plan.gemm_threads,
        [control.address, bases.address, *tables, w2.codes.address, w2.scales.address, launches.inner.address,
         device.rank, plan.gemm2_groups],
    )  # fmt: skip
    device.stream.synchronize(timeout_s)
    if launches.fp8:
        answer = alone.read(torch.uint8, (m, layout.result_bytes))
        out = mx.dequantize_mxfp8(
            answer[:, :hidden], answer[:, hidden : hidden + layout.sf_bytes].contiguous()
        )
    else:
        out = alone.read(torch.bfloat16, (m, hidden)).float()
    for memory in (alone, bases, control):
        memory.free()
    return out
