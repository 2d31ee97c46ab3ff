"""What public sources report of 8 x MI355X serving DeepSeek-V4-Pro at DP8 attention + EP8: figures to be held against.

Served by their systems, not by this one. "before" = without the paths in question, "after" = with them.
"""

from __future__ import annotations

from dataclasses import dataclass

from loadgen.tier.speculation import Speculation


@dataclass(frozen=True, kw_only=True)
class DecodeRun:
    """A run at constant concurrency, fixed-slot decode runtime (after) against compact only (before).

    metric: "tpot" or "step_interval", its p50 in milliseconds. same_kernels: both sides ran compact, because a step
    has more rows than the fixed-slot runtime holds; what differs there is noise.
    """

    concurrency: int
    speculation: Speculation
    metric: str
    before_ms: float
    after_ms: float
    same_kernels: bool = False

    @property
    def num_rows_per_rank(self) -> int:
        """Rows of one rank in a decode step when all requests decode."""
        return self.concurrency // 8 * self.speculation.rows_per_request

    @property
    def name(self) -> str:
        drafts = self.speculation.num_drafts
        return f"{drafts} drafts at {self.concurrency}" if drafts else f"no drafts at {self.concurrency}"


PLAIN = Speculation(0)
DRAFTS_3 = Speculation(3, mean=1 + 3 * 0.915)
"""Three drafts of which 91 to 92 % are accepted."""

DECODE_RUNS = (
    DecodeRun(concurrency=32, speculation=PLAIN, metric="tpot", before_ms=40.1, after_ms=34.5),
    DecodeRun(concurrency=128, speculation=PLAIN, metric="tpot", before_ms=49.1, after_ms=43.3),
    DecodeRun(
        concurrency=2048, speculation=PLAIN, metric="tpot", before_ms=121.3, after_ms=121.9, same_kernels=True
    ),
    DecodeRun(concurrency=32, speculation=DRAFTS_3, metric="step_interval", before_ms=50.6, after_ms=44.9),
    DecodeRun(concurrency=128, speculation=DRAFTS_3, metric="step_interval", before_ms=67.6, after_ms=58.1),
    DecodeRun(
        concurrency=512,
        speculation=DRAFTS_3,
        metric="step_interval",
        before_ms=113.9,
        after_ms=113.7,
        same_kernels=True,
    ),
)


@dataclass(frozen=True, kw_only=True)
class AgentxRun:
    """AgentX at a concurrency, fused paths (small_m, large_m) off (before) and on (after); mean of two runs.

    total_tps: tokens/s per GPU, cached input included. p90_intvty: tokens/s/user, of public runs at the same points.
    """

    concurrency: int
    before_total_tps: float
    after_total_tps: float
    before_p90_intvty: float
    after_p90_intvty: float


AGENTX_RUNS = (
    AgentxRun(
        concurrency=128,
        before_total_tps=42_935,
        after_total_tps=47_281,
        before_p90_intvty=31.6,
        after_p90_intvty=36.8,
    ),
    AgentxRun(
        concurrency=256,
        before_total_tps=66_826,
        after_total_tps=73_507,
        before_p90_intvty=27.5,
        after_p90_intvty=29.7,
    ),
    AgentxRun(
        concurrency=384,
        before_total_tps=74_898,
        after_total_tps=79_328,
        before_p90_intvty=22.5,
        after_p90_intvty=22.9,
    ),
)

HOUR_PROFILE = {
    "input_mean": 113_814.0,
    "input_p50": 94_821.0,
    "input_p90": 163_328.0,
    "output_mean": 806.0,
    "output_p50": 333.0,
    "output_p90": 1_874.0,
    "theoretical_cache_hit_rate": 0.975,
}
"""Requests of one profiled hour of AgentX, in tokens."""

DECODE_ROWS = {(128, "p50"): 84.0, (128, "p90"): 119.0, (256, "p50"): 147.0}
"""(concurrency, point) -> rows of one rank in a decode step, of an older run of the workload on a slower deployment.

It does not go with the figures above: at their throughput and interactivity, and with outputs as in HOUR_PROFILE, fewer
requests decode at a time (Little's law: requests = output tokens/s x seconds a token).
"""
