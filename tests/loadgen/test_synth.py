"""Synthetic sessions: deterministic in any order, well-formed, and near the published statistics."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.prefix_cache import common_prefix
from loadgen.synth import SyntheticTraces
from loadgen.trace import streams_of
from loadgen.trace_file import trace_to_record
from megamoe.errors import ConfigError


def test_a_session_depends_on_seed_and_index_only() -> None:
    forward, backward = SyntheticTraces(30, seed=7), SyntheticTraces(30, seed=7)
    later = {idx: trace_to_record(backward[idx]) for idx in (9, 4, 0)}
    assert {idx: trace_to_record(forward[idx]) for idx in (0, 4, 9)} == later
    assert trace_to_record(SyntheticTraces(30, seed=8)[4]) != later[4]


def test_sessions_are_well_formed() -> None:
    traces = SyntheticTraces(25, seed=1)
    for idx in range(len(traces)):
        trace = traces[idx]
        starts = [entry.t for entry in trace.requests]
        assert starts == sorted(starts)
        for stream in streams_of(trace):
            previous = None
            for turn in stream.turns:
                assert turn.num_input == 64 * len(turn.hash_ids) <= 990_000 + 64
                assert turn.num_output >= 1
                assert len(np.unique(turn.hash_ids)) == len(turn.hash_ids)
                if previous is not None:
                    kept = common_prefix(turn.hash_ids, previous.hash_ids)
                    compacted = (
                        266 if stream.stream_idx == 0 else 0
                    )  # 17k tokens of shared prefix, or nothing
                    assert kept in (len(previous.hash_ids), compacted)
                previous = turn


@pytest.fixture(scope="module")
def corpus() -> dict[str, list[float]]:
    """Columns over all requests of two corpora."""
    columns: dict[str, list[float]] = {
        name: [] for name in ("main_in", "sub_in", "main_out", "out", "gap", "new")
    }
    columns["requests"] = []
    for seed in (42, 43):
        traces = SyntheticTraces(393, seed)
        before = len(columns["out"])
        for idx in range(len(traces)):
            for stream in streams_of(traces[idx]):
                main = stream.stream_idx == 0
                cached = 0
                for turn in stream.turns:
                    columns["main_in" if main else "sub_in"].append(turn.num_input)
                    columns["out"].append(turn.num_output)
                    columns["new"].append(turn.num_input - (cached if turn.num_input > cached else 17_024))
                    cached = turn.num_input
                    if main:
                        columns["main_out"].append(turn.num_output)
                if main:
                    columns["gap"] += stream.gaps_s[1:]
        columns["requests"].append(len(columns["out"]) - before)
    return columns


@pytest.mark.parametrize(
    ("column", "percentile", "published", "tolerance"),
    [
        ("main_in", 50, 254_080, 0.10),
        ("main_in", 90, 651_008, 0.12),
        ("sub_in", 50, 64_000, 0.25),
        ("sub_in", 90, 196_326, 0.25),
        ("main_out", 50, 616, 0.05),
        ("main_out", 90, 3_502, 0.10),
        ("out", 50, 444, 0.10),
        ("new", 50, 1_664, 0.10),
        ("gap", 50, 4.9, 0.10),
        ("gap", 90, 131.5, 0.30),
    ],
)
def test_the_recipe_is_near_the_published_statistics(
    corpus: dict[str, list[float]], column: str, percentile: int, published: float, tolerance: float
) -> None:
    assert np.percentile(corpus[column], percentile) == pytest.approx(published, rel=tolerance)


def test_the_corpus_has_the_published_size_and_hit_rate(corpus: dict[str, list[float]]) -> None:
    assert np.mean(corpus["requests"]) == pytest.approx(98_827, rel=0.15)
    hit = 1 - sum(corpus["new"]) / (sum(corpus["main_in"]) + sum(corpus["sub_in"]))
    assert hit == pytest.approx(0.983, abs=0.004)


def test_an_empty_corpus_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_traces must be at least 1, got 0"):
        SyntheticTraces(0)
    with pytest.raises(IndexError):
        SyntheticTraces(3)[3]
