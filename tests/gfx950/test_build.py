"""The cache of code objects: its key, what it keeps, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from megamoe.backends.gfx950 import build, compile_ahead
from megamoe.backends.gfx950.lockstep import emulated, shape_of
from megamoe.bundle import plan_bundle
from megamoe.errors import ConfigError

SPEC = build.KernelSpec.of("close", ABORT=1, NUM_RANKS=2)
COMBINE = dict(HIDDEN=64, META_WORDS=8, TOPK=2, NUM_EXPERTS=4, NUM_RANKS=2)
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


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
    monkeypatch.setattr(build, "FLYDSL", "0.0.0")
    keys.add(SPEC.key)
    monkeypatch.setattr(build, "_sources", lambda: (Path(__file__),))
    keys.add(SPEC.key)
    assert len(keys) == 4


def test_only_the_pinned_release_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    assert f"flydsl=={build.FLYDSL}" in extras["gfx950"]
    monkeypatch.setattr(build.importlib.metadata, "version", lambda name: "0.9.9")
    with pytest.raises(ConfigError, match="version of flydsl must be 0.5.0, got 0.9.9"):
        build.load_or_compile(SPEC, tmp_path)


def test_a_damaged_file_of_the_cache_is_compiled_again(tmp_path: Path) -> None:
    good = build.load_or_compile(SPEC, tmp_path).code
    other = build.load_or_compile(build.KernelSpec.of("combine", **COMBINE), tmp_path).code
    path = tmp_path / SPEC.file
    for damaged in (b"", good[:100], good[:-200], b"x" + good[1:], other):
        path.write_bytes(damaged)
        assert build.missing({"close": SPEC}, tmp_path) == ["close"]
        build.load_or_compile.cache_clear()
        assert build.load_or_compile(SPEC, tmp_path).code == good
        assert path.read_bytes() == good


def test_a_cache_that_cannot_be_written_serves_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = build.load_or_compile(SPEC, tmp_path).code

    def refuse(**_: object) -> None:
        raise PermissionError("Read-only file system")

    monkeypatch.setattr(build.tempfile, "NamedTemporaryFile", refuse)
    build.load_or_compile.cache_clear()
    assert build.load_or_compile(SPEC, tmp_path).code == good
    with pytest.raises(
        ConfigError, match="folder .* must be one that can be written, got Read-only file system"
    ):
        build.load_or_compile(build.KernelSpec.of("close", ABORT=1, NUM_RANKS=4), tmp_path)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="must be one that can be written"):
        build.load_or_compile(build.KernelSpec.of("close", ABORT=1, NUM_RANKS=4), file)


def test_two_processes_may_compile_the_same_at_once(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from megamoe.backends.gfx950 import build; "
        "spec = build.KernelSpec.of('close', ABORT=1, NUM_RANKS=2); "
        "print(build.load_or_compile(spec, pathlib.Path(sys.argv[1])).kernel.name)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=100)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert said[0] == said[1] != ""
    assert [path.name for path in tmp_path.iterdir()] == [SPEC.file]


def test_kernels_of_a_deployment_are_those_that_it_launches() -> None:
    bundle = plan_bundle(emulated(shape_of()))
    names = {spec.name for spec in compile_ahead.kernels_of(bundle, identity=True).values()}
    assert names == {
        "quantize",
        "small_m",
        "large_m",
        "prepare",
        "dispatch",
        "dispatch_gemm1",
        "gemm1",
        "gemm2",
        "identity",
        "combine",
        "close",
    }


def test_without_a_linker_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("ROCM_PATH", "/nowhere")
    with pytest.raises(ConfigError, match="needs ld.lld: install ROCm or the package ziglang"):
        build.find_linker()


def test_nothing_foreign_is_imported_before_it_is_needed() -> None:
    """The backend, its devices for the CPU and its tools: without FlyDSL, MORI or HIP."""
    names = ["backend", "launches", "device.shared", "device.emulated", "compile_ahead", "bench", "lockstep"]
    imports = "; ".join(f"import megamoe.backends.gfx950.{name}" for name in names)
    check = "import sys; found = {'flydsl', 'mori', 'triton'} & set(sys.modules); assert not found, found"
    subprocess.run([sys.executable, "-c", f"{imports}; {check}"], check=True, timeout=100)
