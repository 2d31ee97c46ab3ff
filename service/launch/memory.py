"""How much shared memory a service takes, and whether this machine has it: known before anything is allocated."""

from __future__ import annotations

import psutil

from megamoe import plan_layout, shm_free_bytes
from megamoe.errors import HeapError, must_be
from service.config import ServiceConfig
from service.ring.specs import ring_specs


def shm_bytes(config: ServiceConfig) -> dict[str, int]:
    """Bytes of /dev/shm by purpose, all ranks together. Heaps on GPUs are their own memory."""
    num_ranks = config.moe_shape.num_ranks
    heap = 0 if config.on_gpu else plan_layout(config.bundle).num_bytes_all_ranks
    rings = num_ranks * sum(spec.num_bytes for spec in ring_specs(config))
    return {"heaps": heap, "request rings": rings}


def shm_left_bytes() -> int:
    """Bytes that new segments can take: /dev/shm may promise more than the machine has memory and swap for."""
    return min(shm_free_bytes(), psutil.virtual_memory().available + psutil.swap_memory().free)


def check_fits(config: ServiceConfig) -> None:
    """Raises HeapError when the ranks' segments do not fit, before any of them takes the machine's last page."""
    needs = shm_bytes(config)
    need, left = sum(needs.values()), shm_left_bytes()
    if need > left:
        parts = ", ".join(f"{name} {num_bytes}" for name, num_bytes in needs.items())
        wanted = f"at least {need} bytes ({parts}; see megamoe plan, or lower max_tokens_per_rank)"
        raise HeapError(must_be("free shared memory", wanted, left))
