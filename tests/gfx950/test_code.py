"""The machine code of every variant for DeepSeek-V4-Pro: registers, LDS, spills, loops. Looked at, not run."""

from __future__ import annotations

from collections import Counter

import pytest

from megamoe.backends.gfx950.build import load_or_compile
from megamoe.backends.gfx950.emulator.code_object import Kernel
from megamoe.backends.gfx950.emulator.isa.instruction import Instruction
from megamoe.backends.gfx950.emulator.lowering import missing
from megamoe.backends.gfx950.launches import alone_specs, kernel_specs, small_m_specs
from megamoe.bundle import Deployment, Path, RowFormat, plan_bundle
from megamoe.layout import plan_layout
from megamoe.shape import preset

LIMITS = {
    ("quantize", 0): (42, 0),
    ("gemm1", 32): (194, 23_552), ("gemm1", 64): (208, 79_872), ("gemm1", 128): (256, 159_744),
    ("dispatch_gemm1", 32): (194, 23_552), ("dispatch_gemm1", 64): (208, 79_872),
    ("dispatch_gemm1", 128): (256, 159_744),
    ("small_m", 32): (194, 23_552), ("small_m", 64): (208, 79_872),
    ("gemm2", 32): (152, 33_088), ("gemm2", 64): (196, 66_112), ("gemm2", 128): (256, 159_744),
    ("large_m", 32): (194, 79_872), ("large_m", 64): (216, 79_872), ("large_m", 128): (256, 159_744),
}  # fmt: skip
"""VGPRs and LDS bytes of the published kernels at V4-Pro, by kernel and rows of the tile. GEMM1 alone, and small_m with
all its stages, are held to what GEMM1 with dispatch before it may take; for gemm2 with 128 rows nothing is published,
and gemm1 there spills 45 registers. Of large_m only that is published; with 64 rows it may take 8 registers more than
the published GEMM1 of that size."""
OTHERS = (64, 4096)
"""What kernels without a published counterpart may take."""


def variants() -> dict[str, Kernel]:
    """All kernels that sub-steps of V4-Pro EP8 can launch, by stage and variant."""
    layout = plan_layout(plan_bundle(Deployment(shape=preset("deepseek-v4-pro"), backend="gfx950")))
    specs = {}
    for path in (Path.FIXED_SLOT, Path.LARGE_M, Path.COMPACT):
        for quantized in (False, True):
            for fp8 in (False, True):
                for block_m in (32, 64, 128):
                    for identity in (False, True):
                        settings = dict(
                            block_m=block_m, path=path, quantized=quantized, fp8=fp8, identity=identity
                        )
                        alone = alone_specs(layout, block_m=block_m, fp8=fp8)
                        for spec in (*kernel_specs(layout, **settings).values(), *alone.values()):
                            specs[f"{spec.name} {dict(spec.constants)}"] = spec
    for row_format in RowFormat:
        for block_m in (32, 64):
            for identity in (False, True):
                settings = dict(block_m=block_m, row_format=row_format, identity=identity)
                spec = small_m_specs(layout, **settings)["small_m"]
                specs[f"{spec.name} {dict(spec.constants)}"] = spec
    return {name: load_or_compile(spec).kernel for name, spec in specs.items()}


@pytest.fixture(scope="module")
def kernels() -> dict[str, Kernel]:
    return variants()


def tile_of(name: str) -> int:
    return next((size for size in (32, 64, 128) if f"'BLOCK_M': {size}," in name), 0)


def loops(kernel: Kernel) -> list[list[Instruction]]:
    """The instructions of every loop."""
    return [kernel.instructions[start:stop] for start, stop in kernel.loops]


def matrix_loops(kernel: Kernel) -> list[list[Instruction]]:
    """The loops with matrix instructions that hold no other such loop."""
    found = [loop for loop in loops(kernel) if any("mfma" in one.mnemonic for one in loop)]
    spans = [(loop[0].offset, loop[-1].offset) for loop in found]
    return [
        loop
        for loop, (first, last) in zip(found, spans, strict=True)
        if not any((first, last) != span and first <= span[0] and span[1] <= last for span in spans)
    ]


