"""Prometheus' own tool accepts the configuration, and its rule tests fire every alert."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.queries import (
    DEPLOY,
    RULE_TESTS,
    RULES,
    Query,
    alert_queries,
    alert_rules,
    dashboard_queries,
    variable_queries,
)
from tools.debian_tools import provide

SEVERITIES = {"critical", "warning"}


@pytest.fixture(scope="session")
def promtool() -> Path:
    return provide("prometheus")["promtool"]


def run(promtool: Path, *arguments: str | Path) -> str:
    done = subprocess.run(
        [promtool, *arguments], capture_output=True, text=True, timeout=120, check=False, cwd=RULES.parent
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_configuration_is_valid(promtool: Path) -> None:
    assert "is valid" in run(promtool, "check", "config", DEPLOY / "prometheus" / "prometheus.yml")


def test_rules_are_valid(promtool: Path) -> None:
    assert f"{len(alert_rules())} rules found" in run(promtool, "check", "rules", RULES)


def test_every_alert_fires(promtool: Path) -> None:
    assert "SUCCESS" in run(promtool, "test", "rules", RULE_TESTS)


def test_a_wrong_expectation_fails(promtool: Path, tmp_path: Path) -> None:
    """promtool really compares: the same tests with one severity changed must fail."""
    text = RULE_TESTS.read_text().replace("severity: 'critical'", "severity: 'warning'", 1)
    (tmp_path / "alerts.yml").write_text(RULES.read_text())
    (tmp_path / "alerts_test.yml").write_text(text)
    done = subprocess.run(
        [promtool, "test", "rules", tmp_path / "alerts_test.yml"],
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0


def test_no_alert_lacks_a_test_that_fires_it_and_one_that_does_not() -> None:
    fires: set[str] = set()
    quiet: set[str] = set()
    for test in yaml.safe_load(RULE_TESTS.read_text())["tests"]:
        for case in test["alert_rule_test"]:
            (fires if case["exp_alerts"] else quiet).add(case["alertname"])
    names = {rule["alert"] for rule in alert_rules()}
    assert fires == names
    assert quiet == names


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    names = [rule["alert"] for rule in alert_rules()]
    assert len(names) == len(set(names))
    for rule in alert_rules():
        assert rule["alert"].startswith("Megamoe")
        assert rule["labels"]["severity"] in SEVERITIES
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["annotations"]["description"].endswith(".")


def test_every_dashboard_query_parses(promtool: Path, tmp_path: Path) -> None:
    queries = [*dashboard_queries(), *variable_queries()]
    run(promtool, "check", "rules", as_recording_rules(queries, tmp_path))


def test_a_broken_query_is_noticed(promtool: Path, tmp_path: Path) -> None:
    path = as_recording_rules([Query("broken", "sum(rate(megamoe_rows_total[1m])")], tmp_path)
    done = subprocess.run([promtool, "check", "rules", path], capture_output=True, timeout=60, check=False)
    assert done.returncode != 0


def as_recording_rules(queries: list[Query], folder: Path) -> Path:
    rules = [{"record": f"query:{idx}", "expr": query.expr} for idx, query in enumerate(queries)]
    path = folder / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    return path


@pytest.mark.parametrize("query", [*alert_queries(), *dashboard_queries()], ids=lambda query: query.where)
def test_every_query_selects_something_of_ours(query: Query) -> None:
    assert query.selectors


def test_the_runbook_has_a_line_for_every_alert() -> None:
    text = (DEPLOY / "README.md").read_text()
    assert [rule["alert"] for rule in alert_rules() if rule["alert"] not in text] == []
