"""GEMM1 of the ring kernel (ring_gemm.py): rows times gate and up weights, SwiGLU, MXFP8 into GEMM2's operand."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.backends.hopper.device import gemm1, ring_gemm
from megamoe.backends.hopper.device.chain import after_previous_gluon


@gluon.jit
def _finish(acc0, acc1, factor, rest, row, rows, group, CHUNKS_OUT: gl.constexpr):
    """SwiGLU in the thread (gate and up rows are 8 apart), then into GEMM2's image."""
    image_out, limit = rest
    block_n: gl.constexpr = acc0.shape[1]
    x = gl.reshape(gl.join(acc0, acc1) * factor, [4, 2, 8, block_n, 2])  # warp, gate or up, g, token, unit
    gate, up = gl.split(gl.permute(x, [4, 0, 2, 3, 1]))
    h = gl.reshape(gemm1.swiglu(gate, up, limit), [2, 32, block_n])
    gemm1.store_features(h, image_out, row, group, rows, CHUNKS_OUT * 128, block_n, 4)


@gluon.jit
def gemm1_ring_kernel(
    image_out, words, scales, out_factor, tokens, more_tokens, work, counters, limit, num_programs,
    CHUNKS: gl.constexpr, CHUNKS_OUT: gl.constexpr, GROUPS: gl.constexpr,
    STAGES: gl.constexpr, HALVES: gl.constexpr, COSTS: gl.constexpr,
):  # fmt: skip
    """words, scales, tokens, more_tokens: TMA descriptors. work: int32 [entries, 4]: expert, first image row, rows (at
    most those of both token boxes), unused."""
    after_previous_gluon()
    ring_gemm.run(
        tokens, more_tokens, words, scales, work, counters, num_programs, out_factor, (image_out, limit),
        _finish, CHUNKS_OUT, CHUNKS, GROUPS, STAGES, HALVES, COSTS,
    )  # fmt: skip
