"""The Backend protocol and its lazy registry: what the runtime needs from a device, and nothing more.

A backend owns one rank's symmetric heap, the weights bound to protocol slots and the code of the stages. It is
handed numbers that all ranks agreed on; it never chooses a path. Third-party kernel packages (triton, flydsl, mori)
are imported inside their backend's folder, when the backend is first opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path as FilePath
from typing import Any, NamedTuple, Protocol

import torch

from megamoe.batch import MoeBatch, SubStepReport
from megamoe.bundle import Bundle, Deployment, Path
from megamoe.errors import ConfigError, InvalidArgumentError, must_be
from megamoe.memory import HostMemory, MemoryHandle, MemoryKind, OpenMemory, SharedMemory
from megamoe.path import SubStep
from megamoe.routing import DISTRIBUTIONS
from megamoe.shape import MoeShape
from megamoe.weights import LayerWeights

_MODULES = {
    "cpu": "megamoe.backends.cpu",
    "hopper": "megamoe.backends.hopper",
    "gfx950": "megamoe.backends.gfx950",
}
_SHARED_BY = {MemoryKind.CUDA_IPC: "hopper"}
"""Whose `share_memory(num_bytes, device)`, beside its `open_backend`, lends memory of a kind that needs a device."""


class Launch(NamedTuple):
    """Everything agreed about one sub-step that a backend needs, the same on all ranks except refused/deadline.

    slot_idx: protocol slot (layer). epoch: 32-bit generation of this launch, compared for equality only.
    buffer_idx: which of the two payload buffers. closing: last sub-step of a cut step: ranks exchange a closing flag.
    refused: this rank joins with zero rows and sets the error bit (its caller's call was refused).
    deadline_s: time.monotonic() by which every wait must have ended.
    """

    slot_idx: int
    epoch: int
    buffer_idx: int
    sub_step: SubStep
    closing: bool
    refused: bool
    deadline_s: float


class Backend(Protocol):
    """One rank of a device group. Opened by `open_backend`; not thread-safe: one thread owns it."""

    memory_kinds: tuple[MemoryKind, ...]
    """What `open_memory` opens: tensors in such memory may be rows and results of a sub-step."""

    tensor_device: torch.device | None
    """Where tensors of a sub-step may lie beside the host: a rank that faults on others would leave its peers waiting.
    None: anywhere, they are copied as they come."""

    def open_memory(self, handle: MemoryHandle) -> OpenMemory:
        """Memory of another process for `begin`'s tensors. Asked only for kinds of memory_kinds.

        Raises InvalidArgumentError naming what of the handle is wrong: no such memory, less of it, another device.
        """

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        """Let the device reach host memory in which rows and results will lie, as it is. Returns what undoes it, to be
        called when nothing that was launched uses the memory; without it, it holds until `close`.

        Raises HeapError when the memory cannot be pinned.
        """

    def bind(
        self,
        slot_idx: int,
        weights: LayerWeights,
        check: Callable[[Callable[[int, torch.Tensor], torch.Tensor]], None] | None = None,
    ) -> None:
        """Bind checked weights to a protocol slot, between sub-steps; either everything changes or nothing.

        check: called, before anything changes, with a function that runs one expert of the new weights alone
        (local expert, rows [m, hidden] bf16 on the host -> its answer [m, hidden] there). What it raises, bind
        raises. Raises BindingError: no such slot, or too little memory.
        """

    def bind_identity(self, slot_idx: int) -> None:
        """Bind experts that give a row back as it came: both GEMMs are bypassed, transport and combine are not."""

    def stages(self, path: Path) -> tuple[str, ...]:
        """Names of the launches that make up a sub-step on `path`, in order (small_m: exactly one)."""

    def begin(self, launch: Launch, batch: MoeBatch, out: torch.Tensor) -> None:
        """Take a sub-step: batch is this rank's rows of it, out [n, hidden] bf16 receives the result."""

    def launch(self, stage: str) -> None:
        """Enter the backend once. Raises PeerTimeoutError naming missing ranks, rank, slot, epoch, expected, seen."""

    def finish(self) -> SubStepReport:
        """The report of the sub-step. Raises PeerRefusedError when a peer joined with its error bit set."""

    def abandon(self, error: BaseException) -> None:
        """Leave a sub-step that raised `error`. If the error is this rank's own, peers are told at once."""

    def close(self) -> None:
        """Release device memory, unlink what this rank created. Safe to call twice."""


@dataclass(frozen=True)
class Finding:
    """One thing that a deployment needs of a machine. ok: False where it stands in the way, with what to do."""

    ok: bool
    what: str


@dataclass(frozen=True, kw_only=True)
class KernelWork:
    """What one kernel does in a sub-step, over all ranks. instructions: of waves, without those of waits; mfma: the
    matrix instructions. weight_bytes: loaded, by_16: by 16-byte loads, needed: of the experts that got rows."""

    path: Path
    rows_per_rank: int
    kernel: str
    instructions: int
    mfma: int
    weight_bytes: int
    weight_bytes_by_16: int
    weight_bytes_needed: int
    bytes_to_peers: int

    def cells(self) -> tuple[str, ...]:
        """A table's: path, rows, kernel, instructions, mfma, weight bytes over needed, share by 16, bytes to peers."""
        over = f"{self.weight_bytes / self.weight_bytes_needed:.3g}" if self.weight_bytes_needed else ""
        share = f"{self.weight_bytes_by_16 / self.weight_bytes:.3g}" if self.weight_bytes else ""
        numbers = (self.rows_per_rank, self.kernel, self.instructions, self.mfma)
        return (str(self.path), *map(str, numbers), over, share, str(self.bytes_to_peers))


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel of a shipped folder. seconds: spent on it, 0 where it was there."""

    title: str
    seconds: float
    num_vgprs: int
    lds_bytes: int
    num_done: int
    num_kernels: int


@dataclass(frozen=True, kw_only=True)
class DeviceBench:
    """What to time on a machine's GPUs. shape: of the whole deployment; each of num_ranks has an EP8 rank's experts.

    tokens: a rank. paths: None = all that serve a size. baselines: torch's own parts and, where triton_kernels names
    the folder of its files, that package. gemms: the expert GEMMs alone as well, of one rank. json, plot: files to
    write.
    """

    shape: MoeShape
    num_ranks: int = 1
    tokens: tuple[int, ...] = tuple(1 << power for power in range(14))
    distributions: tuple[str, ...] = DISTRIBUTIONS
    paths: tuple[Path, ...] | None = None
    baselines: bool = True
    triton_kernels: FilePath | None = None
    gemms: bool = False
    json: FilePath | None = None
    plot: FilePath | None = None


@dataclass(frozen=True, kw_only=True)
class DeviceSelftest:
    """What to check on a machine's GPUs. num_ranks: they share GPUs where there are fewer. fast: one shape, BF16."""

    num_ranks: int = 8
    fast: bool = False
    num_soak_steps: int = 50


Say = Callable[[str], None]
"""Takes a line as it comes."""
Opener = Callable[..., Backend]


def open_backend(
    name: str, bundle: Bundle, *, rank: int, group_name: str, num_slots: int, timeout_s: float
) -> Backend:
    """Open rank `rank` of the group called `group_name`; returns when all ranks have opened theirs.

    num_slots: protocol slots, one a layer.
    Raises ConfigError for an unknown backend or one whose packages are not installed, HeapError when memory is
    short, PeerTimeoutError naming ranks that did not open within timeout_s.
    """
    opener: Opener = _module(name).open_backend
    return opener(bundle, rank=rank, group_name=group_name, num_slots=num_slots, timeout_s=timeout_s)


def share_memory(num_bytes: int, *, kind: str = MemoryKind.POSIX_SHM, device: str = "") -> SharedMemory:
    """Memory of this process that a rank on the same host can open: rows are read and results written in place.

    kind: a MemoryKind. device: for cuda_ipc, torch's name of the GPU that holds it ("cuda:0"). Close it after the ranks
    have; a caller that is killed leaves nothing behind.
    Raises InvalidArgumentError (unknown kind, no size), ConfigError (this machine or installation has no such memory),
    HeapError (memory is short).
    """
    if not isinstance(num_bytes, int) or num_bytes < 1:
        raise InvalidArgumentError(must_be("num_bytes", "an integer of at least 1", repr(num_bytes)))
    if kind == MemoryKind.POSIX_SHM:
        return HostMemory.share(num_bytes)
    if kind not in set(MemoryKind):
        raise InvalidArgumentError(must_be("kind", f"one of {', '.join(MemoryKind)}", repr(kind)))
    lend: Callable[..., SharedMemory] | None = getattr(
        _module(_SHARED_BY[MemoryKind(kind)]), "share_memory", None
    )
    if lend is None:
        raise ConfigError(must_be("kind of memory", f"{MemoryKind.POSIX_SHM} in this version", kind))
    return lend(num_bytes, device)


def check_backend(bundle: Bundle) -> None:
    """Say before anything starts what `open_backend` would refuse on this machine. Allocates nothing.

    Raises ConfigError: an unknown backend, packages or a device that are missing, settings that it does not serve.
    A backend that can be refused so has a function `check(bundle)` beside its `open_backend`.
    """
    check: Callable[[Bundle], None] | None = getattr(_module(bundle.deployment.backend), "check", None)
    if check is not None:
        check(bundle)


def check_switch(bundle: Bundle, path: Path) -> None:
    """Whether a path may be switched on while a deployment serves. Needs no device.

    Raises ConfigError where its steps would then have other bits than those of compact, which large_m must not.
    """
    check: Callable[[Bundle, Path], None] | None = getattr(
        _module(bundle.deployment.backend), "check_switch", None
    )
    if check is not None:
        check(bundle, path)


def diagnose(bundle: Bundle) -> list[Finding]:
    """What a deployment's backend needs of this machine, and what of it is missing. Allocates nothing."""
    found: Callable[[Bundle], list[Finding]] | None = getattr(
        _module(bundle.deployment.backend), "diagnose", None
    )
    if found is not None:
        return found(bundle)
    try:
        check_backend(bundle)
    except ConfigError as error:
        return [Finding(False, str(error))]
    return [Finding(True, f"backend {bundle.deployment.backend}")]


def count_work(
    deployment: Deployment, sizes: Mapping[Path, Sequence[int]], distribution: str
) -> list[KernelWork]:
    """What sub-steps of `sizes` rows a rank do, counted on emulated devices. Raises ConfigError for real ones."""
    if not deployment.gfx950_emulated:
        raise ConfigError(must_be("device", "emulated", "real"))
    work: list[KernelWork] = _tool(deployment.backend, "count_work")(deployment, sizes, distribution)
    return work


def compile_ahead(bundle: Bundle, say: Say) -> None:
    """Compile what a deployment's ranks would compile when they open, on all cores, into the compiler's own cache.

    Raises ConfigError: packages that are missing, a backend whose ranks compile nothing or from a folder.
    """
    _tool(bundle.deployment.backend, "compile_for")(bundle, say)


def bench_device(backend: str, wanted: DeviceBench, say: Say) -> bool:
    """Time a GPU backend at full size on this machine and tell of everything; True if nothing failed.

    Raises ConfigError: no GPU, packages that are missing, a backend without such a bench; InvalidArgumentError.
    """
    done: bool = _tool(backend, "bench_device")(wanted, say)
    return done


def selftest_device(backend: str, wanted: DeviceSelftest, say: Say) -> bool:
    """Check a GPU backend's paths, protocol and numbers on this machine; True if all are right. Raises ConfigError."""
    right: bool = _tool(backend, "selftest_device")(wanted, say)
    return right


def compile_kernels(bundle: Bundle, folder: FilePath, *, num_jobs: int = 0) -> Iterator[CompiledKernel]:
    """Bring every kernel of a deployment into a folder to ship, `num_jobs` at a time (0: one a core), and tell of each.

    Raises ConfigError: a backend that compiles at first use only, no compiler, a folder that cannot be written.
    """
    kernels: Iterator[CompiledKernel] = _tool(bundle.deployment.backend, "compile_kernels")(
        bundle, folder, num_jobs=num_jobs
    )
    return kernels


def missing_kernels(bundle: Bundle, folder: FilePath) -> list[str]:
    """Every kernel that a deployment would need and a shipped folder lacks or holds damaged, with the reason.

    Raises ConfigError for a folder that nothing is known of: no manifest, or a damaged one.
    """
    lacking: list[str] = _tool(bundle.deployment.backend, "missing_kernels")(bundle, folder)
    return lacking


def _tool(backend: str, name: str) -> Any:
    """A function that a backend may have beside its `open_backend`. Raises ConfigError where it has none."""
    tool = getattr(_module(backend), name, None)
    if tool is None:
        raise ConfigError(must_be("backend", f"one with {name}", repr(backend)))
    return tool


def _module(name: str) -> Any:
    """The backend's own door."""
    if name not in _MODULES:
        raise ConfigError(must_be("backend", f"one of {', '.join(_MODULES)}", repr(name)))
    try:
        module = import_module(_MODULES[name])
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"backend {name} needs the package {error.name}: install megamoe[{name}] (got: not installed)"
        ) from error
    if not hasattr(module, "open_backend"):
        raise ConfigError(f"backend {name} has no kernels in this version, use another one")
    return module
