"""Trace files: what is written comes back, files are read in bounded memory, and what is wrong is named."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import loadgen.trace.file as trace_file
from loadgen.corpus.synth import SyntheticTraces
from loadgen.replay.session import LiveSession
from loadgen.trace.file import FileTraces, parse_trace, read_traces
from loadgen.trace.schema import trace_to_record, with_hash_lists
from loadgen.trace.trace import Trace, streams_of
from loadgen.trace.writing import write_trace_folder, write_traces
from megamoe.errors import InvalidArgumentError
from tests.loadgen.build import request, subagent, trace


def plain(value: Trace) -> dict[str, Any]:
    """A session as one JSON value, the way any other program would write it."""
    return with_hash_lists(*trace_to_record(value))


def test_synthetic_sessions_survive_the_file_format(tmp_path: Path) -> None:
    synthetic = SyntheticTraces(20, seed=3)
    traces = [synthetic[idx] for idx in range(6)]
    assert any(trace.subagents for trace in traces)
    assert write_traces(tmp_path / "traces.jsonl", traces) == 6
    written = (tmp_path / "traces.jsonl").read_text().splitlines()
    for before, line, after in zip(traces, written, read_traces(tmp_path / "traces.jsonl"), strict=True):
        assert json.loads(line) == plain(before) == plain(after)


def test_a_folder_of_sessions_is_a_corpus_too(tmp_path: Path) -> None:
    traces = [trace(request(0, idx + 1), trace_id=f"t{idx}") for idx in range(3)]
    assert write_trace_folder(tmp_path / "all", traces) == 3
    corpus = FileTraces(tmp_path / "all")
    assert [corpus[idx].id for idx in (2, 0, 1)] == ["t2", "t0", "t1"]
    assert corpus.description == "all (3 sessions)"


def test_a_file_is_a_corpus_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    synthetic = SyntheticTraces(12, seed=5)
    write_traces(path, (synthetic[idx] for idx in range(5)))
    path.write_bytes(path.read_bytes().replace(b"\n", b"\n\n", 2))  # blank lines are skipped
    corpus = FileTraces(path)
    assert len(corpus) == 5
    for idx in (4, 0, 2):
        assert plain(corpus[idx]) == plain(synthetic[idx])
        assert not LiveSession(corpus[idx], "s", 0.0).drained
    with pytest.raises(IndexError):
        corpus[5]


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=5), min_size=1, max_size=8), st.sampled_from([",", ", "])
)
def test_any_lists_of_hash_ids_are_read_as_json_would(lists: list[list[int]], separator: str) -> None:
    """Prompts that extend, shorten, repeat or nearly extend each other (1, 12) are told apart."""
    full = [[11 if value == 3 else value for value in ids] + [1] for ids in lists]
    record = plain(trace(*(request(idx, ids) for idx, ids in enumerate(full))))
    line = json.dumps(record, separators=(separator, ":")).encode()
    assert [turn.hash_ids.tolist() for turn in parse_trace(line, "x").main_requests] == full


def test_prompts_that_extend_each_other_share_memory(tmp_path: Path) -> None:
    turns = [request(idx, 100 + idx) for idx in range(50)]
    write_traces(
        tmp_path / "t.jsonl", [trace(*turns, subagent(3, request(3, [7, 8]), request(4, [7, 8, 9])))]
    )
    (read,) = read_traces(tmp_path / "t.jsonl")
    bases = {id(turn.hash_ids.base) for turn in read.main_requests}
    assert len(bases) == 1
    assert np.array_equal(read.main_requests[49].hash_ids, np.arange(149))


def test_a_file_larger_than_the_memory_it_takes(tmp_path: Path) -> None:
    """A third of a gigabyte of prompts, read by a process that may not grow by more than a sixth of it."""
    turns = [request(idx, list(range(10**6, 10**6 + 12_000 + idx))) for idx in range(400)]
    path = tmp_path / "large.jsonl"
    write_traces(path, (trace(*turns[:200], trace_id=f"t{nth}") for nth in range(19)))
    size = path.stat().st_size
    assert size > 350e6
    program = (
        "import resource, sys; from pathlib import Path; from loadgen.trace.file import FileTraces\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "corpus = FileTraces(Path(sys.argv[1]))\n"
        "grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before\n"
        "print(len(corpus), corpus.num_requests, grown * 1024)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=60, check=True
    )
    sessions, requests, grown = map(int, done.stdout.split())
    assert (sessions, requests) == (19, 19 * 200)
    path.unlink()
    assert grown < size / 6


def test_times_of_a_subagent_before_its_spawn_are_relative_to_it() -> None:
    record = plain(trace(request(0, 1, api_time=50), subagent(30, request(2, 1), request(40, 1))))
    inner = parse_trace(json.dumps(record).encode(), "x").subagents[0].requests
    assert [turn.t for turn in inner] == [32.0, 40.0]


def test_what_a_recording_may_leave_out(tmp_path: Path) -> None:
    record = plain(trace(request(0, 2), subagent(1, request(1, 2))))
    for name in ("tool_tokens", "system_tokens", "totals"):
        del record[name]
    for name in ("input_types", "output_types", "stop", "api_time", "think_time", "ttft"):
        del record["requests"][0][name]
    for name in ("duration_ms", "total_tokens", "tool_use_count"):
        record["requests"][1][name] = None
    record["requests"][0]["out"] = 0
    read = parse_trace(json.dumps(record).encode(), "x")
    assert read.main_requests[0].num_output == 1
    assert len(streams_of(read)) == 2


@pytest.mark.parametrize(
    ("change", "value", "sentence"),
    [
        ("hash_id_scope", "global", "hash_id_scope must be 'local', got 'global'"),
        ("block_size", 0, "block_size must be at least 1, got 0"),
        ("id", None, "id must be a string of Unicode text, got None"),
        ("id", "half \ud800", "id must be a string of Unicode text, got 'half "),
        ("models", "m", "models must be a list of strings, got 'm'"),
        ("requests", [], "requests must be at least one main request, got 0"),
        ("requests.0", [], "requests[0] must be a JSON object, got list"),
        (
            "requests.0.in",
            127,
            "requests[0]: in must be block_size x number of hash_ids = 128, at least 1, got 127",
        ),
        ("requests.0.out", -1, "requests[0]: out must be at least 0, got -1"),
        ("requests.0.out", 1.5, "requests[0]: out must be a whole number within 2^53, got 1.5"),
        ("requests.0.t", 1e300, "requests[0]: t must be a number within 2^53, got 1e+300"),
        ("requests.0.t", 10**400, "requests[0]: t must be a number within 2^53, got 1000"),
        ("requests.0.out", 10**30, "requests[0]: out must be a whole number within 2^53, got 1000"),
        ("requests.1.duration_ms", 10**30, "requests[1]: duration_ms must be a whole number within 2^53"),
        ("requests.0.type", "x", "requests[0]: type must be 'n', 's' or 'subagent', got 'x'"),
        ("requests.0.t", float("nan"), "requests[0]: t must be a number within 2^53, got nan"),
        ("requests.0.api_time", "1", "requests[0]: api_time must be a number within 2^53, or null, got '1'"),
        ("requests.0.hash_ids", None, "requests[0]: hash_ids must be a list of whole numbers, got None"),
        ("requests.0.hash_ids", 0, "requests[0]: hash_ids must be a list of whole numbers, got 0"),
        ("requests.0.hash_ids", ["a"], "requests[0]: hash_ids must be a list of whole numbers, got ['a']"),
        ("requests.0.hash_ids", [1.5, 2], "hash_ids must be lists of whole numbers, got float64 values"),
        ("requests.0.hash_ids", [2**70, 1], "hash_ids must be lists of whole numbers"),
        ("requests.0.temperature", 1, "requests[0]: temperature must be one of t, type,"),
        (
            "requests.1.requests.0.out",
            True,
            "requests[1].requests[0]: out must be a whole number within 2^53, got True",
        ),
        (
            "requests.1.duration_ms",
            0.5,
            "requests[1]: duration_ms must be a whole number within 2^53, or null, got 0.5",
        ),
        (
            "requests.2.agent_id",
            "agent_001",
            "requests[2]: agent_id must be unique in its trace, got 'agent_001'",
        ),
    ],
)
def test_a_wrong_field_is_named(change: str, value: object, sentence: str, tmp_path: Path) -> None:
    good = trace(request(0, 2), subagent(1, request(1, 2)), subagent(2, request(2, 1), agent_id="agent_002"))
    target: Any = plain(good)
    record = target | {"id": "other"}
    *path, last = change.split(".")
    target = record
    for part in path:
        target = target[int(part)] if part.isdigit() else target[part]
    target[int(last) if last.isdigit() else last] = value
    file = tmp_path / "traces.jsonl"
    file.write_text(f"{json.dumps(plain(good))}\n\n{json.dumps(record)}\n")
    with pytest.raises(InvalidArgumentError) as caught:
        FileTraces(file)
    assert sentence in str(caught.value)
    assert "traces.jsonl:3" in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b"{broken", "t.jsonl:2: line must be a JSON object, got"),
        (b"[1]", "t.jsonl:2 must be a JSON object, got list"),
        (b'{"id": "\xff"}', "t.jsonl:2: line must be text in UTF-8"),
        (b'{"id"', "t.jsonl:2: line must be a JSON object, got"),
        (b"[" * 100_000, "t.jsonl:2: line must be a JSON object, got maximum recursion depth"),
        (b'{"id": ' + b"9" * 5000, "t.jsonl:2: line must be a JSON object, got Exceeds the limit"),
        (b'{"id": %d}' % 10**300, "t.jsonl:2: id must be a string of Unicode text, got 1000000"),
        (gzip.compress(b"{}"), "t.jsonl:2: line must be text in UTF-8, not compressed"),
        ('{"id": "t"}'.encode("utf-16"), "t.jsonl:2: line must be text in UTF-8"),
    ],
)
def test_a_wrong_line_is_named(line: bytes, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(json.dumps(plain(trace(request(0, 1)))).encode() + b"\n" + line + b"\n")
    reader = read_traces(path)
    assert next(reader).id == "trace"
    with pytest.raises(InvalidArgumentError) as caught:
        next(reader)
    assert sentence in str(caught.value)


def test_a_line_without_an_end_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_file, "MAX_LINE_BYTES", 100)
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\n" + b"x" * 101)
    (tmp_path / "one.json").write_bytes(b"x" * 101)
    for source, where in ((path, "t.jsonl:2"), (tmp_path, "one.json")):
        with pytest.raises(
            InvalidArgumentError, match=f"{where}: session must be at most 100 bytes, got more"
        ):
            FileTraces(source)
    with pytest.raises(InvalidArgumentError, match="trace file must be a file or a folder, got /dev/zero"):
        FileTraces(Path("/dev/zero"))


def test_an_id_that_comes_twice_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_traces(path, [trace(request(0, 1)), trace(request(0, 1))])
    with pytest.raises(
        InvalidArgumentError, match=r"t\.jsonl:2: id must be unique, it is that of t\.jsonl:1"
    ):
        FileTraces(path)
    path.write_text("\n")
    with pytest.raises(InvalidArgumentError, match=r"sessions in .*t\.jsonl must be at least 1, got 0"):
        FileTraces(path)


def test_text_that_looks_like_a_field_is_left_alone() -> None:
    odd = 'say "hash_ids":[1,2] and \\"hash_ids":[3]'
    record = plain(trace(request(0, [4, 5]), trace_id=odd))
    record["totals"] = {odd: odd}
    read = parse_trace(json.dumps(record).encode(), "x")
    assert read.id == odd
    assert read.totals == {odd: odd}
    assert read.main_requests[0].hash_ids.tolist() == [4, 5]
