"""What deploy/ says and what the code exposes are the same names: metrics, labels, error codes, settings, ports."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from megamoe.errors import ERROR_BY_CODE
from service.config import PROFILES, ServiceConfig, load_config
from service.metrics import RankMetrics
from tests.deploy.queries import DEPLOY, Query, alert_queries, dashboard_queries, variable_queries

QUERIES = [*alert_queries(), *dashboard_queries(), *variable_queries()]
DOCKERFILES = sorted((DEPLOY / "docker").glob("Dockerfile.*"))
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
KUBERNETES = (DEPLOY / "kubernetes" / "raycluster.yaml").read_text()


@pytest.fixture(scope="module")
def series() -> list[tuple[str, dict[str, str]]]:
    """(sample name, labels) of everything that rank 0 exposes before any traffic."""
    metrics = RankMetrics(rank=0, model_name="demo", bundle=load_config(env=False).bundle)
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    metrics.close()
    return [(sample.name, sample.labels) for sample in samples]


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.where)
def test_every_selector_finds_series_of_the_registry(
    query: Query, series: list[tuple[str, dict[str, str]]]
) -> None:
    for selector in query.selectors:
        if not selector.startswith("up{"):
            assert any(matches(selector, name, labels) for name, labels in series), selector


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.where)
def test_every_label_that_is_grouped_by_is_there(
    query: Query, series: list[tuple[str, dict[str, str]]]
) -> None:
    known = {label for _, labels in series for label in labels}
    for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", query.expr):
        assert {label.strip() for label in group.split(",")} <= known


def test_a_wrong_name_or_label_would_be_found(series: list[tuple[str, dict[str, str]]]) -> None:
    for selector in (
        "megamoe_row_total",
        'megamoe_rows_total{path="medium_m"}',
        'megamoe_rows_total{layer="1"}',
    ):
        assert not any(matches(selector, name, labels) for name, labels in series)


def matches(selector: str, name: str, labels: dict[str, str]) -> bool:
    """Whether Prometheus would select this series; = and =~ are all that our queries use."""
    metric, _, rest = selector.partition("{")
    if name != metric:
        return False
    for label, operator, value in re.findall(r'(\w+)(=~|!=|=)"([^"]*)"', rest):
        assert operator in ("=", "=~"), selector
        found = labels.get(label, "")
        if not (re.fullmatch(value, found) if operator == "=~" else found == value):
            return False
    return True


@pytest.mark.parametrize("query", alert_queries(), ids=lambda query: query.where)
def test_alerts_name_error_codes_that_exist(query: Query) -> None:
    for codes in re.findall(r'code=~?"([^"]*)"', query.expr):
        assert set(codes.split("|")) <= set(ERROR_BY_CODE)


def settings_in(text: str) -> dict[str, str]:
    """MEGAMOE_X=value of a Dockerfile, `MEGAMOE_X: value` of compose, name and value of Kubernetes."""
    found = re.findall(r"\bMEGAMOE_([A-Z_]+)(?:=|: |\n\s+value: )(\S+)", text)
    return {name.lower(): value.strip('"') for name, value in found}


@pytest.mark.parametrize(
    "path", [*DOCKERFILES, DEPLOY / "compose" / "compose.yaml"], ids=lambda path: path.name
)
def test_settings_exist_and_are_accepted(path: Any) -> None:
    settings = settings_in(path.read_text())
    assert settings
    config = load_config(overrides=settings, env=False)
    assert set(settings) <= set(ServiceConfig.model_fields)
    assert config.profile in PROFILES


def test_settings_of_the_manifest_exist() -> None:
    (head,) = next(iter(yaml.safe_load_all(KUBERNETES)))["spec"]["headGroupSpec"]["template"]["spec"][
        "containers"
    ]
    names = {item["name"].removeprefix("MEGAMOE_").lower() for item in head["env"]}
    assert names <= set(ServiceConfig.model_fields)


def test_ports_are_the_defaults_of_the_service_and_those_of_the_image() -> None:
    config = ServiceConfig()
    assert (config.port, config.http_port) == (50051, 9400)
    for path in DOCKERFILES:
        settings = settings_in(path.read_text())
        ranks = config.moe_shape.num_ranks
        rank_port, metrics_port = int(settings["rank_port"]), int(settings["metrics_port"])
        exposed = f"EXPOSE {config.port} {config.http_port} {rank_port}-{rank_port + ranks - 1}"
        assert f"{exposed} {metrics_port}-{metrics_port + ranks - 1}\n" in path.read_text()
        assert f"127.0.0.1:{config.http_port}/readyz" in path.read_text()
    assert f"containerPort: {config.port}}}" in KUBERNETES
    assert f"containerPort: {config.http_port}}}" in KUBERNETES
    assert f'"megamoe:{config.port}"' in (DEPLOY / "compose" / "compose.yaml").read_text()
