"""Fits the attention-time model to published figures: five constants, to twelve figures WITHOUT the paths in question.

1. base_s, decode_request_s and decode_row_s from the six decode runs on compact only: what is left of a step after its
   MoE layers (and the draft model's) is linear in requests and rows of a rank. Least squares of relative errors.
2. prefill_row_s and decode_context_s from throughput and P90 interactivity of AgentX at three concurrencies with the
   fused paths off. Gauss-Newton on simulated runs, least squares of the logarithms of simulated over published.

Gains of a path are never fitted: what a run with a path makes of these constants is a prediction. Assumed, not fitted:
one prefill round in 16 decode rounds (the middle of what deployments use), no term for the context of prefill (the
figures all have about the same), one MoE layer in the draft model, KV memory that holds all live sessions, and the
table's max_weight.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from loadgen.corpus.synth import SyntheticTraces
from loadgen.moe.source import SimulatedMoe
from loadgen.moe.table import MoeTimeTable, TableTier
from loadgen.published.simulate import Simulation
from loadgen.published.sources import AGENTX_RUNS, DECODE_RUNS, AgentxRun, DecodeRun
from loadgen.scenario.profiles import PROFILES
from loadgen.scenario.scenario import ScenarioConfig
from loadgen.tier.attention_time import AttentionTime
from megamoe import Path as MoePath

TIER = PROFILES["full"].tier
BEFORE: frozenset[MoePath] = frozenset()
"""Paths besides compact that serve AgentX with the fused paths off: the sources' runtime of 8192 tokens has none."""
STEPS = np.array([10e-6, 2e-9])
"""Finite differences: large against the noise of runs, which are chaotic at the level of a percent."""
START = np.array([45e-6, 0.5e-9])
REGULARITY = 0.05
"""Weight that holds the constants near START where the figures say nothing, per START."""

Figures = dict[str, Any]
Map = Callable[[Sequence[Simulation]], list[Figures]]


def moe_step_ms(moe: TableTier, run: DecodeRun) -> float:
    """MoE milliseconds of one decode step in which every request of the run decodes."""
    num_ranks, drafts = moe.info.num_ranks, run.speculation.num_drafts
    rows = run.num_rows_per_rank

    def layer_us(num_rows: int) -> float:
        return sum(piece.total_us for piece in moe.layer((num_rows,) * num_ranks, prefill=False))

    return (moe.info.num_layers * layer_us(rows) + drafts * layer_us(rows // (drafts + 1))) / 1e3


def fit_decode(table: MoeTimeTable) -> AttentionTime:
    """base_s, decode_request_s and decode_row_s from the decode runs on compact only."""
    moe = TableTier(table, frozenset())
    terms = np.array(
        [[1.0, run.concurrency / moe.info.num_ranks, run.num_rows_per_rank] for run in DECODE_RUNS]
    )
    other_ms = np.array([run.before_ms - moe_step_ms(moe, run) for run in DECODE_RUNS])
    weights = 1 / np.array([run.before_ms for run in DECODE_RUNS])
    base, request, row = np.linalg.lstsq(terms * weights[:, None], other_ms * weights, rcond=None)[0] / 1e3
    return AttentionTime(base_s=float(base), decode_request_s=float(request), decode_row_s=float(row))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the AgentX runs of a fit have in common. Raises ConfigError naming the field."""

    table: MoeTimeTable
    duration_s: float = 1800.0
    seed: int = 42

    def __post_init__(self) -> None:
        self.scenario(1)

    def scenario(self, concurrency: int) -> ScenarioConfig:
        return ScenarioConfig(concurrency=concurrency, duration_wall_s=self.duration_s, seed=self.seed)

    def simulation(self, run: AgentxRun, attention: AttentionTime, paths: frozenset[MoePath]) -> Simulation:
        scenario = self.scenario(run.concurrency)
        return Simulation(
            moe=SimulatedMoe(table=self.table, enabled=paths),
            scenario=scenario,
            tier=replace(TIER, seed=self.seed),
            attention=attention,
            traces=SyntheticTraces(scenario.num_traces, self.seed),
        )


def residuals(figures: Sequence[Figures]) -> npt.NDArray[np.float64]:
    """Logarithms of simulated over published "before" figures: throughput, then interactivity."""
    simulated: list[float] = [one["total_tput_tps"] for one in figures] + [
        one["p90_intvty"] for one in figures
    ]
    published = [run.before_total_tps for run in AGENTX_RUNS] + [run.before_p90_intvty for run in AGENTX_RUNS]
    misses: npt.NDArray[np.float64] = np.log(np.array(simulated) / np.array(published))
    return misses


def fit_agentx(
    setting: Setting, attention: AttentionTime, run_all: Map, note: Callable[[str], None], iterations: int = 1
) -> AttentionTime:
    """`attention` with prefill_row_s and decode_context_s fitted; both stay at least 0."""

    def with_constants(constants: npt.NDArray[np.float64]) -> AttentionTime:
        return replace(attention, prefill_row_s=float(constants[0]), decode_context_s=float(constants[1]))

    def misses(points: Sequence[npt.NDArray[np.float64]]) -> list[npt.NDArray[np.float64]]:
        """Residuals at several points, all runs side by side."""
        runs = [
            setting.simulation(run, with_constants(point), BEFORE) for point in points for run in AGENTX_RUNS
        ]
        figures = run_all(runs)
        return [
            np.concatenate([residuals(figures[at : at + len(AGENTX_RUNS)]), REGULARITY * (point / START - 1)])
            for at, point in zip(range(0, len(figures), len(AGENTX_RUNS)), points)
        ]

    best, point = (np.inf, START), START
    for iteration in range(iterations + 1):
        last = iteration == iterations
        points = [point] if last else [point, *(point + step for step in np.diag(STEPS))]
        missed, *moved = misses(points)
        cost = float(missed @ missed)
        note(f"prefill_row_s {point[0]:.3g}, decode_context_s {point[1]:.3g}: cost {cost:.4f}")
        best = min(best, (cost, point), key=lambda known: known[0])
        if not last:
            jacobian = np.stack([(other - missed) / step for other, step in zip(moved, STEPS)], axis=1)
            point = np.maximum(point - np.linalg.lstsq(jacobian, missed, rcond=None)[0], 0.0)
    return with_constants(best[1])


def run_in_processes(simulations: Sequence[Simulation], workers: int = 2) -> list[Figures]:
    """Reports of all runs, in order."""
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(report_of, simulations))


def report_of(simulation: Simulation) -> Figures:
    """The report of one run, without its records, and what the run cost (`cost`)."""
    began_s, cpu_s = time.perf_counter(), time.process_time()
    report = simulation.run()[1]
    report["cost"] = {
        "wall_s": time.perf_counter() - began_s,
        "cpu_s": time.process_time() - cpu_s,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    return report
