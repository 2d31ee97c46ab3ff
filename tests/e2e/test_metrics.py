"""Metrics of a running service over a real scrape, against what the replies said and counts by hand."""

from __future__ import annotations

import asyncio
import json

import pytest

from megamoe import Path, StageTimes, random_version
from service.client import AsyncMoeGroup, forward_step
from service.metrics import SECONDS_BUCKETS
from tests.e2e.harness import (
    SHAPE,
    Samples,
    ServiceProcess,
    group_rows,
    intent,
    next_plan_id,
    on_all,
    rows,
    scrape,
)

pytestmark = pytest.mark.any_backend


class Delta:
    """What changed between two scrapes of all ranks."""

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self._addresses = addresses
        self._before = scrape(addresses)
        self._after: Samples = {}

    def take(self) -> Delta:
        self._after = scrape(self._addresses)
        return self

    def __call__(self, name: str, **labels: str) -> float:
        """Sum over all series with these labels."""
        wanted = set(labels.items())
        return sum(
            value - self._before.get(key, 0.0)
            for key, value in self._after.items()
            if key[0] == f"megamoe_{name}" and wanted <= set(key[1])
        )

    def now(self, name: str, **labels: str) -> list[float]:
        wanted = set(labels.items())
        return [v for k, v in self._after.items() if k[0] == f"megamoe_{name}" and wanted <= set(k[1])]


async def test_a_scrape_equals_the_replies(group: AsyncMoeGroup) -> None:
    delta = Delta(group.info.metrics_addresses)
    steps = [  # counts, phase, path, fall-offs
        ([4, 0, 0, 2, 0, 0, 0, 1], "decode", Path.SMALL_M),
        ([50, 0, 9, 0, 0, 0, 0, 0], "decode", Path.FIXED_SLOT),
        ([90, 1, 0, 0, 0, 0, 0, 0], "decode", Path.COMPACT),
        ([0, 200, 0, 3, 0, 0, 0, 0], "prefill", Path.LARGE_M),
    ]
    latencies: dict[Path, list[float]] = {path: [] for path in Path}
    sent = dropped = 0
    for counts, phase, path in steps:
        batches = group_rows(counts, seed=50)
        async with group.step(counts, phase, announce_counts=False) as step:
            assert step.plan.weights_version == random_version(0), "of the setting weights_seed"
            for layer_idx in range(SHAPE.num_layers):
                outs = await step.layer(layer_idx, batches)
                for reports in outs.reports_per_rank:
                    latencies[path] += [report.times.total_us * 1e-6 for report in reports]
                    sent += sum(report.counters.bytes_sent for report in reports)
                    dropped += sum(report.counters.dropped_slots for report in reports)
    delta.take()
    layers = SHAPE.num_layers
    assert delta("group_layer_calls_total") == 4 * layers
    assert delta("layer_calls_total") == 4 * layers * 8
    assert delta("group_steps_total", phase="decode") == 3
    assert delta("group_steps_total", phase="prefill") == 1
    for counts, phase, path in steps:
        label = {"path": str(path), "phase": phase}
        assert delta("sub_steps_total", **label) == layers * 8
        assert delta("layer_latency_seconds_count", **label) == layers * 8
        assert abs(delta("layer_latency_seconds_sum", **label) - sum(latencies[path])) < 1e-6 * len(
            latencies[path]
        )
        assert delta("rows_total", path=str(path)) == layers * sum(counts)
        for le in SECONDS_BUCKETS:
            want = sum(seconds <= le for seconds in latencies[path])
            assert delta("layer_latency_seconds_bucket", le=str(le), **label) == want
    assert delta("group_rows_max_sum") == 4 + 50 + 90 + 200
    assert delta("group_rows_mean_sum") == (7 + 59 + 91 + 203) / 8
    assert delta("group_path_switches_total") in (3, 4), (
        "the step before the test may have been on another path"
    )
    assert delta("group_decode_fall_offs_total") == layers, "90 rows are above 64"
    assert delta("bytes_sent_total") == sent
    assert delta("dropped_slots_total") == dropped > 0
    assert delta("stage_latency_seconds_count", stage="gemm1") > 0
    assert set(delta.now("in_flight_requests")) == {0.0}
    assert set(delta.now("ready")) == {1.0}
    assert {int(value) for value in delta.now("weights_version")} == {random_version(0)}
    assert {int(value) for value in delta.now("generation")} == {group.generation}
    assert all(
        abs(value - delta.now("last_progress_timestamp_seconds")[0]) < 60
        for value in delta.now("last_progress_timestamp_seconds")
    )
    assert len(delta.now("group_expert_balancedness")) == 1


async def test_errors_are_counted_once_per_rank(group: AsyncMoeGroup) -> None:
    delta = Delta(group.info.metrics_addresses)
    counts = [5, 0, 0, 0, 0, 0, 0, 5000]
    plan_id = next_plan_id(group)
    await on_all(group, {r: intent(group, plan_id, counts, r, phase="prefill") for r in (0, 7)})
    delta.take()
    assert delta("errors_total", code="invalid_argument", rank="0") == 1
    assert delta("errors_total", code="invalid_argument", rank="7") == 1
    assert delta("errors_total") == 2


async def test_balancedness_of_one_hot_rank(running_service: ServiceProcess) -> None:
    """All rows to rank 0's experts: mean over max over 8 ranks is 1/8."""
    hidden, ids, weights = rows(16, 3)
    hot = (hidden, ids.clamp(min=0) % SHAPE.num_experts_per_rank, weights)
    async with AsyncMoeGroup.connect(running_service.front, holder="hot") as group:
        for _ in range(2):  # the first look ends the window that other tests were in
            await asyncio.sleep(1.1)
            async with group.step([16] + [0] * 7) as step:
                await step.layer(0, [hot] + [None] * 7)
        delta = Delta(group.info.metrics_addresses).take()
        assert delta.now("group_expert_balancedness") == [1 / 8]


async def test_no_series_appear_while_serving(running_service: ServiceProcess) -> None:
    async with AsyncMoeGroup.connect(running_service.front, holder="series") as group:
        addresses = group.info.metrics_addresses
        before = set(scrape(addresses))
        async with group.step([3] * 8) as step:
            for layer_idx in range(SHAPE.num_layers):
                await step.layer(layer_idx, group_rows([3] * 8))
        after = set(scrape(addresses))
    assert before == after
    assert len(after) < 8000
    assert not any({"layer", "session", "request"} & {name for name, _ in labels} for _, labels in after)
    assert {dict(labels)["rank"] for _, labels in after if labels} == {str(rank) for rank in range(8)}


async def test_stage_names_are_those_of_the_reports(running_service: ServiceProcess) -> None:
    await forward_step(running_service.front, 0, group_rows([4] * 8))
    info_addresses = json.loads(running_service.get("/sd")[1])[0]["targets"]
    stages = {dict(labels).get("stage") for name, labels in scrape(info_addresses) if "stage_latency" in name}
    assert stages == set(StageTimes.stages())


def test_service_discovery_and_probes(running_service: ServiceProcess) -> None:
    status, text = running_service.get("/sd")
    (entry,) = json.loads(text)
    assert status == 200
    assert len(entry["targets"]) == 8
    assert entry["labels"] == {"profile": "demo"}
    assert running_service.get("/healthz") == (200, "ok\n")
    assert running_service.get("/readyz") == (200, "ready\n")
    assert running_service.get("/else")[0] == 404
