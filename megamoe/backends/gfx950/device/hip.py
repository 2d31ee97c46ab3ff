"""One rank on an MI355X: torch's ROCm build for memory and streams, HIP for code objects, MORI for the symmetric heap.

Imported only when a real device is asked for. Not run where this was written, for want of an MI355X: what it calls of
HIP, torch and MORI are their documented interfaces.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache

import torch

from megamoe.backends.gfx950.build import Code
from megamoe.backends.gfx950.device import Arg, DeviceStuckError, machine
from megamoe.errors import ConfigError, HeapError, InternalError, must_be

_TICK_HZ = 100e6
"""The constant clock of CDNA devices (`s_memrealtime`)."""
_HEAP_MARGIN_BYTES = 64 << 20
"""What MORI keeps of its heap for itself, generously."""
_LAUNCH_PARAM_BUFFER_POINTER, _LAUNCH_PARAM_BUFFER_SIZE, _LAUNCH_PARAM_END = 1, 2, 3


@cache
def _hip() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libamdhip64.so")
    except OSError as error:
        raise ConfigError(f"backend gfx950 needs the HIP runtime (got: {error})") from error


def _check(status: int, what: str) -> None:
    if status:
        raise InternalError(f"{what} must succeed, got HIP error {status}")


class HipMemory:
    """Bytes of this rank's device, owned by a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor

    @property
    def _bytes(self) -> torch.Tensor:
        if self._tensor is None:
            raise InternalError("memory must not be used after it was given back; this is a bug")
        return self._tensor

    @property
    def address(self) -> int:
        return self._bytes.data_ptr()

    def write(self, data: torch.Tensor, offset: int = 0) -> None:
        raw = data.contiguous().view(-1).view(torch.uint8)
        self._bytes[offset : offset + raw.numel()].copy_(raw)
        if (
            data.is_cuda
        ):  # the copy is queued on the caller's stream, which the kernels' stream knows nothing of
            torch.cuda.current_stream(data.device).synchronize()

    def read(self, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> torch.Tensor:
        out = torch.empty(tuple(shape), dtype=dtype)
        raw = self._bytes[offset : offset + out.numel() * out.itemsize].cpu()
        return raw.view(dtype).view(out.shape)

    def read_into(self, out: torch.Tensor) -> None:
        out.copy_(self._bytes[: out.numel() * out.itemsize].view(out.dtype).view(out.shape))
        if out.is_cuda:
            torch.cuda.current_stream(out.device).synchronize()

    def free(self) -> None:
        self._tensor = None


class HipGraph:
    """A captured row of launches."""

    def __init__(self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
        self._graph, self._stream = graph, stream

    def replay(self) -> None:
        with torch.cuda.stream(self._stream):
            self._graph.replay()


class HipStream:
    """A stream and the functions that were loaded for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._functions: dict[str, ctypes.c_void_p] = {}
        self._graph: torch.cuda.CUDAGraph | None = None
        self._capture: torch.cuda.graph | None = None

    def launch(self, code: Code, num_groups: int, num_threads: int, args: Sequence[Arg]) -> None:
        kernel = code.kernel
        packed = kernel.pack(list(args), (num_groups, 1, 1), (num_threads, 1, 1))
        buffer = ctypes.create_string_buffer(packed, len(packed))
        size = ctypes.c_size_t(len(packed))
        extra = (ctypes.c_void_p * 5)(
            _LAUNCH_PARAM_BUFFER_POINTER, ctypes.addressof(buffer),
            _LAUNCH_PARAM_BUFFER_SIZE, ctypes.addressof(size), _LAUNCH_PARAM_END,
        )  # fmt: skip
        status = _hip().hipModuleLaunchKernel(
            self._function(code), num_groups, 1, 1, num_threads, 1, 1, 0,
            ctypes.c_void_p(self._stream.cuda_stream), None, extra,
        )  # fmt: skip
        _check(status, f"launching {kernel.name}")

    def _function(self, code: Code) -> ctypes.c_void_p:
        key = f"{code.spec}"
        if key not in self._functions:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            _check(_hip().hipModuleLoadData(ctypes.byref(module), code.code), f"loading {code.spec.name}")
            name = code.kernel.name.encode()
            _check(
                _hip().hipModuleGetFunction(ctypes.byref(function), module, name), f"finding {code.spec.name}"
            )
            self._functions[key] = function
        return self._functions[key]

    def begin_capture(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._capture = torch.cuda.graph(self._graph, stream=self._stream)
        self._capture.__enter__()

    def end_capture(self) -> HipGraph:
        if self._capture is None or self._graph is None:
            raise InternalError("a capture must have begun; this is a bug")
        self._capture.__exit__(None, None, None)
        graph, self._graph, self._capture = self._graph, None, None
        return HipGraph(graph, self._stream)

    def synchronize(self, timeout_s: float) -> None:
        """Every wait of a kernel is bounded, so this one ends by itself; timeout_s is the kernels' business here."""
        try:
            self._stream.synchronize()
        except RuntimeError as error:
            raise DeviceStuckError(str(error)) from error


class HipDevice:
    """This process's MI355X. heap: tensor of MORI's symmetric heap; addresses: of every rank's part, seen from here."""

    tick_hz = _TICK_HZ

    def __init__(
        self, rank: int, device: torch.device, heap: torch.Tensor, addresses: tuple[int, ...]
    ) -> None:
        self.rank, self.num_ranks = rank, len(addresses)
        self.num_compute_units = torch.cuda.get_device_properties(device).multi_processor_count
        self.stream = HipStream(device)
        self._device, self._heap, self._addresses = device, heap, addresses

    def allocate(self, num_bytes: int, name: str, *, weights: bool = False) -> HipMemory:
        try:
            memory = torch.zeros(max(num_bytes, 1), dtype=torch.uint8, device=self._device)
            torch.cuda.synchronize(self._device)
            return HipMemory(memory)
        except torch.cuda.OutOfMemoryError as error:
            free, _ = torch.cuda.mem_get_info(self._device)
            raise HeapError(
                must_be(f"free device memory for {name}", f"at least {num_bytes} bytes", free)
            ) from error

    def heap(self) -> HipMemory:
        return HipMemory(self._heap)

    def heap_addresses(self) -> tuple[int, ...]:
        return self._addresses

    def enter(self, epoch: int) -> tuple[int, ...]:
        return ()

    def give_up(self, epoch: int) -> tuple[int, ...]:
        return ()

    def close(self) -> None:
        import mori.shmem

        torch.cuda.synchronize(self._device)
        mori.shmem.shmem_finalize()
        machine.part()


def join(*, rank: int, num_ranks: int, heap_bytes: int, group_name: str, timeout_s: float) -> HipDevice:
    """This process's device and heap; returns when all ranks have theirs.

    Where torch.distributed is initialised, its world is the group and the current device this rank's; else the ranks
    meet over a file in shared memory named after the group, and take the visible device of their number.
    Raises ConfigError (no ROCm build of torch, no MI355X, no MORI, a peer that is reached by RDMA only),
    PeerTimeoutError (a rank did not come within timeout_s).
    """
    problems = [finding.what for finding in machine.look(num_ranks, heap_bytes) if not finding.ok]
    if problems:
        raise ConfigError("; ".join(problems))
    os.environ.setdefault("MORI_SHMEM_HEAP_SIZE", str(heap_bytes + _HEAP_MARGIN_BYTES))
    import mori.shmem as shmem

    machine.meet(rank, num_ranks, group_name, timeout_s)
    device = torch.device("cuda", torch.cuda.current_device())
    shmem.shmem_torch_process_group_init(machine.GROUP)
    if shmem.shmem_npes() != num_ranks or shmem.shmem_mype() != rank:
        got = f"rank {shmem.shmem_mype()} of {shmem.shmem_npes()}"
        raise ConfigError(must_be("the MORI group", f"rank {rank} of {num_ranks}", got))
    heap = shmem.mori_shmem_create_tensor((heap_bytes,), torch.uint8)
    heap.zero_()
    torch.cuda.synchronize(device)
    addresses = tuple(shmem.shmem_ptr_p2p(heap.data_ptr(), rank, peer) for peer in range(num_ranks))
    unreachable = [peer for peer, address in enumerate(addresses) if address == 0]
    if unreachable:
        raise ConfigError(
            must_be("peers", "reachable by peer-to-peer stores", f"RDMA only to ranks {unreachable}")
        )
    shmem.shmem_barrier_all()
    return HipDevice(rank, device, heap, addresses)
