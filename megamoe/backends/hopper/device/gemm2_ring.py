"""GEMM2 of the ring kernel (ring_gemm.py): intermediate rows times the down projection, rows to their sources."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.backends.hopper.device import gemm2, ring_gemm


@gluon.jit
def _store_unit(acc, factor, rest, row, rows, first_feature, HIDDEN: gl.constexpr, FP8: gl.constexpr):
    """Round 64 features and store them at their rows' sources."""
    row_address, row_weight = rest
    out: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    y = acc * factor
    if not FP8:
        # Rounded before it crosses shared memory: half the bytes.
        y = y.to(gl.bfloat16)
    y = gl.convert_layout(gl.permute(y, (1, 0)), out)
    gemm2.store_rows(y, row_address, row_weight, row, rows, first_feature, HIDDEN, FP8)


@gluon.jit
def finish(acc0, acc1, factor, rest, row, rows, group, STATIC: gl.constexpr):
    _store_unit(acc0, factor, rest, row, rows, group * 128, STATIC[0], STATIC[1])
    _store_unit(acc1, factor, rest, row, rows, group * 128 + 64, STATIC[0], STATIC[1])


@gluon.jit
def gemm2_ring_kernel(
    row_address, row_weight, words, scales, out_factor, box64, box32, box16, work, counters, num_programs,
    HIDDEN: gl.constexpr, CHUNKS: gl.constexpr, GROUPS: gl.constexpr, FP8: gl.constexpr,
    WIDTHS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """words, scales, box64, box32, box16: TMA descriptors. work, counters: as for GEMM1."""
    ring_gemm.run(
        box64, box32, box16, words, scales, work, counters, num_programs, out_factor, (row_address, row_weight),
        finish, (HIDDEN, FP8), CHUNKS, GROUPS, WIDTHS, STAGES,
    )  # fmt: skip
