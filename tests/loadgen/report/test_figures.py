"""Figures against independent arithmetic."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.report.figures import (
    accounting,
    cache_figures,
    latency_figures,
    max_live_trees,
    row_figures,
    stats_of,
    successful,
    throughput_figures,
)
from loadgen.steps.records import RequestRecord, RunPhase, RunRecord, Status, StepRecord


def record(
    uid: str = "r",
    start: float = 0.0,
    emissions: tuple[float, ...] = (1.0, 2.0),
    out: int = 2,
    **changes: object,
) -> RequestRecord:
    fields: dict[str, object] = {
        "uid": uid,
        "trace_id": "t",
        "session_uid": "t#1",
        "lane_idx": 0,
        "stream_idx": 0,
        "turn_idx": 0,
        "phase": RunPhase.PROFILE,
        "is_primer": False,
        "status": Status.COMPLETED,
        "rank": 0,
        "num_input": 640,
        "num_output": out,
        "num_emitted": out,
        "num_cached": 320,
        "num_blocks": 10,
        "theoretical_hit_blocks": 6,
        "num_verify_steps": len(emissions) - 1,
        "num_accepted": out - 1,
        "start_s": start,
        "end_s": emissions[-1] if emissions else start,
        "emissions": emissions,
    }
    return RequestRecord(**(fields | changes))


def step(rows: tuple[int, ...], paths: tuple[str, ...], phase: str = "decode") -> StepRecord:
    return StepRecord(
        step_idx=0,
        run_phase=RunPhase.PROFILE,
        phase=phase,
        start_s=0.0,
        end_s=1.0,
        attention_s=0.2,
        agree_s=0.1,
        moe_s=0.4,
        num_rows_per_rank=rows,
        num_requests=1,
        num_tokens=1,
        num_completed=0,
        paths=paths,
    )


def by_hand(values: list[float], share: float) -> float:
    """A percentile from its definition: linear between the two nearest ranks."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=60))
def test_statistics_follow_their_definitions(values: list[float]) -> None:
    stats = stats_of(values, "s")
    assert stats["count"] == len(values)
    assert stats["mean"] == pytest.approx(math.fsum(values) / len(values))
    assert stats["std"] == pytest.approx(statistics.pstdev(values), abs=1e-6)
    for percentile in (50, 75, 90, 95):
        assert stats[f"p{percentile}"] == pytest.approx(by_hand(values, percentile / 100))


requests = st.lists(
    st.tuples(
        st.floats(0, 100),
        st.lists(st.floats(0.001, 5), min_size=1, max_size=12),
        st.integers(1, 5),
    ),
    min_size=1,
    max_size=20,
)


@given(requests)
def test_request_figures_follow_their_definitions(drawn: list[tuple[float, list[float], int]]) -> None:
    made = []
    for idx, (start, gaps, per_step) in enumerate(drawn):
        emissions = tuple(start + math.fsum(gaps[: count + 1]) for count in range(len(gaps)))
        made.append(record(f"r{idx}", start, emissions, out=1 + per_step * (len(gaps) - 1)))
    figures = latency_figures(made)
    ttft = [request.emissions[0] - request.start_s for request in made]
    e2el = [request.emissions[-1] - request.start_s for request in made]
    itl = [
        (total - first) / (request.num_output - 1)
        for total, first, request in zip(e2el, ttft, made)
        if request.num_output > 1
    ]
    norm = [total / request.num_output for total, request in zip(e2el, made)]
    intervals = [b - a for request in made for a, b in zip(request.emissions, request.emissions[1:])]
    for name, values in (
        ("ttft", ttft),
        ("e2el", e2el),
        ("itl", itl),
        ("tpot", itl),
        ("step_interval", intervals),
    ):
        assert figures[name]["count"] == len(values)
        if values:
            assert figures[name]["p90"] == pytest.approx(by_hand(values, 0.9))
            assert figures[name]["mean"] == pytest.approx(statistics.fmean(values))
        else:
            assert figures[name]["p90"] is None
    if itl:
        assert figures["intvty"]["p90"] == pytest.approx(1 / by_hand(itl, 0.9))
        assert figures["intvty"]["mean"] == pytest.approx(len(itl) / math.fsum(itl))
        assert figures["intvty"]["std"] == pytest.approx(
            statistics.pstdev([1 / value for value in itl]), abs=1e-6
        )
    assert figures["e2e_norm_intvty"]["p50"] == pytest.approx(1 / by_hand(norm, 0.5))


