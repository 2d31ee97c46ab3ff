"""The fences, waits and barriers of our own kernels are needed: without one kind of them the detectors speak up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megamoe.backends.gfx950 import launches
from megamoe.backends.gfx950.build import Code, KernelSpec, load_or_compile
from megamoe.backends.gfx950.emulator.code_object import Kernel
from megamoe.backends.gfx950.emulator.isa.instruction import Instruction
from megamoe.backends.gfx950.lockstep import Ranks, batches_of, emulated, shape_of
from megamoe.bundle import Path
from megamoe.errors import MegaMoeError

NOP = bytes.fromhex("000080bf")


def without(kernel: Kernel, mnemonic: str) -> Kernel:
    """The kernel with every instruction of that name replaced by s_nop."""
    dropped = [one for one in kernel.instructions if one.mnemonic == mnemonic]
    assert dropped, f"{kernel.name} has no {mnemonic}"
    return replaced(kernel, dropped, mnemonic)


def replaced(kernel: Kernel, dropped: list[Instruction], what: str) -> Kernel:
    code = bytearray(kernel.code)
    for one in dropped:
        code[one.offset : one.offset + one.size] = NOP * (one.size // 4)
    return replace(kernel, code=bytes(code), name=f"{kernel.name} without {what}")


def run(path: Path, *, identity: bool, seed: int) -> list[str]:
    with Ranks(emulated(shape_of(num_experts=16)), seed=seed) as ranks:
        if identity:
            ranks.bind_identity()
        else:
            ranks.bind()
        try:
            ranks.run(path, batches_of(ranks.shape, [3, 1, 4, 1, 5, 9, 2, 6]))
        except MegaMoeError as error:
            return [str(error)]
        return ranks.reports()


@pytest.mark.parametrize("mnemonic", ["buffer_wbl2", "buffer_inv", "s_barrier", "s_waitcnt"])
@pytest.mark.parametrize(
    ("kernel", "path", "identity"),
    [
        ("dispatch", Path.FIXED_SLOT, True),
        ("prepare", Path.COMPACT, True),
        ("dispatch_gemm1", Path.FIXED_SLOT, False),
        ("large_m", Path.LARGE_M, True),
        ("large_m", Path.LARGE_M, False),
        ("small_m", Path.SMALL_M, False),
    ],
)
def test_a_kernel_without_them_is_caught(
    monkeypatch: pytest.MonkeyPatch, kernel: str, path: Path, identity: bool, mnemonic: str
) -> None:
    def load(spec: KernelSpec) -> Code:
        code = load_or_compile(spec)
        if spec.name != kernel:
            return code
        mutant = Code(spec, code.code)
        mutant.__dict__["kernel"] = without(code.kernel, mnemonic)
        return mutant

    monkeypatch.setattr(launches, "load_or_compile", load)
    found = any(run(path, identity=identity, seed=seed) for seed in (1, 2, 3))
    assert found, f"{kernel} without {mnemonic} must be reported, or fault"


@pytest.mark.parametrize("mnemonic", ["buffer_wbl2", "buffer_inv"])
def test_every_fence_of_readiness_is_needed_by_itself(monkeypatch: pytest.MonkeyPatch, mnemonic: str) -> None:
    """small_m marks and waits in three places: for lists, and for tiles of light and of heavy owners. Tiles have two
    units of GEMM1 here, of different workgroups."""
    shape = shape_of(512, 256, num_experts=64)

    def load(spec: KernelSpec) -> Code:
        code = load_or_compile(spec)
        if spec.name != "small_m":
            return code
        kernel = code.kernel
        found = [one for one in kernel.instructions if one.mnemonic == mnemonic]
        sources = [kernel.lines.find(kernel.address + one.offset) for one in found]
        of_readiness = [
            one
            for one, source in zip(found, sources, strict=True)
            if source is not None and source[0] == "ready.py"
        ]
        assert len(of_readiness) == 3
        mutant = Code(spec, code.code)
        mutant.__dict__["kernel"] = replaced(kernel, [of_readiness[place]], f"{mnemonic} {place}")
        return mutant

    monkeypatch.setattr(launches, "load_or_compile", load)
    for place in range(3):
        reports: list[str] = []
        for heavy_rows in (1, 10_000):
            if reports:
                break
            with Ranks(emulated(shape, auto_fp8_min_rows=heavy_rows), seed=1) as ranks:
                ranks.bind()
                ranks.run(Path.SMALL_M, batches_of(shape, [3, 1, 4, 1, 5, 9, 2, 6]))
                reports += ranks.reports()
        assert reports, f"small_m without {mnemonic} {place} of readiness must be reported"
