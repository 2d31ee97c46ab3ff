"""Sessions of one request, for simple load."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loadgen.trace.trace import BLOCK_SIZE, Trace, TraceRequest


@dataclass(frozen=True, kw_only=True)
class SingleTurns:
    """Sessions of one request each, for load at constant concurrency: num_input tokens in, outputs uniform within a
    quarter of num_output either way, so that lanes do not run in step."""

    count: int
    num_input: int = 1024
    num_output: int = 1024
    seed: int = 42

    @property
    def description(self) -> str:
        return f"{self.count} single requests, {self.num_input} tokens in, about {self.num_output} out"

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, trace_idx: int) -> Trace:
        if not 0 <= trace_idx < self.count:
            raise IndexError(trace_idx)
        rng = np.random.default_rng((self.seed, trace_idx))
        request = TraceRequest(
            t=0.0,
            num_input=self.num_input,
            num_output=int(rng.integers(self.num_output * 3 // 4, self.num_output * 5 // 4 + 1)),
            hash_ids=np.arange(self.num_input // BLOCK_SIZE, dtype=np.int64),
            api_time=1.0,
        )
        return Trace(id=f"single-{trace_idx}", requests=(request,))
