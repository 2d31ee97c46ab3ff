"""An emulated MI355X: gfx950 code objects run on the CPU, any number of ranks at a time.

`DeviceGroup(DeviceConfig(num_ranks=8))` gives ranks with memory, streams, symmetric heaps and graphs; `load(hsaco)`
gives kernels. Detectors (`DeviceConfig.checked`) report LDS races, races in global memory and values used before their
`s_waitcnt`; addresses out of range, deadlocks and unimplemented instructions are errors. The C core is compiled on
first use.
"""

from __future__ import annotations

from megamoe.backends.gfx950.emulator.device import (
    Buffer,
    DeviceConfig,
    DeviceGroup,
    Graph,
    LaunchHandle,
    Stream,
    load,
)
from megamoe.backends.gfx950.emulator.report import WIDTHS, Report, Traffic, raise_reports

__all__ = [
    "WIDTHS",
    "Buffer",
    "DeviceConfig",
    "DeviceGroup",
    "Graph",
    "LaunchHandle",
    "Report",
    "Stream",
    "Traffic",
    "load",
    "raise_reports",
]
