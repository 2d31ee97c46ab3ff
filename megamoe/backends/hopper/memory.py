"""Memory of callers: device memory lent and opened by handle, host memory that kernels reach where it lies.

A caller lends an allocation of its GPU (`share_memory`), a rank on the same GPU opens it, and kernels read rows and
write results there: nothing is copied, nothing passes the host.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import torch

from megamoe.backends.hopper import driver
from megamoe.backends.hopper.shortage import allocating
from megamoe.errors import ConfigError, InvalidArgumentError, must_be
from megamoe.memory import MemoryHandle, MemoryKind, check_view

_lock = threading.Lock()
_lent: set[bytes] = set()
"""Handles that this process made: it cannot open them itself."""
_opened: dict[tuple[bytes, int], tuple[int, int]] = {}
"""(Address, users) of allocations of other processes, by handle and GPU: the driver opens each once."""
_MAX_VIEWS = 256


def uuid_of(device: torch.device) -> str:
    """A GPU's name that is the same in all processes: "GPU-...", as nvidia-smi -L says."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def export_tensor(tensor: torch.Tensor) -> MemoryHandle:
    """Let other processes of this host open the memory of a contiguous tensor, for as long as it lives.

    Raises InvalidArgumentError for a tensor that is not on a GPU, ConfigError for an allocation that no handle is made
    for (torch's expandable segments).
    """
    if not tensor.is_cuda or not tensor.is_contiguous():
        raise InvalidArgumentError(
            must_be("lent tensor", "contiguous and on a GPU", f"{list(tensor.stride())} on {tensor.device}")
        )
    try:
        payload, offset = driver.export_allocation(tensor.data_ptr(), tensor.device.index)
    except driver.DriverError as error:
        wanted = "from cudaMalloc (not of expandable segments)"
        raise ConfigError(must_be("allocation of the lent tensor", wanted, str(error))) from error
    with _lock:
        _lent.add(payload)
    return MemoryHandle(
        kind=MemoryKind.CUDA_IPC,
        payload=payload,
        offset=offset,
        num_bytes=tensor.nbytes,
        device=uuid_of(tensor.device),
    )


class Allocation:
    """An allocation of another process, opened for kernels of `device`, on whichever GPU it is; each is opened once."""

    def __init__(self, payload: bytes, device: torch.device) -> None:
        """Raises InvalidArgumentError: this process's own, or nothing that can be opened."""
        self._key = (payload, device.index)
        self._closed = False
        with _lock:
            if payload in _lent:
                raise InvalidArgumentError(must_be("memory.payload", "of another process", "of this one"))
            address, users = _opened.get(self._key, (0, 0))
            if not users:
                address = self._open(payload, device)
            _opened[self._key] = (address, users + 1)
        self.address = address

    @staticmethod
    def _open(payload: bytes, device: torch.device) -> int:
        if len(payload) != driver.HANDLE_BYTES:
            raise InvalidArgumentError(
                must_be("memory.payload", f"{driver.HANDLE_BYTES} bytes", len(payload))
            )
        try:
            return driver.open_allocation(payload, device.index)
        except driver.DriverError as error:
            raise InvalidArgumentError(
                must_be("memory.payload", "an allocation that another process has", error.name)
            ) from error

    def close(self) -> None:
        """Safe to call twice. Nothing may use it any more."""
        if self._closed:
            return
        self._closed = True
        with _lock:
            address, users = _opened.pop(self._key)
            if users > 1:
                _opened[self._key] = (address, users - 1)
            else:
                driver.close_allocation(address, self._key[1])


