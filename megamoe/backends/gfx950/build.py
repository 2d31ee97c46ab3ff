"""FlyDSL kernel -> gfx950 code object, on any CPU machine, kept in a cache of our own.

FlyDSL's cache key holds digests of native libraries, so what is compiled here would miss on a ROCm machine; ours holds
what shapes the code: kernel sources, constants, FlyDSL's version. The cache lies under `~/.cache/megamoe` (or
`XDG_CACHE_HOME`); it may be read-only once it has what is asked for, and a damaged file in it is compiled again. What
`compile_ahead` has put into a folder to ship is loaded from there without FlyDSL, checked against its manifest, and
never compiled. FlyDSL wants `ld.lld` (LLVM 17 or newer) under ROCM_PATH; without ROCm that of `ziglang` is used.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

from megamoe.backends.gfx950.emulator.code_object import CodeObject, Kernel
from megamoe.backends.gfx950.emulator.errors import CodeObjectError
from megamoe.errors import ConfigError, InternalError, must_be

FLYDSL = "0.5.0"
"""The release that kernels are written for; another one may give other code, or none."""
MANIFEST = "manifest.json"
_ZIGLANG = "the one of ziglang"
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
        digest = hashlib.sha256(f"{self.name} {self.constants} {FLYDSL} {_SETTINGS}".encode())
        for path in _sources():
            digest.update(path.read_bytes())
        return digest.hexdigest()[:24]

    @property
    def file(self) -> str:
        """Name of its code object, in the cache and in a folder that is shipped."""
        return f"{self.name}-{self.key}.hsaco"

    @property
    def title(self) -> str:
        """Name and constants, for people."""
        return " ".join([self.name, *(f"{name.lower()}={value}" for name, value in self.constants)])


@dataclass(frozen=True)
class Code:
    """A compiled kernel. code: the HSACO bytes, loadable by HIP and by the emulator alike.

    Raises CodeObjectError, when `kernel` is asked for, if they are not those of this one kernel.
    """

    spec: KernelSpec
    code: bytes = field(repr=False)

    @cached_property
    def kernel(self) -> Kernel:
        """Its metadata and instructions: registers, spills, LDS, arguments."""
        kernels = list(CodeObject(self.code).kernels.values())
        if len(kernels) != 1 or not kernels[0].name.startswith(f"{self.spec.name}_kernel"):
            found = ", ".join(kernel.name for kernel in kernels)
            raise CodeObjectError(
                must_be("kernel of the code object", f"{self.spec.name}_kernel alone", found)
            )
        return kernels[0]


@cache
def _sources() -> tuple[Path, ...]:
    own = Path(__file__)
    return (*sorted(_KERNELS.glob("*.py")), own.with_name("record.py"), own.parents[2] / "layout.py")


def _check_version() -> None:
    try:
        version = importlib.metadata.version("flydsl")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            "backend gfx950 needs the package flydsl: install megamoe[gfx950], or ship kernels of `megamoe compile` "
            "(got: not installed)"
        ) from None
    if version != FLYDSL:
        raise ConfigError(must_be("version of flydsl", FLYDSL, version))


def cache_folder() -> Path:
    """Where code objects are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "megamoe" / "gfx950-kernels"


@cache
def load_or_compile(spec: KernelSpec, folder: Path | None = None) -> Code:
    """The code of a kernel, compiled now if the cache does not hold it; the same object each time in a process.

    Raises ConfigError without FlyDSL or a linker, or for a cache that cannot be written and lacks the kernel.
    """
    folder = folder or cache_folder()
    code = _kept(spec, folder)
    if code is None:
        code = Code(spec, _compile(spec))
        write_whole(folder / spec.file, code.code)
    return code


def _kept(spec: KernelSpec, folder: Path) -> Code | None:
    """What a folder has of a kernel; None where it has nothing, or a file that is damaged."""
    try:
        code = Code(spec, (folder / spec.file).read_bytes())
        return code if code.kernel else None
    except (OSError, CodeObjectError):
        return None


