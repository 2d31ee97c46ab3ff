"""Damaged machine code ends in an error of the emulator or runs on: `python -m tests.gfx950.fuzz SEED COUNT`."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace

import numpy as np

from megamoe.backends.gfx950.emulator.code_object import Kernel
from megamoe.backends.gfx950.emulator.device import DeviceConfig, DeviceGroup
from megamoe.backends.gfx950.emulator.errors import EmulatorError

from . import triton_kernels as tk
from .assembly import kernel_of
from .test_flydsl import exchange_kernel
from .toolchain import triton_kernel


def kernels() -> list[tuple[Kernel, int, int, int]]:
    """Kernel, work-items, dynamic LDS, pointers among the arguments."""
    matmul = {"a": "*bf16", "b": "*bf16", "c": "*fp32", "N": "i32", "K": "i32"}
    scalar = "s_load_dwordx4 s[4:7], s[0:1], 0x0\n" + "\n".join(f"s_mov_b32 s{k}, {k}" for k in range(8, 60))
    return [
        (*triton_kernel(tk.softmax, {"x": "*fp32", "out": "*fp32", "n": "i32"}, {"BLOCK": 512}), 2),
        (*triton_kernel(tk.matmul, matmul, {"BM": 32, "BN": 32, "BK": 32}), 3),
        (exchange_kernel(), 256, 0, 3),
        (kernel_of(scalar, lds_bytes=1024, scratch_bytes=64), 64, 0, 2),
    ]


def damaged(kernel: Kernel, rng: np.random.Generator) -> Kernel:
    """The kernel with one to four instructions changed, and with all registers, so that most of them are still valid.

    An operand field gets other bits, the opcode another neighbour, or the word is that of another instruction.
    """
    code = np.frombuffer(kernel.code, np.uint32).copy()
    starts = [one.offset // 4 for one in kernel.instructions]
    for _ in range(rng.integers(1, 5)):
        at = starts[rng.integers(len(starts))]
        low, high = [(0, 9), (9, 17), (17, 25), (16, 23), (0, 32)][rng.integers(5)]
        code[at] ^= np.uint32(rng.integers(1 << (high - low), dtype=np.uint64) << low)
        if rng.integers(4) == 0:
            code[at] = code[starts[rng.integers(len(starts))]]
    d = replace(kernel.descriptor, rsrc1=kernel.descriptor.rsrc1 | 63, rsrc3=kernel.descriptor.rsrc3 | 63)
    return replace(kernel, code=code.tobytes(), name="damaged", descriptor=d)


def main(seed: int, count: int) -> None:
    """Run `count` damaged kernels and print how they ended."""
    rng, ends = np.random.default_rng(seed), Counter[str]()
    whole = kernels()
    for k in range(count):
        kernel, items, shared, pointers = whole[k % len(whole)]
        config = DeviceConfig.checked(num_ranks=2, seed=k + 1, max_instructions=20_000, num_threads=1 + k % 2)
        with DeviceGroup(config) as group:
            heap = group.symmetric_heap(1 << 16)
            try:
                broken = damaged(kernel, rng)
                table = group.devices[0].upload(np.full(64, heap[1].address, np.uint64))
                args = [table.address, heap[0].address, heap[0].address][:pointers]
                args += [1] * (len(broken.explicit_args) - pointers)
                for device in group.devices:
                    device.default_stream.launch(broken, (2,), (items,), args, lds_bytes=shared)
                group.synchronize(20)
                ends["ran on"] += 1
            except EmulatorError as error:
                ends[type(error).__name__] += 1
            assert all(report.text for report in group.reports())
    print(dict(sorted(ends.items())))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
