"""The Hopper backend: Triton and Gluon kernels for H100 and H200, ranks joined by peer stores and flags.

packing: weights in tensor-core order. plan, record, buffers: what is launched with which tables, in which memory.
device: the kernels, one file a stage, and their flags; references: the same stages in torch. kernels: launches, in the
rooms named so. board: how large_m hands out work. served: what this backend takes. sub_steps: one after the other, with
call, graphs, staging, stream and report. driver, memory: memory of callers. shortage: memory that there is not. group,
backend: ranks and the door.
lockstep, selftest: tests on a GPU. bench, baseline, floors: times, what they are compared with, what a layer costs at
least. commands: what a person types. docs/hopper.md says how fast it is and why.

Nothing here imports Triton before a GPU backend is opened.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from megamoe.bundle import Bundle, Path
from megamoe.errors import ConfigError, InvalidArgumentError, OperatorError, must_be

if TYPE_CHECKING:
    from megamoe.backends import DeviceBench, DeviceSelftest, Say
    from megamoe.backends.hopper.backend import HopperBackend
    from megamoe.backends.hopper.memory import DeviceMemory

_MAJOR = 9
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def separate_queues() -> None:
    """Ask for more hardware queues than ranks; to be called before CUDA starts in this process.

    Streams of ranks on one GPU must never share a queue: a kernel that waits would hold up the one that it waits
    for. The driver's default is 8, which is enough for a process with one rank, and what a launcher may ask for before:
    a GPU has queues for some 450 (14 processes of 32).
    """
    os.environ.setdefault(_CONNECTIONS, "32")


def check(bundle: Bundle) -> None:
    """Raises ConfigError where no rank could open here: no Triton or another than 3.6, no CUDA device or one of another
    kind, settings that are not served."""
    served = _backend().check_served
    check_gpu(bundle.shape.num_ranks)
    check_triton()
    served(bundle)


def check_switch(bundle: Bundle, path: Path) -> None:
    """See megamoe.backends.check_switch."""
    _module("served").check_switch(bundle, path)


def check_gpu(num_ranks: int | None = None) -> None:
    """Raises ConfigError where torch has no CUDA device, or one of those that so many ranks use is no H100 or H200.

    num_ranks: None = as many as there are devices. Asking is the first use of CUDA: queues are settled before.
    """
    import torch

    separate_queues()
    if not torch.cuda.is_available():
        raise ConfigError("backend hopper needs a CUDA build of torch and a GPU (got: no CUDA device)")
    num_devices = torch.cuda.device_count()
    for number in range(min(num_ranks or num_devices, num_devices)):
        major, minor = torch.cuda.get_device_capability(number)
        if major != _MAJOR:
            name = f"compute capability of GPU {number}"
            raise ConfigError(must_be(name, f"{_MAJOR}.0 (H100, H200)", f"{major}.{minor}"))


def exit_status(main: Callable[[], int | None]) -> int:
    """What `main` of a script returns; what the machine or the arguments lack becomes one sentence and status 1."""
    try:
        with _packages():
            return main() or 0
    except (OperatorError, InvalidArgumentError) as error:
        print(error, file=sys.stderr)
        return 1


def check_triton() -> None:
    """Raises ConfigError where there is no Triton, or one whose Gluon lacks what the tiled kernels use of it.

    Triton 3.6 has `shared_memory_descriptor._reinterpret`, 3.9 has not.
    """
    with _packages():
        triton = import_module("triton")
        gluon = import_module("triton.experimental.gluon.language._core")
    if not hasattr(gluon.shared_memory_descriptor, "_reinterpret"):
        raise ConfigError(f"backend hopper needs triton 3.6 (got: {triton.__version__}, whose Gluon differs)")


def compile_for(bundle: Bundle, say: Say) -> None:
    """See megamoe.backends.compile_ahead."""
    _module("compile_ahead").compile_for([bundle.deployment], say)


def bench_device(wanted: DeviceBench, say: Say) -> bool:
    """See megamoe.backends.bench_device."""
    done: bool = _module("commands").bench(wanted, say)
    return done


def selftest_device(wanted: DeviceSelftest, say: Say) -> bool:
    """See megamoe.backends.selftest_device."""
    right: bool = _module("commands").selftest(wanted, say)
    return right


def _backend() -> Any:
    """The module with the kernels."""
    return _module("backend")


def _module(name: str) -> Any:
    """A module of this folder. Raises ConfigError naming a package that is not installed."""
    with _packages():
        return import_module(f"megamoe.backends.hopper.{name}")


@contextmanager
def _packages() -> Iterator[None]:
    """Raises ConfigError naming a package that is imported within and not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == __name__.partition(".")[0]:
            raise
        raise ConfigError(
            f"backend hopper needs the package {error.name}: install megamoe[hopper] (got: not installed)"
        ) from error


def open_backend(
    bundle: Bundle, *, rank: int, group_name: str, num_slots: int | None, timeout_s: float
) -> HopperBackend:
    """Open rank `rank`; returns when all ranks have opened, each in a process or a thread of its own.

    Raises ConfigError (no Triton, no Hopper GPU, settings that this backend does not serve), HeapError,
    PeerTimeoutError.
    """
    separate_queues()
    opened: HopperBackend = _backend().HopperBackend(
        bundle, rank=rank, group_name=group_name, num_slots=num_slots, timeout_s=timeout_s
    )
    return opened


def share_memory(num_bytes: int, device: str) -> DeviceMemory:
    """Memory of a GPU of this process that a rank on it can open: see megamoe.backends.share_memory."""
    from megamoe.backends.hopper import memory

    return memory.share_memory(num_bytes, device)
