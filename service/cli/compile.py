"""`megamoe compile`: fills a folder with the kernels of a deployment, or says which it lacks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from megamoe import Bundle, compile_kernels, missing_kernels, plan_bundle
from service.config import ServiceConfig


def _bundle(config: ServiceConfig) -> Bundle:
    """What the configuration builds on gfx950, the one backend that is compiled ahead of time, whatever it says."""
    return plan_bundle(replace(config.deployment, backend="gfx950"))


def print_compiled(config: ServiceConfig, folder: Path, num_jobs: int) -> None:
    """Compile and print a line a kernel as they come. Raises ConfigError."""
    out = Console(highlight=False, soft_wrap=True)
    for one in compile_kernels(_bundle(config), folder, num_jobs=num_jobs):
        spent = f"{one.seconds:5.1f} s" if one.seconds else "  there"
        size = f"{one.num_vgprs:3d} VGPR {one.lds_bytes:6d} B LDS"
        out.print(f"{one.num_done:3d}/{one.num_kernels} {spent}  {size}  {one.title}")
    out.print(f"serve with --backend gfx950 --gfx950-kernels {folder}")


def print_missing(config: ServiceConfig, folder: Path) -> bool:
    """Name every kernel that the folder lacks; True if it has them all."""
    out = Console(highlight=False, soft_wrap=True)
    lacking = missing_kernels(_bundle(config), folder)
    for text in lacking:
        out.print(f"missing: {text}")
    out.print(f"{folder} lacks {len(lacking)} kernels" if lacking else f"{folder} has every kernel")
    return not lacking
