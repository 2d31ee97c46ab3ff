"""What rank tests share: small deployments, batches that any process can rebuild from a seed, and workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from megamoe import (
    Deployment,
    LayerWeights,
    MoeBatch,
    MoeOutput,
    MoeShape,
    Path,
    PathPolicy,
    Phase,
    PlanId,
    RowFormat,
    Runtime,
    StepIntent,
    StepPlan,
    SubStepReport,
    agree,
    random_layer_weights,
    shard,
)
from megamoe.routing import route_rank
from tests.ranks import Rank

# Oracles run while rank processes have the cores: a second thread would spin for a core that is not there.
torch.set_num_threads(1)

SHAPE = MoeShape(
    name="tests",
    hidden=96,
    intermediate=64,
    num_experts=32,
    num_topk=4,
    num_ranks=8,
    num_layers=2,
    swiglu_limit=10.0,
)
CAPACITY = 64
SEED = 7

_POLICIES = {
    Path.SMALL_M: PathPolicy(small_m_enabled=True, fixed_slot_enabled=False),
    Path.FIXED_SLOT: PathPolicy(small_m_enabled=False, fixed_slot_enabled=True),
    Path.LARGE_M: PathPolicy(fixed_slot_enabled=False, large_m_enabled=True, large_m_min_tokens=1),
    Path.COMPACT: PathPolicy(fixed_slot_enabled=False),
}
POLICY_VERSION = {path: version for version, path in enumerate(_POLICIES, start=1)}


def deployment(shape: MoeShape = SHAPE, *, capacity: int = CAPACITY, **settings: Any) -> Deployment:
    """All four paths at one capacity, so that each can serve every case."""
    chosen: dict[str, Any] = {
        "shape": shape,
        "max_tokens_per_rank": capacity,
        "fixed_slot_max": capacity,
        "small_m_capacities": (capacity,),
        "large_m_capacity": capacity,
        "large_m_min_tokens": 1,
        "small_m_enabled": False,
    }
    return Deployment(**(chosen | settings))


def plan_for(num_rows_per_rank: Sequence[int], path: Path = Path.COMPACT, step_id: int = 0) -> StepPlan:
    """The agreed plan of a prefill step whose policy leaves `path` as the first choice."""
    num_ranks = len(num_rows_per_rank)
    return agree(
        [
            StepIntent(
                rank=rank,
                num_ranks=num_ranks,
                plan_id=PlanId(1, step_id),
                num_rows=rows,
                phase=Phase.PREFILL if rows else Phase.IDLE,
                policy_version=POLICY_VERSION[path],
            )
            for rank, rows in enumerate(num_rows_per_rank)
        ]
    )


@dataclass(frozen=True)
class Case:
    """One layer call: which path, which rows. Equal cases give equal batches in every process."""

    path: Path
    num_rows_per_rank: tuple[int, ...]
    distribution: str = "uniform"
    no_expert_share: float = 0.0
    duplicate_share: float = 0.0
    poison: str = ""
    """ "nan" or "inf": put into one element of every third row of rank 1; of quantized rows: a NaN code."""
    quantized: bool = False
    exact: bool = False
    """Rows that MXFP8 holds exactly and power-of-two weights, for bitwise transport tests."""
    seed: int = SEED
    layer_idx: int = 0

    def on(self, path: Path) -> Case:
        return replace(self, path=path)


def batch_of(case: Case, shape: MoeShape, rank: int) -> MoeBatch:
    """The rows of one rank."""
    n = case.num_rows_per_rank[rank]
    ids, weights = route_rank(
        shape,
        case.distribution,
        n,
        seed=case.seed,
        rank=rank,
        no_expert_share=case.no_expert_share,
        duplicate_share=case.duplicate_share,
    )
    weights[ids < 0] = float("nan")  # nobody reads the weight of a slot without expert
    generator = torch.Generator().manual_seed(1000 * case.seed + rank)
    if case.exact:
        x = torch.randint(-8, 9, (n, shape.hidden), generator=generator).float()
        weights = torch.exp2(torch.randint(-2, 2, weights.shape, generator=generator).float())
    else:
        x = torch.randn(n, shape.hidden, generator=generator)
    if case.poison and rank == 1 and not case.quantized:
        x[::3, 5] = float(case.poison)
    if case.quantized:
        from megamoe import mx

        codes, scales = mx.quantize_mxfp8(x)
        if case.poison and rank == 1:
            codes[::3, 5] = 0x7F
        return MoeBatch.of(shape, codes, ids, weights, scales)
    return MoeBatch.of(shape, x.bfloat16(), ids, weights)


def whole_batch(case: Case, shape: MoeShape) -> MoeBatch:
    """All ranks' rows as one batch, for the oracles."""
    parts = [batch_of(case, shape, rank) for rank in range(shape.num_ranks)]
    scales = [part.hidden_states_sf for part in parts if part.hidden_states_sf is not None]
    return MoeBatch(
        torch.cat([part.hidden_states for part in parts]),
        torch.cat([part.topk_ids for part in parts]),
        torch.cat([part.topk_weights for part in parts]),
        torch.cat(scales) if scales else None,
    )


@cache
def all_weights(shape: MoeShape, layer_idx: int = 0) -> LayerWeights:
    """All experts of a layer, as the oracles take them."""
    return random_layer_weights(shape, seed=SEED, layer_idx=layer_idx)


def open_runtime(rank: Rank, deployed: Deployment, **settings: Any) -> Runtime:
    """An opened runtime that knows a policy per path."""
    runtime = Runtime.open(deployed, rank=rank.rank, group_name=rank.group_name, timeout_s=20.0, **settings)
    for path, version in POLICY_VERSION.items():
        runtime.stage_policy(replace(_POLICIES[path], version=version))
    return runtime


def bind_all(runtime: Runtime) -> None:
    shape = runtime.bundle.shape
    for layer_idx in range(runtime.num_slots):
        runtime.bind_layer(layer_idx, shard(all_weights(shape, layer_idx), shape, runtime.rank))


@dataclass(frozen=True)
class Answer:
    """A rank's output of one case as plain values that pickle cheaply."""

    hidden_states: torch.Tensor
    sub_steps: tuple[SubStepReport, ...]

    @property
    def report(self) -> SubStepReport:
        return self.sub_steps[0]

    @property
    def row_formats(self) -> tuple[RowFormat, ...]:
        return self.report.row_format_per_rank


def call(runtime: Runtime, case: Case, **settings: Any) -> MoeOutput:
    """One layer call of a case on this rank."""
    plan = plan_for(case.num_rows_per_rank, case.path)
    return runtime.forward(
        batch_of(case, runtime.bundle.shape, runtime.rank), plan, case.layer_idx, **settings
    )


def cases_worker(
    rank: Rank, deployed: Deployment, cases: Sequence[Case], identity: bool = False
) -> list[Answer]:
    """Open, bind, run all cases in order, close."""
    with open_runtime(rank, deployed) as runtime:
        if identity:
            for slot_idx in range(runtime.num_slots):
                runtime.bind_identity(slot_idx)
        else:
            bind_all(runtime)
        outputs = [call(runtime, case) for case in cases]
        return [Answer(out.hidden_states, out.sub_steps) for out in outputs]


def whole_output(answers: Sequence[Answer]) -> torch.Tensor:
    """All ranks' output rows in rank order."""
    return torch.cat([answer.hidden_states for answer in answers])
