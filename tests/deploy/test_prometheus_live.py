"""A real Prometheus scrapes two ranks' real registries (tests/e2e does the same over a whole service).

Every dashboard query and alert selector answers, and the numbers are those that were recorded, worked out by hand.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path as FilePath

import pytest

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
    choose_path,
)
from service.config import load_config
from service.metrics import RankMetrics
from tests.deploy.prometheus_server import (
    PrometheusServer,
    prometheus,
    rules,
    selectors_without_series,
    wait_for_dashboard,
)

pytestmark = pytest.mark.e2e

NUM_RANKS = 2
ROWS = {Path.SMALL_M: 8, Path.FIXED_SLOT: 40, Path.LARGE_M: 200, Path.COMPACT: 100}


@contextmanager
def front(metrics_ports: list[int]) -> Iterator[str]:
    """The least of a front: an HTTP service discovery of the ranks."""
    body = json.dumps([{"targets": [f"127.0.0.1:{port}"]} for port in metrics_ports]).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[RankMetrics]]:
    bundle = load_config(env=False, overrides={"num_ranks": NUM_RANKS}).bundle
    found = [RankMetrics(rank=rank, model_name="demo", bundle=bundle) for rank in range(NUM_RANKS)]
    for metrics in found:
        metrics.heap_bytes.set(1 << 20)
        metrics.generation.set(1)
        metrics.watch(
            {
                "ready": lambda: 1.0,
                "last_progress": time.time,
                "queue_depth": lambda: 0.0,
                "in_flight": lambda: 0.0,
                "heap_high_water": lambda: float(1 << 19),
            }
        )
    yield found
    for metrics in found:
        metrics.close()


@pytest.fixture(scope="module")
def server(ranks: list[RankMetrics], tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrometheusServer]:
    with ExitStack() as stack:
        ports = [metrics.serve("127.0.0.1", 0) for metrics in ranks]
        url = stack.enter_context(front(ports))
        folder: FilePath = tmp_path_factory.mktemp("prometheus")
        found = stack.enter_context(prometheus(url, folder))
        found.wait_until("both ranks are scraped", lambda: len(found.up_targets()) == NUM_RANKS, 30)
        yield found


def record(ranks: list[RankMetrics], num_rows: int, phase: Phase, step_id: int) -> Path:
    """One layer call of one step with `num_rows` on rank 0 and one row on rank 1; 3 ms of which 1 ms waiting."""
    config = load_config(env=False, overrides={"num_ranks": NUM_RANKS})
    policy = PathPolicy.of(config.deployment)
    plan = StepPlan(
        plan_id=PlanId(1, step_id),
        num_rows_per_rank=(num_rows, 1),
        phase=phase,
        dtype="bfloat16",
        weights_version=1,
        placement_version=0,
        policy_version=policy.version,
    )
    (sub_step,) = choose_path(plan, config.bundle, policy)
    times = StageTimes(
        quantize_us=100,
        dispatch_us=400,
        gemm1_us=600,
        gemm2_us=500,
        combine_us=400,
        wait_us=1000,
        total_us=3000,
    )
    report = SubStepReport(
        path=sub_step.path,
        runtime_capacity=sub_step.runtime_capacity,
        num_rows_per_rank=plan.num_rows_per_rank,
        row_format_per_rank=(RowFormat.BF16,) * NUM_RANKS,
        counters=Counters(
            launches=1, bytes_sent=1000, padded_rows=5, dropped_slots=2, rows_received=6 * num_rows
        ),
        times=times,
    )
    for metrics in ranks:
        metrics.record_plan(plan, policy)
        metrics.record_step(plan, policy, (report,))
    return sub_step.path


def test_every_query_answers_with_the_recorded_numbers(
    server: PrometheusServer, ranks: list[RankMetrics]
) -> None:
    # Rates need two scrapes that differ, so every kind of step is recorded again and again until they are seen.
    stop = threading.Event()
    taken: list[Path] = []

    def traffic() -> None:
        step_id = 0
        while not stop.is_set():
            for phase in (Phase.DECODE, Phase.PREFILL):
                for num_rows in ROWS.values():
                    step_id += 1
                    taken.append(record(ranks, num_rows, phase, step_id))
            stop.wait(0.2)

    thread = threading.Thread(target=traffic)
    thread.start()
    try:
        wait_for_dashboard(server, 60)
    finally:
        stop.set()
        thread.join(10)
    assert set(taken) == set(Path)
    for metrics in ranks:
        metrics.flush()
    calls = len(taken)
    server.wait_until_scraped_after(time.time(), NUM_RANKS, 15)
    assert server.value("sum(megamoe_group_layer_calls_total)") == calls
    assert server.value("sum(megamoe_layer_calls_total)") == calls * NUM_RANKS
    for path in Path:
        assert server.value(f'sum(megamoe_sub_steps_total{{path="{path}", rank="0"}})') == taken.count(path)
        assert server.value(
            f'sum(megamoe_layer_latency_seconds_sum{{path="{path}", rank="1"}})'
        ) == pytest.approx(taken.count(path) * 0.003)
    assert server.value('sum(megamoe_barrier_wait_seconds_sum{rank="0"})') == pytest.approx(calls * 0.001)
    assert server.value('sum(megamoe_bytes_sent_total{rank="1"})') == calls * 1000
    # Decode steps of 100 and 200 rows are above small_m (32) and fixed_slot (64).
    assert server.value("megamoe_group_decode_fall_offs_total") == calls / 4


def test_every_alert_selects_series_and_evaluates(server: PrometheusServer, ranks: list[RankMetrics]) -> None:
    assert selectors_without_series(server) == []
    server.wait_until(
        "every rule is evaluated", lambda: all(rule["health"] == "ok" for rule in rules(server).values()), 15
    )
    assert {rule.get("lastError", "") for rule in rules(server).values()} == {""}
    critical = {name for name, rule in rules(server).items() if rule["labels"]["severity"] == "critical"}
    # A scrape between two ranks' first steps sees two versions for a moment: such an alert must settle, not stay.
    server.wait_until(
        "no critical alert is left pending",
        lambda: {name for name in critical if rules(server)[name]["state"] != "inactive"} == set(),
        15,
    )


def test_a_stuck_rank_makes_its_alert_pending(server: PrometheusServer, ranks: list[RankMetrics]) -> None:
    stuck_at = time.time() - 60
    ranks[1].watch({"last_progress": lambda: stuck_at})
    server.wait_until(
        "MegamoeRankWithoutProgress waits for its time",
        lambda: rules(server)["MegamoeRankWithoutProgress"]["state"] in ("pending", "firing"),
        15,
    )
    (alert,) = rules(server)["MegamoeRankWithoutProgress"]["alerts"]
    assert alert["labels"]["rank"] == "1"
