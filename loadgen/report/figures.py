"""Figures of a run from its records: the definitions, in one place.

Per request: ttft = first token - sent; e2el = last token - sent; itl = (e2el - ttft) / (output tokens - 1), for
outputs of at least 2 tokens; tpot is the same list. step_interval = time between two emissions of a request.
intvty = 1 / itl and e2e_norm_intvty = output tokens / e2el: their percentiles are those of the slow side, so that p90
interactivity is 1 / p90(itl); mean is 1 / mean as well, std that of the requests' own values.
Percentiles interpolate linearly. Throughput counts successful requests of the profile, over max(end) - min(start) of
them, per GPU (rank).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from loadgen.steps.records import RequestRecord, RunPhase, RunRecord, Status, StepRecord

PERCENTILES = (50, 75, 90, 95)
Stats = dict[str, Any]
Values = Sequence[float] | npt.NDArray[np.float64]


def percentiles_of(values: Values, percentiles: Sequence[float], factor: float = 1.0) -> Stats:
    """{"p50": ...} of values times factor; None each when there are none."""
    if len(values) == 0:
        return {f"p{percentile:g}": None for percentile in percentiles}
    points = np.percentile(np.asarray(values, dtype=np.float64), percentiles) * factor
    return {f"p{percentile:g}": float(point) for percentile, point in zip(percentiles, points)}


def stats_of(values: Values, unit: str) -> Stats:
    """mean, p50, p75, p90, p95, std (of the population), min, max and count."""
    array = np.asarray(values, dtype=np.float64)
    empty = array.size == 0
    return {
        "unit": unit,
        "count": int(array.size),
        "mean": None if empty else float(array.mean()),
        **percentiles_of(array, PERCENTILES),
        "std": None if empty else float(array.std()),
        "min": None if empty else float(array.min()),
        "max": None if empty else float(array.max()),
    }


def inverse_stats(slow: Stats, values: Sequence[float], unit: str) -> Stats:
    """Statistics of 1/x from those of x: every point is 1 over x's point of the same name."""
    own = stats_of(values, unit)
    for name in ("mean", *(f"p{percentile}" for percentile in PERCENTILES)):
        own[name] = 1.0 / slow[name] if slow[name] else None
    return own


def successful(record: RunRecord) -> list[RequestRecord]:
    """Requests that the figures are made of: completed, in the profile."""
    return [
        request
        for request in record.requests
        if request.phase is RunPhase.PROFILE and request.status is Status.COMPLETED
    ]


def histogram_of(values: Values, bounds: Values = (), num_bins: int = 48) -> dict[str, list[float]]:
    """Counts of the positive values between `bounds`, which are one more than counts.

    bounds: given, ascending and around all values, or else num_bins evenly spaced in their logarithm. Both lists are
    empty when there is nothing to count.
    """
    array = np.asarray(values, dtype=np.float64)
    array = array[array > 0]
    if array.size == 0:
        return {"bounds": [], "counts": []}
    edges = np.asarray(bounds, dtype=np.float64)
    if edges.size == 0:
        low, high = float(array.min()), float(array.max())
        edges = np.geomspace(low * (1 - 1e-9), high * (1 + 1e-9), num_bins + 1)
    counts, _ = np.histogram(array, edges)
    return {"bounds": edges.tolist(), "counts": counts.tolist()}


def distributions(requests: Sequence[RequestRecord], steps: Sequence[StepRecord]) -> dict[str, Any]:
    """Histograms of what the report gives percentiles of: latencies in seconds, and the largest rank's rows by step."""
    rows = [step.max_rows for step in steps]
    # Whole numbers of rows: no bin is narrower than one row, and none is empty for that alone.
    bounds = np.unique(np.floor(np.geomspace(1, max(rows, default=1) + 1, 65))) - 0.5
    bounds[-1:] = max(rows, default=1) + 0.5
    return {
        "ttft": histogram_of([request.ttft_s for request in requests]),
        "itl": histogram_of([itl_of(request) for request in requests if request.num_output >= 2]),
        "step_interval": histogram_of(_step_intervals(requests)),
        "e2el": histogram_of([request.e2el_s for request in requests]),
        "max_rows": histogram_of(rows, bounds),
        "decode_max_rows": histogram_of([step.max_rows for step in steps if step.phase == "decode"], bounds),
    }


def _step_intervals(requests: Sequence[RequestRecord]) -> Values:
    """Times between two emissions of a request, of all requests."""
    gaps = [np.diff(np.asarray(request.emissions)) for request in requests]
    return np.concatenate(gaps) if gaps else []


def latency_figures(requests: Sequence[RequestRecord]) -> dict[str, Stats]:
    """ttft, e2el, itl, tpot, step_interval in seconds; intvty and e2e_norm_intvty in tokens/s/user."""
    e2el = [request.e2el_s for request in requests]
    itl = [itl_of(request) for request in requests if request.num_output >= 2]
    norm = [request.e2el_s / request.num_output for request in requests]
    itl_stats, norm_stats = stats_of(itl, "s"), stats_of(norm, "s")
    return {
        "ttft": stats_of([request.ttft_s for request in requests], "s"),
        "e2el": stats_of(e2el, "s"),
        "itl": itl_stats,
        "tpot": dict(itl_stats),
        "step_interval": stats_of(_step_intervals(requests), "s"),
        "intvty": inverse_stats(itl_stats, [1 / value for value in itl if value > 0], "tok/s/user"),
        "e2e_norm_intvty": inverse_stats(
            norm_stats, [1 / value for value in norm if value > 0], "tok/s/user"
        ),
    }


