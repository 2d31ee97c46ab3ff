"""What an emulated device is made of, and how it runs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

_MAX_WORKERS = 64


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """What is emulated. An MI355X has 256 compute units in 8 dies (XCD), 160 KiB of LDS each.

    detect_waits: registers and LDS used before their `s_waitcnt`. detect_lds, detect_global: races.
    seed: 0 runs waves in turn, another number draws wave and slice length. quantum: most instructions of a slice.
    max_groups: most resident workgroups of a launch (0: as many as fit). max_instructions: budget of one wait.
    num_threads: workers that run the ranks side by side (0: one a core, at most one a rank). Only one worker repeats a
    run exactly for the same seed.
    """

    num_ranks: int = 1
    num_cus: int = 256
    num_xcds: int = 8
    lds_per_cu: int = 160 * 1024
    max_groups: int = 0
    detect_waits: bool = False
    detect_lds: bool = False
    detect_global: bool = False
    seed: int = 0
    quantum: int = 0
    max_instructions: int = 20_000_000_000
    num_threads: int = 1

    @property
    def num_workers(self) -> int:
        """Workers of the core: `num_threads`, or the cores this process may use, at most one a rank."""
        wanted = self.num_threads or len(os.sched_getaffinity(0))
        return max(1, min(wanted, self.num_ranks, _MAX_WORKERS))

    @property
    def detect(self) -> int:
        """The detectors as the core's bit mask."""
        return self.detect_waits | self.detect_lds << 1 | self.detect_global << 2

    @classmethod
    def checked(cls, **settings: Any) -> DeviceConfig:
        """A configuration with every detector on."""
        return cls(detect_waits=True, detect_lds=True, detect_global=True, **settings)