def test_registers_and_lds_are_at_or_under_the_published_figures(kernels: dict[str, Kernel]) -> None:
    assert len(kernels) == 49
    assert Counter(name.split()[0] for name in kernels)["gemm2"] == 6
    for name, kernel in kernels.items():
        vgprs, lds = LIMITS.get((name.split()[0], tile_of(name)), OTHERS)
        assert kernel.spills == (0, 0), name
        assert kernel.scratch_bytes == 0, name
        assert kernel.descriptor.num_vgprs <= vgprs, f"{name}: {kernel.descriptor.num_vgprs} VGPRs"
        assert kernel.lds_bytes <= lds, f"{name}: {kernel.lds_bytes} bytes of LDS"
        assert missing(kernel) == set(), name


def test_the_grid_of_small_m_is_resident(kernels: dict[str, Kernel]) -> None:
    """plan.py gives a compute unit two workgroups of four waves, or one of eight: 512 VGPRs a SIMD, 160 KiB of LDS."""
    for name, kernel in kernels.items():
        if name.startswith("small_m "):
            waves, wanted = (4, 2) if tile_of(name) == 32 else (8, 1)
            waves_a_simd = 512 // (-(-kernel.descriptor.num_vgprs // 8) * 8)
            assert 4 * waves_a_simd // waves >= wanted, name
            assert 160 * 1024 // kernel.lds_bytes >= wanted, name


def test_matrix_loops_hold_no_scalar_detours(kernels: dict[str, Kernel]) -> None:
    """No waterfall: a value that should be uniform but is not would be read lane by lane in the loop."""
    seen = 0
    for name, kernel in kernels.items():
        found = matrix_loops(kernel)
        seen += len(found)
        for loop in found:
            body = Counter(one.mnemonic for one in loop)
            assert body["v_readfirstlane_b32"] == 0, name
            rows = {32: 2, 64: 4, 128: 4}[tile_of(name)]
            assert body["v_mfma_scale_f32_16x16x128_f8f6f4"] == 16 * rows, name
            loads = sum(n for one, n in body.items() if one.startswith(("buffer_load", "global_load")))
            assert loads == body["buffer_load_dwordx4"], name
            assert body["s_barrier"] == 2, name
    assert seen == 15 + 2 * 6 + 4 * 6
    for name, kernel in kernels.items():
        for loop in loops(kernel):
            if loop[-1].mnemonic == "s_cbranch_execnz":
                assert "v_readfirstlane_b32" not in [one.mnemonic for one in loop], f"waterfall in {name}"


def test_small_m_streams_weights_or_reads_them_through_the_caches(kernels: dict[str, Kernel]) -> None:
    """Both ways are in every kernel of small_m, for both GEMMs; fixed_slot and compact always stream."""
    for name, kernel in kernels.items():
        streams = [
            any(one.mods.get("nt") for one in loop if one.mnemonic == "buffer_load_dwordx4")
            for loop in matrix_loops(kernel)
        ]
        if name.startswith("small_m ") and streams:
            assert sorted(streams) == [False, False, True, True], name
        elif not name.startswith("large_m "):
            assert all(streams), name


def test_spins_sleep(kernels: dict[str, Kernel]) -> None:
    """A loop that loads past the caches and computes or stores nothing is a spin."""
    spins: Counter[str] = Counter()
    for name, kernel in kernels.items():
        for instructions in loops(kernel):
            loop = [one.mnemonic + ("*" if one.mods.get("sc1") else "") for one in instructions]
            polls = any(one.startswith("global_load") and one.endswith("*") for one in loop)
            works = any(one.startswith(("global_store", "global_atomic", "v_mfma")) for one in loop)
            if polls and not works:
                spins[name.split()[0]] += 1
                assert "s_sleep" in loop, name
    assert spins == {
        "small_m": 60,
        "large_m": 78,
        "dispatch_gemm1": 12,
        "dispatch": 2,
        "prepare": 1,
        "combine": 1,
        "close": 1,
    }
