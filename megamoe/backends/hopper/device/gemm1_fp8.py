"""GEMM1 of the FP8 kernel (fp8_gemm.py): rows times gate and up weights, SwiGLU, MXFP8."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.backends.hopper.device import fp8_gemm
from megamoe.backends.hopper.device.chain import after_previous_gluon
from megamoe.backends.hopper.device.mx_gluon import mxfp8_codes

SWIGLU: gl.constexpr = gl.constexpr(
    "{.reg .f32 g, u, t; min.NaN.f32 g, $1, $3; min.NaN.f32 u, $2, $3; neg.f32 t, $3; max.NaN.f32 u, u, t;\n"
    "mul.ftz.f32 t, g, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.ftz.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 t, t;\n"
    "mul.f32 g, g, t; mul.f32 $0, g, u;}"
)
"""gemm1.swiglu of gate, up and the limit, 1 / (1 + 2^(-gate log2 e)) without the cases of a division and an exponential
by the book: 10 instructions for some 30."""


@gluon.jit
def _swiglu(gate, up, limit):
    limits = gl.full(gate.shape, limit, gl.float32, layout=gate.type.layout)
    return gl.inline_asm_elementwise(
        SWIGLU, "=f,f,f,f", [gate, up, limits], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _finish(acc, rest, row, rows, unit, FEATURES: gl.constexpr):
    """SwiGLU in the thread (gate and up rows are 8 apart): 32 features, one MX block, of every token. Rounded after it
    has crossed shared memory, where two threads have a block."""
    middle, exponents, stride, limit = rest
    n: gl.constexpr = acc.shape[1]
    gate, up = gl.split(gl.permute(gl.reshape(acc, [4, 2, 8, n]), [0, 2, 3, 1]))
    h = gl.reshape(_swiglu(gate, up, limit), [32, n])
    out: gl.constexpr = gl.BlockedLayout([1, 16], [16, 2], [4, 1], [1, 0])
    codes, exponent = mxfp8_codes(gl.convert_layout(gl.permute(h, (1, 0)), out))
    token = gl.arange(0, n, layout=gl.SliceLayout(1, out))
    feature = unit * 32 + gl.arange(0, 32, layout=gl.SliceLayout(0, out))
    at = middle + (row + token).to(gl.int64)[:, None] * FEATURES
    gl.store(at + feature[None, :], codes, mask=(token < rows)[:, None])
    column = gl.arange(0, n, layout=exponent.type.layout)
    gl.store(exponents + unit * stride + row + column, exponent.to(gl.uint8), mask=column < rows)


@gluon.jit
def gemm1_fp8_kernel(
    middle, exponents, stride, words, weight_scales, row_base, row_factor, tokens, scales, work, num_entries, limit,
    num_programs,
    CHUNKS: gl.constexpr, CHUNKS_OUT: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """middle, exponents out: see Fp8Operands, stride the latter's. words, weight_scales, tokens, scales: TMA
    descriptors. row_base, ..., work: see fp8_gemm.run."""
    after_previous_gluon()
    fp8_gemm.run(
        tokens, scales, words, weight_scales, work, num_entries, num_programs, row_base, row_factor,
        (middle, exponents, stride, limit), _finish, CHUNKS_OUT * 128, CHUNKS, GROUPS, STAGES,
    )  # fmt: skip
