"""The gfx950 (MI355X) backend: FlyDSL kernels, a symmetric heap, and an emulated device that proves them.

kernels: one file a stage; references: the same stages in torch; build: FlyDSL to code objects, cached. shuffle:
weights in MFMA order. plan, record, launches: what is launched with which arguments and tables. device: the two
devices, `emulated` and `hip`; emulator: the CPU that runs gfx950 code. expert, backend: the binding check and the door.

Nothing here imports FlyDSL, MORI or ROCm before it is needed: FlyDSL when a kernel is compiled, the others for `hip`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from megamoe.bundle import Bundle, Deployment, Path
from megamoe.errors import ConfigError

if TYPE_CHECKING:
    from megamoe.backends import CompiledKernel, Finding, KernelWork
    from megamoe.backends.gfx950.backend import Gfx950Backend


def check(bundle: Bundle) -> None:
    """Raises ConfigError where no rank could open here: settings that are not served, no ROCm device."""
    import torch

    from megamoe.backends.gfx950.backend import check_served

    check_served(bundle.deployment)
    if not bundle.deployment.gfx950_emulated and not (torch.version.hip and torch.cuda.is_available()):
        raise ConfigError("backend gfx950 needs a ROCm build of torch and a GPU (got: no ROCm device)")


def diagnose(bundle: Bundle) -> list[Finding]:
    """See megamoe.backends.diagnose."""
    from megamoe.backends.gfx950 import diagnosis

    return diagnosis.diagnose(bundle)


def count_work(
    deployment: Deployment, sizes: Mapping[Path, Sequence[int]], distribution: str
) -> list[KernelWork]:
    """See megamoe.backends.count_work."""
    from megamoe.backends.gfx950 import bench

    return bench.count_work(deployment, sizes, distribution)


def compile_kernels(bundle: Bundle, folder: FilePath, *, num_jobs: int = 0) -> Iterator[CompiledKernel]:
    """See megamoe.backends.compile_kernels."""
    from megamoe.backends.gfx950 import compile_ahead as ahead

    return ahead.compile_kernels(bundle, folder, num_jobs=num_jobs)


def missing_kernels(bundle: Bundle, folder: FilePath) -> list[str]:
    """See megamoe.backends.missing_kernels."""
    from megamoe.backends.gfx950 import compile_ahead as ahead

    return ahead.missing_kernels(bundle, folder)


def open_backend(
    bundle: Bundle, *, rank: int, group_name: str, num_slots: int | None, timeout_s: float
) -> Gfx950Backend:
    """Open rank `rank`; returns when all ranks have opened.

    Deployments with `gfx950_emulated` run on emulated devices, ranks in processes or threads of
    their own. Others need an MI355X, ROCm and MORI: one process a rank.
    Raises ConfigError (a package or device is missing, settings that are not served), HeapError, PeerTimeoutError.
    """
    from megamoe.backends.gfx950.backend import Gfx950Backend, check_served
    from megamoe.layout import plan_layout

    check_served(bundle.deployment)
    layout = plan_layout(bundle, num_slots=num_slots)
    fingerprint = bundle.deployment.fingerprint()
    if bundle.deployment.gfx950_emulated:
        from megamoe.backends.gfx950.device.shared import SharedDevice

        device = SharedDevice(
            layout, rank=rank, group_name=group_name, fingerprint=fingerprint, timeout_s=timeout_s
        )
        return Gfx950Backend(bundle, device, num_slots=num_slots)
    from megamoe.backends.gfx950.device import hip

    return Gfx950Backend(
        bundle,
        hip.join(
            rank=rank,
            num_ranks=layout.num_ranks,
            heap_bytes=layout.num_bytes,
            group_name=group_name,
            timeout_s=timeout_s,
        ),
        num_slots=num_slots,
    )
