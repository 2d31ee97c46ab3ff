"""Runs without a service: MoE time from a table, virtual time, one report. Also the constant-concurrency runs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadgen.attention_tier import TierConfig
from loadgen.attention_time import AttentionTime
from loadgen.clock import VirtualClock
from loadgen.figures import stats_of, successful
from loadgen.moe_source import SimulatedMoe
from loadgen.moe_table import TableTier
from loadgen.records import RunRecord
from loadgen.replay import Replay
from loadgen.report import build_report
from loadgen.scenario import ScenarioConfig
from loadgen.trace import BLOCK_SIZE, Trace, TraceRequest, TraceSource


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """One run to make; plain values, so that another process can make it."""

    moe: SimulatedMoe
    scenario: ScenarioConfig
    tier: TierConfig
    attention: AttentionTime
    traces: TraceSource

    def run(self) -> tuple[RunRecord, dict[str, Any]]:
        """The records, and the report with the lengths of its requests beside (`input_tokens`, `output_tokens`)."""
        moe = TableTier(self.moe.table, self.moe.enabled)
        replay = Replay(moe, self.traces, self.scenario, self.tier, VirtualClock(), attention=self.attention)
        record = asyncio.run(replay.run())
        report = build_report(
            record,
            moe.info,
            self.scenario,
            replay.tier_config,
            None,
            traces=self.traces.description,
            distribution="uniform",
            not_counted="no service: MoE time is simulated",
            simulated=moe.description,
            attention=self.attention,
        )
        requests = successful(record)
        report["input_tokens"] = stats_of([request.num_input for request in requests], "tokens")
        report["output_tokens"] = stats_of([request.num_output for request in requests], "tokens")
        return record, report


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
