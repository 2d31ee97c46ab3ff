"""The dashboard is whole: panels that say what they show, on one data source, and do not lie on each other."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import yaml

from tests.deploy.queries import DASHBOARD, DEPLOY, board_variables, dashboard, dashboard_queries

PROVISIONING = DEPLOY / "grafana" / "provisioning"
PANELS = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]

# What the dashboard promises to show, each with a metric that must be in it.
PROMISED = {
    "latency per path p50, p90, p99": "megamoe_layer_latency_seconds_bucket",
    "path mix": "megamoe_sub_steps_total",
    "fall-offs from the decode path": "megamoe_group_decode_fall_offs_total",
    "rows per rank": "megamoe_group_rows_max_bucket",
    "stage breakdown": "megamoe_stage_latency_seconds_sum",
    "barrier wait": "megamoe_barrier_wait_seconds_sum",
    "errors": "megamoe_errors_total",
    "queue": "megamoe_queue_depth",
    "generation": "megamoe_generation",
    "last progress per rank": "megamoe_last_progress_timestamp_seconds",
}


@pytest.mark.parametrize("subject", PROMISED)
def test_shows_what_it_promises(subject: str) -> None:
    assert any(PROMISED[subject] in query.metric_names for query in dashboard_queries())


@pytest.mark.parametrize("quantile", ["0.5", "0.9", "0.99"])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_latency_has_its_three_quantiles_per_path_and_phase(quantile: str, phase: str) -> None:
    start = f"histogram_quantile({quantile}, sum by (path, le) (rate(megamoe_layer_latency_seconds_bucket{{"
    assert any(
        query.expr.startswith(start) and f'phase="{phase}"' in query.expr for query in dashboard_queries()
    )


def test_panels_have_ids_titles_descriptions_units_and_queries() -> None:
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(ids) == len(set(ids))
    titles = [panel["title"] for panel in PANELS]
    assert len(titles) == len(set(titles))
    for panel in PANELS:
        assert panel["description"].endswith("."), panel["title"]
        assert panel["targets"], panel["title"]
        if panel["type"] != "heatmap":
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]


def test_panels_stay_on_the_grid_and_do_not_overlap() -> None:
    def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
        pos = panel["gridPos"]
        assert pos["x"] + pos["w"] <= 24, panel["title"]
        return set(
            itertools.product(range(pos["x"], pos["x"] + pos["w"]), range(pos["y"], pos["y"] + pos["h"]))
        )

    for one, other in itertools.combinations(dashboard()["panels"], 2):
        assert not cells(one) & cells(other), (one["title"], other["title"])


def test_every_query_goes_to_the_chosen_data_source() -> None:
    for panel in PANELS:
        for item in (panel, *panel["targets"]):
            assert item["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_every_variable_is_used_and_every_used_one_is_defined() -> None:
    text = DASHBOARD.read_text()
    for variable in board_variables():
        assert f"${variable['name']}" in text


def test_provisioning_loads_the_dashboard_from_prometheus() -> None:
    (source,) = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    assert source["url"] == "http://prometheus:9090"
    scrape = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    assert source["jsonData"]["timeInterval"] == scrape["global"]["scrape_interval"]
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "megamoe.yml").read_text())["providers"]
    compose = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
    mounts = [mount.split(":")[1] for mount in compose["services"]["grafana"]["volumes"]]
    assert provider["options"]["path"] in mounts
    assert "/etc/grafana/provisioning" in mounts