class DeviceMemory:
    """Implements megamoe.memory.SharedMemory (`share`) and OpenMemory (`open`)."""

    def __init__(
        self,
        handle: MemoryHandle,
        memory: torch.Tensor,
        published: torch.cuda.Event,
        allocation: Allocation | None = None,
    ) -> None:
        self.handle = handle
        self._memory = memory
        self._published = published
        self._allocation = allocation
        start = memory.data_ptr()
        self._addresses = range(start, start + memory.nbytes)
        self._views: dict[tuple[int, tuple[int, ...], torch.dtype], torch.Tensor] = {}

    @classmethod
    def share(cls, num_bytes: int, device: torch.device) -> DeviceMemory:
        """Lend zeroed memory of a GPU. Raises HeapError when it is short, ConfigError as `export_tensor`."""
        with allocating("lent memory", num_bytes, device):
            memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        torch.cuda.current_stream(device).synchronize()
        published = torch.cuda.Event(interprocess=True)
        published.record(torch.cuda.current_stream(device))
        handle = export_tensor(memory)
        return cls(replace(handle, payload=handle.payload + published.ipc_handle()), memory, published)

    @classmethod
    def open(cls, handle: MemoryHandle, device: torch.device) -> DeviceMemory:
        """Open what another process lends, for kernels on `device`. Raises InvalidArgumentError: memory of another
        GPU, this process's own, none that can be opened, or more of it than its owner has there."""
        if handle.device != uuid_of(device):
            raise InvalidArgumentError(must_be("memory.device", uuid_of(device), handle.device or "the host"))
        allocated, published = handle.payload[: driver.HANDLE_BYTES], handle.payload[driver.HANDLE_BYTES :]
        if len(handle.payload) != 2 * driver.HANDLE_BYTES:
            wanted = f"{2 * driver.HANDLE_BYTES} bytes"
            raise InvalidArgumentError(must_be("memory.payload", wanted, len(handle.payload)))
        allocation = Allocation(allocated, device)
        try:
            there = driver.bytes_from(allocation.address, device.index)
            last = handle.offset + handle.num_bytes
            if last > there:
                wanted = f"inside the {there} bytes of its allocation"
                raise InvalidArgumentError(must_be("memory", wanted, f"bytes up to {last}"))
            memory = tensor_at(allocation.address + handle.offset, handle.num_bytes, device)
            return cls(handle, memory, open_event(published, device), allocation)
        except BaseException:
            allocation.close()
            raise

    @property
    def num_bytes(self) -> int:
        return self.handle.num_bytes

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As OpenMemory says; the same view again for the same arguments."""
        key = (offset, shape, dtype)
        view = self._views.get(key)
        if view is None:
            size = check_view(self.num_bytes, offset, shape, dtype)
            view = self._memory[offset : offset + size].view(dtype).view(shape)
            if len(self._views) == _MAX_VIEWS:
                self._views.clear()
            self._views[key] = view
        return view

    def publish(self) -> None:
        """As SharedMemory says: a mark in the stream, which the rank looks at.

        None where the stream has nothing left to do, for then earlier marks have come too.
        """
        stream = torch.cuda.current_stream(self._memory.device.index)
        if not stream.query():
            self._published.record(stream)

    def holds(self, address: int) -> bool:
        return address in self._addresses

    def is_published(self) -> bool:
        """Whether the owner's GPU has come to where the owner last published."""
        return bool(self._published.query())

    @property
    def is_closed(self) -> bool:
        return not self._addresses

    def close(self) -> None:
        self._views.clear()
        self._addresses = range(0)
        if self._allocation is not None:
            self._allocation.close()


class _Interface:
    """What torch asks for memory that is not its own."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def open_event(handle: bytes, device: torch.device) -> torch.cuda.Event:
    """An event that another process records. Raises InvalidArgumentError where there is none."""
    try:
        event: torch.cuda.Event = torch.cuda.Event.from_ipc_handle(device, handle)
    except RuntimeError as error:
        first, _, _ = str(error).partition("\n")
        raise InvalidArgumentError(
            must_be("memory.payload", "an event that another process has", first)
        ) from error
    return event


def tensor_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [num_bytes] over memory of a GPU, without owning it."""
    return torch.as_tensor(_Interface(address, num_bytes), device=device)


def share_memory(num_bytes: int, device: str) -> DeviceMemory:
    """See megamoe.backends.share_memory. device: torch's name of a GPU, or "" for the current one."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "memory of kind cuda_ipc needs a CUDA build of torch and a GPU (got: no CUDA device)"
        )
    wanted = torch.device(device or "cuda")
    if wanted.type != "cuda":
        raise ConfigError(must_be("device of cuda_ipc memory", "a GPU, as cuda:0", repr(device)))
    index = torch.cuda.current_device() if wanted.index is None else wanted.index
    return DeviceMemory.share(num_bytes, torch.device("cuda", index))
