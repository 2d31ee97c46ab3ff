"""The cache of code objects: its key, compiling ahead of time, and the check that fails on what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megamoe.backends.gfx950 import build, compile_ahead
from megamoe.backends.gfx950.lockstep import emulated, shape_of
from megamoe.bundle import plan_bundle
from megamoe.errors import ConfigError

SPEC = build.KernelSpec.of("close", ABORT=1, NUM_RANKS=2)


def test_what_is_compiled_is_kept_and_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.missing({"close": SPEC}, tmp_path) == ["close"]
    code = build.load_or_compile(SPEC, tmp_path)
    assert build.missing({"close": SPEC}, tmp_path) == []
    (kept,) = tmp_path.glob("close-*.hsaco")
    assert kept.read_bytes() == code.code
    assert code.kernel.name.startswith("close_kernel")
    assert code.kernel.spills == (0, 0)

    def refuse(spec: build.KernelSpec) -> bytes:
        raise AssertionError(f"{spec} must come from the cache")

    monkeypatch.setattr(build, "_compile", refuse)
    build.load_or_compile.cache_clear()
    assert build.load_or_compile(SPEC, tmp_path).code == code.code


def test_the_key_follows_sources_constants_and_version(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {SPEC.key, build.KernelSpec.of("close", ABORT=0, NUM_RANKS=2).key}
    monkeypatch.setattr(build, "_version", lambda: "0.0.0")
    keys.add(SPEC.key)
    monkeypatch.setattr(build, "_sources", lambda: (Path(__file__),))
    keys.add(SPEC.key)
    assert len(keys) == 4


def test_kernels_of_a_deployment_are_those_that_it_launches() -> None:
    bundle = plan_bundle(emulated(shape_of()))
    names = {spec.name for spec in compile_ahead.kernels_of(bundle, identity=True).values()}
    assert names == {
        "quantize",
        "prepare",
        "dispatch",
        "dispatch_gemm1",
        "gemm1",
        "gemm2",
        "identity",
        "combine",
        "close",
    }


def test_check_fails_on_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--shape", "demo", "--emulated", "--max-tokens-per-rank", "8", "--folder", str(tmp_path)]
    assert compile_ahead.main([*small, "--check"]) == 1
    assert "missing: gemm1" in capsys.readouterr().out
    assert compile_ahead.main(small) == 0
    capsys.readouterr()
    assert compile_ahead.main([*small, "--check"]) == 0
    assert "10 of 10 kernels are there" in capsys.readouterr().out


def test_without_a_linker_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs ld.lld: install ROCm or the package ziglang"):
        build._linker_folder()


def test_nothing_foreign_is_imported_before_it_is_needed() -> None:
    """The backend, its devices for the CPU and its tools: without FlyDSL, MORI or HIP."""
    names = ["backend", "launches", "device.shared", "device.emulated", "compile_ahead", "bench", "lockstep"]
    imports = "; ".join(f"import megamoe.backends.gfx950.{name}" for name in names)
    check = "import sys; found = {'flydsl', 'mori', 'triton'} & set(sys.modules); assert not found, found"
    subprocess.run([sys.executable, "-c", f"{imports}; {check}"], check=True, timeout=100)
