"""GEMM2 of the FP8 kernel (fp8_gemm.py): intermediate rows times the down projection, bf16 rows to their sources."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.backends.hopper.device import fp8_gemm, gemm2
from megamoe.backends.hopper.device.chain import after_previous_gluon


@gluon.jit
def _finish(acc, rest, row, rows, unit, HIDDEN: gl.constexpr):
    row_address, row_weight = rest
    out: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    # Rounded before it crosses shared memory: half the bytes.
    y = gl.convert_layout(gl.permute(acc.to(gl.bfloat16), (1, 0)), out)
    gemm2.store_rows(y, row_address, row_weight, row, rows, unit * 64, HIDDEN, False)


@gluon.jit
def gemm2_fp8_kernel(
    row_address, row_weight, words, weight_scales, row_base, row_factor, tokens, scales, work, num_entries,
    num_programs,
    HIDDEN: gl.constexpr, CHUNKS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """words, weight_scales, tokens, scales: TMA descriptors. row_base, ..., work: see fp8_gemm.run."""
    after_previous_gluon()
    fp8_gemm.run(
        tokens, scales, words, weight_scales, work, num_entries, num_programs, row_base, row_factor,
        (row_address, row_weight), _finish, HIDDEN, CHUNKS, GROUPS, STAGES,
    )  # fmt: skip
