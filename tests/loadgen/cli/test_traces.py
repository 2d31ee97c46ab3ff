"""`loadgen synth` and `loadgen stats`: what they write, print and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadgen.cli.main import app
from loadgen.corpus.synth import SyntheticTraces
from loadgen.trace.file import FileTraces
from loadgen.trace.trace import Trace


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_synth_writes_what_stats_counts(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    status, text = invoke("synth", str(path), "--sessions", "10", "--seed", "3")
    assert status == 0, text
    assert "10 sessions" in text
    corpus = FileTraces(path)
    traces = [corpus[idx] for idx in range(10)]
    requests = sum(len(trace.main_requests) for trace in traces)
    requests += sum(len(entry.requests) for trace in traces for entry in trace.subagents)
    status, text = invoke("stats", str(path))
    assert status == 0, text
    line = next(line for line in text.splitlines() if " requests " in line)
    assert "98,827" in line
    assert f"{requests:,}" in line
    assert f"{requests / 98_827 - 1:+.1%}" in line


def test_the_same_seed_writes_the_same_file(tmp_path: Path) -> None:
    for name, seed in (("a", "7"), ("b", "7"), ("c", "8")):
        assert invoke("synth", str(tmp_path / name), "--sessions", "3", "--seed", seed)[0] == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()


def test_a_context_limit_leaves_out_what_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "short.jsonl"
    status, text = invoke("synth", str(path), "--sessions", "6", "--max-context", "80000")
    assert status == 0, text
    corpus = FileTraces(path)
    assert 0 < len(corpus) <= 6
    for idx in range(len(corpus)):
        assert all(turn.num_input + turn.num_output <= 80_000 for turn in corpus[idx].main_requests)


def test_split_writes_a_file_a_session(tmp_path: Path) -> None:
    assert invoke("synth", str(tmp_path / "all"), "--sessions", "3", "--split")[0] == 0
    files = sorted((tmp_path / "all").iterdir())
    assert [json.loads(file.read_text())["id"] for file in files] == [file.stem for file in files]
    assert len(files) == 3
    assert invoke("stats", str(tmp_path / "all"))[0] == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["synth", "{out}", "--sessions", "0"], "num_traces must be from 1 to 1,000,000, got 0"),
        (["synth", "{out}", "--sessions", "2", "--max-context", "9"], "so that some request fits, got 9"),
        (["synth", "{out}", "--max-context", "0"], "max_context must be at least 1, got 0"),
        (["synth", "{bad}"], "out must be a path with nothing there yet"),
        (["stats", "{out}"], "path must be a trace file or a folder of them"),
        (["stats", "{bad}"], "bad.jsonl:1: line must be a JSON object"),
        (["stats", "{empty}"], "must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("{\n")
    (tmp_path / "empty").mkdir()
    places = {"out": tmp_path / "out.jsonl", "bad": tmp_path / "bad.jsonl", "empty": tmp_path / "empty"}
    status, text = invoke(*(argument.format(**places) for argument in arguments))
    assert status == 2
    assert sentence in " ".join(text.split())
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("split", [(), ("--split",)])
def test_a_corpus_that_was_not_finished_is_not_there(
    split: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = SyntheticTraces.__getitem__

    def interrupted(traces: SyntheticTraces, trace_idx: int) -> Trace:
        if trace_idx == 2:
            raise KeyboardInterrupt
        return made(traces, trace_idx)

    monkeypatch.setattr(SyntheticTraces, "__getitem__", interrupted)
    status, _ = invoke("synth", str(tmp_path / "out"), "--sessions", "3", *split)
    assert status == 130
    assert list(tmp_path.iterdir()) == []
