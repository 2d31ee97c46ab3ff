"""The page's text and tables; its layout is `page.html.j2`, its drawings come from `charts`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from loadgen.page import charts
from loadgen.report.run import Run

MAX_CHARTED_RUNS = 16
"""Runs with charts of their own: more would make a page of over 2 MB, which mails and wikis do not take."""
LATENCIES = {
    "ttft": "TTFT",
    "itl": "ITL",
    "tpot": "TPOT",
    "step_interval": "step interval",
    "e2el": "E2E latency",
}
POINTS = ("mean", "p50", "p75", "p90", "p95", "std")


@dataclass(frozen=True)
class Card:
    """One chart with its title and a sentence on how to read it."""

    title: str
    note: str
    svg: Markup


def write_page(runs: Sequence[Run], path: Path) -> Path:
    """Write the page of these runs; returns its path."""
    environment = Environment(
        loader=PackageLoader("loadgen.page", "."), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["number"] = number
    template = environment.get_template("page.html.j2")
    ordered = sorted(runs, key=lambda run: (run.series, run.concurrency))
    text = template.render(
        runs=ordered,
        overview=_cards(_overview(ordered)) if len(ordered) > 1 else [],
        cards={
            id(run): _cards(_charts(run)) if idx < MAX_CHARTED_RUNS else [] for idx, run in enumerate(ordered)
        },
        latencies=LATENCIES,
        points=POINTS,
        facts=_facts,
        tiles=_tiles,
        uid=id,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def number(value: float | None, digits: int = 1) -> str:
    """A number for people; a dash for none."""
    return "–" if value is None else f"{value:,.{digits}f}"


def _cards(drawn: Sequence[tuple[str, str, str]]) -> list[Card]:
    return [
        Card(title, note, Markup(svg)) for title, note, svg in drawn if svg
    ]  # our own drawing, no text from outside


def _overview(runs: Sequence[Run]) -> list[tuple[str, str, str]]:
    svg = charts.throughput_against_interactivity(runs)
    note = "One dot a run, with its concurrency. Up and to the right is better."
    return [("Throughput against P90 interactivity", note, svg)]


def _charts(run: Run) -> list[tuple[str, str, str]]:
    token = [("itl", "ITL"), ("step_interval", "step interval")]
    whole = [("ttft", "TTFT"), ("e2el", "E2E latency")]
    return [
        ("Between tokens", "Inter-token latency of requests, and time between two emissions of a request.",
         charts.latencies(run, token, "Distributions of inter-token latency and step interval")),
        ("Whole requests", "Time to first token and to the last one.",
         charts.latencies(run, whole, "Distributions of time to first token and end-to-end latency")),
        ("Path mix", "Which path served the layer calls of each moment.", charts.path_mix(run)),
        ("Rows per rank", "The largest rank's rows decide the path of a step.", charts.rows_per_rank(run)),
        ("Rows over time", "Most rows that one rank brought to a step.", charts.rows_over_time(run)),
        ("Stages", "Where a sub-step's time goes on its slowest rank, as the service reports it.", charts.stages(run)),
        ("Output", "Tokens emitted by steps that ended in each moment.", charts.tokens_over_time(run)),
    ]  # fmt: skip


def _tiles(run: Run) -> list[tuple[str, str, str]]:
    """(what, value, unit) of the figures that a reader wants first."""
    report = run.report
    completed, failed = report["requests"]["completed"], report["requests"]["failed"]
    share: Callable[[float | None], str] = lambda value: "–" if value is None else f"{value:.1%}"  # noqa: E731
    return [
        ("total throughput", number(report["total_tput_tps"], 0), "tok/s per GPU"),
        ("output throughput", number(report["output_tput_tps"], 1), "tok/s per GPU"),
        ("P90 interactivity", number(report["p90_intvty"], 1), "tok/s/user"),
        ("requests", f"{completed:,}", f"completed, {failed:,} failed"),
        ("accept length", number(report["accept_length"], 2), "tokens a verify step"),
        ("off the decode path", share(report["off_decode_path_share"]), "of decode steps"),
    ]


def _facts(run: Run) -> list[tuple[str, str]]:
    """What was run, in words."""
    report = run.report
    service, scenario = report["service"], report["config"]["scenario"]
    simulated = report.get("simulated")
    moe = f"simulated from table {simulated['table']}" if simulated else "served, every layer a real call"
    match = {True: "the same", False: "DIFFERENT", None: "not known"}[report["service_steps_match"]]
    ranks = f"{service['num_ranks']} ranks, {report['layers']} MoE layers"
    scales = (
        f"time x{scenario['time_scale']:.3g}, tokens x{scenario['token_scale']:.3g}, seed {scenario['seed']}"
    )
    facts = [
        ("Service", f"{service['model_name']}: {service['backend']}, {ranks}"),
        ("MoE time", moe),
        ("Attention time", report["attention_time"]),
        (
            "Profile",
            f"{report['profile']['duration_s']:,.0f} s, {report['profile']['steps']:,} steps; {scales}",
        ),
        ("Traces", report["traces"]),
        ("Routing", report["routing"]),
        ("Steps counted by client and service", match),
    ]
    overhead = report["generator"]["overhead_share_of_answer_time"]
    if overhead is not None and not simulated:
        facts.append(("Load generator's own time", f"{overhead:.1%} of the service's answer time"))
    if simulated and simulated["proxies"]:
        proxies = [
            ", ".join(f"{name} {value}" for name, value in proxy.items()) for proxy in simulated["proxies"]
        ]
        facts.append(("Entries that stand in for others", "; ".join(proxies)))
    return facts
