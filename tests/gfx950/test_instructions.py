"""Dynamic wave instructions of every kernel, by path and size, against what was recorded: a change must be meant.

`python -m tests.gfx950.test_instructions` records them anew. Instructions of waits are not counted: how often a kernel
polls depends on everything else.
"""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from megamoe.backends.gfx950.bench import measure
from service.cli import app

RECORD = Path(__file__).with_name("instructions.json")
ALLOWED = 0.02


def measured() -> dict[str, dict[str, int]]:
    """Instructions of all ranks together, by "path, rows a rank" and kernel; uniform routing, 512 x 256, 32 experts."""
    out: dict[str, dict[str, int]] = {}
    for one in measure(512, 256, "uniform"):
        out.setdefault(f"{one.path}, {one.rows_per_rank} rows", {})[one.kernel] = one.instructions
    return out


def test_no_kernel_executes_more_than_was_recorded() -> None:
    recorded: dict[str, dict[str, int]] = json.loads(RECORD.read_text())
    found = measured()
    assert found.keys() == recorded.keys()
    for case, kernels in found.items():
        assert kernels.keys() == recorded[case].keys()
        for kernel, got in kernels.items():
            want = recorded[case][kernel]
            assert abs(got - want) <= ALLOWED * want, f"{case}, {kernel}: recorded {want}, measured {got}"


def test_weights_are_read_once_and_wide() -> None:
    """Up to 32 rows an expert, and one tile of 256 columns that is full: each weight byte once, by 16-byte loads."""
    for one in measure(512, 512, "uniform"):
        if one.weight_bytes and one.rows_per_rank in (1, 8):
            assert one.weight_bytes <= 1.05 * one.weight_bytes_needed, one
            assert one.weight_bytes_by_16 >= 0.95 * one.weight_bytes, one


def test_bench_prints_counts_where_the_device_is_emulated() -> None:
    shape = json.dumps(dict(hidden=64, intermediate=64, num_experts=8, num_topk=2, num_ranks=2))
    settings = ["--profile", "emulated", "--shape", shape, "--sizes", "1,64", "--paths", "compact,fixed_slot"]
    done = CliRunner().invoke(app, ["bench", *settings])
    assert done.exit_code == 0, done.output
    rows = [line.split("\u2502")[1:4] for line in done.output.splitlines() if line.startswith("\u2502")]
    kernels = [tuple(cell.strip() for cell in row) for row in rows]
    assert ("fixed_slot", "1", "dispatch_gemm1") in kernels
    assert ("compact", "64", "prepare") in kernels
    assert ("fixed_slot", "64", "dispatch_gemm1") not in kernels  # above its capacity
    done = CliRunner().invoke(app, ["bench", "--backend", "gfx950", "--sizes", "1"])
    assert (done.exit_code, "ROCm" in done.output) == (1, True)


if __name__ == "__main__":
    RECORD.write_text(json.dumps(measured(), indent=2) + "\n")
