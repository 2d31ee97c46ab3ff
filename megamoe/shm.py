"""Shared memory of one host: segments that are really there, and 32-bit futex words to sleep on.

A segment is allocated with posix_fallocate, so that a full /dev/shm is a HeapError at start and not SIGBUS later.
Attaching does not register with Python's resource tracker (before 3.13 the first process to exit would unlink
everyone's memory). Waits are futex calls through ctypes, which releases the GIL: a bounded spin, then sleep.
Linux on x86-64 or aarch64; anything else is refused with a ConfigError.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
import threading
import time
from pathlib import Path

import torch

from megamoe.errors import HeapError, InvalidArgumentError, must_be

SHM_DIR = Path("/dev/shm")
NAME_PREFIX = "megamoe-"
"""Every segment of this product starts so: `ls /dev/shm` tells what is ours."""


class SharedSegment:
    """A named piece of shared memory, mapped into this process.

    The creator unlinks; mappings elsewhere stay valid until closed. `buf` is the whole memory as a memoryview.
    """

    def __init__(self, name: str, mapping: mmap.mmap, *, owner: bool) -> None:
        self.name = name
        self.num_bytes = len(mapping)
        self._mapping: mmap.mmap | None = mapping
        self._owner = owner
        self.buf = memoryview(mapping)
        self.bytes_u8 = torch.frombuffer(mapping, dtype=torch.uint8)
        self.base_ptr = self.bytes_u8.data_ptr()

    @classmethod
    def create(cls, name: str, num_bytes: int, *, prefault: bool = False) -> SharedSegment:
        """Allocate `num_bytes` (rounded up to pages), zeroed. Raises HeapError when it does not fit or exists.

        prefault: map every page now instead of at its first touch.
        """
        num_bytes = -(-max(num_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        path = _path_of(name)
        try:
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        except FileExistsError:
            raise HeapError(
                f"shared memory {name} exists already: another group runs under this name"
            ) from None
        try:
            try:
                os.posix_fallocate(fd, 0, num_bytes)
            except OSError as error:
                path.unlink(missing_ok=True)
                free = shm_free_bytes()
                raise HeapError(
                    must_be(
                        f"free space of {SHM_DIR} for {name}",
                        f"at least {num_bytes} bytes",
                        f"{free} ({error.strerror})",
                    )
                ) from error
            return cls(name, _map(fd, num_bytes, prefault), owner=True)
        finally:
            os.close(fd)

    @classmethod
    def attach(cls, name: str, *, timeout_s: float = 0.0, prefault: bool = False) -> SharedSegment:
        """Map an existing segment, waiting up to timeout_s for it to appear. Raises HeapError if it does not.

        prefault: map every page now instead of at its first touch.
        """
        path = _path_of(name)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fd = os.open(path, os.O_RDWR)
            except FileNotFoundError:
                pass
            else:
                try:
                    # Between the creator's open and its fallocate the file is there, and empty.
                    num_bytes = os.fstat(fd).st_size
                    if num_bytes:
                        return cls(name, _map(fd, num_bytes, prefault), owner=False)
                finally:
                    os.close(fd)
            if time.monotonic() >= deadline:
                raise HeapError(f"shared memory {name} is not there after {timeout_s} s")
            time.sleep(0.005)

    @classmethod
    def attach_page(cls, name: str, offset: int) -> SharedSegment:
        """Map one page of an existing segment and nothing else of it. Raises HeapError if it is not there."""
        try:
            fd = os.open(_path_of(name), os.O_RDWR)
        except FileNotFoundError:
            raise HeapError(f"shared memory {name} is not there") from None
        try:
            return cls(name, mmap.mmap(fd, mmap.PAGESIZE, offset=offset), owner=False)
        except (ValueError, OSError) as error:
            raise HeapError(f"no page at {offset} of {name} can be mapped: {error}") from error
        finally:
            os.close(fd)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor view of [offset, ...). Raises InvalidArgumentError past the end; offsets are 64-bit."""
        num_bytes = dtype.itemsize
        for size in shape:
            num_bytes *= size
        if offset < 0 or offset + num_bytes > self.num_bytes:
            raise InvalidArgumentError(
                must_be(
                    f"view of {self.name}",
                    f"inside its {self.num_bytes} bytes",
                    f"[{offset}, {offset + num_bytes})",
                )
            )
        return self.bytes_u8[offset : offset + num_bytes].view(dtype).view(shape)

    @property
    def path(self) -> Path:
        """The file behind the name: what processes of one group lock (flock) to take turns."""
        return _path_of(self.name)

    def word(self, offset: int) -> Word:
        """The 32-bit word at a 4-byte aligned offset."""
        return Word(self, offset)

    def close(self) -> None:
        """Drop this mapping (views handed out keep the pages alive until they go). Safe to call twice."""
        self._mapping = None
        self.buf.release()

    def unlink(self) -> None:
        """Remove the name. Safe to call twice; only meant for whoever created it or cleans up after it."""
        _path_of(self.name).unlink(missing_ok=True)


