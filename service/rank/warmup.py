"""Warm-up: one layer call through every runtime of the bundle before a group says that it is ready.

Owns: which steps reach every runtime. Pure but for `run`; all ranks derive the same steps, so the calls are collective.
Kernels that compile on first use do so here, on all ranks, and not under a caller's step timeout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from megamoe import (
    Bundle,
    MoeBatch,
    Path,
    PathPolicy,
    Phase,
    PlanId,
    Runtime,
    RuntimeSpec,
    StepPlan,
    choose_path,
)
from megamoe.errors import InternalError


@dataclass(frozen=True)
class WarmUpStep:
    """A step that one runtime serves under `policy`."""

    spec: RuntimeSpec
    policy: PathPolicy
    plan: StepPlan


def warm_up_steps(bundle: Bundle, policy: PathPolicy) -> tuple[WarmUpStep, ...]:
    """One step per runtime, with few rows. Where `policy` never takes a runtime, a newer one allows only it."""
    steps = []
    newest = policy
    for spec in bundle.runtimes:
        plan = _plan_for(spec, bundle, policy)
        used = policy
        if plan is None:
            newest = used = _only(spec.path, newest)
            plan = _plan_for(spec, bundle, used)
        if plan is None:
            raise InternalError(f"no step reaches the runtime {spec}: this is a bug")
        steps.append(WarmUpStep(spec, used, plan))
    return tuple(steps)


def served_policy(bundle: Bundle, policy: PathPolicy) -> PathPolicy:
    """`policy` with the version that it has after warm-up: newer than any that the warm-up staged."""
    newest = max(step.policy.version for step in warm_up_steps(bundle, policy))
    return policy if newest == policy.version else replace(policy, version=newest + 1)


def run(runtime: Runtime, policy: PathPolicy, *, layer_idx: int = 0, timeout_s: float) -> None:
    """Run all warm-up steps (collective). Leaves `served_policy` as the newest policy of the runtime."""
    bundle = runtime.bundle
    for step in warm_up_steps(bundle, policy):
        runtime.stage_policy(step.policy)
        num_rows = step.plan.num_rows_per_rank[runtime.rank]
        batch = _rows(bundle, num_rows)
        runtime.forward(batch, step.plan, layer_idx, timeout_s=timeout_s)
    runtime.stage_policy(served_policy(bundle, policy))


def _only(path: Path, policy: PathPolicy) -> PathPolicy:
    return replace(
        policy,
        version=policy.version + 1,
        small_m_enabled=path is Path.SMALL_M,
        fixed_slot_enabled=path is Path.FIXED_SLOT,
        large_m_enabled=path is Path.LARGE_M,
    )


def _plan_for(spec: RuntimeSpec, bundle: Bundle, policy: PathPolicy) -> StepPlan | None:
    """The step with the fewest rows that `spec` serves, None if the policy never takes it."""
    num_ranks = bundle.shape.num_ranks
    for max_rows in _edges(spec, bundle, policy):
        for phase in (Phase.DECODE, Phase.PREFILL):
            plan = StepPlan(
                plan_id=PlanId(0, 0),
                num_rows_per_rank=(max_rows, *[1] * (num_ranks - 1)),
                phase=phase,
                dtype="bfloat16",
                weights_version=0,
                placement_version=0,
                policy_version=policy.version,
            )
            (sub_step,) = choose_path(plan, bundle, policy)
            if (sub_step.path, sub_step.runtime_capacity) == (spec.path, spec.capacity):
                return plan
    return None


def _edges(spec: RuntimeSpec, bundle: Bundle, policy: PathPolicy) -> Iterator[int]:
    """Row counts at which the choice can change, ascending."""
    after = {other.capacity + 1 for other in bundle.runtimes}
    yield from sorted(rows for rows in {1, policy.large_m_min_tokens, *after} if rows <= spec.capacity)


def _rows(bundle: Bundle, num_rows: int) -> MoeBatch:
    """Ones, routed to experts of all ranks in turn."""
    shape = bundle.shape
    slots = torch.arange(num_rows * shape.num_topk, dtype=torch.int64)
    ids = slots * shape.num_experts_per_rank + slots // shape.num_ranks
    return MoeBatch.of(
        shape,
        torch.ones(num_rows, shape.hidden, dtype=torch.bfloat16),
        (ids % shape.num_experts).to(torch.int32).view(num_rows, shape.num_topk),
        torch.full((num_rows, shape.num_topk), 1.0 / shape.num_topk),
    )
