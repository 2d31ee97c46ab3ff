"""A live session tree: delays from live completions, joins, spawns, idle caps, the start in the middle."""

from __future__ import annotations

import hashlib
import heapq
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.corpus.recipe import Recipe
from loadgen.corpus.synth import SyntheticTraces
from loadgen.replay.session import LiveSession, start_point, stopped_length
from loadgen.trace.trace import Trace
from tests.loadgen.build import request, subagent, trace


def start(session: LiveSession, now: float) -> list[tuple[int, int]]:
    """All turns that are due at `now`, as (stream, turn)."""
    turns = []
    while (turn := session.take_due(now)) is not None:
        turns.append((turn.stream_idx, turn.turn_idx))
    return turns


def test_a_turn_waits_its_recorded_gap_after_the_live_completion() -> None:
    session = LiveSession(trace(request(0, 1, api_time=2), request(5, 2)), "s", 100.0)
    assert start(session, 100.0) == [(0, 0)]
    assert session.due_at() == math.inf
    session.complete(0, 150.0)  # far slower than recorded
    assert session.due_at() == 153.0
    assert start(session, 152.9) == []
    assert start(session, 153.0) == [(0, 1)]
    assert not session.drained
    session.complete(0, 154.0)
    assert session.drained


def test_time_scale_compresses_gaps() -> None:
    session = LiveSession(trace(request(0, 1, api_time=0), request(60, 2)), "s", 0.0, time_scale=1 / 60)
    start(session, 0.0)
    session.complete(0, 7.0)
    assert session.due_at() == pytest.approx(8.0)


def test_subagents_run_in_parallel_and_the_join_waits_for_the_slowest() -> None:
    main = [request(0, 1, api_time=1), request(10, 2, api_time=1), request(20, 3)]
    fast = subagent(2, request(2, 1, api_time=1), agent_id="fast")  # joins turn 1
    slow = subagent(3, request(3, 1, api_time=1), request(5, 1, api_time=1), agent_id="slow")  # joins turn 1
    session = LiveSession(trace(*main, fast, slow), "s", 0.0)
    assert start(session, 0.0) == [(0, 0)]
    session.complete(0, 4.0)
    assert start(session, 4.0) == []
    assert start(session, 5.0) == [(1, 0)]
    assert start(session, 6.0) == [(2, 0)]
    session.complete(1, 7.0)
    session.complete(2, 8.0)
    assert start(session, 9.0) == [(2, 1)]  # one second after it completed, as recorded
    assert start(session, 13.1) == []  # turn 1 would be due at 13, but the slow one still runs
    session.complete(2, 30.0)
    assert session.due_at() == 30.0
    assert start(session, 30.0) == [(0, 1)]


def test_a_fast_subagent_does_not_shorten_the_recorded_gap() -> None:
    session = LiveSession(
        trace(request(0, 1, api_time=1), request(10, 2), subagent(2, request(2, 1, api_time=1))), "s", 0.0
    )
    start(session, 0.0)
    session.complete(0, 1.0)
    start(session, 2.0)
    session.complete(1, 2.5)
    assert session.due_at() == pytest.approx(10.0)


def test_a_subagent_of_a_turn_in_flight_starts_while_it_runs() -> None:
    session = LiveSession(
        trace(request(0, 1, api_time=5), request(30, 2), subagent(2, request(2, 1, api_time=1))), "s", 0.0
    )
    assert start(session, 0.0) == [(0, 0)]
    assert start(session, 2.0) == [(1, 0)]
    assert session.num_in_flight == 2


def test_a_background_subagent_keeps_the_tree_alive() -> None:
    session = LiveSession(
        trace(request(0, 1, api_time=1), request(2, 2, api_time=1), subagent(1, request(1, 1, api_time=99))),
        "s",
        0.0,
    )
    start(session, 0.0)
    session.complete(0, 1.0)
    assert start(session, 2.0) == [(1, 0), (0, 1)]
    session.complete(0, 3.0)
    assert not session.drained
    session.complete(1, 50.0)
    assert session.drained


def test_an_idle_tree_waits_at_most_its_cap_and_keeps_its_order() -> None:
    session = LiveSession(
        trace(request(0, 1, api_time=0), request(9000, 2, api_time=0), subagent(8000, request(8000, 1))),
        "s",
        0.0,
        time_scale=0.5,
        tree_idle_cap_s=300.0,
    )
    start(session, 0.0)
    session.complete(0, 10.0)
    assert session.due_at() == pytest.approx(10 + 300 * 0.5)  # the sub-agent, not 8000 / 2
    assert start(session, session.due_at()) == [(1, 0)]
    assert session.due_at() == math.inf  # the main turn joins the sub-agent


