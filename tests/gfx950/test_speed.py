"""Speed on one core, measured in CPU time so that a busy machine does not fail it: half of what an idle one reaches."""

from __future__ import annotations

import pytest

from megamoe.backends.gfx950.emulator.device import DeviceConfig

from .speed import WORKLOADS, measure


@pytest.mark.parametrize("name", WORKLOADS)
def test_instructions_a_second(name: str) -> None:
    queue = WORKLOADS[name]()
    off, _ = measure(queue, DeviceConfig())
    on, _ = measure(queue, DeviceConfig.checked())
    assert off > 2.5e6, f"{off / 1e6:.2f} million wave instructions a second without detectors"
    assert on > 1e6, f"{on / 1e6:.2f} million wave instructions a second with all detectors"
