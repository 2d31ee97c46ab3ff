"""The report of a run as one JSON object; `files` writes it.

`paths`, `calls` and `steps` cover the whole run, warm-up included, because they are compared with the service's own
counters; `profile.paths` and every request figure cover the profile only. Latencies of requests are seconds of wall
time, also where time was compressed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from loadgen.moe.scrape import Counters, Histogram
from loadgen.moe.tier import TierInfo
from loadgen.report.figures import (
    acceptance_figures,
    accounting,
    cache_figures,
    distributions,
    latency_figures,
    percentiles_of,
    row_figures,
    successful,
    throughput_figures,
)
from loadgen.scenario.scenario import FIXED, ScenarioConfig
from loadgen.steps.records import PathTimes, RunPhase, RunRecord
from loadgen.tier.attention_tier import TierConfig
from loadgen.tier.attention_time import AttentionTime
from megamoe import Path as MoePath

SCHEMA = "megamoe.loadgen.report/1"
PATHS = tuple(str(path) for path in MoePath)
PATH_PERCENTILES = (50, 90, 99)


def build_report(
    record: RunRecord,
    info: TierInfo,
    config: ScenarioConfig,
    tier_config: TierConfig,
    counted: Counters | None,
    *,
    traces: str,
    distribution: str,
    not_counted: str = "",
    simulated: dict[str, Any] | None = None,
    attention: AttentionTime | None = None,
    scenario: str | None = None,
    invalid_reasons: Sequence[str] = (),
) -> dict[str, Any]:
    """The report as JSON values. counted: what the service counted in the run; None = not known, for the reason
    not_counted. simulated: what the MoE time was taken from; None = a service served it. invalid_reasons: why this is
    no valid submission, beyond what config and run tell. scenario: its name; None = the configured one."""
    requests = successful(record)
    latency = latency_figures(requests)
    profile_steps = [step for step in record.steps if step.run_phase is RunPhase.PROFILE]
    check = compare(record, counted, not_counted)
    sent = accounting(record)
    reasons = [
        *invalid_reasons,
        *config.invalid_reasons,
        *_reasons_of_run(record, config, sent, simulated),
    ]
    return {
        "schema": SCHEMA,
        "scenario": scenario or config.scenario,
        "submission_valid": not reasons,
        "submission_invalid_reasons": reasons,
        "run_cancelled": record.cancelled,
        "run_aborted": record.aborted,
        "requests": {
            "completed": sent["profile"]["completed"],
            "failed": sent["profile"]["failed"] + sent["warmup"]["failed"],
            "cancelled": sent["profile"]["cancelled"],
            "context_overflow": sent["profile"]["context_overflow"],
        },
        "request_accounting": sent,
        "layers": info.num_layers,
        "calls": record.num_calls,
        "service_steps_match": check["match"],
        "service_check": check,
        "paths": {path: _path(record.path_times(path), counted, path) for path in PATHS},
        **throughput_figures(requests, info.num_ranks),
        "p90_intvty": latency["intvty"]["p90"],
        **latency,
        **row_figures(profile_steps),
        **acceptance_figures(requests),
        **cache_figures(requests),
        "distributions": distributions(requests, profile_steps),
        "profile": {
            "duration_s": max(record.profile_end_s - record.profile_start_s, 0.0),
            "steps": len(profile_steps),
            "paths": {path: _path(record.path_times(path, RunPhase.PROFILE), None, path) for path in PATHS},
            "path_mix": _path_mix(record),
        },
        "steps": {
            "executed": len(record.steps),
            "failed": record.num_failed_steps,
            "retried": record.num_retried_steps,
            "calls_failed": record.num_calls_failed,
            "service_restarts": [at - record.run_start_s for at in record.restarts],
            "idle_skips": record.num_idle_skips,
            "idle_skipped_s": record.idle_skipped_s,
        },
        "errors": record.errors,
        "generator": _generator(record),
        "service": {
            **{name: value for name, value in asdict(info).items() if name != "metrics_urls"},
            "num_ranks": info.num_ranks,
        },
        "traces": traces,
        "routing": distribution,
        "config": {"scenario": asdict(config), "attention_tier": asdict(tier_config)},
        "moe_time": "simulated" if simulated else "served",
        "simulated": simulated,
        "attention_time": "modelled",
        "attention_model": asdict(attention or AttentionTime()),
    }


def none_completed(sent: dict[str, Any], scenario: str) -> bool:
    """Whether requests were sent and none completed: then nothing was measured. Constant rows are never complete."""
    return scenario != FIXED and sent["profile"]["sent"] > 0 and not sent["profile"]["completed"]


def _reasons_of_run(
    record: RunRecord, config: ScenarioConfig, sent: dict[str, Any], simulated: dict[str, Any] | None
) -> list[str]:
    reasons = []
    if record.cancelled:
        reasons.append("the run was cancelled")
    if simulated:
        reasons.append("MoE time is simulated")
    if record.aborted:
        reasons.append(f"the run was aborted: {record.aborted}")
    if record.restarts:
        reasons.append(f"the service's group restarted {len(record.restarts)} time(s) in the run")
    profile = sent["profile"]
    if profile["context_overflow"] > config.max_overflow_share * max(profile["sent"], 1):
        reasons.append(
            f"{profile['context_overflow']} of {profile['sent']} requests overflow the context, more than "
            f"{config.max_overflow_share:.0%}"
        )
    if none_completed(sent, config.scenario):
        reasons.append(f"none of {profile['sent']} requests completed")
    if profile["failed"] + sent["warmup"]["failed"]:
        reasons.append(f"{profile['failed'] + sent['warmup']['failed']} requests failed")
    return reasons


def _path(times: PathTimes, counted: Counters | None, path: str) -> dict[str, Any]:
    """latency_ms: the caller's round trip; service_ms: the slowest rank's time in the replies; scraped_ms: from the
    service's histograms of all ranks."""
    figures: dict[str, Any] = {
        "num_steps": times.num_steps,
        "latency_ms": percentiles_of(times.client, PATH_PERCENTILES, 1e3),
        "service_ms": percentiles_of(times.service, PATH_PERCENTILES, 1e3),
        "stages_ms": {
            stage: percentiles_of(values, (50,), 1e3)["p50"] for stage, values in sorted(times.stages.items())
        },
    }
    histogram = counted.latency.get(path) if counted else None
    if counted is not None:
        figures["scraped_num_steps"] = counted.sub_steps.get(path, 0)
        figures["scraped_ms"] = {
            f"p{percentile}": histogram.quantile(percentile / 100) * 1e3
            if histogram and histogram.count
            else None
            for percentile in PATH_PERCENTILES
        }
    return figures


