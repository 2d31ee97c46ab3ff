"""The bench measures every built path next to plain torch, and cleans up after itself."""

from __future__ import annotations

import os
from pathlib import Path as FilePath

import pytest

from megamoe import BenchConfig, MoeShape, Path, bench_deployment, format_results, run_bench
from megamoe.errors import InvalidArgumentError

SHAPE = MoeShape(hidden=64, intermediate=32, num_experts=8, num_topk=2, num_ranks=2)


def test_every_path_and_size_is_measured() -> None:
    config = BenchConfig(
        deployment=bench_deployment(SHAPE, max_tokens_per_rank=32),
        sizes=(4, 32),
        num_warmup=1,
        num_calls=4,
        num_threads=1,
    )
    results = list(run_bench(config))
    assert {(result.path, result.tokens_per_rank) for result in results} == {
        (path, size) for path in Path for size in (4, 32)
    }
    for result in results:
        assert 0 < result.p50_ms <= result.p90_ms
        assert result.rows_per_s == pytest.approx(1e3 * 2 * result.tokens_per_rank / result.p50_ms)
        assert result.torch_ratio == pytest.approx(result.torch_p50_ms / result.p50_ms)
        assert {"quantize", "dispatch", "gemm1", "gemm2", "combine", "wait"} == set(result.stage_ms)
    table = format_results(results).splitlines()
    assert len(table) == 1 + len(results)
    assert table[1].startswith("small_m")
    assert not list(FilePath("/dev/shm").glob(f"megamoe-bench-{os.getpid()}-*"))


def test_nothing_to_measure_is_refused() -> None:
    config = BenchConfig(deployment=bench_deployment(SHAPE, max_tokens_per_rank=8), sizes=(64,))
    with pytest.raises(InvalidArgumentError, match="within what is built"):
        next(run_bench(config))
