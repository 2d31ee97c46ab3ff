"""Small hand-made traces for tests."""

from __future__ import annotations

import numpy as np

from loadgen.trace.trace import BLOCK_SIZE, SubagentEntry, Trace, TraceRequest


def request(t: float, blocks: int | list[int], out: int = 10, api_time: float | None = 1.0) -> TraceRequest:
    ids = list(range(blocks)) if isinstance(blocks, int) else blocks
    return TraceRequest(
        t=t,
        num_input=BLOCK_SIZE * len(ids),
        num_output=out,
        hash_ids=np.asarray(ids, dtype=np.int64),
        api_time=api_time,
    )


def subagent(t: float, *requests: TraceRequest, agent_id: str = "agent_001") -> SubagentEntry:
    return SubagentEntry(t=t, agent_id=agent_id, requests=requests)


def trace(*entries: TraceRequest | SubagentEntry, trace_id: str = "trace") -> Trace:
    return Trace(id=trace_id, requests=tuple(sorted(entries, key=lambda entry: entry.t)))


class FixedTraces:
    """A corpus of given traces."""

    description = "given"

    def __init__(self, *traces: Trace) -> None:
        self._traces = traces

    def __len__(self) -> int:
        return len(self._traces)

    def __getitem__(self, trace_idx: int) -> Trace:
        return self._traces[trace_idx]
