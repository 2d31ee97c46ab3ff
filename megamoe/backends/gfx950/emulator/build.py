"""Compile the emulator's C core on first use, and keep it in a cache keyed by everything that shapes it.

The system's C compiler is used when there is one, else the one in the package `ziglang`. The cache lies under
`~/.cache/megamoe` (or `XDG_CACHE_HOME`), because the package folder may be read-only.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megamoe.backends.gfx950.emulator.errors import ToolchainError

CORE = Path(__file__).parent / "core"
FLAGS = ["-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fPIC", "-w"]


def find_compiler() -> list[str]:
    """The command of a C compiler. Raises ToolchainError when neither the system nor ziglang has one."""
    for name in ("cc", "gcc", "clang"):
        path = shutil.which(name)
        if path:
            return [path]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    raise ToolchainError(
        "the gfx950 emulator needs a C compiler: install one, or the package ziglang; got neither"
    )


def _machine_flags() -> list[str]:
    return ["-march=native"] if platform.machine() in ("x86_64", "AMD64") else []


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "megamoe" / "gfx950-emulator"


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ToolchainError(f"the C compiler {command[0]} must start, got {error}") from error
    if done.returncode:
        said = done.stderr.strip()[:2000] or f"exit status {done.returncode}"
        raise ToolchainError(f"compiling the gfx950 emulator must succeed, got: {said}")


def _work_folder(folder: Path) -> tempfile.TemporaryDirectory[str]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=folder)
    except OSError as error:
        raise ToolchainError(f"folder {folder} must be one that can be written, got {error}") from error


def build(compiler: list[str] | None = None, folder: Path | None = None) -> Path:
    """Path of the shared library, compiled now if the cache does not hold it. Raises ToolchainError."""
    command = [*(compiler or find_compiler()), *FLAGS, *_machine_flags()]
    sources = sorted(CORE.glob("*.c"))
    digest = hashlib.sha256("\0".join([*command, _cpu_features()]).encode())
    for path in [*sources, *sorted(CORE.glob("*.h"))]:
        digest.update(path.read_bytes())
    folder = folder or _cache_folder()
    target = folder / f"emulator-{digest.hexdigest()[:24]}.so"
    if target.exists():
        return target
    with _work_folder(folder) as work:
        objects = [f"{work}/{path.stem}.o" for path in sources]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(_run, ([*command, "-c", str(s), "-o", o] for s, o in zip(sources, objects))))
        _run([*command, "-shared", *objects, "-o", f"{work}/out.so", "-lm"])
        Path(f"{work}/out.so").replace(target)
    return target
