"""What sub-steps cost in instructions and bytes, counted by the emulator: `python -m megamoe.backends.gfx950.bench`.

There is no time here: an emulator has none to give. For every path and size, and every kernel, over all ranks: wave
instructions, matrix instructions, bytes of weights loaded (against the bytes of the experts that got rows) and the
share of them by 16-byte loads, bytes stored to other ranks. Any machine gives the same, but for kernels that wait.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence

from megamoe.backends.gfx950.device.emulated import WEIGHTS_CLASS, EmulatedStream
from megamoe.backends.gfx950.lockstep import Ranks, batches_of, emulated, shape_of
from megamoe.bundle import Path
from megamoe.routing import DISTRIBUTIONS

SIZES = {Path.FIXED_SLOT: (1, 8, 32), Path.COMPACT: (8, 64), Path.LARGE_M: (64,)}


def measure(hidden: int, intermediate: int, distribution: str) -> list[dict[str, object]]:
    """One record a path, size and kernel."""
    shape = shape_of(hidden, intermediate)
    matrix = {
        "dispatch_gemm1": 2 * intermediate * hidden * 17 // 32,
        "gemm2": hidden * intermediate * 17 // 32,
        "large_m": 3 * hidden * intermediate * 17 // 32,
    }
    records: list[dict[str, object]] = []
    with Ranks(emulated(shape), checked=False) as ranks:
        ranks.bind()
        epoch = 0
        for path, sizes in SIZES.items():
            for rows in sizes:
                ranks.run(
                    path, batches_of(shape, [rows] * shape.num_ranks, distribution, seed=1), epoch=epoch
                )
                epoch += 1
                hit = sum(
                    count > 0 for backend in ranks.backends for count in backend.launches.rows_per_expert()
                )
                sums: dict[str, list[int]] = defaultdict(lambda: [0] * 5)
                for backend in ranks.backends:
                    stream = backend.device.stream
                    assert isinstance(stream, EmulatedStream)
                    for handle in stream.take_handles():
                        traffic, total = handle.traffic, sums[handle.kernel.name.rsplit("_kernel")[0]]
                        total[0] += traffic.num_instructions
                        total[1] += traffic.num_mfma
                        total[2] += traffic.loaded(WEIGHTS_CLASS)
                        total[3] += traffic.loaded(WEIGHTS_CLASS, 16)
                        total[4] += traffic.remote_bytes[1]
                for kernel, (instructions, mfma, weights, by_16, remote) in sums.items():
                    needed = hit * matrix.get(kernel, 0)
                    records.append(
                        {
                            "path": str(path), "rows_per_rank": rows, "kernel": kernel, "instructions": instructions,
                            "mfma": mfma, "weight_bytes": weights,
                            "weight_bytes_over_needed": round(weights / needed, 3) if needed else None,
                            "share_by_16_bytes": round(by_16 / weights, 3) if weights else None,
                            "bytes_to_peers": remote,
                        }
                    )  # fmt: skip
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
        print(json.dumps(records, indent=2))
        return 0
    print(
        "| path | rows a rank | kernel | instructions | mfma | weight bytes / needed | by 16 bytes | bytes to peers |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for one in records:
        cells = [one[key] for key in ("path", "rows_per_rank", "kernel", "instructions", "mfma")]
        cells += [one["weight_bytes_over_needed"], one["share_by_16_bytes"], one["bytes_to_peers"]]
        print("| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
