"""One expert alone, through both GEMM kernels and the packed weights: what a binding is checked with."""

from __future__ import annotations

import torch

from megamoe import mx
from megamoe.backends.hopper import packing
from megamoe.backends.hopper.buffers import BoundLayer
from megamoe.backends.hopper.kernels import Kernels
from megamoe.backends.hopper.plan import BLOCK_ROWS, Counter, GemmPlan


def expert_rows(
    kernels: Kernels, layer: BoundLayer, gemms: GemmPlan, expert: int, rows: torch.Tensor
) -> torch.Tensor:
    """Up to 8 rows [m, hidden] bf16 on the host -> the expert's answer [m, hidden] there, fp32.

    Uses the rank's tables: not while a sub-step is under way. Runs on the current stream and waits for it.
    """
    buffers = kernels.buffers
    hidden, device = buffers.shape.hidden, buffers.device
    streaming = gemms.stream_max_rows > 0
    x = torch.zeros((BLOCK_ROWS, buffers.sizes.image_columns), dtype=torch.bfloat16, device=device)
    x[: len(rows), :hidden] = mx.dequantize_mxfp8(*mx.quantize_mxfp8(rows.to(device)))
    buffers.image[:BLOCK_ROWS] = packing.to_stream_order(x) if streaming else packing.to_tiled_order(x)
    answer = torch.zeros((len(rows), buffers.layout.result_bytes), dtype=torch.uint8, device=device)
    addresses = [answer.data_ptr() + number * answer.stride(0) for number in range(len(rows))]
    buffers.row_address[: len(rows)] = torch.tensor(addresses, dtype=torch.int64, device=device)
    buffers.row_weight[: len(rows)] = 1.0
    sizes, work = buffers.sizes, buffers.work
    first, counter = (
        (sizes.stream_offset, Counter.NUM_STREAM_ENTRIES)
        if streaming
        else (sizes.tiled_offset, Counter.NUM_TILED_ENTRIES)
    )
    work[: sizes.stream_offset] = 0
    work[counter] = 1
    work[first : first + 4] = torch.tensor([expert, 0, len(rows), 0], dtype=torch.int32, device=device)
    kernels.gemm1(layer, gemms)
    kernels.gemm2(layer, gemms, plain_rows=True)
    return answer.view(torch.bfloat16).float().cpu()
