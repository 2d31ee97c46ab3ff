"""Runs without a service: MoE time from a table, virtual time, one report."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from loadgen.clock import VirtualClock
from loadgen.moe.source import SimulatedMoe
from loadgen.moe.table import TableTier
from loadgen.replay.replay import Replay
from loadgen.report.figures import stats_of, successful
from loadgen.report.report import build_report
from loadgen.scenario.scenario import ScenarioConfig
from loadgen.steps.records import RunRecord
from loadgen.tier.attention_tier import TierConfig
from loadgen.tier.attention_time import AttentionTime
from loadgen.trace.trace import TraceSource


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