def itl_of(request: RequestRecord) -> float:
    """Inter-token latency: the time after the first token, by the tokens after the first."""
    return (request.e2el_s - request.ttft_s) / (request.num_output - 1)


def throughput_figures(requests: Sequence[RequestRecord], num_gpus: int) -> dict[str, float | None]:
    """total, output and input tokens/s per GPU; total counts the full input, cached tokens included."""
    if not requests:
        return dict.fromkeys(
            ("total_tput_tps", "output_tput_tps", "input_tput_tps", "request_tput_rps", "span_s")
        )
    start = min(request.start_s for request in requests)
    span = max(request.emissions[-1] for request in requests) - start
    num_input = sum(request.num_input for request in requests)
    num_output = sum(request.num_output for request in requests)
    if span <= 0:
        return dict.fromkeys(
            ("total_tput_tps", "output_tput_tps", "input_tput_tps", "request_tput_rps"), None
        ) | {"span_s": span}
    return {
        "total_tput_tps": (num_input + num_output) / span / num_gpus,
        "output_tput_tps": num_output / span / num_gpus,
        "input_tput_tps": num_input / span / num_gpus,
        "request_tput_rps": len(requests) / span,
        "span_s": span,
    }


def row_figures(steps: Sequence[StepRecord]) -> dict[str, Any]:
    """Rows that ranks brought to steps: of every rank, of the largest rank, and its share off the decode path."""
    all_rows = [rows for step in steps for rows in step.num_rows_per_rank]
    decode = [step for step in steps if step.phase == "decode"]

    def rows_of(chosen: Sequence[StepRecord]) -> Stats:
        largest = [step.max_rows for step in chosen]
        every = [rows for step in chosen for rows in step.num_rows_per_rank]
        return {
            **percentiles_of(every, (50, 90)),
            "max": max(every, default=None),
            "mean": float(np.mean(every)) if every else None,
            "max_over_ranks": {**percentiles_of(largest, (50, 90)), "max": max(largest, default=None)},
        }

    off = [step for step in decode if not set(step.paths) <= {"small_m", "fixed_slot"}]
    return {
        "rows_per_rank": rows_of(steps) | {"decode": rows_of(decode)},
        "idle_rank_share": sum(rows == 0 for rows in all_rows) / len(all_rows) if all_rows else None,
        "off_decode_path_share": len(off) / len(decode) if decode else None,
        "decode_steps": len(decode),
        "prefill_steps": len(steps) - len(decode),
    }


def cache_figures(requests: Sequence[RequestRecord]) -> dict[str, float | None]:
    """theoretical_cache_hit_rate: blocks that an unlimited shared cache would hold; cache_hit_rate: tokens that the
    ranks' caches did hold."""
    blocks = sum(request.num_blocks for request in requests)
    tokens = sum(request.num_input for request in requests)
    hits = sum(request.theoretical_hit_blocks for request in requests)
    cached = sum(request.num_cached for request in requests)
    return {
        "theoretical_cache_hit_rate": hits / blocks if blocks else None,
        "cache_hit_rate": cached / tokens if tokens else None,
    }


def acceptance_figures(requests: Sequence[RequestRecord]) -> dict[str, float | None]:
    """accept_length: tokens that a verify step accepted, per request, before an output ended inside it."""
    steps = sum(request.num_verify_steps for request in requests)
    accepted = sum(request.num_accepted for request in requests)
    return {"accept_length": accepted / steps if steps else None}


def accounting(record: RunRecord) -> dict[str, Any]:
    """Where every request that was sent went, for warm-up and profile; sent = the sum of the four outcomes."""

    def count(chosen: Sequence[RequestRecord]) -> dict[str, int]:
        outcomes = {str(status): sum(request.status is status for request in chosen) for status in Status}
        return {"sent": len(chosen)} | outcomes

    warmup = [request for request in record.requests if request.phase is RunPhase.WARMUP]
    profile = [request for request in record.requests if request.phase is RunPhase.PROFILE]
    return {
        "warmup": count(warmup) | {"primers": sum(request.is_primer for request in warmup)},
        "profile": count(profile)
        | {
            "main": sum(request.stream_idx == 0 for request in profile),
            "subagent": sum(request.stream_idx > 0 for request in profile),
        },
        "sessions": record.num_sessions,
        "max_live_trees": max_live_trees(record.requests),
    }


def max_live_trees(requests: Sequence[RequestRecord]) -> int:
    """The most session trees between their first start and their last end at any moment."""
    spans: dict[str, tuple[float, float]] = {}
    for request in requests:
        low, high = spans.get(request.session_uid, (math.inf, -math.inf))
        spans[request.session_uid] = (min(low, request.start_s), max(high, request.end_s))
    # A lane that refills at the very moment of a drain holds one tree, not two: ends come first.
    edges = sorted([(start, 1) for start, _ in spans.values()] + [(end, -1) for _, end in spans.values()])
    live = most = 0
    for _, change in edges:
        live += change
        most = max(most, live)
    return most