def write_whole(path: Path, data: bytes, *, executable: bool = False) -> None:
    """Write a file so that others see all of it or none. Raises ConfigError naming a folder that cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".new-", delete=False) as out:
            out.write(data)
        Path(out.name).chmod(0o755 if executable else 0o644)
        Path(out.name).replace(path)
    except OSError as error:
        raise ConfigError(must_be(f"folder {path.parent}", "one that can be written", error)) from error


def missing(specs: Mapping[str, KernelSpec], folder: Path | None = None) -> list[str]:
    """Names of the kernels that a folder (default: the cache) lacks or holds damaged."""
    folder = folder or cache_folder()
    return [name for name, spec in specs.items() if _kept(spec, folder) is None]


@lru_cache
def shipped(spec: KernelSpec, folder: Path) -> Code:
    """The code of a kernel from a folder that `compile_ahead` filled. Needs no FlyDSL.

    Raises ConfigError naming the kernel or file that is missing, or that is not as the manifest says.
    """
    entries = manifest(folder)
    if spec.file not in entries:
        raise ConfigError(
            must_be(f"kernels of {folder}", f"with {spec.title} (megamoe compile)", "none of it")
        )
    path = folder / spec.file
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(must_be(f"kernel {path}", "readable", error)) from error
    digest = hashlib.sha256(data).hexdigest()
    if digest != entries[spec.file]["sha256"]:
        raise ConfigError(must_be(f"sha256 of {path}", entries[spec.file]["sha256"], digest))
    return Code(spec, data)


def manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """A shipped folder's kernels by file name. Raises ConfigError for one that is missing or damaged."""
    path = folder / MANIFEST
    try:
        read = json.loads(path.read_text())
        entries = {str(one["file"]): {**one, "sha256": str(one["sha256"])} for one in read["kernels"]}
        target = read["target"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        wanted = "the manifest of a folder that `megamoe compile` has filled"
        raise ConfigError(must_be(str(path), wanted, f"{type(error).__name__}: {error}")) from error
    if target != "gfx950":
        raise ConfigError(must_be(f"target of {path}", "gfx950", repr(target)))
    return entries


@cache
def _prepare() -> None:
    """Set what FlyDSL reads when it is imported: compile only, for gfx950, without its own cache."""
    os.environ.update(_SETTINGS)
    if find_linker() == _ZIGLANG:
        os.environ["ROCM_PATH"] = _linker_folder()


def find_linker() -> str:
    """The linker that FlyDSL will use. Raises ConfigError where there is none."""
    linker = Path(os.environ.get("ROCM_PATH", "/opt/rocm")) / "llvm" / "bin" / "ld.lld"
    if linker.exists():
        return str(linker)
    if importlib.util.find_spec("ziglang") is None:
        raise ConfigError("backend gfx950 needs ld.lld: install ROCm or the package ziglang (got: neither)")
    return _ZIGLANG


def _linker_folder() -> str:
    """A folder that looks like ROCm as far as linking needs it: a script that starts ziglang's linker."""
    linker = cache_folder() / "rocm" / "llvm" / "bin" / "ld.lld"
    text = f'#!/bin/sh\nexec "{sys.executable}" -m ziglang ld.lld "$@"\n'
    if not linker.exists() or linker.read_text() != text:
        write_whole(linker, text.encode(), executable=True)
    return str(cache_folder() / "rocm")


def _compile(spec: KernelSpec) -> bytes:
    with _lock:
        _check_version()
        _prepare()
        module = importlib.import_module(f"megamoe.backends.gfx950.kernels.{spec.name}")
        launch = module.compile_kernel
        try:
            launch(**dict(spec.constants))
            return _code_of(launch)
        except Exception as error:
            what = f"compiling {spec.title} with {find_linker()} must succeed"
            raise InternalError(f"{what}, got {type(error).__name__}: {str(error)[:2000]}") from error


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
