"""Compilers of the tests: Triton and FlyDSL to gfx950 on a machine without a GPU, and an assembler.

Triton brings its own linker. FlyDSL wants `ld.lld` under ROCM_PATH: a two-line script that starts ziglang's is put there.
"""

# ruff: noqa: E501  (tables of cases read best with one case a line)

from __future__ import annotations

import os
import struct
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from megamoe.backends.gfx950.emulator.code_object import CodeObject, Kernel


@lru_cache(maxsize=1)
def rocm_path() -> str:
    """A folder that looks like ROCm as far as FlyDSL's linking needs it."""
    folder = tempfile.mkdtemp(prefix="megamoe-rocm-")
    linker = Path(folder) / "llvm" / "bin" / "ld.lld"
    linker.parent.mkdir(parents=True)
    linker.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ziglang ld.lld "$@"\n')
    linker.chmod(0o755)
    return folder


def prepare_flydsl() -> None:
    """Set what FlyDSL reads when it is imported: compile only, for gfx950, without its cache."""
    os.environ.update(
        ROCM_PATH=rocm_path(),
        COMPILE_ONLY="1",
        ARCH="gfx950",
        FLYDSL_GPU_ARCH="gfx950",
        FLYDSL_RUNTIME_ENABLE_CACHE="0",
        FLYDSL_DEBUG_ENABLE_DEBUG_INFO="1",
    )


def flydsl_kernel(launch: Any) -> Kernel:
    """The only kernel of an `@flyc.jit` function that has been called (and so compiled)."""
    from flydsl._mlir import ir
    from flydsl._mlir.dialects import gpu
    from flydsl.compiler.jit_function import _create_mlir_context

    artifact = launch._last_compiled[1]
    text = getattr(artifact, "_ir_text", None) or artifact.ir_text
    with _create_mlir_context():
        for operation in ir.Module.parse(text).body.operations:
            if operation.operation.name == "gpu.binary":
                (binary,) = operation.operation.attributes["objects"]
                (kernel,) = CodeObject(bytes(gpu.ObjectAttr(binary).object)).kernels.values()
                return kernel
    raise AssertionError("the compiled module holds no binary")


def triton_kernel(
    function: Callable[..., None], signature: Mapping[str, str], constants: Mapping[str, Any], **options: Any
) -> tuple[Kernel, int, int]:
    """A Triton kernel compiled for gfx950, its work-items per program and its dynamic LDS in bytes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {**signature, **dict.fromkeys(constants, "constexpr")}
    compiled = triton.compile(
        ASTSource(fn=triton.jit(function), signature=types, constexprs=dict(constants)),
        target=GPUTarget("hip", "gfx950", 64), options={"num_warps": 4, **options},
    )  # fmt: skip
    (kernel,) = CodeObject(compiled.asm["hsaco"]).kernels.values()
    return kernel, 64 * compiled.metadata.num_warps, max(compiled.metadata.shared - kernel.lds_bytes, 0)


def assemble(text: str) -> bytes:
    """Machine code of gfx950 assembly. Raises ValueError naming the text when LLVM refuses it."""
    from triton._C import libtriton

    libtriton.llvm.init_targets()
    try:
        data = libtriton.amd.assemble_amdgcn(text + "\n", "amdgcn-amd-amdhsa", "gfx950", "")
    except RuntimeError as error:
        raise ValueError(f"{text!r}: {error}") from error
    if len(data) < 64:
        raise ValueError(f"{text!r} is not gfx950 assembly")
    table, count = struct.unpack_from("<Q", data, 40)[0], struct.unpack_from("<H", data, 60)[0]
    names = struct.unpack_from("<H", data, 62)[0]
    heads = [struct.unpack_from("<IIQQQQIIQQ", data, table + 64 * k) for k in range(count)]
    for head in heads:
        at = heads[names][4] + head[0]
        if data[at : data.index(b"\0", at)] == b".text":
            return data[head[4] : head[4] + head[5]]
    raise AssertionError("the object has no .text")
