"""Compile a deployment's kernels ahead of time, or check that the cache has them all.

`python -m megamoe.backends.gfx950.compile_ahead --shape deepseek-v4-pro` compiles what sub-steps of that deployment can
launch; with `--check` nothing is compiled and the exit status is 1 if a kernel is missing. `--folder` names a cache to
ship; code objects depend on kernel sources, constants and FlyDSL's version only, not on the machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path as FilePath

from megamoe.backends.gfx950.build import KernelSpec, load_or_compile, missing
from megamoe.backends.gfx950.launches import alone_specs, kernel_specs
from megamoe.backends.gfx950.plan import plan_launch, rows_bucket
from megamoe.bundle import Bundle, Deployment, Path, RowFormat, plan_bundle
from megamoe.layout import plan_layout
from megamoe.shape import PRESETS, preset

BUILT = (Path.FIXED_SLOT, Path.COMPACT)
_ANY_COMPUTE_UNITS = 256
"""Grids depend on them, kernels do not."""


def kernels_of(bundle: Bundle, *, identity: bool = False) -> dict[str, KernelSpec]:
    """Every kernel that a sub-step or a binding can launch, by name and constants. identity: transport tests' too."""
    layout = plan_layout(bundle)
    fp8 = bundle.deployment.combine_row_format is RowFormat.FP8
    tile = plan_launch(bundle.shape, 1, _ANY_COMPUTE_UNITS).block_m
    found = alone_specs(layout, block_m=tile, fp8=fp8)
    specs = {f"{spec.name} {dict(spec.constants)}": spec for spec in found.values()}
    for path in BUILT:
        capacity = max(bundle.capacities(path), default=0)
        buckets = {rows_bucket(1 << power) for power in range(capacity.bit_length())}
        tiles = {plan_launch(bundle.shape, rows, _ANY_COMPUTE_UNITS).block_m for rows in buckets}
        for block_m in sorted(tiles):
            for quantized in (False, True):
                for alone in (False, True) if identity else (False,):
                    found = kernel_specs(
                        layout,
                        block_m=block_m,
                        compact=path is Path.COMPACT,
                        quantized=quantized,
                        fp8=fp8,
                        identity=alone,
                    )
                    specs |= {f"{spec.name} {dict(spec.constants)}": spec for spec in found.values()}
    return specs


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, or with --check only look; 1 if a kernel is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(PRESETS), default="deepseek-v4-pro")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--max-tokens-per-rank", type=int, default=8192)
    parser.add_argument("--fixed-slot-max", type=int, default=255)
    parser.add_argument("--row-format", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument(
        "--emulated", action="store_true", help="the emulated profile, which accepts any shape"
    )
    parser.add_argument("--folder", type=FilePath, default=None, help="cache folder (default: the user's)")
    parser.add_argument(
        "--check", action="store_true", help="compile nothing, fail on any kernel that is missing"
    )
    options = parser.parse_args(arguments)
    bundle = plan_bundle(
        Deployment(
            shape=preset(options.shape).with_ranks(options.ranks),
            backend="gfx950",
            max_tokens_per_rank=options.max_tokens_per_rank,
            fixed_slot_max=options.fixed_slot_max,
            combine_row_format=RowFormat(options.row_format),
            gfx950_emulated=options.emulated,
        )
    )
    specs = kernels_of(bundle)
    if options.check:
        lacking = missing(specs, options.folder)
        for name in lacking:
            print(f"missing: {name}")
        print(f"{len(specs) - len(lacking)} of {len(specs)} kernels are there")
        return 1 if lacking else 0
    for name, spec in specs.items():
        started = time.perf_counter()
        kernel = load_or_compile(spec, options.folder).kernel
        spent = time.perf_counter() - started
        print(
            f"{spent:5.1f} s  {kernel.descriptor.num_vgprs:3d} VGPR  {kernel.lds_bytes:6d} B LDS  {name}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
