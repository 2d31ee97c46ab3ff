"""GEMM1 of the ring kernel (ring_gemm.py): rows times gate and up weights, SwiGLU, MXFP8 into GEMM2's operand."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.backends.hopper.device import gemm1, ring_gemm
from megamoe.backends.hopper.device.ring_loop import halves


@gluon.jit
def _store_piece(acc0, acc1, factor, rest, row, rows, group, CHUNKS_OUT: gl.constexpr):
    """SwiGLU in the thread (gate and up rows are 8 apart), then into GEMM2's image."""
    image_out, limit = rest
    block_n: gl.constexpr = acc0.shape[1]
    x = gl.reshape(gl.join(acc0, acc1) * factor, [4, 2, 8, block_n, 2])  # warp, gate or up, g, token, unit
    gate, up = gl.split(gl.permute(x, [4, 0, 2, 3, 1]))
    h = gl.reshape(gemm1.swiglu(gate, up, limit), [2, 32, block_n])
    gemm1.store_features(h, image_out, row, group, rows, CHUNKS_OUT * 128, block_n, 4)


@gluon.jit
def finish(acc0, acc1, factor, rest, row, rows, group, CHUNKS_OUT: gl.constexpr):
    if acc0.shape[1] > 32:
        # In pieces: registers and shared memory are those of 32 tokens.
        first0, second0 = halves(acc0)
        first1, second1 = halves(acc1)
        _store_piece(first0, first1, factor, rest, row, rows, group, CHUNKS_OUT)
        if rows > 32:
            _store_piece(second0, second1, factor, rest, row + 32, rows - 32, group, CHUNKS_OUT)
    else:
        _store_piece(acc0, acc1, factor, rest, row, rows, group, CHUNKS_OUT)


@gluon.jit
def gemm1_ring_kernel(
    image_out, words, scales, out_factor, box64, box32, box16, work, counters, limit, num_programs,
    CHUNKS: gl.constexpr, CHUNKS_OUT: gl.constexpr, GROUPS: gl.constexpr,
    WIDTHS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """words, scales, box64, box32, box16: TMA descriptors. work: int32 [entries, 4]: expert, first image row, rows,
    unused; counters: entries of each of WIDTHS, widest first."""
    ring_gemm.run(
        box64, box32, box16, words, scales, work, counters, num_programs, out_factor, (image_out, limit),
        finish, CHUNKS_OUT, CHUNKS, GROUPS, WIDTHS, STAGES,
    )  # fmt: skip
