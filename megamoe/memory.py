"""Memory that one process owns and another one computes on: how it is named, lent and opened.

A caller on the same host lends rows and room for results (`share_memory` in backends gives the memory and its handle);
a rank opens the handle (`Runtime.open_memory`) and reads and writes tensors in place. Owns the handle, the two
protocols, the one rule of what lies inside, and the kind that needs no device: POSIX shared memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import weakref
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import Protocol

import torch

from megamoe.errors import HeapError, InvalidArgumentError, must_be
from megamoe.shm import NAME_PREFIX, SHM_DIR, SharedSegment

MEMORY_ALIGN = 16
"""Every tensor in lent memory begins at a multiple of this many bytes: devices move rows in pieces of it."""
MAX_PAYLOAD_BYTES = 256
_LENT_PREFIX = f"{NAME_PREFIX}memory-"


class MemoryKind(StrEnum):
    """How another process reaches memory. POSIX_SHM: a named segment of the host; CUDA_IPC: an allocation of a GPU."""

    POSIX_SHM = "posix_shm"
    CUDA_IPC = "cuda_ipc"


@dataclass(frozen=True, kw_only=True)
class MemoryHandle:
    """What a process needs to open memory of another one; plain bytes and numbers, so that any wire can carry it.

    kind: a MemoryKind, as its text. payload: posix_shm: the segment's name in UTF-8; cuda_ipc: the 64 bytes of the
    cudaIpcMemHandle_t of the allocation, then the 64 of the cudaIpcEventHandle_t of the event that its owner records
    when it publishes. offset: where the lent bytes begin in what payload names. num_bytes: how many are lent. device:
    "" for the host, a GPU's UUID ("GPU-...") for cuda_ipc.
    """

    kind: str
    payload: bytes
    offset: int
    num_bytes: int
    device: str = ""

    def __post_init__(self) -> None:
        """Raises InvalidArgumentError: an unknown kind, no payload or a long one, a range that cannot be."""
        if self.kind not in set(MemoryKind):
            raise InvalidArgumentError(
                must_be("memory.kind", f"one of {', '.join(MemoryKind)}", repr(self.kind))
            )
        if not 1 <= len(self.payload) <= MAX_PAYLOAD_BYTES:
            raise InvalidArgumentError(
                must_be("memory.payload", f"1 to {MAX_PAYLOAD_BYTES} bytes", len(self.payload))
            )
        for name, value, least in (("offset", self.offset, 0), ("num_bytes", self.num_bytes, 1)):
            if not least <= value < 2**62:
                raise InvalidArgumentError(must_be(f"memory.{name}", f"from {least} to 2^62 - 1", value))
        if self.offset % MEMORY_ALIGN:
            raise InvalidArgumentError(must_be("memory.offset", f"a multiple of {MEMORY_ALIGN}", self.offset))


class OpenMemory(Protocol):
    """Memory of another process, opened here. Offsets count from the first lent byte."""

    @property
    def num_bytes(self) -> int: ...

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous view; no copy, no synchronisation. Raises InvalidArgumentError as `check_view` says."""

    def close(self) -> None:
        """Give the mapping back: when nothing that was launched uses its tensors any more. Safe to call twice."""


class SharedMemory(OpenMemory, Protocol):
    """Memory of this process that others may open with `handle`. Its owner closes it after they have."""

    @property
    def handle(self) -> MemoryHandle: ...

    def publish(self) -> None:
        """What this process wrote so far, or queued on its current stream, is there before a rank that it then calls
        reads the memory. Does not wait."""