def compare(record: RunRecord, counted: Counters | None, not_counted: str = "") -> dict[str, Any]:
    """Whether the service counted what was called: layer calls, sub-steps per path, and medians within one bucket.

    match is False with reasons when something differs, and None when nothing could be read. A call that failed may
    have been executed without a reply: for each such call the service may have counted one more. Calls made before the
    service's group last restarted are counted by nobody any more: calls_before_restart says how many.
    """
    if counted is None:
        return {"match": None, "reasons": [not_counted or "the service's counters were not read"]}
    reasons = []
    made = record.since_restart()
    unknown = made.num_calls_failed
    if not 0 <= counted.group_layer_calls - made.num_calls <= unknown:
        reasons.append(f"layer calls: {made.num_calls} made, {counted.group_layer_calls} counted")
    paths: dict[str, Any] = {}
    for path in PATHS:
        seen, scraped = made.num_steps.get(path, 0), counted.sub_steps.get(path, 0)
        if scraped < seen or (not unknown and scraped != seen):
            reasons.append(f"{path}: {seen} sub-steps seen, {scraped} counted")
        replies = [value for times in made.by_rank.get(path, {}).values() for value in times]
        histogram = counted.latency.get(path)
        paths[path] = {"seen": seen, "counted": scraped}
        if not replies or histogram is None or not histogram.count:
            continue
        median = percentiles_of(replies, (50,))["p50"]
        apart = _buckets_apart(histogram, replies)
        paths[path] |= {
            "replies_p50_ms": median * 1e3,
            "scraped_p50_ms": histogram.quantile(0.5) * 1e3,
            "buckets_apart": apart,
        }
        if apart > 1:
            reasons.append(f"{path}: p50 of replies and of the service's histogram lie {apart} buckets apart")
    return {
        "match": not reasons,
        "reasons": reasons,
        "layer_calls": {
            "made": made.num_calls,
            "failed": made.num_calls_failed,
            "counted": counted.group_layer_calls,
        },
        "calls_before_restart": record.num_calls - made.num_calls,
        "paths": paths,
    }


def _buckets_apart(histogram: Histogram, replies: Sequence[float]) -> int:
    """Buckets between the histogram's median and the median that the replies imply.

    Ranks without rows observe a sub-step but are not called, so the histogram may hold more than was replied. Those
    unknown times may lie anywhere, which makes the implied median a range; without unknown times it is a point.
    """
    ordered = np.sort(np.asarray(replies))
    num_unknown = max(histogram.count - len(ordered), 0)
    middle = histogram.count / 2
    seen = histogram.quantile_bucket(0.5)
    apart = 0
    if num_unknown < middle:  # even if all unknown times are shorter, the median is a reply's
        shortest = ordered[max(math.ceil(middle - num_unknown), 1) - 1]
        apart = max(apart, histogram.bucket_of(float(shortest)) - seen)
    if middle <= len(ordered):  # even if all unknown times are longer
        longest = ordered[min(math.floor(middle), len(ordered) - 1)]
        apart = max(apart, seen - histogram.bucket_of(float(longest)))
    return apart


def _path_mix(record: RunRecord) -> dict[str, dict[str, int]]:
    """Steps of the profile by phase and path of their first sub-step."""
    mix = Counter(
        (step.phase, step.paths[0])
        for step in record.steps
        if step.run_phase is RunPhase.PROFILE and step.paths
    )
    return {phase: {path: mix[phase, path] for path in PATHS} for phase in ("prefill", "decode")}


def _generator(record: RunRecord) -> dict[str, Any]:
    """The generator's own share of a step, against the time that the service took to answer."""
    moe_s = sum(step.moe_s + step.agree_s for step in record.steps)
    overhead_s = sum(step.overhead_s for step in record.steps)
    return {
        "overhead_ms_per_step": percentiles_of([step.overhead_s for step in record.steps], (50, 99), 1e3),
        "overhead_share_of_answer_time": overhead_s / moe_s if moe_s > 0 else None,
        "attention_s": sum(step.attention_s for step in record.steps),
        "moe_s": moe_s,
    }


# ---------------------------------------------------------------- files
