"""Programmatic dependent launch: a kernel may start while the one before it in the stream ends, up to this point."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

AFTER_PREVIOUS = tl.constexpr("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;\nmov.u32 $0, 0;")


@triton.jit
def after_previous():
    """Every kernel's first act, before it reads memory: wait until the kernel before it has finished and all it wrote
    is there; then let the next one start. A no-op for kernels that are launched without the attribute."""
    tl.inline_asm_elementwise(AFTER_PREVIOUS, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@gluon.jit
def after_previous_gluon():
    gl.inline_asm_elementwise(AFTER_PREVIOUS, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