def test_the_cap_counts_from_the_moment_the_whole_tree_is_idle() -> None:
    session = LiveSession(
        trace(
            request(0, 1, api_time=0), request(4000, 2, api_time=0), subagent(1, request(1, 1, api_time=9000))
        ),
        "s",
        0.0,
        tree_idle_cap_s=300.0,
    )
    start(session, 0.0)
    session.complete(0, 0.0)
    assert start(session, 1.0) == [(1, 0)]  # in the background
    session.complete(1, 10.0)
    assert session.due_at() == pytest.approx(10 + 300)


def test_the_recorded_gap_stands_while_a_subagent_runs() -> None:
    session = LiveSession(
        trace(
            request(0, 1, api_time=2), request(4000, 2, api_time=0), subagent(1, request(1, 1, api_time=9000))
        ),
        "s",
        0.0,
        tree_idle_cap_s=300.0,
    )
    start(session, 0.0)
    assert start(session, 1.0) == [(1, 0)]
    session.complete(0, 2.0)
    assert session.due_at() == pytest.approx(4000)


def test_the_start_point_is_the_published_one() -> None:
    recorded = trace(request(100, 1), request(300, 1, api_time=0), trace_id="abc")
    seed = int.from_bytes(hashlib.sha256(b"42:abc:7").digest()[:8], "big")
    expected = 100 + np.random.default_rng(seed).uniform(0.25, 0.75) * 200
    assert start_point(recorded, 42, 7, 0.25, 0.75) == expected
    points = {start_point(recorded, 42, lane, 0.25, 0.75) for lane in range(50)}
    assert len(points) == 50
    assert all(150 <= point <= 250 for point in points)


def test_entering_in_the_middle_primes_the_streams_that_are_alive() -> None:
    recorded = trace(
        request(0, 1, api_time=1),
        request(10, 2, api_time=1),
        request(50, 3, api_time=1),
        subagent(2, request(2, 1, api_time=1), agent_id="over"),
        subagent(12, request(12, 1, api_time=1), request(40, 2, api_time=1), agent_id="alive"),
        subagent(13, request(30, 1, api_time=1), agent_id="not yet begun"),
        subagent(60, request(60, 1, api_time=1), agent_id="later"),
    )
    session = LiveSession(recorded, "s", 1000.0, start_t=20.0)
    assert [(turn.stream_idx, turn.turn_idx) for turn in session.primers()] == [(0, 1), (2, 0)]
    # Main turn 2 joins "alive" and "not yet begun"; these come first, at their offsets from the start point.
    assert session.due_at() == 1010.0
    assert start(session, 1020.0) == [(3, 0), (2, 1)]
    session.complete(3, 1021.0)
    assert start(session, 1029.0) == []
    session.complete(2, 1025.0)
    assert session.due_at() == 1030.0
    assert start(session, 1030.0) == [(0, 2)]
    assert session.due_at() == math.inf  # "later" is spawned by turn 2, nine seconds after it
    session.complete(0, 1031.0)
    assert session.due_at() == 1040.0


def test_a_start_inside_the_last_call_leaves_that_call() -> None:
    session = LiveSession(
        trace(request(0, 1, api_time=1), request(2, 2, api_time=1000)), "s", 0.0, start_t=700.0
    )
    assert start(session, 0.0) == [(0, 1)]
    session.complete(0, 1.0)
    assert session.drained


def test_a_subagent_of_the_last_call_is_not_run_again() -> None:
    recorded = trace(request(0, 1, api_time=1000), subagent(5, request(5, 1, api_time=1)))
    session = LiveSession(recorded, "s", 0.0, start_t=700.0)
    assert start(session, 0.0) == [(0, 0)]
    session.complete(0, 1.0)
    assert session.drained


def test_delays_are_left_out_in_warm_up_and_come_back_in_full() -> None:
    session = LiveSession(
        trace(*(request(10.0 * idx, idx + 1, api_time=0) for idx in range(4))), "s", 0.0, without_delays=True
    )
    start(session, 0.0)
    session.complete(0, 1.0)
    assert start(session, 1.0) == [(0, 1)]
    session.complete(0, 2.0)
    session.begin_profile(100.0)
    assert session.due_at() == 110.0


