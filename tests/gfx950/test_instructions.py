"""Dynamic wave instructions of every kernel, by path and size, against what was recorded: a change must be meant.

`python -m tests.gfx950.test_instructions` records them anew. Kernels that wait are left out of the comparison: how
often they poll depends on everything else.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path as FilePath

from megamoe.backends.gfx950.lockstep import Ranks, batches_of, emulated, shape_of
from megamoe.bundle import Path

RECORD = FilePath(__file__).with_name("instructions.json")
SIZES = {Path.FIXED_SLOT: (1, 8, 32), Path.COMPACT: (8, 64)}
WITHOUT_WAITS = ("quantize", "gemm2")
ALLOWED = 0.02


def measure() -> dict[str, dict[str, int]]:
    """Instructions of all ranks together, by "path, rows a rank" and kernel; uniform routing, 512 x 256, 32 experts."""
    out: dict[str, dict[str, int]] = {}
    with Ranks(emulated(shape_of(512, 256)), checked=False) as ranks:
        ranks.bind()
        epoch = 0
        for path, sizes in SIZES.items():
            for rows in sizes:
                ranks.run(path, batches_of(ranks.shape, [rows] * 8, seed=1), epoch=epoch)
                epoch += 1
                counts: Counter[str] = Counter()
                for backend in ranks.backends:
                    for handle in backend.device.stream.take_handles():
                        counts[handle.kernel.name.rsplit("_kernel")[0]] += handle.traffic.num_instructions
                out[f"{path}, {rows} rows"] = dict(sorted(counts.items()))
    return out


def test_no_kernel_executes_more_than_was_recorded() -> None:
    recorded: dict[str, dict[str, int]] = json.loads(RECORD.read_text())
    measured = measure()
    assert measured.keys() == recorded.keys()
    for case, kernels in measured.items():
        for kernel in WITHOUT_WAITS:
            want, got = recorded[case][kernel], kernels[kernel]
            assert abs(got - want) <= ALLOWED * want, f"{case}, {kernel}: recorded {want}, measured {got}"


if __name__ == "__main__":
    RECORD.write_text(json.dumps(measure(), indent=2) + "\n")
