"""What the processes of a service get as their environment."""

from __future__ import annotations

import os

from service.config.settings import ServiceConfig
from service.config.sources import ENV_PREFIX


def child_environment(config: ServiceConfig) -> dict[str, str]:
    """Variables that a rank process must have before it starts.

    The malloc settings halve the cost of messages of 64 rows and more (measured on 2 cores with 14 KB rows): big
    buffers are kept instead of mapped and unmapped for every message. One OpenMP pool per rank, sized by
    torch_threads, so that 8 ranks do not fight for the cores.

    CUDA's hardware queues: a process has one rank and one stream, for which the driver's default of 8 is enough. A
    GPU has not many: measured on an H200, with 32 a process 14 processes got a context, the next ones "out of memory".
    """
    threads = str(threads_per_rank(config))
    return {
        "MALLOC_MMAP_THRESHOLD_": "1073741824",
        "MALLOC_TRIM_THRESHOLD_": "4294967296",
        "MALLOC_TOP_PAD_": "67108864",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # Idle OpenMP workers must sleep at once: the cores belong to other ranks.
        "OMP_WAIT_POLICY": "PASSIVE",
        "CUDA_DEVICE_MAX_CONNECTIONS": "8",
    }


def threads_per_rank(config: ServiceConfig) -> int:
    """torch_threads, or an equal share of the cores, at least 1."""
    if config.torch_threads:
        return config.torch_threads
    return max(1, len(os.sched_getaffinity(0)) // config.moe_shape.num_ranks)


def inherited_environment() -> dict[str, str]:
    """The environment for child processes, without our own settings: children get their config as a value."""
    return {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
