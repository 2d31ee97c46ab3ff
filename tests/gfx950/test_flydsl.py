"""FlyDSL kernels run right; machine code with one instruction replaced by `s_nop` is caught."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import ml_dtypes
import numpy as np
import pytest

from megamoe.backends.gfx950.emulator.code_object import Kernel
from megamoe.backends.gfx950.emulator.device import DeviceConfig, DeviceGroup
from megamoe.backends.gfx950.emulator.isa.instruction import Instruction
from megamoe.backends.gfx950.emulator.isa.text import disassemble

from .toolchain import flydsl_kernel

R = 8
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@lru_cache(maxsize=1)
def exchange_kernel() -> Kernel:
    from . import flydsl_kernels as fk

    zero = fk.fx.Int64(0)
    fk.launch_exchange(zero, zero, zero, fk.fx.Int32(0), fk.fx.Int32(1), R)
    return flydsl_kernel(fk.launch_exchange)


def test_scaled_gemm() -> None:
    from . import flydsl_kernels as fk

    m, n, k = 32, 48, 512
    rng = np.random.default_rng(0)
    a = rng.standard_normal((m, k)).astype(ml_dtypes.float8_e4m3fn)
    b = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    sa, sb = (rng.integers(124, 130, (rows, k // 32), dtype=np.uint8) for rows in (m, n))
    zero = fk.fx.Int64(0)
    fk.launch_mx_gemm(zero, zero, zero, zero, zero, fk.fx.Int32(m), fk.fx.Int32(n), k)
    kernel = flydsl_kernel(fk.launch_mx_gemm)
    assert kernel.spills == (0, 0)
    assert kernel.lds_bytes == 2048
    with DeviceGroup(DeviceConfig.checked(seed=2)) as group:
        device = group.devices[0]
        inputs = [device.upload(x.view(np.uint8), f"input{i}", klass=i) for i, x in enumerate((a, b, sa, sb))]
        out = device.allocate(2 * m * n, "out")
        handle = device.default_stream.launch(
            kernel, (m // 16, n // 16), (64,), [*(x.address for x in inputs), out.address, n]
        )
        group.synchronize()
        assert group.reports() == []
        got = out.view(ml_dtypes.bfloat16, (m, n)).astype(np.float64)
        assert handle is not None
        traffic = handle.traffic
    x = a.astype(np.float64) * np.repeat(2.0 ** (sa.astype(float) - 127), 32, 1)
    y = np.stack([E2M1[b & 15], E2M1[b >> 4]], -1).reshape(n, k) * np.repeat(
        2.0 ** (sb.astype(float) - 127), 32, 1
    )
    want = x @ y.T
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 4e-3
    assert traffic.num_mfma == (m // 16) * (n // 16) * (k // 128)
    assert traffic.loaded(1) == traffic.loaded(1, 16) == b.nbytes * (m // 16)
    assert traffic.loaded(2, 1) == sa.nbytes * (n // 16)


def test_loads_into_lds() -> None:
    from . import flydsl_kernels as fk

    fk.launch_dma(fk.fx.Int64(0), fk.fx.Int64(0))
    with DeviceGroup(DeviceConfig.checked(seed=4)) as group:
        device = group.devices[0]
        x, y = device.upload(np.arange(1024, dtype=np.int32)), device.allocate(4096)
        handle = device.default_stream.launch(
            flydsl_kernel(fk.launch_dma), (1,), (256,), [x.address, y.address]
        )
        group.synchronize()
        assert group.reports() == []
        np.testing.assert_array_equal(y.view(np.int32), np.arange(1024).reshape(256, 4)[::-1].reshape(-1))
        assert handle is not None
        assert handle.traffic.lds_dma_bytes == 4096


def run_exchange(
    kernel: Kernel, seed: int, *, epochs: tuple[int, ...] = (1,), num_threads: int = 1
) -> tuple[list[str], bool]:
    """All ranks exchange with all; the reports, and whether every rank got every rank's words."""
    with DeviceGroup(DeviceConfig.checked(num_ranks=R, seed=seed, num_threads=num_threads)) as group:
        heap = group.symmetric_heap(4096 * R + 4 * R)
        words = [np.arange(1024, dtype=np.int32) + 10000 * rank for rank in range(R)]
        outs = [device.allocate(4096 * R, f"out[{device.rank}]") for device in group.devices]
        tables = [
            device.upload(np.array([h.address for h in heap], np.uint64), "table") for device in group.devices
        ]
        sources = [device.upload(words[device.rank], "source") for device in group.devices]
        for epoch in epochs:
            for rank, device in enumerate(group.devices):
                args = [tables[rank].address, sources[rank].address, outs[rank].address, rank, epoch]
                device.default_stream.launch(kernel, (R,), (256,), args)
            group.synchronize()
        right = all((out.view(np.int32, (R, 1024)) == np.stack(words)).all() for out in outs)
        return [r.text for r in group.reports()], right


@pytest.mark.parametrize("seed", [0, 1, 2, 7, 8, 9])
def test_exchange_between_eight_ranks(seed: int) -> None:
    assert run_exchange(exchange_kernel(), seed, epochs=(1, 2, -(2**31), -1)) == ([], True)


def mutant(kernel: Kernel, dropped: list[Instruction]) -> Kernel:
    """The kernel with `dropped` replaced by s_nop."""
    code = bytearray(kernel.code)
    for one in dropped:
        code[one.offset : one.offset + one.size] = bytes.fromhex("000080bf") * (one.size // 4)
    return replace(kernel, code=bytes(code), name="mutant")


def test_every_fence_wait_and_barrier_of_the_exchange_is_needed() -> None:
    kernel = exchange_kernel()
    code = kernel.instructions
    first_store = next(k for k, one in enumerate(code) if one.mnemonic.startswith("global_store"))
    # The release fence and the release store each write back, so only without both is something missing.
    cases = [
        [one for one in code if one.mnemonic == "buffer_wbl2"],
        [one for one in code if one.mnemonic == "buffer_inv"],
    ]
    cases += [[one] for one in code if one.mnemonic == "s_barrier"]
    cases += [
        [code[k]]
        for k in range(first_store + 1, len(code))
        if code[k].mnemonic == "s_waitcnt" and "load" in code[k - 1].mnemonic
    ]
    assert len(cases) >= 5
    for dropped in cases:
        reports = [r for seed in (1, 2, 3) for r in run_exchange(mutant(kernel, dropped), seed)[0]]
        assert dropped, "nothing to drop"
        assert reports, disassemble(dropped[0])
        assert all("(flydsl_kernels.py:" in text for text in reports)
