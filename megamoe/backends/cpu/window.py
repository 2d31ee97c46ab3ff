"""All ranks' segments side by side in one range of addresses, so that one tensor spans the whole group.

A scatter to all ranks is then one indexed store into a [num_ranks, ...] view instead of a loop over ranks. The range
is reserved without memory; each rank's file is mapped over its part.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence

import torch

from megamoe.errors import HeapError
from megamoe.shm import SharedSegment

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # Linux; the mmap module of 3.11 does not name the second


class Window:
    """[num_ranks, num_bytes] of shared memory. The mapping lives as long as any tensor of it."""

    def __init__(self, segments: Sequence[SharedSegment], num_bytes: int) -> None:
        self._stride = num_bytes
        self._num_ranks = len(segments)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        mapping = mmap.mmap(-1, num_bytes * len(segments), flags=flags)
        self._bytes = torch.frombuffer(mapping, dtype=torch.uint8)
        base = self._bytes.data_ptr()
        for idx, segment in enumerate(segments):
            fd = os.open(segment.path, os.O_RDWR)
            try:
                prot = mmap.PROT_READ | mmap.PROT_WRITE
                wanted = base + idx * num_bytes
                got = _mmap(wanted, num_bytes, prot, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
                if got != wanted:
                    error = os.strerror(ctypes.get_errno())
                    raise HeapError(f"{segment.name} cannot be mapped: {num_bytes} bytes wanted, got {error}")
            finally:
                os.close(fd)

    def tensor(self, offset: int, rows: int, row_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        """[num_ranks, rows, row_bytes / itemsize] of dtype: the same region of every rank."""
        size = dtype.itemsize
        typed = self._bytes.view(dtype)
        width = row_bytes // size
        return typed.as_strided(
            (self._num_ranks, rows, width), (self._stride // size, width, 1), offset // size
        )
