"""One emulated rank on a symmetric heap in POSIX shared memory: ranks in processes or threads of their own.

Every rank has an emulated device of its own that maps all ranks' heaps; kernels of different ranks really run side by
side and meet in memory only. Detectors that compare ranks need `emulated` instead. Sizes and offsets come from
megamoe.layout; segments lose their names once all ranks have mapped them.
"""

from __future__ import annotations

import contextlib
import struct
import time

import numpy as np

from megamoe.backends.gfx950 import emulator
from megamoe.backends.gfx950.device.emulated import (
    HEAP_CLASS,
    TICK_HZ,
    WEIGHTS_CLASS,
    EmulatedMemory,
    EmulatedStream,
)
from megamoe.backends.gfx950.record import POSTED
from megamoe.errors import ConfigError, HeapError, PeerTimeoutError, must_be
from megamoe.layout import HeapLayout
from megamoe.shm import SharedSegment

NUM_CUS = 32
"""Compute units of a rank here: every workgroup of a grid costs the emulator time, whatever it finds to do."""
_IDLE_S = 0.0005
_MAGIC = 0x4D4D4F46
_FINGERPRINT = slice(8, 56)
_MASK32 = 0xFFFFFFFF


class SharedDevice:
    """Implements megamoe.backends.gfx950.device.Device. Opening is collective.

    Raises ConfigError (deployments differ), HeapError (shared memory short or taken), PeerTimeoutError naming ranks
    that did not open within timeout_s.
    """

    def __init__(
        self, layout: HeapLayout, *, rank: int, group_name: str, fingerprint: str, timeout_s: float
    ) -> None:
        self.rank, self.num_ranks = rank, layout.num_ranks
        self.num_compute_units, self.tick_hz = NUM_CUS, TICK_HZ
        self._layout = layout
        self._segments: list[SharedSegment] = []
        self._own: SharedSegment | None = None
        self._group = emulator.DeviceGroup(emulator.DeviceConfig(num_ranks=self.num_ranks, num_cus=NUM_CUS))
        # Others may always bring what waves wait for: only the deadline ends a wait.
        self._group.hosts, self._group.idle_s = 2, _IDLE_S
        self._device = self._group.devices[rank]
        self.stream = EmulatedStream(self._device.stream())
        try:
            self._open(
                group_name, f"{fingerprint}/{layout.num_slots}", time.monotonic() + timeout_s, timeout_s
            )
        except BaseException:
            self.close()
            raise
        self._heaps = tuple(
            self._group.adopt(
                np.frombuffer(segment.buf, np.uint8)[: layout.num_bytes], f"heap[{peer}]", peer, peer_visible=True,
                klass=HEAP_CLASS,
            )
            for peer, segment in enumerate(self._segments)
        )  # fmt: skip

    def _open(self, group_name: str, fingerprint: str, deadline: float, timeout_s: float) -> None:
        names = [f"{group_name}-heap-{peer}" for peer in range(self.num_ranks)]
        own = self._own = SharedSegment.create(names[self.rank], self._layout.num_bytes)
        own.buf[_FINGERPRINT] = fingerprint.encode().ljust(_FINGERPRINT.stop - _FINGERPRINT.start)
        own.word(0).store(_MAGIC)
        own.word(0).wake_all()
        missing = []
        for peer, name in enumerate(names):
            try:
                left_s = max(deadline - time.monotonic(), 0.0)
                segment = own if peer == self.rank else SharedSegment.attach(name, timeout_s=left_s)
            except HeapError:
                missing.append(peer)
                continue
            self._segments.append(segment)
            if not segment.word(0).wait_while(0, max(deadline - time.monotonic(), 0.0)):
                missing.append(peer)
        self._check_all_came(group_name, missing, timeout_s)
        said = [bytes(segment.buf[_FINGERPRINT]).decode().strip() for segment in self._segments]
        ready = self._layout.region("ready").offset
        for segment in self._segments:
            segment.word(ready + 4 * self.rank).store(_MAGIC)
            segment.word(ready + 4 * self.rank).wake_all()
        missing = [
            peer
            for peer in range(self.num_ranks)
            if not own.word(ready + 4 * peer).wait_while(0, max(deadline - time.monotonic(), 0.0))
        ]
        self._check_all_came(group_name, missing, timeout_s)
        own.unlink()
        if len(set(said)) > 1:
            each = ", ".join(f"rank {peer}: {text}" for peer, text in enumerate(said))
            raise ConfigError(must_be("deployment (digest and number of slots)", "equal on all ranks", each))

    def _check_all_came(self, group_name: str, missing: list[int], timeout_s: float) -> None:
        if missing:
            where = f"group {group_name} did not open within {timeout_s} s (rank {self.rank})"
            raise PeerTimeoutError(f"ranks {missing} of {where}", missing)

    def allocate(self, num_bytes: int, name: str, *, weights: bool = False) -> EmulatedMemory:
        klass = WEIGHTS_CLASS if weights else 0
        return EmulatedMemory(self._device.allocate(max(num_bytes, 1), name, klass=klass, read_only=weights))

    def heap(self) -> EmulatedMemory:
        return EmulatedMemory(self._heaps[self.rank])

    def heap_addresses(self) -> tuple[int, ...]:
        return tuple(heap.address for heap in self._heaps)

    # ------------------------------------------------------------------------------------- who is where

    def enter(self, epoch: int) -> tuple[int, ...]:
        struct.pack_into(
            "<Q", self._segments[self.rank].buf, self._layout.region("progress").offset, _word(epoch, 0)
        )
        return self.given_up(epoch)

    def give_up(self, epoch: int) -> tuple[int, ...]:
        """What a peer said already, else who has not come as far as this launch: posted to all ranks."""
        told = self.given_up(epoch)
        if told:
            return told
        progress = self._layout.region("progress").offset
        words = [struct.unpack_from("<Q", segment.buf, progress)[0] for segment in self._segments]
        missing = tuple(peer for peer, word in enumerate(words) if word != _word(epoch, 0))
        mask = sum(1 << peer for peer in missing)
        place = self._layout.region("aborts").offset + 8 * self.rank
        for segment in self._segments:
            struct.pack_into("<Q", segment.buf, place, _word(epoch, mask))
        return missing

    def given_up(self, epoch: int) -> tuple[int, ...]:
        """Ranks that some rank said have not come to launch `epoch`; () if nobody gave it up."""
        line = self._layout.region("aborts").offset
        words = struct.unpack_from(f"<{self.num_ranks}Q", self._segments[self.rank].buf, line)
        masks = [word >> 32 & 0xFF for word in words if word >> 63 and word & _MASK32 == epoch]
        mask = 0
        for one in masks:
            mask |= one
        return tuple(peer for peer in range(self.num_ranks) if mask >> peer & 1)

    def close(self) -> None:
        self._group.close()
        self._heaps = ()
        for segment in self._segments:
            # A view that still lives keeps its mapping; the pages go when the process does.
            with contextlib.suppress(BufferError):
                segment.close()
        if self._own is not None:
            self._own.unlink()
        self._segments, self._own = [], None


def _word(epoch: int, info: int) -> int:
    return epoch | (info | POSTED) << 32
