"""The machine under a rank on a real device: what it must have, and how ranks meet before MORI starts."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from megamoe.backends import Finding
from megamoe.errors import PeerTimeoutError, must_be
from megamoe.shm import SHM_DIR

_distributed: Any = distributed  # names that torch exports without saying so
ARCH, NUM_UNITS = "gfx950", 256
GROUP = "megamoe"
"""Name under which MORI looks the process group up."""


def look(num_ranks: int, num_bytes: int = 0) -> list[Finding]:
    """What ranks need of this machine, one by one. num_bytes: of device memory, that a rank will ask for."""
    if torch.version.hip is None or not torch.cuda.is_available():
        built = torch.version.hip or ("CUDA" if torch.version.cuda else "CPU")
        what = f"an MI355X (got: a {built} build and no ROCm device; --device emulated needs neither)"
        return [Finding(False, f"backend gfx950 needs a ROCm build of torch and {what}")]
    count = torch.cuda.device_count()
    gpus = [torch.cuda.get_device_properties(index) for index in range(count)]
    archs = {gpu.gcnArchName.split(":")[0] for gpu in gpus}
    units = {gpu.multi_processor_count for gpu in gpus}
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    far = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    free = min(torch.cuda.mem_get_info(index)[0] for index in range(count))
    has_mori = importlib.util.find_spec("mori") is not None
    return [
        Finding(True, f"ROCm {torch.version.hip}"),
        _finding(
            "GPUs that a rank sees", count == 1 or count >= num_ranks, f"{num_ranks}, or 1 of its own", count
        ),
        _finding("architecture of the GPUs", archs == {ARCH}, f"{ARCH} (MI355X)", _listed(archs)),
        _finding("compute units of a GPU", units == {NUM_UNITS}, f"{NUM_UNITS} in 8 XCDs", _listed(units)),
        _finding("GPUs without peer access", not far, "none", _listed(far) or "none"),
        _finding("free memory of a GPU", free >= num_bytes, f"at least {num_bytes} bytes", free),
        _finding("package amd-mori", has_mori, "installed", "installed" if has_mori else "missing"),
    ]


def _finding(name: str, ok: bool, wanted: str, got: object) -> Finding:
    return Finding(ok, f"{name}: {got}" if ok else must_be(name, wanted, got))


def _listed(values: set[str] | set[int] | Sequence[object]) -> str:
    return ", ".join(sorted(map(str, values)))


def meet(rank: int, num_ranks: int, group_name: str, timeout_s: float) -> None:
    """Make the process group that MORI starts from, called GROUP, and this rank's device the current one.

    Where torch.distributed is initialised its world is the group, and the current device this rank's. Else ranks, all
    of one host, meet over a file in shared memory and take the visible device of their number.
    Raises PeerTimeoutError when not all have come within timeout_s.
    """
    if not distributed.is_initialized():
        torch.cuda.set_device(rank if torch.cuda.device_count() >= num_ranks else 0)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = _distributed.FileStore(f"{SHM_DIR}/{group_name}-meeting", num_ranks)
        try:
            distributed.init_process_group(
                "gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=timeout_s)
            )
        except RuntimeError as error:
            what = f"ranks of group {group_name} did not all open within {timeout_s} s (rank {rank})"
            raise PeerTimeoutError(f"{what}: {error}", ()) from error
    _distributed.distributed_c10d._register_process_group(GROUP, distributed.group.WORLD)


def part() -> None:
    """Leave the process group that `meet` made, so that another runtime of this process can meet anew."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
