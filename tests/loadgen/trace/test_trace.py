"""Streams of a session, joins, scaling."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.trace.trace import scale_tokens, streams_of
from megamoe.errors import InvalidArgumentError
from tests.loadgen.build import request, subagent, trace


def test_gaps_run_from_recorded_end_to_start_and_overlaps_count_as_zero() -> None:
    (main,) = streams_of(trace(request(0, 1, api_time=2), request(5, 2, api_time=4), request(8, 3)))
    assert main.gaps_s == (0.0, 3.0, 0.0)


@pytest.mark.parametrize(
    ("start", "length", "spawn", "in_flight", "gap", "join"),
    [
        (2.5, 1.0, 0, False, 0.5, 1),  # between turns, done before the next
        (1.0, 1.0, 0, True, 1.0, 1),  # while the spawning turn (0..2) is in flight
        (2.5, 2.5, 0, False, 0.5, 1),  # ends exactly when turn 1 starts: joins it
        (2.5, 2.6, 0, False, 0.5, 2),  # a little later: joins the turn after
        (2.5, 99.0, 0, False, 0.5, None),  # never joined: background
        (11.5, 1.0, 2, False, 0.5, None),  # after the last turn
    ],
)
def test_a_subagent_hangs_between_the_turns_around_it(
    start: float, length: float, spawn: int, in_flight: bool, gap: float, join: int | None
) -> None:
    main = [request(0, 1, api_time=2), request(5, 2, api_time=1), request(10, 3, api_time=1)]
    _, stream = streams_of(trace(*main, subagent(start, request(start, 1, api_time=length))))
    assert (stream.spawn_turn_idx, stream.spawn_in_flight, stream.join_turn_idx) == (spawn, in_flight, join)
    assert stream.gaps_s == (pytest.approx(gap),)


def test_a_trace_without_main_requests_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="at least one main request"):
        streams_of(trace(subagent(0, request(0, 1))))


@given(
    shared=st.integers(0, 40),
    own=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    scale=st.sampled_from([1 / 200, 1 / 64, 1 / 50, 0.1, 0.33, 0.5, 1.0]),
)
def test_scaled_prompts_share_the_same_part_as_before(
    shared: int, own: tuple[int, int], scale: float
) -> None:
    prefix = list(range(shared))
    first = request(0, prefix + [1000 + idx for idx in range(own[0])], out=64)
    second = request(5, prefix + [2000 + idx for idx in range(own[1])], out=1)
    scaled = scale_tokens(trace(first, second), scale)
    a, b = scaled.main_requests
    common = len(set(a.hash_ids.tolist()) & set(b.hash_ids.tolist()))
    assert scaled.block_size == max(1, math.ceil(64 * scale))
    assert a.num_input == len(a.hash_ids) * scaled.block_size
    assert a.num_output == max(1, round(64 * scale))
    assert b.num_output == 1
    assert a.num_input >= first.num_input * scale - 1e-6
    assert a.num_input < first.num_input * scale + scaled.block_size
    assert abs(common * scaled.block_size - shared * 64 * scale) <= scaled.block_size
