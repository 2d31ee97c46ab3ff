"""Statistics of a corpus, on sessions small enough to count by hand."""

from __future__ import annotations

import math

import pytest

from loadgen.corpus.statistics import TARGETS, Corpus
from loadgen.trace.trace import limit_context
from tests.loadgen.build import request, subagent, trace

FIRST = trace(
    request(0, 4, out=10, api_time=1),
    request(3, 6, out=20, api_time=1),  # gap 2, two new blocks
    request(304.5, [0, 1, 90, 91], out=30, api_time=1),  # gap 300.5, compacted: shares two blocks
    subagent(
        1.5, request(1.5, [50, 51, 52], out=5, api_time=1), request(2.6, [50, 51, 52, 53], out=5, api_time=9)
    ),
    subagent(2, request(2, [50, 51, 60], out=7, api_time=1), agent_id="agent_002"),
    trace_id="first",
)
SECOND = trace(request(0, 1, out=40), trace_id="second")


@pytest.fixture
def figures() -> dict[str, float]:
    return Corpus.of([FIRST, SECOND]).statistics()


def test_counts(figures: dict[str, float]) -> None:
    assert figures["sessions"] == 2
    assert (figures["requests"], figures["requests, main"], figures["requests, sub-agents"]) == (7, 4, 3)
    assert (figures["sub-agent groups"], figures["sessions with sub-agents"]) == (2, 0.5)
    assert figures["groups a session with any p50"] == 2
    assert (figures["requests a group p50"], figures["requests a group max"]) == (1.5, 2)
    assert figures["concurrent groups max"] == 2
    assert figures["main turns a session p50"] == 2


def test_new_tokens_are_behind_the_longest_prefix_seen_in_the_session(figures: dict[str, float]) -> None:
    # 4, 2 and 2 of the main agent; 3 and 1 of one sub-agent, 1 of the other; 1 of the second session.
    assert figures["new tokens mean"] == pytest.approx(64 * 14 / 7)
    total = 4 + 6 + 4 + 3 + 4 + 3 + 1
    assert figures["ideal prefix-cache hit"] == pytest.approx(1 - 14 / total)
    assert figures["prefill : output"] == pytest.approx(64 * 14 / 117)


def test_gaps_are_those_of_the_main_agent(figures: dict[str, float]) -> None:
    assert figures["gap mean s"] == pytest.approx((2 + 300.5) / 2)
    assert figures["gaps over 300 s"] == 0.5


def test_sub_agents_after_each_other_are_not_at_once() -> None:
    serial = trace(
        request(0, 1, api_time=1),
        subagent(1, request(1, 1, api_time=2)),
        subagent(3, request(3, 1, api_time=2), agent_id="agent_002"),
    )
    assert Corpus.of([serial]).statistics()["concurrent groups max"] == 1


def test_the_256k_variant_leaves_out_what_does_not_fit() -> None:
    large = trace(request(0, 1, out=40), request(9, 4000, out=0), request(20, 4000, out=1))
    figures = Corpus.of([large]).statistics()
    assert figures["256k: requests"] == 2
    assert figures["256k: output p50"] == 20
    limited = limit_context(large, 256_000)
    assert [turn.t for turn in limited.main_requests] == [0, 9]
    assert Corpus.of([limited]).statistics()["requests"] == 2
    assert limit_context(large, 64) is None


def test_nothing_to_count_is_nan_and_nothing_at_all_is_refused() -> None:
    figures = Corpus.of([SECOND]).statistics()
    assert math.isnan(figures["gap mean s"])
    assert math.isnan(figures["input p50, sub-agents"])
    assert set(figures) == {target.name for target in TARGETS}
    with pytest.raises(ValueError, match="without sessions"):
        Corpus().statistics()