def test_throughput_is_per_gpu_over_the_span_of_the_requests_themselves() -> None:
    made = [record("a", 10.0, (11.0, 12.0), out=20), record("b", 11.0, (13.0, 15.0), out=30)]
    figures = throughput_figures(made, 8)
    assert figures["span_s"] == 5.0
    assert figures["total_tput_tps"] == pytest.approx((640 * 2 + 50) / 5 / 8)
    assert figures["output_tput_tps"] == pytest.approx(50 / 5 / 8)
    assert figures["input_tput_tps"] == pytest.approx(1280 / 5 / 8)
    assert figures["request_tput_rps"] == pytest.approx(2 / 5)
    assert throughput_figures([], 8)["total_tput_tps"] is None


def test_warm_up_and_unfinished_requests_stay_out_of_the_figures() -> None:
    run = RunRecord(
        requests=[
            record("good"),
            record("warm", phase=RunPhase.WARMUP),
            record("primer", phase=RunPhase.WARMUP, is_primer=True),
            record("failed", status=Status.FAILED),
            record("cut", status=Status.CANCELLED),
            record("long", status=Status.CONTEXT_OVERFLOW, emissions=()),
            record("sub", stream_idx=3),
        ]
    )
    assert [request.uid for request in successful(run)] == ["good", "sub"]
    counts = accounting(run)
    assert counts["profile"] == {
        "sent": 5, "completed": 2, "failed": 1, "cancelled": 1, "context_overflow": 1, "main": 4, "subagent": 1,
    }  # fmt: skip
    assert counts["warmup"]["sent"] == 2
    assert counts["warmup"]["primers"] == 1


def test_rows_count_every_rank_and_the_largest() -> None:
    steps = [
        step((0, 7, 14), ("small_m",)),
        step((7, 7, 70), ("compact",)),
        step((70, 0, 0), ("fixed_slot",)),
        step((512, 0, 0), ("compact",), "prefill"),
    ]
    figures = row_figures(steps)
    rows = [0, 7, 14, 7, 7, 70, 70, 0, 0, 512, 0, 0]
    assert figures["rows_per_rank"]["p50"] == by_hand(rows, 0.5)
    assert figures["rows_per_rank"]["p90"] == by_hand(rows, 0.9)
    assert figures["rows_per_rank"]["max"] == 512
    assert figures["rows_per_rank"]["max_over_ranks"]["p50"] == by_hand([14, 70, 70, 512], 0.5)
    assert figures["rows_per_rank"]["decode"]["max"] == 70
    assert figures["idle_rank_share"] == 5 / 12
    assert figures["off_decode_path_share"] == 1 / 3
    assert (figures["decode_steps"], figures["prefill_steps"]) == (3, 1)


def test_hit_rates() -> None:
    assert cache_figures([record(), record(num_cached=0, theoretical_hit_blocks=0)]) == {
        "theoretical_cache_hit_rate": 0.3,
        "cache_hit_rate": 0.25,
    }


def test_a_lane_that_refills_at_once_holds_one_tree() -> None:
    made = [
        record("a", 0.0, (5.0,), session_uid="1"),
        record("b", 2.0, (9.0,), session_uid="2"),
        record("c", 5.0, (7.0,), session_uid="3"),
        record("d", 8.0, (10.0,), session_uid="3"),
    ]
    assert max_live_trees(made) == 2


def test_overhead_is_what_nothing_else_explains() -> None:
    assert step((1,), ("small_m",)).overhead_s == pytest.approx(0.3)
