"""Whole runs in virtual time against a tier that computes nothing."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from loadgen.clock import VirtualClock
from loadgen.corpus.synth import SyntheticTraces
from loadgen.replay.replay import Replay
from loadgen.report.files import slice_rows, write_report
from loadgen.report.report import build_report
from loadgen.scenario.profiles import PROFILES
from loadgen.scenario.scenario import ScenarioConfig
from loadgen.steps.records import RunPhase, RunRecord, Status
from loadgen.steps.runner import RETRY_PAUSE_S
from loadgen.tier.attention_tier import TierConfig
from loadgen.tier.attention_time import AttentionTime
from loadgen.tier.speculation import Speculation
from loadgen.trace.trace import TraceSource
from megamoe.errors import ConfigError, MegaMoeError, PeerTimeoutError
from tests.loadgen.build import FixedTraces, request, subagent, trace
from tests.loadgen.fake_tier import FakeTier, demo_info

DEMO = PROFILES["demo"]
NO_ATTENTION = AttentionTime(
    base_s=0, prefill_row_s=0, prefill_row_context_s=0, decode_request_s=0, decode_context_s=0, decode_row_s=0
)


def play(
    config: ScenarioConfig,
    traces: TraceSource | None = None,
    tier_config: TierConfig = DEMO.tier,
    *,
    attention: AttentionTime | None = None,
    during: Callable[[Replay], None] | None = None,
    **fake: object,
) -> tuple[RunRecord, FakeTier, Replay]:
    clock = VirtualClock()
    tier = FakeTier(clock, **fake)
    replay = Replay(
        tier, traces or SyntheticTraces(60, config.seed), config, tier_config, clock, attention=attention
    )
    if during:
        during(replay)
    record = asyncio.run(replay.run())
    assert tier.bad_batches == []
    return record, tier, replay


def short(**changes: object) -> ScenarioConfig:
    fields = {"concurrency": 6, "duration_wall_s": 8.0, "seed": 1}
    return DEMO.scenario.with_changes(**(fields | changes))


@pytest.fixture(scope="module")
def demo() -> tuple[RunRecord, FakeTier, Replay]:
    """The demo profile, on a tier about as fast as 8 ranks on 2 cores."""
    return play(DEMO.scenario, layer_s=lambda rows: 0.006 + rows * 0.00012)


def test_every_layer_of_every_step_is_called_in_order(demo: tuple[RunRecord, FakeTier, Replay]) -> None:
    record, tier, _ = demo
    assert len(record.steps) == len(tier.steps) > 300
    assert tier.calls == [(step, layer) for step in range(len(tier.steps)) for layer in range(4)]
    assert record.num_calls == 4 * len(record.steps)
    for seen, (rows, phases) in zip(record.steps, tier.steps):
        assert seen.num_rows_per_rank == rows
        assert [name == "idle" for name in phases] == [count == 0 for count in rows]
        assert seen.phase == ("prefill" if "prefill" in phases else "decode")


def test_the_demo_serves_steps_on_all_four_paths_in_both_phases(
    demo: tuple[RunRecord, FakeTier, Replay],
) -> None:
    record, _, _ = demo
    steps = [step for step in record.steps if step.run_phase is RunPhase.PROFILE]
    for path in ("small_m", "fixed_slot", "compact", "large_m"):
        assert sum(path in step.paths for step in steps) >= 5, path
    assert sum(step.phase == "prefill" for step in steps) > 20
    assert sum(step.phase == "decode" for step in steps) > 100
    assert max(step.max_rows for step in steps) <= 512


def test_the_closed_loop_never_holds_more_trees_than_lanes(demo: tuple[RunRecord, FakeTier, Replay]) -> None:
    record, _, _replay = demo
    lanes: dict[int, list[tuple[float, float, str]]] = {}
    sessions: dict[str, list[float]] = {}
    for done in record.requests:
        sessions.setdefault(f"{done.lane_idx}/{done.session_uid}", []).extend((done.start_s, done.end_s))
    for name, times in sessions.items():
        lanes.setdefault(int(name.split("/")[0]), []).append((min(times), max(times), name))
    assert set(lanes) == set(range(DEMO.scenario.concurrency))
    for held in lanes.values():
        held.sort()
        for (_, end, _), (start, _, _) in itertools.pairwise(held):
            assert start >= end, "a lane took a session before the one before had drained"
    report = report_of(demo)
    assert report["request_accounting"]["max_live_trees"] <= DEMO.scenario.concurrency


def test_tokens_are_conserved(demo: tuple[RunRecord, FakeTier, Replay]) -> None:
    record, tier, _ = demo
    emitted = sum(done.num_emitted for done in record.requests)
    assert sum(step.num_tokens for step in record.steps) == emitted
    for done in record.requests:
        if done.status is Status.COMPLETED:
            assert done.num_emitted == done.num_output
            assert len(done.emissions) == 1 + done.num_verify_steps
            assert done.num_cached <= done.num_input - 1
            assert done.num_cached <= done.theoretical_hit_blocks  # one token a block at this scale
    prefill = sum(done.num_input - done.num_cached for done in record.requests if done.emissions)
    decode = 7 * sum(done.num_verify_steps for done in record.requests)
    rows = sum(sum(rows) for rows, _ in tier.steps)
    cut = [done for done in record.requests if done.status is Status.CANCELLED and not done.emissions]
    assert prefill + decode <= rows <= prefill + decode + sum(done.num_input for done in cut)


def test_warm_up_comes_first_and_counts_its_requests(demo: tuple[RunRecord, FakeTier, Replay]) -> None:
    record, _, _ = demo
    warm = [done for done in record.requests if done.phase is RunPhase.WARMUP]
    assert all(done.end_s <= record.profile_start_s for done in warm)
    assert all(done.start_s >= record.profile_start_s for done in record.requests if done not in warm)
    primers = [done for done in warm if done.is_primer]
    assert primers
    assert all(done.num_output == 1 for done in primers)
    budget = DEMO.scenario.warmup_requests
    for lane in range(DEMO.scenario.concurrency):
        assert sum(done.lane_idx == lane and not done.is_primer for done in warm) == budget


def test_the_primer_leaves_the_next_turn_little_to_prefill(demo: tuple[RunRecord, FakeTier, Replay]) -> None:
    record, _, _ = demo
    requests = [done for done in record.requests if not done.is_primer and done.status is Status.COMPLETED]
    hit = sum(done.num_cached for done in requests) / sum(done.num_input for done in requests)
    assert 0.93 < hit < 0.99


def test_acceptance_has_the_published_mean(demo: tuple[RunRecord, FakeTier, Replay]) -> None:
    record, _, _ = demo
    steps = sum(done.num_verify_steps for done in record.requests)
    assert sum(done.num_accepted for done in record.requests) / steps == pytest.approx(3.77, abs=0.02)


def outline(record: RunRecord) -> list[tuple[object, ...]]:
    return [(done.uid, done.status, done.start_s, done.emissions, done.rank) for done in record.requests]


def test_a_run_is_determined_by_its_seed() -> None:
    first, second = outline(play(short())[0]), outline(play(short())[0])
    assert first == second
    assert outline(play(short(seed=2))[0]) != first


def test_the_number_of_ranks_comes_from_the_service() -> None:
    record, tier, _ = play(short(duration_wall_s=2.0), info=demo_info(num_ranks=2, num_layers=3))
    assert {len(rows) for rows, _ in tier.steps} == {2}
    assert record.num_calls == 3 * len(record.steps)
    assert {done.rank for done in record.requests} == {0, 1}


def test_a_request_takes_what_its_steps_take() -> None:
    """One request alone, by hand: 2 chunks of prefill, then 7 output tokens in 2 verify steps."""
    config = ScenarioConfig(
        concurrency=1, warmup_requests=0, duration_wall_s=1000.0, start_min=0, start_max=0
    )
    attention = AttentionTime(
        base_s=0.1,
        prefill_row_s=0.001,
        prefill_row_context_s=0,
        decode_request_s=0,
        decode_context_s=0,
        decode_row_s=0.002,
    )
    # The start point is the first request itself, so there is nothing to prime.
    corpus = FixedTraces(trace(request(0, 10, out=8, api_time=0)))
    record, tier, _ = play(
        config,
        corpus,
        TierConfig(chunk_rows=512),
        attention=attention,
        during=lambda replay: stop_after(replay, 1),
    )
    done = record.requests[0]
    prefill = (0.1 + 0.512 + 0.04) + (0.1 + 0.128 + 0.04)
    verify = 0.1 + 7 * 0.002 + 0.04
    assert done.emissions == pytest.approx((prefill, prefill + verify, prefill + 2 * verify))
    assert [rows[done.rank] for rows, _ in tier.steps] == [512, 128, 7, 7]
    assert done.ttft_s == pytest.approx(prefill)
    assert record.steps[0].attention_s == pytest.approx(0.612)
    assert record.steps[0].moe_s == pytest.approx(0.04)
    assert all(abs(step.overhead_s) < 1e-9 for step in record.steps)


def stop_after(replay: Replay, num_requests: int) -> None:
    """Cancel the run once so many requests have been recorded."""
    finish = replay._finish

    def watched(*args: object, **kwargs: object) -> None:
        finish(*args, **kwargs)
        if len(replay.record.requests) == num_requests:
            replay.cancel()

    replay._finish = watched


def test_delays_count_from_the_live_completion_times_time_scale() -> None:
    config = ScenarioConfig(
        concurrency=1, warmup_requests=0, duration_wall_s=500.0, start_min=0, start_max=0, time_scale=0.5
    )
    corpus = FixedTraces(trace(request(0, 1, out=1, api_time=3), request(11, 2, out=1, api_time=3)))
    record, _, _ = play(config, corpus, attention=NO_ATTENTION)
    first, second, third = record.requests[:3]
    assert second.start_s - first.end_s == pytest.approx(8 * 0.5)
    assert third.start_s == second.end_s  # the lane's next session begins at once
    assert third.session_uid != first.session_uid
    fourth = record.requests[3]
    assert fourth.start_s - third.end_s == pytest.approx(8 * 0.5)  # delays count in later sessions too


@pytest.mark.parametrize("time_scale", [1.0, 0.25])
def test_an_idle_system_waits_ten_recorded_seconds_at_most(time_scale: float) -> None:
    config = ScenarioConfig(
        concurrency=1,
        warmup_requests=0,
        duration_wall_s=100.0,
        start_min=0,
        start_max=0,
        time_scale=time_scale,
    )
    corpus = FixedTraces(trace(request(0, 1, out=1, api_time=0), request(5000, 2, out=1, api_time=0)))
    record, _, _ = play(config, corpus, attention=NO_ATTENTION)
    first, second = record.requests[:2]
    assert second.start_s - first.end_s == pytest.approx(10.0 * time_scale)
    assert record.num_idle_skips >= 1


def test_starts_after_warm_up_are_spread() -> None:
    config = short(concurrency=12, warmup_requests=1)
    record, _, _ = play(config)
    first: dict[int, float] = {}
    for done in record.requests:
        if done.phase is RunPhase.PROFILE:
            first.setdefault(done.lane_idx, done.start_s)
            first[done.lane_idx] = min(first[done.lane_idx], done.start_s)
    assert min(first.values()) == pytest.approx(record.profile_start_s)
    assert len({round(at, 3) for at in first.values()}) > 3


def test_in_flight_requests_get_a_grace_period_and_are_then_cancelled() -> None:
    corpus = FixedTraces(trace(request(0, 1, out=1000, api_time=1)))
    config = ScenarioConfig(
        concurrency=2, warmup_requests=0, duration_wall_s=1.0, grace_wall_s=2.0, start_min=0, start_max=0
    )
    record, _, _ = play(config, corpus, attention=NO_ATTENTION)
    assert [done.status for done in record.requests] == [Status.CANCELLED] * 2
    assert record.profile_end_s - record.profile_start_s == pytest.approx(3.0, abs=0.1)
    assert not record.cancelled
    assert record.num_sessions == 2  # the lanes take nothing new once the profile is over


def test_caches_hold_live_sessions_only(demo: tuple[RunRecord, FakeTier, Replay]) -> None:
    record, _, replay = demo
    assert record.num_sessions > DEMO.scenario.concurrency
    cached = {uid for rank in replay._tier._ranks for uid in rank.cache._prompts}
    assert len(cached) <= DEMO.scenario.concurrency
    assert len(replay._theoretical) <= DEMO.scenario.concurrency


def test_attention_passes_in_full_whatever_the_number_of_layers() -> None:
    attention = AttentionTime(
        base_s=0.3,
        prefill_row_s=0,
        prefill_row_context_s=0,
        decode_request_s=0,
        decode_context_s=0,
        decode_row_s=0,
    )
    record, _, _ = play(short(time_scale=0.5), attention=attention, info=demo_info(num_layers=3))
    assert {round(step.attention_s, 9) for step in record.steps} == {0.15}


def fail_steps(*steps: int, layer: int = 1) -> Callable[[int, int], MegaMoeError | None]:
    def fail(step_idx: int, layer_idx: int) -> MegaMoeError | None:
        return (
            PeerTimeoutError("rank 3 did not come", [3]) if step_idx in steps and layer_idx == layer else None
        )

    return fail


def test_a_failed_step_is_tried_again_as_a_new_step() -> None:
    record, tier, _ = play(short(step_retries=1), fail=fail_steps(20))
    assert tier.steps[20] == tier.steps[21]
    assert record.steps[20].overhead_s == pytest.approx(
        RETRY_PAUSE_S + 0.02, abs=0.02
    )  # a pause, and what was lost
    assert (record.num_retried_steps, record.num_failed_steps, record.num_calls_failed) == (1, 0, 1)
    assert record.errors == {"peer_timeout: rank 3 did not come": 1}
    assert all(done.status is not Status.FAILED for done in record.requests)


def test_a_step_that_fails_for_good_fails_its_requests_and_the_loop_goes_on() -> None:
    record, tier, _ = play(short(step_retries=0, max_failed_share=1.0), fail=fail_steps(40))
    failed = [done for done in record.requests if done.status is Status.FAILED]
    assert failed
    assert all(done.error == "peer_timeout: rank 3 did not come" for done in failed)
    assert len(record.steps) == len(tier.steps) - 1 > 60
    assert not record.aborted


def test_a_run_with_too_many_failures_is_aborted() -> None:
    record, tier, _ = play(short(step_retries=0), fail=fail_steps(*range(30, 10_000)))
    assert "requests failed; the last error: peer_timeout" in record.aborted
    finished = len([done for done in record.requests if done.status is not Status.CANCELLED])
    failed = sum(done.status is Status.FAILED for done in record.requests)
    assert failed > 0.1 * finished
    assert len(tier.steps) < 100


def test_cancelling_keeps_what_there_is(tmp_path: Path) -> None:
    run = play(short(duration_wall_s=100.0), during=lambda replay: stop_after(replay, 60))
    record, _, replay = run
    assert record.cancelled
    assert replay.num_in_flight == 0
    report = report_of(run)
    assert report["run_cancelled"] is True
    assert "the run was cancelled" in report["submission_invalid_reasons"]
    write_report(tmp_path, report, record, 1.0)


def test_a_prompt_over_the_context_limit_is_accounted_for() -> None:
    corpus = FixedTraces(
        trace(
            request(0, 4, out=1, api_time=0),
            request(1, 50, out=1, api_time=0),
            request(2, 5, out=1, api_time=0),
        )
    )
    config = ScenarioConfig(
        concurrency=1, warmup_requests=0, duration_wall_s=20.0, start_min=0, start_max=0, unsafe_override=True
    )
    run = play(config, corpus, TierConfig(context_limit=1000), attention=NO_ATTENTION)
    by_turn = [(done.turn_idx, str(done.status)) for done in run[0].requests[:4]]
    assert by_turn == [(0, "completed"), (1, "context_overflow"), (2, "completed"), (0, "completed")]
    report = report_of(run)
    assert report["requests"]["failed"] == 0
    assert any("overflow the context" in reason for reason in report["submission_invalid_reasons"])


def test_sessions_of_which_nothing_fits_end_the_run() -> None:
    """No request, no step, no time: such sessions would follow each other within one instant, for ever."""
    corpus = FixedTraces(trace(request(0, 50, out=1, api_time=0), request(1, 60, out=1, api_time=0)))
    config = ScenarioConfig(concurrency=2, warmup_requests=1, duration_wall_s=20.0)
    record, _, _ = play(config, corpus, TierConfig(context_limit=1000), attention=NO_ATTENTION)
    assert record.aborted
    assert "no request of 1 sessions fits; the last: prompt and output must be at most" in record.aborted
    assert {str(done.status) for done in record.requests} == {"context_overflow"}
    assert len(record.requests) < 30


def test_without_the_marker_a_repeated_trace_finds_its_old_prompts() -> None:
    corpus = FixedTraces(trace(request(0, 20, out=1, api_time=0), subagent(0, request(0, [900], out=1))))
    common = {
        "concurrency": 1,
        "warmup_requests": 0,
        "duration_wall_s": 5.0,
        "start_min": 0.0,
        "start_max": 0.0,
    }
    busted, _, _ = play(ScenarioConfig(**common), corpus, attention=NO_ATTENTION)
    kept, _, _ = play(
        ScenarioConfig(**common, cache_bust=False, unsafe_override=True), corpus, attention=NO_ATTENTION
    )
    assert {done.num_cached for done in busted.requests} == {0}
    assert max(done.num_cached for done in kept.requests) == 19 * 64


def test_a_fixed_rate_under_override_spaces_the_requests() -> None:
    record, _, _ = play(
        short(request_rate=4.0, unsafe_override=True, warmup_requests=0, duration_wall_s=20.0)
    )
    starts = sorted(done.start_s for done in record.requests if not done.is_primer)
    assert min(b - a for a, b in itertools.pairwise(starts)) >= 0.25 - 1e-9


def test_no_streaming_shows_tokens_at_the_end_only() -> None:
    record, _, _ = play(short(streaming=False, unsafe_override=True))
    assert all(len(done.emissions) == 1 for done in record.requests if done.status is Status.COMPLETED)


def test_a_tier_too_big_for_the_service_is_cut_to_fit_or_refused() -> None:
    config = TierConfig(chunk_rows=8192, max_running=512)
    _, tier, replay = play(short(duration_wall_s=1.0), tier_config=config)
    assert (replay.tier_config.chunk_rows, replay.tier_config.max_running) == (2048, 292)
    assert max(max(rows) for rows, _ in tier.steps) <= 2048
    clock = VirtualClock()
    info = demo_info()
    small = FakeTier(clock, info=type(info)(**{**info.__dict__, "max_step_rows": 4}))
    with pytest.raises(
        ConfigError, match=r"rows of a decode request \(num_drafts \+ 1\) must be at most 4, got 7"
    ):
        Replay(small, SyntheticTraces(5), short(), TierConfig(), clock)


def report_of(run: tuple[RunRecord, FakeTier, Replay]) -> dict[str, object]:
    record, tier, replay = run
    return build_report(
        record,
        tier.info,
        replay.config,
        replay.tier_config,
        None,
        traces="given",
        distribution="uniform",
        not_counted="a fake has no counters",
    )


def test_the_report_says_what_happened(demo: tuple[RunRecord, FakeTier, Replay], tmp_path: Path) -> None:
    record, tier, _ = demo
    report = report_of(demo)
    path = write_report(tmp_path, report, record, 1.0)
    assert json.loads(path.read_text()) == report
    assert report["layers"] == 4
    assert report["calls"] == len(tier.calls)
    assert sum(figures["num_steps"] for figures in report["paths"].values()) == len(tier.calls)
    for figures in report["paths"].values():
        latency = figures["latency_ms"]
        assert 0 < latency["p50"] <= latency["p90"] <= latency["p99"]
        assert figures["service_ms"]["p50"] == pytest.approx(0.9 * latency["p50"])
    completed = [done for done in record.requests if done.phase == "profile" and done.status == "completed"]
    assert report["requests"] == {
        "completed": len(completed), "failed": 0, "context_overflow": 0,
        "cancelled": report["request_accounting"]["profile"]["cancelled"],
    }  # fmt: skip
    sent = report["request_accounting"]["profile"]
    assert sent["sent"] == sum(
        sent[status] for status in ("completed", "failed", "cancelled", "context_overflow")
    )
    assert report["service_steps_match"] is None
    assert report["submission_valid"] is False
    assert any("time_scale" in reason for reason in report["submission_invalid_reasons"])
    assert any("token_scale" in reason for reason in report["submission_invalid_reasons"])
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len(lines) == len(record.requests)
    assert sum(line["phase"] == "profile" and line["status"] == "completed" for line in lines) == len(
        completed
    )
    rows = slice_rows(record, 1.0)
    assert sum(row["steps"] for row in rows) == report["profile"]["steps"]
    assert sum(row["completed"] for row in rows) == len(completed)
    header, *body = (tmp_path / "slices.csv").read_text().splitlines()
    assert header.startswith("start_s,steps,prefill_steps,decode_steps,small_m,fixed_slot,large_m,compact")
    assert len(body) == len(rows)


def test_without_drafts_a_request_brings_one_row() -> None:
    config = TierConfig(chunk_rows=512, speculation=Speculation(0))
    record, tier, _ = play(short(duration_wall_s=2.0), tier_config=config)
    decode = [rows for rows, phases in tier.steps if "prefill" not in phases]
    assert decode
    assert max(max(rows) for rows in decode) <= 6
    assert all(done.num_accepted == done.num_verify_steps for done in record.requests)
