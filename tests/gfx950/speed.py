"""Wave instructions a second: `python -m tests.gfx950.speed [--threads N]`.

Each workload runs with the detectors off and with all of them on. On one core CPU time counts, so a busy machine does
not matter; with --threads eight ranks run in N threads, and wall time counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import ml_dtypes
import numpy as np

from megamoe.backends.gfx950.emulator.code_object import Kernel
from megamoe.backends.gfx950.emulator.device import DeviceConfig, DeviceGroup

from . import triton_kernels as tk
from .toolchain import flydsl_kernel, triton_kernel

rng = np.random.default_rng(3)
Queue = Callable[[DeviceGroup], None]


def _repeat(
    kernel: Kernel,
    items: int,
    shared: int,
    grid: tuple[int, ...],
    arrays: list[np.ndarray],
    numbers: list[int],
    group: DeviceGroup,
) -> None:
    """Queue one launch on every rank."""
    for device in group.devices:
        args = [device.upload(a).address for a in arrays] + numbers
        args += [0] * (len(kernel.explicit_args) - len(args))
        device.default_stream.launch(kernel, grid, (items,), args, lds_bytes=shared)


def elementwise() -> Queue:
    """SiLU of 2^18 floats."""
    count = 1 << 18
    kernel, items, shared = triton_kernel(
        tk.silu, {"x": "*fp32", "out": "*fp32", "n": "i32"}, {"BLOCK": 1024}
    )
    x = np.linspace(-9, 9, count, dtype=np.float32)
    return partial(_repeat, kernel, items, shared, (count // 1024,), [x, np.zeros_like(x)], [count])


def reduction() -> Queue:
    """Softmax of 512 rows of 2000 floats: wave and workgroup reductions."""
    kernel, items, shared = triton_kernel(
        tk.softmax, {"x": "*fp32", "out": "*fp32", "n": "i32"}, {"BLOCK": 2048}
    )
    x = rng.standard_normal((512, 2000)).astype(np.float32)
    return partial(_repeat, kernel, items, shared, (512,), [x, np.zeros_like(x)], [2000])


def half_matmul() -> Queue:
    """bf16 [128, 512] x [512, 128], 64x64 tiles: LDS written by 16-bit words."""
    types = {"a": "*bf16", "b": "*bf16", "c": "*fp32", "N": "i32", "K": "i32"}
    kernel, items, shared = triton_kernel(tk.matmul, types, {"BM": 64, "BN": 64, "BK": 64})
    a, b = (rng.standard_normal((512, 128)).astype(ml_dtypes.bfloat16) for _ in range(2))
    return partial(
        _repeat, kernel, items, shared, (2, 2), [a, b, np.zeros((128, 128), np.float32)], [128, 512]
    )


def scaled_matmul() -> Queue:
    """MXFP8 x MXFP4 [64, 1024] x [1024, 64]."""
    names = ("a", "sa", "b", "sb", "c", "N", "K")
    types = dict(zip(names, ["*fp8e4nv", "*u8", "*u8", "*u8", "*fp32", "i32", "i32"], strict=True))
    kernel, items, shared = triton_kernel(
        tk.scaled_matmul, types, {"BM": 64, "BN": 64, "BK": 256, "FB": "e2m1", "PB": 2}
    )
    a, b = rng.integers(0, 120, (64, 1024), dtype=np.uint8), rng.integers(0, 256, (64, 512), dtype=np.uint8)
    scale = np.full((64, 32), 127, np.uint8)
    return partial(
        _repeat,
        kernel,
        items,
        shared,
        (1, 1),
        [a, scale, b, scale, np.zeros((64, 64), np.float32)],
        [64, 1024],
    )


def atomics() -> Queue:
    """A histogram of 2^16 numbers by global atomics."""
    kernel, items, shared = triton_kernel(
        tk.histogram, {"x": "*i32", "out": "*i32", "n": "i32"}, {"BLOCK": 1024}
    )
    x = rng.integers(0, 4096, 1 << 16, dtype=np.int32)
    return partial(_repeat, kernel, items, shared, (64,), [x, np.zeros(4096, np.int32)], [1 << 16])


def tile_matmul() -> Queue:
    """The scaled-MFMA GEMM written in FlyDSL: one wave a tile, A through LDS."""
    from . import flydsl_kernels as fk

    m, n, k = 128, 256, 1024
    zero = fk.fx.Int64(0)
    fk.launch_mx_gemm(zero, zero, zero, zero, zero, fk.fx.Int32(m), fk.fx.Int32(n), k)
    kernel = flydsl_kernel(fk.launch_mx_gemm)
    a, b = rng.integers(0, 120, (m, k), dtype=np.uint8), rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    sa, sb = (np.full((rows, k // 32), 127, np.uint8) for rows in (m, n))
    return partial(
        _repeat, kernel, 64, 0, (m // 16, n // 16), [a, b, sa, sb, np.zeros((m, n), np.uint16)], [n]
    )


WORKLOADS: dict[str, Callable[[], Queue]] = {
    one.__name__: one for one in (elementwise, reduction, half_matmul, scaled_matmul, atomics, tile_matmul)
}


def measure(queue: Queue, config: DeviceConfig, *, repeats: int = 3, wall: bool = False) -> tuple[float, int]:
    """Best of `repeats` runs in instructions a second (of CPU or wall time), and the instructions of one."""
    clock = time.perf_counter if wall else time.process_time
    best, count = 0.0, 0
    with DeviceGroup(config) as group:
        for _ in range(repeats):
            queue(group)
            before, start = group.num_executed, clock()
            group.synchronize()
            count = group.num_executed - before
            best = max(best, count / (clock() - start))
    return best, count


def main() -> None:
    """Print one line a workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args()
    chosen, threads = arguments.only, arguments.threads
    shape = {"num_ranks": 8, "num_threads": threads} if threads else {}
    print(f"{'workload':16}{'instructions':>14}{'off, M/s':>10}{'all on, M/s':>13}")
    for name, make in WORKLOADS.items():
        if chosen in name:
            queue = make()
            off, count = measure(queue, DeviceConfig(**shape), wall=bool(threads))
            on, _ = measure(queue, DeviceConfig.checked(**shape), wall=bool(threads))
            print(f"{name:16}{count:>14}{off / 1e6:>10.2f}{on / 1e6:>13.2f}")


if __name__ == "__main__":
    main()
