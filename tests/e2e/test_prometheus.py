"""A real Prometheus over the running service: the dashboard shows it, the alerts watch it, the numbers are its own."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from megamoe import Path
from service.client import MoeGroup
from tests.deploy.prometheus_server import (
    PrometheusServer,
    prometheus,
    rules,
    selectors_without_series,
    wait_for_dashboard,
)
from tests.e2e.harness import SHAPE, ServiceProcess, group_rows

pytestmark = pytest.mark.one_launcher("ray")
SCRAPE_TIMEOUT_S = 20.0

# (rows of ranks 0 and 1, phase) of steps that take each path under the demo profile; the decode step of 100 rows is
# above every decode capacity.
STEPS = {
    Path.SMALL_M: (8, "decode"),
    Path.FIXED_SLOT: (48, "decode"),
    Path.LARGE_M: (200, "prefill"),
    Path.COMPACT: (100, "decode"),
}


@pytest.fixture(scope="module")
def server(
    running_service: ServiceProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrometheusServer]:
    with prometheus(running_service.http, tmp_path_factory.mktemp("prometheus")) as found:
        found.wait_until("every rank is scraped", lambda: len(found.up_targets()) == SHAPE.num_ranks, 30)
        yield found


class Traffic(threading.Thread):
    """Steps on every path, over and over, until told to stop; counts what the replies said."""

    def __init__(self, front: str) -> None:
        super().__init__(name="traffic")
        self.front = front
        self.enough = threading.Event()
        self.num_calls = 0
        self.num_sub_steps: Counter[Path] = Counter()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with MoeGroup.connect(self.front, holder="dashboard") as moe:
                while not self.enough.is_set():
                    for num_rows, phase in STEPS.values():
                        self._step(moe, num_rows, phase)
        except BaseException as error:
            self.error = error

    def _step(self, moe: MoeGroup, num_rows: int, phase: str) -> None:
        counts = [num_rows, num_rows // 2] + [0] * (SHAPE.num_ranks - 2)
        batches = group_rows(counts)
        with moe.step(counts, phase) as step:
            for layer_idx in range(SHAPE.num_layers):
                outs = step.layer(layer_idx, batches)
                self.num_calls += 1
                self.num_sub_steps.update(report.path for report in outs.sub_steps)

    def finish(self) -> None:
        self.enough.set()
        self.join(60)
        assert not self.is_alive(), "the last step did not end"
        if self.error:
            raise self.error


def sub_steps(server: PrometheusServer) -> dict[Path, float]:
    """Executed sub-steps per path, as rank 0 counts them."""
    return {path: server.value(f'sum(megamoe_sub_steps_total{{path="{path}", rank="0"}})') for path in Path}


def test_the_dashboard_shows_real_traffic_and_counts_it(
    server: PrometheusServer, running_service: ServiceProcess
) -> None:
    server.wait_until_scraped_after(time.time(), SHAPE.num_ranks, SCRAPE_TIMEOUT_S)
    calls_before, sub_steps_before = server.value("megamoe_group_layer_calls_total"), sub_steps(server)
    traffic = Traffic(running_service.front)
    traffic.start()
    try:
        wait_for_dashboard(server, 90)
    finally:
        traffic.finish()
    assert set(traffic.num_sub_steps) == set(Path)
    # Observation happens off the device thread, so the last replies may be ahead of it by a moment.
    server.wait_until_scraped_after(time.time() + 1.0, SHAPE.num_ranks, SCRAPE_TIMEOUT_S)
    assert server.value("megamoe_group_layer_calls_total") - calls_before == traffic.num_calls
    assert {
        path: n - sub_steps_before[path] for path, n in sub_steps(server).items()
    } == traffic.num_sub_steps


def test_the_alerts_watch_the_service_and_are_content(server: PrometheusServer) -> None:
    assert selectors_without_series(server) == []
    server.wait_until(
        "every rule is evaluated", lambda: all(rule["health"] == "ok" for rule in rules(server).values()), 15
    )
    # Errors that other tests provoked may show as caller errors; nothing critical may come of a healthy service.
    never = {
        "MegamoeRankDown",
        "MegamoeAbsent",
        "MegamoeNotReady",
        "MegamoeRankWithoutProgress",
        "MegamoeRestartLoop",
    }
    assert {name for name in never if rules(server)[name]["state"] != "inactive"} == set()
