"""Every PromQL expression under deploy/, and what it selects: one reading for the offline and the live checks."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "rules" / "alerts.yml"
RULE_TESTS = DEPLOY / "prometheus" / "rules" / "alerts_test.yml"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "megamoe.json"

# What Grafana puts in place of its variables; "all" stands for a variable with every value chosen.
MACROS = {"$__rate_interval": "1m", "$__interval": "15s", "$model_name": ".+", "$rank": ".+", "$path": ".+"}
HISTOGRAM_SUFFIXES = ("_bucket", "_sum", "_count")


@dataclass(frozen=True)
class Query:
    """`where` names the alert or panel for a failing test; `expr` is plain PromQL, Grafana's variables replaced."""

    where: str
    expr: str

    @property
    def selectors(self) -> list[str]:
        """Every instant selector in it, such as `megamoe_errors_total{code="internal"}`."""
        return re.findall(r"(?:\bmegamoe_[a-z0-9_]+|\bup(?=\{))(?:\{[^}]*\})?", self.expr)

    @property
    def metric_names(self) -> set[str]:
        """Names of our own metrics in it, as they are exposed."""
        return {name for selector in self.selectors if (name := selector.split("{")[0]) != "up"}


def alert_queries() -> list[Query]:
    """One query for each alert, named after it."""
    return [Query(rule["alert"], rule["expr"]) for rule in alert_rules()]


def alert_rules() -> list[dict[str, Any]]:
    """The alerts as they stand in the file."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    """The Grafana dashboard."""
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return loaded


def dashboard_queries() -> list[Query]:
    """One query for each target of each panel and for each annotation."""
    board = dashboard()
    found = [
        Query(f"{panel['title']} [{target['refId']}]", target["expr"])
        for panel in board["panels"]
        for target in panel.get("targets", [])
    ]
    found += [Query(f"annotation {item['name']}", item["expr"]) for item in board["annotations"]["list"]]
    return [Query(query.where, _without_variables(query.expr)) for query in found]


def variable_queries() -> list[Query]:
    """The selectors behind the dashboard's variables: label_values(selector, label)."""
    found = []
    for variable in board_variables():
        match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
        assert match, f"variable {variable['name']} must be label_values(selector, label)"
        found.append(Query(f"variable {variable['name']}", _without_variables(match[1])))
    return found


def board_variables() -> list[dict[str, Any]]:
    """Variables of the dashboard that query Prometheus."""
    return [item for item in dashboard()["templating"]["list"] if item["type"] == "query"]


def _without_variables(expr: str) -> str:
    for macro, value in MACROS.items():
        expr = expr.replace(macro, value)
    assert "$" not in expr, f"unknown Grafana variable in {expr}"
    return expr


def base_name(metric_name: str, known: set[str]) -> str:
    """The family of a sample name: `x_bucket` belongs to the histogram `x` where that is known."""
    for suffix in HISTOGRAM_SUFFIXES:
        if metric_name not in known and metric_name.removesuffix(suffix) in known:
            return metric_name.removesuffix(suffix)
    return metric_name
