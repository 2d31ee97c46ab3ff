"""Speed on one core, measured in CPU time so that a busy machine does not fail it: half of what an idle one reaches."""

from __future__ import annotations

import time

import numpy as np
import pytest

from megamoe.backends.gfx950.emulator.device import DeviceConfig, DeviceGroup

from . import triton_kernels as tk
from .toolchain import triton_kernel


@pytest.mark.parametrize(("checked", "least"), [(False, 2.5e6), (True, 0.5e6)])
def test_instructions_a_second(checked: bool, least: float) -> None:
    kernel, items, _ = triton_kernel(tk.silu, {"x": "*fp32", "out": "*fp32", "n": "i32"}, {"BLOCK": 1024})
    count = 1 << 18
    with DeviceGroup(DeviceConfig.checked() if checked else DeviceConfig()) as group:
        device = group.devices[0]
        x, out = device.upload(np.linspace(-9, 9, count, dtype=np.float32)), device.allocate(4 * count)
        best = 0.0
        for _ in range(3):
            args = [x.address, out.address, count, 0, 0][: len(kernel.explicit_args)]
            device.default_stream.launch(kernel, (count // 1024,), (items,), args)
            before, start = group.num_executed, time.process_time()
            group.synchronize()
            best = max(best, (group.num_executed - before) / (time.process_time() - start))
    assert best > least, f"{best / 1e6:.2f} million wave instructions a second"
