"""How the ranks of a group find each other's device memory: in one process, or one process a rank.

Every rank puts a card into shared memory, `<group_name>-device-<rank>`: its deployment, and how others reach its heap.
A rank of the same process takes the tensor itself; one of another process opens a CUDA IPC handle, and its kernels
then store over NVLink as before. Cards have no name any more once all ranks have read all of them.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from dataclasses import dataclass

import torch

from megamoe.backends.hopper.memory import Allocation, export_tensor
from megamoe.errors import ConfigError, HeapError, PeerTimeoutError, must_be
from megamoe.shm import SharedSegment

_MAGIC = 0x484F5050
_READY = 64
"""Byte of the first rank's word that says it has read this card."""
_FINGERPRINT = slice(8, 40)
_PROCESS = slice(96, 128)
_SHARED = 128
"""Byte of the word that says that the handle is there: only where some rank is of another process."""
_LENGTH = slice(136, 144)
_HANDLE = 144
_CARD_BYTES = 4096
_OFFSET_BYTES = 8
"""Of a heap in its allocation, after the allocation's handle."""
_this_process = uuid.uuid4().hex
_own: dict[tuple[str, int], torch.Tensor] = {}
_lock = threading.Lock()


@dataclass
class RemoteHeap:
    """A heap of another process, as kernels of this one reach it."""

    allocation: Allocation
    offset: int

    def data_ptr(self) -> int:
        return self.allocation.address + self.offset


@dataclass
class DeviceGroup:
    """The heaps of all ranks (uint8), each on its own device, in rank order."""

    name: str
    heaps: dict[int, torch.Tensor | RemoteHeap]

    def of_this_process(self) -> list[torch.Tensor]:
        return [heap for heap in self.heaps.values() if isinstance(heap, torch.Tensor)]

    def addresses(self) -> list[int]:
        """Heap base of every rank as this process sees it, in rank order."""
        return [self.heaps[rank].data_ptr() for rank in sorted(self.heaps)]


def share(heap: torch.Tensor) -> bytes:
    """What another process needs to open a heap; nothing for memory that only this process has."""
    if heap.device.type != "cuda":
        return b""
    handle = export_tensor(heap)
    return handle.payload + handle.offset.to_bytes(_OFFSET_BYTES, "little")


def open_shared(handle: bytes, rank: int, device: torch.device) -> RemoteHeap:
    """The heap of a rank of another process, for kernels on `device`. Raises ConfigError where it did not share one.

    The handle is opened in the context of `device`, whichever GPU the memory is on: only then may its kernels store
    there.
    """
    if not handle:
        raise ConfigError(
            must_be(f"heap of rank {rank}", "device memory, to be shared between processes", "not")
        )
    payload, offset = handle[:-_OFFSET_BYTES], handle[-_OFFSET_BYTES:]
    return RemoteHeap(Allocation(payload, device), int.from_bytes(offset, "little"))


def join(
    name: str, *, rank: int, num_ranks: int, fingerprint: str, heap: torch.Tensor, timeout_s: float
) -> DeviceGroup:
    """Bring a rank's heap into the group; returns when all ranks have brought theirs and read the others'.

    name: "megamoe-...", the same on all ranks. Raises ConfigError (ranks with another deployment, on all alike),
    HeapError (the rank is taken), PeerTimeoutError naming ranks that did not come within timeout_s.
    """
    deadline = time.monotonic() + timeout_s
    group = DeviceGroup(name, {})
    cards: list[SharedSegment] = []
    own = SharedSegment.create(f"{name}-device-{rank}", _CARD_BYTES)
    try:
        with _lock:
            _own[name, rank] = heap
        _fill(own, fingerprint)
        _read_all(group, rank, num_ranks, heap, own, cards, deadline, timeout_s)
        return group
    except BaseException:
        leave(group, rank)
        raise
    finally:
        own.unlink()
        for card in (own, *cards):
            with contextlib.suppress(BufferError):
                card.close()


def leave(group: DeviceGroup, rank: int) -> None:
    """Let all heaps go. This rank's kernels must have finished."""
    heaps, group.heaps = group.heaps, {}
    with _lock:
        _own.pop((group.name, rank), None)
    for heap in heaps.values():
        if isinstance(heap, RemoteHeap):
            heap.allocation.close()


def _fill(card: SharedSegment, fingerprint: str) -> None:
    card.buf[_FINGERPRINT] = fingerprint.ljust(_FINGERPRINT.stop - _FINGERPRINT.start).encode()
    card.buf[_PROCESS] = _this_process.encode()
    _say(card, 0)


def _fill_handle(card: SharedSegment, handle: bytes) -> None:
    card.buf[_LENGTH] = len(handle).to_bytes(8, "little")
    card.buf[_HANDLE : _HANDLE + len(handle)] = handle
    _say(card, _SHARED)


def _say(card: SharedSegment, offset: int) -> None:
    word = card.word(offset)
    word.store(_MAGIC)
    word.wake_all()


def _is_here(card: SharedSegment) -> bool:
    return bytes(card.buf[_PROCESS]).decode() == _this_process


def _read_all(
    group: DeviceGroup,
    rank: int,
    num_ranks: int,
    heap: torch.Tensor,
    own: SharedSegment,
    cards: list[SharedSegment],
    deadline: float,
    timeout_s: float,
) -> None:
    """Read every rank's card, say so on it, and wait until everybody has read this one. group: gets the heaps."""
    name = group.name

    def left_s() -> float:
        return max(deadline - time.monotonic(), 0.0)

    missing: list[int] = []
    found: dict[int, SharedSegment] = {}
    for peer in range(num_ranks):
        try:
            card = own if peer == rank else SharedSegment.attach(f"{name}-device-{peer}", timeout_s=left_s())
        except HeapError:
            missing.append(peer)
            continue
        if card is not own:
            cards.append(card)
        found[peer] = card
        if not card.word(0).wait_while(0, left_s()):
            missing.append(peer)
    said = {peer: bytes(card.buf[_FINGERPRINT]).decode().strip() for peer, card in found.items()}
    alike = len(set(said.values())) == 1
    if alike and not missing:
        if not all(_is_here(card) for card in found.values()):
            _fill_handle(own, share(heap))
        for peer, card in found.items():
            there = _heap_of(name, peer, card, heap.device, left_s())
            if there is None:
                missing.append(peer)
            else:
                group.heaps[peer] = there
    for card in found.values() if not missing else ():
        _say(card, _READY + 4 * rank)
    missing = missing or [
        peer for peer in range(num_ranks) if not own.word(_READY + 4 * peer).wait_while(0, left_s())
    ]
    if missing:
        raise PeerTimeoutError(
            f"ranks {missing} of group {name} did not open within {timeout_s} s (rank {rank} waited)", missing
        )
    if not alike:
        each = ", ".join(f"rank {peer}: {text}" for peer, text in said.items())
        raise ConfigError(must_be("deployment", "equal on all ranks", each))


def _heap_of(
    name: str, peer: int, card: SharedSegment, device: torch.device, timeout_s: float
) -> torch.Tensor | RemoteHeap | None:
    """None: the peer has given up since it put its card there, or does not share its heap within timeout_s."""
    if _is_here(card):
        with _lock:
            return _own.get((name, peer))
    if not card.word(_SHARED).wait_while(0, timeout_s):
        return None
    length = int.from_bytes(card.buf[_LENGTH], "little")
    return open_shared(bytes(card.buf[_HANDLE : _HANDLE + length]), peer, device)
