"""Compile every kernel of a deployment into a folder to ship, and say which kernels a folder lacks.

The folder holds a code object a kernel and `manifest.json`, which names each one's constants, registers and digest.
Code objects depend on kernel sources, constants and FlyDSL's version only, not on the machine; no GPU is needed. A
folder may serve several deployments: what is there is kept, what is missing is added.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from itertools import chain
from pathlib import Path as FilePath
from typing import Any

from megamoe.backends import CompiledKernel
from megamoe.backends.gfx950.build import (
    FLYDSL,
    MANIFEST,
    Code,
    KernelSpec,
    load_or_compile,
    manifest,
    missing,
    shipped,
    write_whole,
)
from megamoe.backends.gfx950.launches import alone_specs, kernel_specs, small_m_specs
from megamoe.backends.gfx950.plan import plan_launch, rows_bucket
from megamoe.bundle import Bundle, Path, RowFormat
from megamoe.errors import ConfigError, must_be
from megamoe.layout import plan_layout

BUILT = (Path.FIXED_SLOT, Path.LARGE_M, Path.COMPACT)
_ANY_COMPUTE_UNITS = 256
"""Grids depend on them, kernels do not."""
_PR_SET_PDEATHSIG = 1
_MOST_JOBS = 16
"""A compiling process takes about 400 MB."""


def kernels_of(bundle: Bundle, *, identity: bool = False) -> dict[str, KernelSpec]:
    """Every kernel that a sub-step or a binding can launch, by name and constants. identity: transport tests' too."""
    layout = plan_layout(bundle)
    fp8 = bundle.deployment.combine_row_format is RowFormat.FP8
    tile = plan_launch(bundle.shape, 1, _ANY_COMPUTE_UNITS).block_m
    found = list(alone_specs(layout, block_m=tile, fp8=fp8).values())
    for path in BUILT:
        for block_m in sorted(_tiles(bundle, path)):
            for quantized in (False, True):
                for alone in (False, True) if identity else (False,):
                    specs = kernel_specs(
                        layout,
                        block_m=block_m,
                        path=path,
                        quantized=quantized,
                        fp8=fp8,
                        identity=alone,
                    )
                    found += specs.values()
    row_format = bundle.deployment.combine_row_format
    for block_m in sorted(_tiles(bundle, Path.SMALL_M)):
        for alone in (False, True) if identity else (False,):
            specs = small_m_specs(layout, block_m=block_m, row_format=row_format, identity=alone)
            found += specs.values()
    return {spec.title: spec for spec in found}


def _tiles(bundle: Bundle, path: Path) -> set[int]:
    """Rows of all tiles that a path can take."""
    capacity = max(bundle.capacities(path), default=0)
    buckets = {rows_bucket(1 << power) for power in range(capacity.bit_length())}
    return {plan_launch(bundle.shape, rows, _ANY_COMPUTE_UNITS).block_m for rows in buckets}


def compile_kernels(bundle: Bundle, folder: FilePath, *, num_jobs: int = 0) -> Iterator[CompiledKernel]:
    """Bring every kernel of a deployment into `folder`, several at a time (0: a process a core), and yield them as they
    come; the manifest is written last. What is there but not as an earlier manifest says is compiled anew.

    Raises ConfigError (no FlyDSL or linker, a folder that cannot be written, a compiler that died).
    """
    specs = kernels_of(bundle)
    _drop_altered(specs, folder)
    todo = {title: specs[title] for title in missing(specs, folder)}
    found = ((load_or_compile(spec, folder), 0.0) for title, spec in specs.items() if title not in todo)
    made = _compile_all(list(todo.values()), folder, num_jobs or len(os.sched_getaffinity(0)))
    for num_done, (code, seconds) in enumerate(chain(found, made), 1):
        yield CompiledKernel(
            title=code.spec.title,
            seconds=seconds,
            num_vgprs=code.kernel.descriptor.num_vgprs,
            lds_bytes=code.kernel.lds_bytes,
            num_done=num_done,
            num_kernels=len(specs),
        )
    _write_manifest(folder, specs)


def _drop_altered(specs: dict[str, KernelSpec], folder: FilePath) -> None:
    """Remove code objects whose digest is another than the manifest's, lest it be written over with theirs."""
    try:
        entries = manifest(folder)
    except ConfigError:  # nothing to compare with
        return
    for name in {spec.file for spec in specs.values()} & entries.keys():
        path = folder / name
        try:
            if path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() != entries[name]["sha256"]:
                path.unlink()
        except OSError as error:
            raise ConfigError(must_be(f"kernel {path}", "one that can be replaced", error)) from error


def _compile_all(specs: list[KernelSpec], folder: FilePath, num_jobs: int) -> Iterator[tuple[Code, float]]:
    num_jobs = min(num_jobs, len(specs), _MOST_JOBS)
    if num_jobs < 2:
        yield from (_compile_one(spec, folder) for spec in specs)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_jobs, mp_context=context, initializer=_die_with, initargs=(os.getpid(),))
    try:
        futures = [pool.submit(_compile_one, spec, folder) for spec in specs]
        yield from (future.result() for future in as_completed(futures))
    except BrokenProcessPool as error:
        raise ConfigError(
            f"compiling processes must live: is there memory for {num_jobs} of 400 MB? (got: {error})"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _compile_one(spec: KernelSpec, folder: FilePath) -> tuple[Code, float]:
    started = time.perf_counter()
    code = load_or_compile(spec, folder)
    return Code(spec, code.code), time.perf_counter() - started


def _die_with(parent_pid: int) -> None:
    """Processes of a command that was killed would wait for their next kernel for ever."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def missing_kernels(bundle: Bundle, folder: FilePath) -> list[str]:
    """What a deployment would need and a shipped folder lacks, or holds other than its manifest says, each with why.

    Raises ConfigError for a folder whose manifest is missing or damaged: then nothing is known of any kernel.
    """
    manifest(folder)
    lacking = []
    for spec in kernels_of(bundle).values():
        try:
            shipped(spec, folder)
        except ConfigError as error:
            lacking.append(f"{spec.title}: {error}")
    return lacking


def _write_manifest(folder: FilePath, specs: dict[str, KernelSpec]) -> None:
    """Entries of other deployments stay as long as their files do."""
    try:
        entries = {name: one for name, one in manifest(folder).items() if (folder / name).exists()}
    except ConfigError:
        entries = {}
    entries |= {spec.file: _entry(load_or_compile(spec, folder)) for spec in specs.values()}
    whole = {"target": "gfx950", "flydsl": FLYDSL, "kernels": [entries[name] for name in sorted(entries)]}
    write_whole(folder / MANIFEST, (json.dumps(whole, indent=1) + "\n").encode())


def _entry(code: Code) -> dict[str, Any]:
    kernel = code.kernel
    return {
        "file": code.spec.file,
        "sha256": hashlib.sha256(code.code).hexdigest(),
        "kernel": kernel.name,
        "constants": dict(code.spec.constants),
        "vgprs": kernel.descriptor.num_vgprs,
        "spills": sum(kernel.spills),
        "lds_bytes": kernel.lds_bytes,
    }
