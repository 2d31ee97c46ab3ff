"""Metrics against values computed by hand, over a real scrape; a bounded number of series."""

from __future__ import annotations

import itertools
import os
import urllib.request
from collections.abc import Iterator
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from megamoe import (
    Counters,
    Path,
    PathPolicy,
    Phase,
    PlanId,
    RowFormat,
    StageTimes,
    StepPlan,
    SubStepReport,
    plan_layout,
    unlink_all,
)
from service.config import load_config
from service.metrics import SECONDS_BUCKETS, Balance, RankMetrics

BUNDLE = load_config(env=False).bundle
POLICY = PathPolicy.of(BUNDLE.deployment)


def plan_of(counts: tuple[int, ...], phase: Phase) -> StepPlan:
    return StepPlan(
        plan_id=PlanId(1, 1),
        num_rows_per_rank=counts,
        phase=phase,
        dtype="bfloat16",
        weights_version=3,
        placement_version=0,
        policy_version=0,
    )


def report_of(path: Path, counts: tuple[int, ...], *, total_us: float, wait_us: float = 0.0) -> SubStepReport:
    return SubStepReport(
        path=path,
        runtime_capacity=64,
        num_rows_per_rank=counts,
        row_format_per_rank=(RowFormat.BF16,) * 8,
        counters=Counters(bytes_sent=1000, padded_rows=5, dropped_slots=2, rows_received=sum(counts)),
        times=StageTimes(gemm1_us=300.0, wait_us=wait_us, total_us=total_us),
    )


