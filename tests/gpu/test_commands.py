"""`megamoe bench --backend hopper` as a person starts it: a small run, its report and its plot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.e2e.harness import ROOT


def test_a_small_bench_is_complete(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "service.cli", "bench", "--backend=hopper", "--ranks=1", "--sizes=1,64"]
    files = [f"--json={tmp_path}/bench.json", f"--plot={tmp_path}/bench.png"]
    done = subprocess.run(
        [*command, "--distribution=uniform,one_rank", *files],
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    report = json.loads((tmp_path / "bench.json").read_text())
    cells = {(t["path"], t["distribution"], t["tokens"]) for t in report["timings"]}
    paths = ("small_m", "fixed_slot", "compact")
    assert cells == {(p, d, t) for p in paths for d in ("uniform", "one_rank") for t in (1, 64)}
    assert all(0.05 < timing["fraction"] < 1.05 for timing in report["timings"])
    assert {baseline["name"] for baseline in report["baselines"]} == {"grouped_mm"}
    assert 3e12 < report["rates"]["bytes_per_s"] < 6e12
    assert 4e14 < report["rates"]["flops_per_s"] < 1e15
    assert (tmp_path / "bench.png").stat().st_size > 10_000
    assert "| 64 |" in done.stdout
