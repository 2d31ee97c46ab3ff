"""Make the virtual environment of this checkout: the CPU build of torch, the pinned versions, the project itself.

`make_venv.py [FOLDER] [EXTRA]`: FOLDER is `.venv` by default; EXTRA is an extra of pyproject.toml to install with the
project (`dev` brings compilers of 1.7 GB for the emulator's tests, which nobody needs who only runs the service).
Owns: that folder and the stamps in it that `make` compares with pyproject.toml and the pins.
Refuses: a Python older than 3.11. Needs nothing but Python with pip and venv.

torch comes first and alone, because a plain `torch` on Linux x86_64 resolves to a CUDA build of several gigabytes.
The ways, in order, until one works:
 1. `TORCH_REQUIREMENT`, when set: given to pip as it is (a file, a URL, or a requirement).
 2. pip with `torch==<pin>+cpu`: the local version `+cpu` can only ever be the small build. Works wherever pip's own
    configuration knows a place that has it.
 3. uv (from PyPI) with `--torch-backend cpu`: uv itself knows where the CPU builds are.
 4. pip with `torch==<pin>`: a CPU build where the platform has no other (macOS, Linux on Arm), else the CUDA build,
    which runs the CPU default just as well.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints" / "cpu.txt"
MIN_PYTHON = (3, 11)


def pinned(name: str) -> str:
    """Version that constraints/cpu.txt pins for `name`."""
    found = re.search(rf"^{re.escape(name)}==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE)
    if not found:
        raise SystemExit(f"{CONSTRAINTS}: must pin {name}")
    return found.group(1)


def run(*command: str | Path, quiet: bool = False) -> bool:
    """Run one command; False when it failed. `quiet` hides the output of an attempt that may fail."""
    sink = subprocess.DEVNULL if quiet else None
    return (
        subprocess.run([str(c) for c in command], cwd=ROOT, stdout=sink, stderr=sink, check=False).returncode
        == 0
    )


def install_torch(python: Path) -> str:
    """Install the CPU build of torch by the first way that works, and say which one it was."""
    pip = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    version = pinned("torch")
    wanted = os.environ.get("TORCH_REQUIREMENT")
    if wanted:
        if run(*pip, "-c", CONSTRAINTS, wanted):
            return f"TORCH_REQUIREMENT={wanted}"
        raise SystemExit(f"TORCH_REQUIREMENT must be installable by pip, got {wanted!r}")
    if run(*pip, "-c", CONSTRAINTS, f"torch=={version}+cpu", quiet=True):
        return "pip, +cpu build"
    cuda_is_default = platform.system() == "Linux" and platform.machine() in ("x86_64", "AMD64")
    if cuda_is_default:
        uv = [python, "-m", "uv", "pip", "install", "--quiet", "--python", python, "--torch-backend", "cpu"]
        if run(*pip, "uv") and run(*uv, "-c", CONSTRAINTS, f"torch=={version}", quiet=True):
            return "uv, CPU backend"
        print("no CPU build of torch is in reach; taking PyPI's CUDA build, several gigabytes", flush=True)
    if run(*pip, "-c", CONSTRAINTS, f"torch=={version}"):
        return "pip, the platform's own build"
    raise SystemExit(f"torch=={version} could not be installed")


def main() -> None:
    """Make or renew the environment that the arguments name."""
    if sys.version_info < MIN_PYTHON:
        raise SystemExit(f"Python must be at least 3.11, got {platform.python_version()} ({sys.executable})")
    folder = ROOT / (sys.argv[1] if len(sys.argv) > 1 else ".venv")
    python = folder / "bin" / "python"
    extra = sys.argv[2] if len(sys.argv) > 2 else ""
    start_s = time.monotonic()
    if python.exists() and not run(python, "-c", "import pip", quiet=True):
        shutil.rmtree(folder)  # half made, or its interpreter is gone
    if not python.exists():
        print(f"making {folder.name} with Python {platform.python_version()}", flush=True)
        venv.create(folder, with_pip=True, symlinks=True)
    probe = f"import torch; assert torch.__version__.split('+')[0] == {pinned('torch')!r}"
    if run(python, "-c", probe, quiet=True):
        way = "already there"
    else:
        way = install_torch(python)
    print(f"torch {pinned('torch')}: {way}", flush=True)
    pip = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    # setuptools first, so that the project is built here and not in a second, unpinned environment.
    if not run(*pip, "-c", CONSTRAINTS, f"setuptools=={pinned('setuptools')}"):
        raise SystemExit("setuptools could not be installed")
    # compat: a .pth file with the checkout's path. Setuptools' default, an import hook, is asked last: beside a clone
    # called megamoe, `import megamoe` would find that folder and not the package in it.
    project = ["--config-settings", "editable_mode=compat", "-e", f".[{extra}]" if extra else "."]
    if not run(*pip, "--no-build-isolation", "-c", CONSTRAINTS, *project):
        raise SystemExit("the project could not be installed; pip's words are above")
    (folder / (f".stamp-{extra}" if extra else ".stamp")).write_text(f"{way}\n")
    print(
        f"{folder.name}{f' with {extra}' if extra else ''} is ready ({time.monotonic() - start_s:.0f} s)",
        flush=True,
    )


if __name__ == "__main__":
    main()
