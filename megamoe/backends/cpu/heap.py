"""The symmetric heap as one rank sees it: its own segment, its peers' segments, and typed views of all.

Opening is collective: every rank creates `<group_name>-heap-<rank>`, maps all others and says so in their `ready`
lines; it returns when all ranks have said so. From then on the segments have no name: however the ranks end, their
memory goes with them. Ranks that were started with another deployment are refused, on all ranks alike. Sizes and
offsets come from megamoe.layout only.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from megamoe.backends.cpu.window import Window
from megamoe.errors import ConfigError, HeapError, PeerTimeoutError, must_be
from megamoe.layout import NUM_BUFFERS, WIDE_BYTES, HeapLayout
from megamoe.shm import SharedSegment

_MAGIC = 0x4D4D4F45
_FINGERPRINT = slice(8, 40)
"""Bytes of the header: digest of the deployment and the number of slots. Header and ready lines lie at the same
offsets in every layout, so that ranks with different ones can still tell each other."""
_UNUSED_EPOCH = 0x5EEDFACE
"""Epoch half of a flag before its first post: a sleeper on it is woken by the group's usual first epoch, 0. (Should a
group start at this epoch, the posted bit keeps it right and only the first sleep is longer.)"""

WIDE = torch.complex128
"""16-byte elements: rows are moved as these, several times faster than as bytes or bf16 by indexed copies."""
assert WIDE.itemsize == WIDE_BYTES

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Buffer:
    """One of the two buffers, of all ranks; [rank] of a tensor is that rank's own.

    counts: [num_ranks, num_ranks, counts_words] int32, a row per source. meta: [num_ranks, max_rows_received,
    meta_words] int32. rows: [num_ranks, max_rows_received, row_bytes / 16] wide: e4m3 codes, E8M0 scales. results:
    [num_ranks, capacity * num_topk, result_bytes / 16] wide, a row per (token, slot) of the rank's own batch.
    """

    counts: Int32Array
    meta: torch.Tensor
    rows: torch.Tensor
    results: torch.Tensor


def _buffer(window: Window, layout: HeapLayout, buffer_idx: int) -> Buffer:
    def view(name: str, rows: int, row_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        return window.tensor(layout.region(f"{name}{buffer_idx}").offset, rows, row_bytes, dtype)

    received = layout.max_rows_received
    routed = layout.capacity * layout.bundle.shape.num_topk
    return Buffer(
        counts=view("counts", layout.num_ranks, 4 * layout.counts_words, torch.int32).numpy(),
        meta=view("payload_meta", received, 4 * layout.meta_words, torch.int32),
        rows=view("payload_rows", received, layout.row_bytes, WIDE),
        results=view("combine_rows", routed, layout.result_bytes, WIDE),
    )


def segment_name(group_name: str, rank: int) -> str:
    return f"{group_name}-heap-{rank}"


class Heap:
    """segments: one a rank, this rank's own included. buffers: the two buffers of all ranks."""

    def __init__(self, layout: HeapLayout, *, rank: int, group_name: str, timeout_s: float) -> None:
        self.layout = layout
        self.rank = rank
        self.group_name = group_name
        self._opened: list[SharedSegment] = []
        self._created: SharedSegment | None = None
        deadline = time.monotonic() + timeout_s
        try:
            self._open(deadline, timeout_s)
        except BaseException:
            self.close()
            raise

    def _open(self, deadline: float, timeout_s: float) -> None:
        layout, rank = self.layout, self.rank
        fingerprint = _fingerprint(layout)
        own = SharedSegment.create(segment_name(self.group_name, rank), layout.num_bytes)
        self._created = own
        self._opened.append(own)
        own.buf[_FINGERPRINT] = fingerprint
        flags = layout.region("flags")
        own.tensor(flags.offset, (flags.num_bytes // 8,), torch.int64).fill_(_UNUSED_EPOCH)
        magic = own.word(layout.region("header").offset)
        magic.store(_MAGIC)
        magic.wake_all()
        segments: list[SharedSegment] = []
        missing: list[int] = []
        for peer in range(layout.num_ranks):
            try:
                segments.append(own if peer == rank else self._attach(peer, deadline))
            except HeapError:
                missing.append(peer)
        if missing:
            raise self._absent(missing, timeout_s)
        said = [bytes(segment.buf[_FINGERPRINT]).decode() for segment in segments]
        if len(set(said)) == 1:
            window = Window(segments, layout.num_bytes)
        # From here on a quick peer may close and unlink its segment: everything that needs names is done.
        ready = layout.region("ready").offset
        for segment in segments:
            word = segment.word(ready + 4 * rank)
            word.store(_MAGIC)
            word.wake_all()
        missing = [
            peer
            for peer in range(layout.num_ranks)
            if not own.word(ready + 4 * peer).wait_while(0, max(deadline - time.monotonic(), 0.0))
        ]
        if missing:
            raise self._absent(missing, timeout_s)
        # Everyone has mapped it: without a name, nothing is left behind however this process ends.
        own.unlink()
        # Only now, when nobody needs this rank's segment to find out the same.
        if len(set(said)) > 1:
            each = ", ".join(f"rank {peer}: {text}" for peer, text in enumerate(said))
            raise ConfigError(must_be("deployment (digest and number of slots)", "equal on all ranks", each))
        self.segments = tuple(segments)
        self.buffers = tuple(_buffer(window, layout, idx) for idx in range(NUM_BUFFERS))

    def _attach(self, peer: int, deadline: float) -> SharedSegment:
        name = segment_name(self.group_name, peer)
        segment = SharedSegment.attach(name, timeout_s=max(deadline - time.monotonic(), 0.0))
        self._opened.append(segment)
        if not segment.word(0).wait_while(0, max(deadline - time.monotonic(), 0.0)):
            raise HeapError(f"shared memory {name} was made but never filled in")
        return segment

    def _absent(self, missing: list[int], timeout_s: float) -> PeerTimeoutError:
        return PeerTimeoutError(
            f"ranks {missing} of group {self.group_name} did not open within {timeout_s} s (rank {self.rank} waited)",
            missing,
        )

    def close(self) -> None:
        """Unlink this rank's segment and drop all mappings. Safe to call twice."""
        for segment in self._opened:
            # A view that still lives keeps its mapping; the pages go when the process does.
            with contextlib.suppress(BufferError):
                segment.close()
        self._opened = []
        self.segments = ()
        self.buffers = ()
        if self._created is not None:
            self._created.unlink()
            self._created = None


def _fingerprint(layout: HeapLayout) -> bytes:
    text = f"{layout.bundle.deployment.fingerprint()}/{layout.num_slots}"
    return text.ljust(_FINGERPRINT.stop - _FINGERPRINT.start).encode()