def _map(fd: int, num_bytes: int, prefault: bool) -> mmap.mmap:
    return mmap.mmap(fd, num_bytes, mmap.MAP_SHARED | (mmap.MAP_POPULATE if prefault else 0))


def _path_of(name: str) -> Path:
    if not name.startswith(NAME_PREFIX) or "/" in name:
        raise InvalidArgumentError(must_be("segment name", f"{NAME_PREFIX}... without '/'", repr(name)))
    return SHM_DIR / name


def shm_free_bytes() -> int:
    """Bytes that new segments can still take (Docker's default /dev/shm is 64 MB)."""
    stat = os.statvfs(SHM_DIR)
    return stat.f_bavail * stat.f_frsize


def unlink_all(prefix: str) -> list[str]:
    """Remove every segment whose name starts with `prefix`: clean-up after a killed group. Returns the names."""
    if not prefix.startswith(NAME_PREFIX):
        raise InvalidArgumentError(must_be("prefix", f"at least {NAME_PREFIX!r}", repr(prefix)))
    names = sorted(path.name for path in SHM_DIR.glob(prefix + "*"))
    for name in names:
        _path_of(name).unlink(missing_ok=True)
    return names


# ---------------------------------------------------------------------------------------------- futex words

_FUTEX_NR = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
# Of futex(2), after the number: told once, so that no call converts its arguments by trial.
_syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int,
)
_WORD = struct.Struct("=I")
_MASK = 0xFFFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


_STRONG_ORDER = platform.machine() == "x86_64"
_fence_lock = threading.Lock()


def fence() -> None:
    """Order earlier loads and stores before later ones, as seen by other processes.

    x86-64 keeps stores in order and loads in order, which is all that publish-then-flag needs; elsewhere an
    uncontended lock gives acquire and release.
    """
    if not _STRONG_ORDER:
        with _fence_lock:
            pass


_full_fence_lock = threading.Lock()


def full_fence() -> None:
    """Order earlier stores before later loads too: for who stores, then looks whether the other side sleeps.

    An uncontended lock is a locked instruction, which no x86-64 load passes; aarch64's acquire and release give it too
    for the one pair of words that Bell and rings look at.
    """
    with _full_fence_lock:
        pass


class Word:
    """A 32-bit word in shared memory that processes store to, compare and sleep on.

    Values are taken modulo 2^32; waits compare for equality only, so that generations may wrap.
    """

    __slots__ = ("_address", "_segment", "_view")

    def __init__(self, segment: SharedSegment, offset: int) -> None:
        if offset % 4:
            raise InvalidArgumentError(must_be("word offset", "a multiple of 4", offset))
        self._segment = segment
        self._view = segment.buf[offset : offset + 4].cast("I")
        self._address = ctypes.c_void_p(segment.base_ptr + offset)

    def load(self) -> int:
        value = self._view[0]
        if not _STRONG_ORDER:
            fence()
        return value

    def store(self, value: int) -> None:
        """Publish: everything stored before is visible to who sees this value."""
        if not _STRONG_ORDER:
            fence()
        self._view[0] = value & _MASK

    def wake_all(self) -> None:
        """Wake every process that sleeps on this word."""
        _syscall(
            _FUTEX_NR,
            self._address,
            _FUTEX_WAKE,
            0x7FFFFFFF,
            None,
            None,
            0,
        )

    def wait_while(self, value: int, timeout_s: float, *, spin: int = 20) -> bool:
        """Sleep while the word equals `value`, at most timeout_s seconds. True if it differs on return.

        Spins `spin` loads first: long enough to catch an answer that is under way, too short to burn a core that
        the awaited rank needs.
        """
        value &= _MASK
        for _ in range(spin):
            if self._view[0] != value:
                fence()
                return True
        deadline = time.monotonic() + timeout_s
        while self._view[0] == value:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            spec = _Timespec(int(left_s), int((left_s % 1) * 1e9))
            _syscall(
                _FUTEX_NR,
                self._address,
                _FUTEX_WAIT,
                value,
                ctypes.byref(spec),
                None,
                0,
            )
        fence()
        return True
