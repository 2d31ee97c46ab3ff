"""Trace files written here load in the loader of the public replay harness, and mean the same sessions there."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loadgen.cli.main import app
from loadgen.trace.file import read_traces
from loadgen.trace.trace import SubagentEntry, Trace
from tools.python_tools import provide

NUM_SESSIONS = 12
# What the harness makes of a folder of sessions: requests by agent, and the streams that it would replay.
PROGRAM = """
import json, sys
from aiperf.dataset.loader.weka_trace import WekaTraceLoader
assert WekaTraceLoader.can_load(filename=sys.argv[1])
loader = WekaTraceLoader(filename=sys.argv[1])
data = loader.load_dataset()
plans = loader._build_reconstruction_plans(data)
row = lambda request: [request.t, request.input_length, request.output_length, sum(request.hash_ids), request.api_time]
print(json.dumps({
    "main": {plan.trace_id: [row(request) for _, request in plan.normals] for plan in plans.parent_plans},
    "subagents": {plan.session_id: [row(request) for request in plan.requests] for plan in plans.child_plans},
    "split": len(plans.flat_plans),
}))
"""


@pytest.fixture(scope="module")
def harness() -> Path:
    return provide("agentx-harness")["python"]


def load(harness: Path, folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [str(harness), "-c", PROGRAM, str(folder)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def rows(requests: Any) -> list[list[float]]:
    return [
        [turn.t, turn.num_input, turn.num_output, int(turn.hash_ids.sum()), turn.api_time]
        for turn in sorted(requests, key=lambda turn: turn.t)
    ]


def test_the_harness_reads_what_synth_writes(harness: Path, tmp_path: Path) -> None:
    """Every request arrives, and each agent stays one stream: no compaction looks like another agent."""
    folder = tmp_path / "sessions"
    arguments = ["synth", str(folder), "--split", "--sessions", str(NUM_SESSIONS), "--seed", "5"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    written: list[Trace] = list(read_traces(folder))
    assert len(written) == NUM_SESSIONS
    loaded = load(harness, folder)
    assert loaded["split"] == 0
    assert loaded["main"] == {trace.id: rows(trace.main_requests) for trace in written}
    groups: list[tuple[Trace, SubagentEntry]] = [
        (trace, entry) for trace in written for entry in trace.subagents
    ]
    assert len(groups) > 10
    assert loaded["subagents"] == {
        f"{trace.id}::sa:{entry.agent_id}": rows(entry.requests) for trace, entry in groups
    }


def test_the_check_would_object(harness: Path, tmp_path: Path) -> None:
    """A field that the harness does not know is refused by it."""
    record = {"id": "a", "models": [], "block_size": 64, "hash_id_scope": "local", "requests": [], "odd": 1}
    (tmp_path / "a.json").write_text(json.dumps(record))
    done = subprocess.run(
        [str(harness), "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode != 0
