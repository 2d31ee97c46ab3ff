"""The service's own counters, read from its Prometheus pages before and after a run, and whether they tell the same.

Counted by rank 0: layer calls of the group and executed sub-steps per path. Latencies: the histograms of all ranks,
whose median must lie within one bucket of the median of the stage times in the replies.
"""

from __future__ import annotations

import asyncio
import bisect
import math
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from megamoe.errors import UnavailableError

SCRAPE_TIMEOUT_S = 5.0
SETTLE_S = 5.0
"""Metrics are observed off the device thread: the last calls may show up a little later than their replies."""


@dataclass(slots=True)
class Histogram:
    """Cumulative counts by upper bound (seconds), ascending, inf last; sum of the observed values."""

    bounds: list[float] = field(default_factory=list)
    counts: list[float] = field(default_factory=list)
    total_s: float = 0.0

    @property
    def count(self) -> int:
        return round(self.counts[-1]) if self.counts else 0

    def bucket_of(self, value: float) -> int:
        """Index of the bucket that holds `value`."""
        return bisect.bisect_left(self.bounds, value)

    def quantile_bucket(self, quantile: float) -> int:
        """Index of the bucket that holds the quantile; -1 when nothing was observed."""
        if not self.count:
            return -1
        return bisect.bisect_left(self.counts, quantile * self.counts[-1])

    def quantile(self, quantile: float) -> float:
        """The quantile by linear interpolation inside its bucket, as Prometheus does; nan when empty."""
        idx = self.quantile_bucket(quantile)
        if idx < 0:
            return math.nan
        if math.isinf(self.bounds[idx]):
            return self.bounds[idx - 1] if idx else math.inf
        low, before = (self.bounds[idx - 1], self.counts[idx - 1]) if idx else (0.0, 0.0)
        inside = self.counts[idx] - before
        return low + (self.bounds[idx] - low) * (quantile * self.counts[-1] - before) / inside


@dataclass(slots=True)
class Counters:
    """One reading, or the difference of two. latency: by path, all ranks and phases together."""

    group_layer_calls: int = 0
    sub_steps: dict[str, int] = field(default_factory=dict)
    latency: dict[str, Histogram] = field(default_factory=dict)


def read_pages(pages: Sequence[str]) -> Counters:
    """The counters on the Prometheus pages of all ranks, rank 0 first."""
    counters = Counters()
    buckets: dict[str, dict[float, float]] = {}
    sums: dict[str, float] = {}
    for rank, page in enumerate(pages):
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                path = sample.labels.get("path", "")
                if sample.name == "megamoe_layer_latency_seconds_bucket":
                    by_bound = buckets.setdefault(path, {})
                    bound = float(sample.labels["le"])
                    by_bound[bound] = by_bound.get(bound, 0.0) + sample.value
                elif sample.name == "megamoe_layer_latency_seconds_sum":
                    sums[path] = sums.get(path, 0.0) + sample.value
                elif rank == 0 and sample.name == "megamoe_group_layer_calls_total":
                    counters.group_layer_calls += round(sample.value)
                elif rank == 0 and sample.name == "megamoe_sub_steps_total":
                    counters.sub_steps[path] = counters.sub_steps.get(path, 0) + round(sample.value)
    for path, by_bound in buckets.items():
        bounds = sorted(by_bound)
        counters.latency[path] = Histogram(bounds, [by_bound[bound] for bound in bounds], sums.get(path, 0.0))
    return counters


def difference(after: Counters, before: Counters) -> Counters:
    """What happened between two readings."""
    latency = {}
    for path, histogram in after.latency.items():
        old = before.latency.get(path) or Histogram(histogram.bounds, [0.0] * len(histogram.bounds))
        counts = [new - had for new, had in zip(histogram.counts, old.counts, strict=True)]
        latency[path] = Histogram(histogram.bounds, counts, histogram.total_s - old.total_s)
    return Counters(
        after.group_layer_calls - before.group_layer_calls,
        {path: count - before.sub_steps.get(path, 0) for path, count in after.sub_steps.items()},
        latency,
    )


async def scrape(urls: Sequence[str]) -> Counters:
    """Read the pages of all ranks. Raises UnavailableError naming the page that cannot be read."""
    return read_pages(await asyncio.gather(*(asyncio.to_thread(_get, url) for url in urls)))


async def scrape_settled(
    urls: Sequence[str], before: Counters, num_calls: int, num_sub_steps: int
) -> Counters:
    """The difference to `before`, once it shows num_calls and num_sub_steps or SETTLE_S have passed."""
    deadline = asyncio.get_running_loop().time() + SETTLE_S
    while True:
        delta = difference(await scrape(urls), before)
        settled = delta.group_layer_calls >= num_calls and _total(delta.sub_steps.values()) >= num_sub_steps
        if settled or asyncio.get_running_loop().time() >= deadline:
            return delta
        await asyncio.sleep(0.1)


def _total(counts: Iterable[int]) -> int:
    return sum(counts)


def _get(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=SCRAPE_TIMEOUT_S) as reply:
            body: bytes = reply.read()
    except (OSError, urllib.error.URLError) as error:
        raise UnavailableError(f"metrics page {url} cannot be read: {error}") from error
    return body.decode("utf-8")
