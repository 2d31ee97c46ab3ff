"""The few calls of the CUDA driver that torch does not offer or that cost less here: allocations by handle, between
processes of one host, and launching a captured graph."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from types import TracebackType

import torch

from megamoe.errors import ConfigError, InternalError, must_be

HANDLE_BYTES = 64
_LIBRARY = "libcuda.so.1"
_LAZY_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: memory of another GPU is reached over NVLink."""


class DriverError(InternalError):
    """A call of the CUDA driver failed. name: of its error, as CUDA_ERROR_INVALID_VALUE."""

    def __init__(self, call: str, name: str) -> None:
        super().__init__(must_be(f"result of {call}", "CUDA_SUCCESS", name))
        self.name = name


class Handle(ctypes.Structure):
    """CUipcMemHandle, which is cudaIpcMemHandle_t too. Passed by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


@cache
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise ConfigError(must_be(_LIBRARY, "installed (the NVIDIA driver)", "not")) from error


def _call(name: str, *arguments: object) -> None:
    """Raises DriverError."""
    _check(name, getattr(_library(), name)(*arguments))


def _check(name: str, code: int) -> None:
    if code:
        said = ctypes.c_char_p()
        _library().cuGetErrorName(code, ctypes.byref(said))
        raise DriverError(name, (said.value or str(code).encode()).decode())


class Context:
    """The primary context of a GPU, which torch uses too: the calling thread's, inside `with`."""

    def __init__(self, device_idx: int) -> None:
        device, self.handle = ctypes.c_int(), ctypes.c_void_p()
        _call("cuInit", 0)
        _call("cuDeviceGet", ctypes.byref(device), device_idx)
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(self.handle), device)

    def __enter__(self) -> None:
        _call("cuCtxPushCurrent_v2", self.handle)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


@cache
def context_of(device_idx: int) -> Context:
    """Kept for good: torch keeps the primary context as long as the process lives."""
    return Context(device_idx)


def graph_launcher(graph: int, stream: int, device_idx: int) -> Callable[[], None]:
    """A function that queues an instantiated graph (cudaGraphExec_t) on a stream of a GPU, whatever stream and GPU are
    current. It raises DriverError. Everything it needs is looked up beforehand: it is called 61 times a step."""
    library, context = _library(), context_of(device_idx).handle
    push, launch, pop = library.cuCtxPushCurrent_v2, library.cuGraphLaunch, library.cuCtxPopCurrent_v2
    what, where = ctypes.c_void_p(graph), ctypes.c_void_p(stream)
    popped = ctypes.byref(ctypes.c_void_p())

    def run() -> None:
        _check("cuCtxPushCurrent_v2", push(context))
        code = launch(what, where)
        pop(popped)
        _check("cuGraphLaunch", code)

    return run


@cache
def _runtime() -> ctypes.CDLL | None:
    """The CUDA runtime that torch has loaded, if any."""
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        return ctypes.CDLL(f"libcudart.so.{major}", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None


def forget_last_error() -> None:
    """After a call of the CUDA runtime that this thread may go on without. The runtime keeps its error, and torch would
    find it after the next kernel that it launches here, and take it for that kernel's."""
    runtime = _runtime()
    if runtime is not None:
        runtime.cudaGetLastError()


def export_allocation(address: int, device_idx: int) -> tuple[bytes, int]:
    """(handle of the allocation that holds an address, the address's offset in it).

    Raises DriverError for memory that no handle is made for: not from cudaMalloc, as torch's expandable segments.
    """
    handle = Handle()
    with context_of(device_idx):
        base, _ = _range_of(address)
        _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
    return bytes(handle), address - base


def open_allocation(payload: bytes, device_idx: int) -> int:
    """Address, for kernels on a GPU, of an allocation of another process, on that GPU or another one.

    Raises DriverError: no such allocation, or one of this process.
    """
    address = ctypes.c_uint64()
    with context_of(device_idx):
        handle = Handle.from_buffer_copy(payload)
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
    return address.value


def bytes_from(address: int, device_idx: int) -> int:
    """How many bytes an allocation has from an address in it on. Raises DriverError."""
    with context_of(device_idx):
        base, num_bytes = _range_of(address)
    return base + num_bytes - address


def _range_of(address: int) -> tuple[int, int]:
    """(first address, bytes) of the allocation that holds an address, in the context entered. Raises DriverError."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    return base.value, size.value


def close_allocation(address: int, device_idx: int) -> None:
    """Give an opened allocation back. Nothing may use it any more."""
    with context_of(device_idx):
        _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))
