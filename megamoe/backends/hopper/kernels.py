"""Launches of one rank's stages on the current stream: the host side of the kernel files, one method a stage.

Nothing here reads device memory or waits. Grids follow from the device and from how many ranks share it; what a
kernel does follows from the control block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from megamoe.backends.hopper import record
from megamoe.backends.hopper.buffers import BoundLayer, packs_densely
from megamoe.backends.hopper.control_launches import ControlLaunches
from megamoe.backends.hopper.gemm_launches import GemmLaunches
from megamoe.backends.hopper.launches import Device
from megamoe.backends.hopper.plan import GemmPlan
from megamoe.backends.hopper.staged_launches import StagedLaunches
from megamoe.backends.hopper.whole_launches import WholeLaunches
from megamoe.bundle import Path

__all__ = ["Device", "Kernels"]


class Kernels(ControlLaunches, StagedLaunches, GemmLaunches, WholeLaunches):
    """All launches of one rank."""

    def warm_up(
        self,
        plans: Iterable[GemmPlan],
        capacities: Mapping[Path, Iterable[int]],
        small_m: Iterable[GemmPlan] = (),
        large_m: Iterable[GemmPlan] = (),
    ) -> None:
        """Compile and load every kernel that steps of these plans and runtimes can need. small_m, large_m: plans of
        those paths.

        Must happen before any rank's first launch: loading code may wait for the device, and so for a kernel of a
        peer that itself waits for this rank. Runs everything once on memory of its own, with no rows and no patience.
        """
        b = self.buffers
        scratch = torch.zeros(1 << 16, dtype=torch.uint8, device=b.device)
        real = b.bases.clone()
        b.bases.fill_(scratch.data_ptr())
        words = [0] * record.NUM_WORDS
        words[record.Word.ABORTS_OFFSET] = 4096
        words[record.Word.COUNTS_OFFSET] = 8192
        b.control.copy_(torch.tensor(words, dtype=torch.int64))
        b.work.zero_()
        layer = BoundLayer(self._no_weights, self._no_weights)
        for path, values in capacities.items():
            compact = packs_densely(path)
            if compact:
                self.prepare()
            for quantized in (False, True):
                for rows in {1, b.layout.capacity}:
                    self.dispatch(rows, compact=compact, quantized=quantized)
            for gemms in plans:
                for capacity in values:
                    self.index(gemms, capacity, compact=compact)
        self.identity()
        for gemms in plans:
            self.expand(gemms)
            self.gemm1(layer, gemms)
            self.gemm2(layer, gemms)
            self.gemm2(layer, gemms, plain_rows=True)
        for gemms in small_m:
            self.small_m(layer, gemms)
            self.small_m(BoundLayer(None, None), gemms)
        for gemms in large_m:
            self.quantize(1)
            self.large_m(layer, gemms)
            self.large_m(BoundLayer(None, None), gemms)
        self.combine(1)
        self.close()
        self.abort()
        self.take(1)
        self.tell()
        _finish(b.device)
        b.bases.copy_(real)
        b.control.zero_()
        _finish(b.device)


def _finish(device: torch.device) -> None:
    """Wait for all that runs on a device; compiling ahead has none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
