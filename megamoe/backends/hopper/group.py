"""Ranks that share one process: how they find each other and each other's memory.

Every rank has its own heap, stream and thread. Ranks are spread over the GPUs of the process; those that share a GPU
run side by side, each on its share of the multiprocessors. One rank a process would need the same three things from
elsewhere (heaps, addresses, agreement on the deployment) and nothing else from this backend.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import torch

from megamoe.errors import ConfigError, PeerTimeoutError, must_be

_lock = threading.Lock()
_groups: dict[str, VirtualGroup] = {}


@dataclass
class VirtualGroup:
    """All ranks of a group in this process. fingerprint: of the deployment, the same for all."""

    name: str
    num_ranks: int
    fingerprint: str
    heaps: dict[int, torch.Tensor] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def addresses(self) -> list[int]:
        """Heap base of every rank, in rank order."""
        return [self.heaps[rank].data_ptr() for rank in range(self.num_ranks)]


def join(
    name: str, *, rank: int, num_ranks: int, fingerprint: str, heap: torch.Tensor, timeout_s: float
) -> VirtualGroup:
    """Bring a rank's heap into the group; returns when all ranks have brought theirs.

    Raises ConfigError (rank taken, or another deployment), PeerTimeoutError naming ranks that did not come.
    """
    with _lock:
        group = _groups.setdefault(name, VirtualGroup(name, num_ranks, fingerprint))
    if group.fingerprint != fingerprint:
        raise ConfigError(
            must_be(f"deployment of rank {rank}", f"the group's ({group.fingerprint})", fingerprint)
        )
    deadline_s = time.monotonic() + timeout_s
    with group.changed:
        if rank in group.heaps:
            raise ConfigError(must_be("rank", f"one that group {name} does not have yet", rank))
        group.heaps[rank] = heap
        group.changed.notify_all()
        while len(group.heaps) < num_ranks:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not group.changed.wait(left_s):
                missing = [peer for peer in range(num_ranks) if peer not in group.heaps]
                _remove(group, rank)
                raise PeerTimeoutError(
                    f"ranks {missing} of group {name} did not open within {timeout_s} s (rank {rank})",
                    missing,
                )
    return group


def leave(group: VirtualGroup, rank: int) -> None:
    """Take a rank's heap out; the last one ends the group. Its kernels must have finished."""
    with group.changed:
        _remove(group, rank)


def _remove(group: VirtualGroup, rank: int) -> None:
    group.heaps.pop(rank, None)
    if not group.heaps:
        with _lock:
            if _groups.get(group.name) is group:
                del _groups[group.name]
