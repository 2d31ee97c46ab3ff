"""Reading the service's counters: pages as its own metrics code writes them."""

from __future__ import annotations

import math
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from loadgen.moe.scrape import Counters, difference, read_pages, scrape, scrape_settled
from loadgen.moe.scrape import Histogram as Seen
from loadgen.moe.tier import SubStepSeen
from loadgen.report.report import compare
from loadgen.steps.records import RunPhase, RunRecord
from megamoe.errors import UnavailableError

BOUNDS = (0.001, 0.01, 0.1, 1.0)


class Page:
    """One rank's registry, with the series that the load generator reads."""

    def __init__(self, rank: int) -> None:
        self.registry = CollectorRegistry()
        labels = ["rank", "model_name"]
        self.rank = rank
        self.latency = Histogram(
            "megamoe_layer_latency_seconds",
            "x",
            [*labels, "path", "phase"],
            registry=self.registry,
            buckets=BOUNDS,
        )
        self.sub_steps = Counter("megamoe_sub_steps", "x", [*labels, "path", "phase"], registry=self.registry)
        if rank == 0:
            self.calls = Counter("megamoe_group_layer_calls", "x", labels, registry=self.registry)

    def step(self, path: str, phase: str, seconds: float) -> None:
        self.latency.labels(str(self.rank), "m", path, phase).observe(seconds)
        self.sub_steps.labels(str(self.rank), "m", path, phase).inc()
        if self.rank == 0:
            self.calls.labels("0", "m").inc()

    def text(self) -> str:
        return generate_latest(self.registry).decode()


def test_pages_are_summed_over_phases_and_counted_by_rank_0() -> None:
    pages = [Page(0), Page(1)]
    for page in pages:
        page.step("compact", "prefill", 0.05)
    before = read_pages([page.text() for page in pages])
    for page in pages:
        page.step("compact", "prefill", 0.02)
        page.step("compact", "decode", 0.005)
        page.step("small_m", "decode", 0.0005)
    delta = difference(read_pages([page.text() for page in pages]), before)
    assert delta.group_layer_calls == 3
    assert delta.sub_steps == {"compact": 2, "small_m": 1}
    assert delta.latency["compact"].count == 4
    assert delta.latency["compact"].counts == [0, 2, 4, 4, 4]
    assert delta.latency["compact"].total_s == pytest.approx(2 * 0.025)
    assert delta.latency["small_m"].count == 2


def test_quantiles_interpolate_inside_their_bucket() -> None:
    seen = Seen([0.001, 0.01, 0.1, math.inf], [0.0, 10.0, 30.0, 30.0])
    assert seen.quantile_bucket(0.5) == 2
    assert seen.quantile(0.5) == pytest.approx(0.01 + 0.09 * 5 / 20)
    assert seen.bucket_of(0.01) == 1
    assert seen.bucket_of(0.0100001) == 2
    assert seen.bucket_of(5.0) == 3
    assert Seen([1.0, math.inf], [0.0, 4.0]).quantile(0.5) == 1.0
    assert math.isnan(Seen([1.0, math.inf], [0.0, 0.0]).quantile(0.5))


def run_of(seconds: list[float]) -> RunRecord:
    record = RunRecord()
    for value in seconds:
        piece = SubStepSeen(
            path="compact",
            runtime_capacity=64,
            max_rows=8,
            total_us_per_rank={0: value * 1e6, 1: value * 1e6},
            stages_us={},
        )
        record.add_call(RunPhase.PROFILE, value * 1.1, (piece,))
    return record


def counted_by_service(
    seconds: list[float], calls: int | None = None, idle_rank: list[float] | None = None
) -> Counters:
    """What two ranks counted; idle_rank: what rank 1 observed instead."""
    pages = [Page(0), Page(1)]
    for page, observed in zip(pages, (seconds, seconds if idle_rank is None else idle_rank)):
        for value in observed:
            page.step("compact", "decode", value)
    counted = read_pages([page.text() for page in pages])
    if calls is not None:
        counted.group_layer_calls = calls
    return counted