def check_view(num_bytes: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a tensor in lent memory. Raises InvalidArgumentError unless it is aligned and inside."""
    if offset % MEMORY_ALIGN:
        raise InvalidArgumentError(must_be("offset in memory", f"a multiple of {MEMORY_ALIGN}", offset))
    size = prod(shape) * dtype.itemsize
    if offset < 0 or min(shape, default=0) < 0 or offset + size > num_bytes:
        raise InvalidArgumentError(
            must_be("tensor in memory", f"inside its {num_bytes} bytes", f"bytes [{offset}, {offset + size})")
        )
    return size


class HostMemory:
    """POSIX shared memory: `share` lends a new segment, `open` maps one that another process lends.

    Its owner keeps the segment locked; the lock dies with it. Who closes a segment without an owner removes its name,
    and so does `remove_unowned`, so that a killed owner leaves nothing in /dev/shm.
    """

    def __init__(self, segment: SharedSegment, handle: MemoryHandle, lock_fd: int) -> None:
        self.handle = handle
        self._segment = segment
        self._lock_fd = lock_fd

    @classmethod
    def share(cls, num_bytes: int) -> HostMemory:
        """Lend num_bytes, zeroed and there (prefaulted). Raises HeapError when /dev/shm is short."""
        segment = SharedSegment.create(
            f"{_LENT_PREFIX}{os.getpid()}-{secrets.token_hex(8)}", num_bytes, prefault=True
        )
        handle = MemoryHandle(
            kind=MemoryKind.POSIX_SHM, payload=segment.name.encode(), offset=0, num_bytes=segment.num_bytes
        )
        lock_fd = os.open(segment.path, os.O_RDWR)
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        memory = cls(segment, handle, lock_fd)
        weakref.finalize(memory, _remove_own, segment.name, os.getpid())
        return memory

    @classmethod
    def open(cls, handle: MemoryHandle) -> HostMemory:
        """Map what another process lends. Raises InvalidArgumentError: another kind, no such memory, or less of it."""
        if handle.kind != MemoryKind.POSIX_SHM or handle.device:
            got = f"{handle.kind} on {handle.device or 'the host'}"
            raise InvalidArgumentError(must_be("memory.kind", f"{MemoryKind.POSIX_SHM} on the host", got))
        name = handle.payload.decode(errors="replace")
        if not name.startswith(_LENT_PREFIX):
            raise InvalidArgumentError(
                must_be("memory.payload", f"a name like {_LENT_PREFIX}...", repr(name))
            )
        try:
            segment = SharedSegment.attach(name, prefault=True)
        except HeapError as error:
            raise InvalidArgumentError(
                must_be("memory.payload", "shared memory that is there", repr(name))
            ) from error
        if handle.offset + handle.num_bytes > segment.num_bytes:
            last = handle.offset + handle.num_bytes
            segment.close()
            raise InvalidArgumentError(
                must_be("memory", f"inside the {segment.num_bytes} bytes of {name}", f"bytes up to {last}")
            )
        return cls(segment, handle, -1)

    @property
    def num_bytes(self) -> int:
        return self.handle.num_bytes

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        check_view(self.num_bytes, offset, shape, dtype)
        return self._segment.tensor(self.handle.offset + offset, shape, dtype)

    def publish(self) -> None:
        """Nothing to wait for: what a process stores into shared memory is there."""

    def close(self) -> None:
        """Give the mapping back, and the name if its owner is gone or this is the owner. Safe to call twice."""
        if self._lock_fd >= 0:
            self._segment.unlink()
            os.close(self._lock_fd)
            self._lock_fd = -1
        self._segment.close()
        _remove_if_unowned(self._segment.name)


def _remove_own(name: str, owner_pid: int) -> None:
    """Whose owner forgot to close it, or was interrupted while it did: at its end, and not at that of a fork."""
    if os.getpid() == owner_pid:
        (SHM_DIR / name).unlink(missing_ok=True)


def remove_unowned() -> list[str]:
    """Remove lent memory whose owner has ended without closing it; returns the names."""
    names = (path.name for path in sorted(SHM_DIR.glob(f"{_LENT_PREFIX}*")))
    return [name for name in names if _remove_if_unowned(name)]


def _remove_if_unowned(name: str) -> bool:
    with contextlib.suppress(
        OSError
    ):  # it is gone, belongs to another user, or its owner lives and has it locked
        fd = os.open(SHM_DIR / name, os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(SHM_DIR / name)
        finally:
            os.close(fd)
        return True
    return False
