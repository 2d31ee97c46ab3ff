"""A real Prometheus with the configuration of deploy/, pointed at a front that runs now."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.queries import DEPLOY, RULES, Query, alert_queries, dashboard_queries, variable_queries
from tools.debian_tools import provide

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0


class PrometheusServer:
    """Talks to one Prometheus over its HTTP API."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **params: str) -> Any:
        """`data` of an API answer. Raises AssertionError with Prometheus' words when it refuses."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(params)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                body = json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} {params}: {error.read().decode()}") from error
        assert body["status"] == "success", body
        return body["data"]

    def query(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """(labels, value) of every series that an instant query returns."""
        result = self.get("query", query=expr)["result"]
        return [(item["metric"], float(item["value"][1])) for item in result]

    def value(self, expr: str) -> float:
        """The value of a query that returns exactly one series."""
        found = self.query(expr)
        assert len(found) == 1, f"{expr} must return one series, got {found}"
        return found[0][1]

    def up_targets(self) -> list[str]:
        """Instances of the job `megamoe` whose last scrape worked."""
        return [
            item["labels"]["instance"]
            for item in self.get("targets", state="active")["activeTargets"]
            if item["labels"]["job"] == "megamoe" and item["health"] == "up"
        ]

    def wait_until(self, what: str, check: Callable[[], bool], timeout_s: float) -> None:
        """Wait for something that scrapes bring about. Raises AssertionError that says what did not come."""
        deadline = time.monotonic() + timeout_s
        while not check():
            targets = self.get("targets", state="active")
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}; targets: {targets}"
            time.sleep(0.2)

    def wait_until_scraped_after(self, moment_s: float, num_ranks: int, timeout_s: float) -> None:
        """Wait until what is known of every rank is from after `moment_s` (Unix seconds)."""
        self.wait_until(
            f"{num_ranks} ranks are scraped again",
            lambda: len(self.query(f"timestamp(megamoe_ready) > {moment_s!r}")) == num_ranks,
            timeout_s,
        )


@contextmanager
def prometheus(front_url: str, folder: Path) -> Iterator[PrometheusServer]:
    """Run Prometheus with deploy/'s configuration, scraping faster, over the ranks that `front_url`/sd lists."""
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"] |= {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(RULES)]
    (discovery,) = config["scrape_configs"][0]["http_sd_configs"]
    discovery |= {"url": f"{front_url}/sd", "refresh_interval": "1s"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{_free_port()}"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                provide("prometheus")["prometheus"],
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
                "--log.level=warn",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait_ready(process, f"http://{address}", folder / "log")
            yield PrometheusServer(f"http://{address}")
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/-/ready", timeout=2):
                return
        except OSError:
            assert process.poll() is None, f"Prometheus ended: {log.read_text()}"
            assert time.monotonic() < deadline, f"Prometheus is not ready: {log.read_text()}"
            time.sleep(0.1)


def wait_for_dashboard(server: PrometheusServer, timeout_s: float) -> None:
    """Wait until every panel of the dashboard has a finite value, which needs traffic on all paths and phases."""
    missing = [query for query in dashboard_queries() if not query.where.startswith("annotation")]

    def all_there() -> bool:
        missing[:] = [query for query in missing if not _has_value(server, query)]
        return not missing

    try:
        server.wait_until("every dashboard query has a value", all_there, timeout_s)
    except AssertionError as error:
        names = "; ".join(f"{query.where}: {query.expr}" for query in missing)
        raise AssertionError(f"no value for {names}") from error


def _has_value(server: PrometheusServer, query: Query) -> bool:
    return any(math.isfinite(value) for _, value in server.query(query.expr))


def selectors_without_series(server: PrometheusServer) -> list[str]:
    """`where: selector` of every alert, variable and annotation selector that returns nothing."""
    annotations = [query for query in dashboard_queries() if query.where.startswith("annotation")]
    return [
        f"{query.where}: {selector}"
        for query in (*alert_queries(), *variable_queries(), *annotations)
        for selector in query.selectors
        if not server.query(selector)
    ]


def rules(server: PrometheusServer) -> dict[str, dict[str, Any]]:
    """Alert name -> the rule as Prometheus evaluates it (health, lastError, state)."""
    return {rule["name"]: rule for group in server.get("rules")["groups"] for rule in group["rules"]}