def test_equal_counts_and_near_medians_match() -> None:
    seconds = [0.005] * 3 + [0.05] * 2
    check = compare(run_of(seconds), counted_by_service(seconds))
    assert check["match"] is True
    assert check["layer_calls"] == {"made": 5, "failed": 0, "counted": 5}
    assert check["paths"]["compact"]["buckets_apart"] == 0
    assert check["paths"]["large_m"] == {"seen": 0, "counted": 0}


@pytest.mark.parametrize(
    ("counted", "sentence"),
    [
        (counted_by_service([0.005] * 5, calls=6), "layer calls: 5 made, 6 counted"),
        (counted_by_service([0.005] * 4, calls=5), "compact: 5 sub-steps seen, 4 counted"),
        (counted_by_service([0.5] * 5), "lie 2 buckets apart"),
    ],
)
def test_a_difference_is_named(counted: Counters, sentence: str) -> None:
    check = compare(run_of([0.005] * 5), counted)
    assert check["match"] is False
    assert sentence in "; ".join(check["reasons"])


@pytest.mark.parametrize(
    ("replied", "called_rank", "idle_rank", "match"),
    [
        (0.5, 0.5, [0.0005] * 5, True),  # the median may be rank 1's
        (0.5, 0.5, [5.0] * 5, True),
        (0.5, 0.5, [0.0005] * 7, True),
        (0.0005, 0.0005, [5.0] * 7, True),
        (0.5, 0.005, [0.005] * 2, False),  # too few unknown times to explain it
        (0.5, 0.005, [], False),
        (0.0005, 0.05, [0.05] * 2, False),
    ],
)
def test_times_of_ranks_that_were_not_called_may_lie_anywhere(
    replied: float, called_rank: float, idle_rank: list[float], match: bool
) -> None:
    run = run_of([replied] * 5)
    for times in run.times.values():
        del times.by_rank[1]
    assert compare(run, counted_by_service([called_rank] * 5, idle_rank=idle_rank))["match"] is match


def test_after_a_failed_call_the_service_may_have_counted_more_but_not_less() -> None:
    run = run_of([0.005] * 5)
    run.num_calls_failed = 1
    assert compare(run, counted_by_service([0.005] * 6))["match"] is True
    assert compare(run, counted_by_service([0.005] * 7))["match"] is False
    assert compare(run, counted_by_service([0.005] * 4))["match"] is False


def test_a_cut_call_is_shared_out_by_service_time() -> None:
    record = RunRecord()
    pieces = [
        SubStepSeen(path=path, runtime_capacity=64, max_rows=8, total_us_per_rank={0: took}, stages_us={})
        for path, took in (("large_m", 3000.0), ("small_m", 1000.0))
    ]
    record.add_call(RunPhase.PROFILE, 0.008, tuple(pieces))
    assert list(record.path_times("large_m").client) == pytest.approx([0.006])
    assert list(record.path_times("small_m").client) == pytest.approx([0.002])
    assert record.num_calls == 1


def test_counters_that_were_not_read_are_unknown_not_equal() -> None:
    check = compare(run_of([0.005]), None, "no page")
    assert check == {"match": None, "reasons": ["no page"]}


class _Server:
    """Serves one page's text over HTTP."""

    def __init__(self, page: Page) -> None:
        outer = page

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = outer.text().encode()
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/metrics"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)

    def __enter__(self) -> _Server:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(5)


async def test_a_late_observation_is_waited_for() -> None:
    page = Page(0)
    with _Server(page) as server:
        before = await scrape([server.url])
        timer = threading.Timer(0.3, lambda: page.step("compact", "decode", 0.01))
        timer.start()
        delta = await scrape_settled([server.url], before, num_calls=1, num_sub_steps=1)
        timer.join(5)
    assert delta.group_layer_calls == 1


async def test_a_page_that_cannot_be_read_is_named() -> None:
    with pytest.raises(UnavailableError, match=r"metrics page http://127\.0\.0\.1:1/metrics cannot be read"):
        await scrape(["http://127.0.0.1:1/metrics"])
