"""The CPU backend: one process a rank on one host, a symmetric heap in POSIX shared memory, four real paths.

heap: segments and views. signals: flags, waits, aborts. experts, combine: the arithmetic. routed: index
arithmetic. stages: what paths are made of; compact, fixed_slot, small_m, large_m: the paths. call: one sub-step's
state. backend: the door.
"""

from __future__ import annotations

from megamoe.backends.cpu.backend import CpuBackend
from megamoe.bundle import Bundle


def open_backend(
    bundle: Bundle, *, rank: int, group_name: str, num_slots: int | None, timeout_s: float
) -> CpuBackend:
    """Open rank `rank`; returns when all ranks have opened. Raises HeapError, ConfigError, PeerTimeoutError."""
    return CpuBackend(bundle, rank=rank, group_name=group_name, num_slots=num_slots, timeout_s=timeout_s)
