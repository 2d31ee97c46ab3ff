"""FlyDSL kernel -> gfx950 code object, on any CPU machine, kept in a cache of our own.

FlyDSL's cache key holds digests of native libraries, so what is compiled here would miss on a ROCm machine; ours holds
what shapes the code: kernel sources, constants, FlyDSL's version. The cache lies under `~/.cache/megamoe` (or
`XDG_CACHE_HOME`). FlyDSL wants `ld.lld` (LLVM 17 or newer) under ROCM_PATH; without ROCm the one in the package
`ziglang` is used.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from megamoe.backends.gfx950.emulator.code_object import CodeObject, Kernel
from megamoe.errors import ConfigError

_KERNELS = Path(__file__).parent / "kernels"
_lock = threading.Lock()


_SETTINGS = {
    "COMPILE_ONLY": "1",
    "ARCH": "gfx950",
    "FLYDSL_GPU_ARCH": "gfx950",
    "FLYDSL_RUNTIME_ENABLE_CACHE": "0",
    "FLYDSL_DEBUG_ENABLE_DEBUG_INFO": "1",  # line tables, for the emulator's reports; the machine code is the same
}


@dataclass(frozen=True)
class KernelSpec:
    """A kernel by the name of its file in kernels/, and the constants that it is compiled for."""

    name: str
    constants: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, name: str, **constants: int) -> KernelSpec:
        return cls(name, tuple(sorted(constants.items())))

    @property
    def key(self) -> str:
        """Digest of everything that shapes the code."""
        digest = hashlib.sha256(f"{self.name} {self.constants} {_version()} {_SETTINGS}".encode())
        for path in _sources():
            digest.update(path.read_bytes())
        return digest.hexdigest()[:24]


@dataclass(frozen=True)
class Code:
    """A compiled kernel. code: the HSACO bytes, loadable by HIP and by the emulator alike."""

    spec: KernelSpec
    code: bytes = field(repr=False)

    @cached_property
    def kernel(self) -> Kernel:
        """Its metadata and instructions: registers, spills, LDS, arguments."""
        (kernel,) = CodeObject(self.code).kernels.values()
        return kernel


@cache
def _sources() -> tuple[Path, ...]:
    return (*sorted(_KERNELS.glob("*.py")), Path(__file__).with_name("record.py"))


@cache
def _version() -> str:
    try:
        return importlib.metadata.version("flydsl")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            "backend gfx950 needs the package flydsl: install megamoe[gfx950] (got: not installed)"
        ) from None


def cache_folder() -> Path:
    """Where code objects are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "megamoe" / "gfx950-kernels"


@cache
def load_or_compile(spec: KernelSpec, folder: Path | None = None) -> Code:
    """The code of a kernel, compiled now if the cache does not hold it; the same object each time in a process.

    Raises ConfigError without FlyDSL or a linker.
    """
    folder = folder or cache_folder()
    target = folder / f"{spec.name}-{spec.key}.hsaco"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        code = _compile(spec)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as out:
            out.write(code)
        Path(out.name).replace(target)
    return Code(spec, target.read_bytes())


def missing(specs: Mapping[str, KernelSpec], folder: Path | None = None) -> list[str]:
    """Names of the kernels that the cache lacks."""
    folder = folder or cache_folder()
    return [name for name, spec in specs.items() if not (folder / f"{spec.name}-{spec.key}.hsaco").exists()]


@cache
def _prepare() -> None:
    """Set what FlyDSL reads when it is imported: compile only, for gfx950, without its own cache."""
    os.environ.update(_SETTINGS)
    rocm = os.environ.get("ROCM_PATH", "/opt/rocm")
    if not (Path(rocm) / "llvm" / "bin" / "ld.lld").exists():
        os.environ["ROCM_PATH"] = _linker_folder()


def _linker_folder() -> str:
    """A folder that looks like ROCm as far as linking needs it: a script that starts ziglang's linker."""
    if importlib.util.find_spec("ziglang") is None:
        raise ConfigError("backend gfx950 needs ld.lld: install ROCm or the package ziglang (got: neither)")
    linker = cache_folder() / "rocm" / "llvm" / "bin" / "ld.lld"
    text = f'#!/bin/sh\nexec "{sys.executable}" -m ziglang ld.lld "$@"\n'
    if not linker.exists() or linker.read_text() != text:
        linker.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=linker.parent, delete=False) as out:
            out.write(text)
        Path(out.name).chmod(0o755)
        Path(out.name).replace(linker)
    return str(cache_folder() / "rocm")


def _compile(spec: KernelSpec) -> bytes:
    with _lock:
        _version()
        _prepare()
        module = importlib.import_module(f"megamoe.backends.gfx950.kernels.{spec.name}")
        launch = module.compile_kernel
        launch(**dict(spec.constants))
        return _code_of(launch)


def _code_of(launch: Any) -> bytes:
    """HSACO bytes of the only kernel of an `@flyc.jit` function that has just been called (FlyDSL 0.5.0)."""
    from flydsl._mlir import ir
    from flydsl._mlir.dialects import gpu
    from flydsl.compiler.jit_function import _create_mlir_context

    artifact = launch._last_compiled[1]
    text = getattr(artifact, "_ir_text", None) or artifact.ir_text
    with _create_mlir_context():
        for operation in ir.Module.parse(text).body.operations:
            if operation.operation.name == "gpu.binary":
                (binary,) = operation.operation.attributes["objects"]
                return bytes(gpu.ObjectAttr(binary).object)
    raise AssertionError("the compiled module holds no binary")