def test_a_fixed_schedule_follows_the_recorded_times() -> None:
    recorded = trace(
        request(100, 1, api_time=2),
        request(110, 2, api_time=1),
        request(130, 3, api_time=1),
        subagent(104, request(104, 1, api_time=1), request(120, 2, api_time=1)),
    )
    session = LiveSession(recorded, "s", 0.0, time_scale=0.5, fixed_schedule=True, tree_idle_cap_s=1.0)
    assert start(session, 0.0) == [(0, 0)]
    session.complete(0, 1.5)  # slower than recorded: what comes next does not move
    assert session.due_at() == 2.0
    assert start(session, 2.0) == [(1, 0)]
    session.complete(1, 2.1)
    assert start(session, 5.0) == [(0, 1)]
    session.complete(0, 25.0)  # a turn is never sent before the one before it is over
    assert start(session, 25.0) == [(1, 1)]
    session.complete(1, 26.0)
    assert start(session, 26.0) == [(0, 2)]


def test_a_fixed_schedule_goes_on_from_the_turn_after_warm_up() -> None:
    recorded = trace(*(request(10.0 * idx, idx + 1, api_time=0) for idx in range(5)))
    session = LiveSession(recorded, "s", 0.0, without_delays=True, fixed_schedule=True)
    start(session, 0.0)
    session.complete(0, 1.0)
    start(session, 1.0)
    session.complete(0, 2.0)
    session.begin_profile(100.0)
    assert start(session, 100.0) == [(0, 2)]
    session.complete(0, 109.0)
    assert session.due_at() == 110.0
    session.shift(4.0)
    assert start(session, 106.0) == [(0, 3)]
    session.complete(0, 107.0)
    assert session.due_at() == 116.0


def test_a_stopped_length_is_seeded_and_not_above_the_recorded_one() -> None:
    lengths = [stopped_length(100, 7, f"s/{idx}") for idx in range(400)]
    assert lengths == [stopped_length(100, 7, f"s/{idx}") for idx in range(400)]
    assert min(lengths) >= 1
    assert max(lengths) <= 100
    assert 40 < float(np.mean(lengths)) < 60


def _play(recorded: Trace, seed: int, start_t: float | None) -> list[tuple[int, int, float, float]]:
    """Run a session with random latencies; returns (stream, turn, started, ended)."""
    rng = np.random.default_rng(seed)
    session = LiveSession(recorded, "s", 0.0, start_t=start_t, tree_idle_cap_s=300.0)
    now, played = 0.0, []
    running: list[tuple[float, int, int, float]] = []
    while not session.drained:
        end = running[0][0] if running else math.inf
        now = min(end, session.due_at())
        assert now < math.inf, "nothing in flight and nothing due: the session hangs"
        if now == end:
            ended, stream, turn, started = heapq.heappop(running)
            played.append((stream, turn, started, ended))
            session.complete(stream, ended)
            continue
        for stream, turn in start(session, now):
            heapq.heappush(running, (now + float(rng.exponential(5.0)), stream, turn, now))
    return played


SMALL = Recipe(min_turns=3, max_turns=12, subagent_share=0.8, max_group_requests=6)


@given(st.integers(0, 19), st.integers(0, 1000), st.one_of(st.none(), st.floats(0.0, 1.0)))
def test_every_turn_is_played_once_in_order_and_joins_hold(
    trace_idx: int, seed: int, start_share: float | None
) -> None:
    recorded = SyntheticTraces(20, seed=5, recipe=SMALL)[trace_idx]
    low, high = recorded.span
    start_t = None if start_share is None else low + start_share * (high - low)
    session = LiveSession(recorded, "s", 0.0)
    played = _play(recorded, seed, start_t)
    times = {(stream, turn): (started, ended) for stream, turn, started, ended in played}
    assert len(times) == len(played)
    if start_t is None:
        assert len(played) == sum(len(stream.turns) for stream in session.streams)
    for stream in session.streams:
        idx = stream.stream_idx
        for turn in range(1, len(stream.turns)):
            if (idx, turn) in times and (idx, turn - 1) in times:
                assert times[idx, turn][0] >= times[idx, turn - 1][1]
        last = (idx, len(stream.turns) - 1)
        if idx and stream.join_turn_idx is not None and last in times and (0, stream.join_turn_idx) in times:
            assert times[0, stream.join_turn_idx][0] >= times[last][1]
        if idx and (idx, 0) in times and (0, stream.spawn_turn_idx) in times:
            spawned = times[0, stream.spawn_turn_idx]
            assert times[idx, 0][0] >= spawned[0 if stream.spawn_in_flight else 1]
    assert {turn for stream, turn, *_ in played if stream == 0} == set(
        range(
            len(session.streams[0].turns) - sum(stream == 0 for stream, *_ in played),
            len(session.streams[0].turns),
        )
    )