def scrape(port: int) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    return {
        (
            sample.name,
            tuple(sorted((k, v) for k, v in sample.labels.items() if k not in ("rank", "model_name"))),
        ): (sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def metrics() -> Iterator[RankMetrics]:
    made = RankMetrics(rank=0, model_name="demo", bundle=BUNDLE)
    yield made
    made.close()


def test_a_scrape_equals_values_by_hand(metrics: RankMetrics) -> None:
    port = metrics.serve("127.0.0.1", 0)
    small, large = (8, 0, 0, 0, 0, 0, 0, 0), (100, 300, 0, 0, 0, 0, 0, 0)
    decode, prefill = plan_of(small, Phase.DECODE), plan_of(large, Phase.PREFILL)
    metrics.weights_version.set(3)
    metrics.record_plan(decode, POLICY)
    for total_us in (150.0, 250.0, 7000.0):
        metrics.record_step(
            decode, POLICY, (report_of(Path.SMALL_M, small, total_us=total_us, wait_us=80.0),)
        )
    metrics.record_plan(prefill, POLICY)
    metrics.record_step(prefill, POLICY, (report_of(Path.LARGE_M, large, total_us=40_000.0),) * 2)
    metrics.record_error("invalid_argument")
    metrics.record_error("never heard of")
    metrics.flush()
    got = scrape(port)

    def value(name: str, **labels: str) -> float:
        return got[(f"megamoe_{name}", tuple(sorted(labels.items())))]

    def at_most(le: str) -> float:
        return value("layer_latency_seconds_bucket", path="small_m", phase="decode", le=le)

    assert value("sub_steps_total", path="small_m", phase="decode") == 3
    assert value("sub_steps_total", path="large_m", phase="prefill") == 2
    assert value("sub_steps_total", path="compact", phase="decode") == 0
    assert value("layer_calls_total") == value("group_layer_calls_total") == 4
    assert value("group_steps_total", phase="decode") == value("group_steps_total", phase="prefill") == 1
    assert [at_most(le) for le in ("0.0001", "0.0002", "0.0005", "0.005", "0.01")] == [0, 1, 2, 2, 3]
    latency_sum = value("layer_latency_seconds_sum", path="small_m", phase="decode")
    assert latency_sum == pytest.approx(0.0074)
    assert value("stage_latency_seconds_count", path="small_m", stage="gemm1") == 3
    assert value("stage_latency_seconds_count", path="small_m", stage="gemm2") == 0
    assert value("barrier_wait_seconds_sum") == pytest.approx(240e-6)
    assert value("rows_total", path="small_m") == 24
    assert value("rows_total", path="large_m") == 200
    assert value("bytes_sent_total", path="small_m") == 3000
    assert value("padded_rows_total") == 25
    assert value("dropped_slots_total") == 10
    assert value("group_path_switches_total", from_path="small_m", to_path="large_m") == 1
    assert value("group_path_switches_total", from_path="large_m", to_path="small_m") == 0
    assert value("group_rows_max_sum") == 308
    assert value("group_rows_mean_sum") == 1 + 50
    assert value("weights_version") == 3
    assert value("errors_total", code="invalid_argument") == 1
    assert value("errors_total", code="internal") == 1
    assert value("path_enabled", path="small_m") == 1
    layout = plan_layout(BUNDLE)
    assert value("heap_bytes") == layout.num_bytes
    assert value("heap_high_water_bytes") == layout.path_bytes(Path.LARGE_M) * 300 // 512


def test_fall_offs_are_decode_sub_steps_above_enabled_capacities(metrics: RankMetrics) -> None:
    port = metrics.serve("127.0.0.1", 0)
    only_small = replace(POLICY, fixed_slot_enabled=False)
    cases = [(64, Phase.DECODE, POLICY, 0), (65, Phase.DECODE, POLICY, 1), (65, Phase.PREFILL, POLICY, 0)]
    cases += [(33, Phase.DECODE, only_small, 1), (32, Phase.DECODE, only_small, 0)]
    cases += [(99, Phase.DECODE, replace(only_small, small_m_enabled=False), 0)]
    want = 0
    for rows, phase, policy, more in cases:
        counts = (rows,) + (0,) * 7
        report = report_of(Path.COMPACT, counts, total_us=1.0)
        metrics.record_step(plan_of(counts, phase), policy, (report,))
        metrics.flush()
        want += more
        assert scrape(port)[("megamoe_group_decode_fall_offs_total", ())] == want, (rows, phase)


def test_group_series_come_from_rank_0_only_and_series_are_bounded(metrics: RankMetrics) -> None:
    other = RankMetrics(rank=1, model_name="demo", bundle=BUNDLE)
    counts = (1,) * 8

    def series(of: RankMetrics) -> set[tuple[str, str]]:
        return {(s.name, str(s.labels)) for family in of.registry.collect() for s in family.samples}

    before = series(other)
    for path in Path:
        for phase in (Phase.DECODE, Phase.PREFILL):
            other.record_step(plan_of(counts, phase), POLICY, (report_of(path, counts, total_us=1),))
    other.record_error("stale_call")
    other.flush()
    assert series(other) == before, "no series may appear after the start"
    assert not [name for name, _ in before if name.startswith("megamoe_group_")]
    assert len(before) < 1000
    assert [name for name, _ in series(metrics) if name.startswith("megamoe_group_")]
    other.close()


def test_buckets_resolve_50_us_to_10_s() -> None:
    assert SECONDS_BUCKETS[0] == 50e-6
    assert SECONDS_BUCKETS[-1] == 10.0
    steps = [b / a for a, b in itertools.pairwise(SECONDS_BUCKETS)]
    assert max(steps) <= 2.5 + 1e-6


def test_balancedness_is_mean_over_max_over_ranks() -> None:
    name = f"megamoe-t{os.getpid()}"
    try:
        mine = Balance.open(name, 0, 4, timeout_s=1.0)
        theirs = Balance.open(name, 1, 4, timeout_s=1.0)
        assert mine.balancedness() is None
        for rank, rows in enumerate((10, 20, 30, 40)):
            theirs.add(rank, rows)
        assert mine.balancedness() == pytest.approx(25 / 40)
        assert mine.balancedness() is None, "nothing new"
        theirs.add(2, 8)
        assert mine.balancedness() == pytest.approx(2 / 8), "only what came since"
        mine.close()
        theirs.close()
    finally:
        unlink_all(name)
