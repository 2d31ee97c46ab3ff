"""Dynamic wave instructions of every kernel, by path and size, against what was recorded: a change must be meant.

`python -m tests.gfx950.test_instructions` records them anew. Kernels that wait are left out of the comparison: how
often they poll depends on everything else.
"""

from __future__ import annotations

import json
from pathlib import Path

from megamoe.backends.gfx950.bench import measure

RECORD = Path(__file__).with_name("instructions.json")
WITHOUT_WAITS = ("quantize", "gemm2")
ALLOWED = 0.02


def measured() -> dict[str, dict[str, int]]:
    """Instructions of all ranks together, by "path, rows a rank" and kernel; uniform routing, 512 x 256, 32 experts."""
    out: dict[str, dict[str, int]] = {}
    for record in measure(512, 256, "uniform"):
        case = out.setdefault(f"{record['path']}, {record['rows_per_rank']} rows", {})
        case[str(record["kernel"])] = int(str(record["instructions"]))
    return out


def test_no_kernel_executes_more_than_was_recorded() -> None:
    recorded: dict[str, dict[str, int]] = json.loads(RECORD.read_text())
    found = measured()
    assert found.keys() == recorded.keys()
    for case, kernels in found.items():
        assert kernels.keys() == recorded[case].keys()
        for kernel in kernels.keys() & set(WITHOUT_WAITS):
            want, got = recorded[case][kernel], kernels[kernel]
            assert abs(got - want) <= ALLOWED * want, f"{case}, {kernel}: recorded {want}, measured {got}"


def test_weights_are_read_once_and_wide() -> None:
    """Up to 32 rows an expert, and one tile of 256 columns that is full: each weight byte once, by 16-byte loads."""
    for record in measure(512, 512, "uniform"):
        if record["weight_bytes"] and record["rows_per_rank"] in (1, 8):
            assert float(str(record["weight_bytes_over_needed"])) <= 1.05, record
            assert float(str(record["share_by_16_bytes"])) >= 0.95, record


if __name__ == "__main__":
    RECORD.write_text(json.dumps(measured(), indent=2) + "\n")
