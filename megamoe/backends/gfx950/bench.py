"""What sub-steps cost in instructions and bytes, counted by the emulator: `python -m megamoe.backends.gfx950.bench`.

There is no time here: an emulator has none to give. For every path and size, and every kernel, over all ranks: wave
instructions, matrix instructions, bytes of weights loaded (against the bytes of the experts that got rows) and the
share of them by 16-byte loads, bytes stored to other ranks. Instructions of waits are left out: any machine gives the
same.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from megamoe.backends import KernelWork
from megamoe.backends.gfx950.device.emulated import WEIGHTS_CLASS, EmulatedStream
from megamoe.backends.gfx950.emulator.report import Traffic
from megamoe.backends.gfx950.lockstep import Ranks, batches_of, emulated, shape_of
from megamoe.bundle import Deployment, Path
from megamoe.routing import DISTRIBUTIONS

SIZES = {Path.SMALL_M: (1, 8, 16), Path.FIXED_SLOT: (1, 8, 32), Path.COMPACT: (8, 64), Path.LARGE_M: (64,)}


def measure(hidden: int, intermediate: int, distribution: str) -> list[KernelWork]:
    """The work of SIZES at eight ranks, 32 experts, top-6."""
    return count_work(emulated(shape_of(hidden, intermediate)), SIZES, distribution)


def count_work(
    deployment: Deployment, sizes: Mapping[Path, Sequence[int]], distribution: str
) -> list[KernelWork]:
    """One record a path, size (rows a rank) and kernel, over all ranks."""
    shape = deployment.shape
    one = shape.hidden * shape.intermediate * 17 // 32
    needed = {"dispatch_gemm1": 2 * one, "gemm2": one, "small_m": 3 * one, "large_m": 3 * one}
    records: list[KernelWork] = []
    with Ranks(deployment, checked=False) as ranks:
        ranks.bind()
        cases = [(path, rows) for path, some in sizes.items() for rows in some]
        for epoch, (path, rows) in enumerate(cases):
            ranks.run(path, batches_of(shape, [rows] * shape.num_ranks, distribution, seed=1), epoch=epoch)
            hit = sum(count > 0 for backend in ranks.backends for count in backend.launches.rows_per_expert())
            by_kernel: dict[str, list[Traffic]] = defaultdict(list)
            for backend in ranks.backends:
                stream = backend.device.stream
                assert isinstance(stream, EmulatedStream)
                for handle in stream.take_handles():
                    by_kernel[handle.kernel.name.rsplit("_kernel")[0]].append(handle.traffic)
            records += [
                KernelWork(
                    path=path,
                    rows_per_rank=rows,
                    kernel=kernel,
                    instructions=sum(one.num_instructions - one.num_waiting for one in launches),
                    mfma=sum(one.num_mfma for one in launches),
                    weight_bytes=sum(one.loaded(WEIGHTS_CLASS) for one in launches),
                    weight_bytes_by_16=sum(one.loaded(WEIGHTS_CLASS, 16) for one in launches),
                    weight_bytes_needed=hit * needed.get(kernel, 0),
                    bytes_to_peers=sum(one.remote_bytes[1] for one in launches),
                )
                for kernel, launches in by_kernel.items()
            ]
    return records


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table, or JSON with --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=256)
    parser.add_argument("--distribution", choices=DISTRIBUTIONS, default="uniform")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    records = measure(options.hidden, options.intermediate, options.distribution)
    if options.json:
        print(json.dumps([asdict(one) for one in records], indent=2))
        return 0
    print(
        "| path | rows a rank | kernel | instructions | mfma | weight bytes / needed | by 16 bytes | bytes to peers |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for one in records:
        print("| " + " | ".join(one.cells()) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
