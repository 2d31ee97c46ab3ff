"""SwiGLU as triton_kernels' matmul applies it to its accumulator: the one part of that baseline which is ours."""

import triton
import triton.language as tl


@triton.jit(repr=lambda _: "megamoe_swiglu")
def swiglu(x, limit):
    """x fp32 [rows, 2 * columns], gate and up in turn -> [rows, columns]; gate is clamped above, up on both sides."""
    gate, up = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    gate = tl.minimum(gate, limit)
    up = tl.clamp(up, -limit, limit)
    return gate / (1 + tl.exp(-gate)) * up
