"""Is a deployment right on this machine? Every path that it builds, on a process a rank, against the oracles.

All distributions x ways to fill ranks against the quantization-aware oracle; the same ways with experts that give rows
back as they came, bitwise; then epochs over both wraps, paths and layers in turn. Every rank draws all experts'
weights to know what is right: that takes memory beside what a rank needs anyway.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import torch

from megamoe.batch import MoeBatch
from megamoe.bundle import Bundle, Deployment, Path, plan_bundle
from megamoe.errors import MegaMoeError
from megamoe.path import PathPolicy
from megamoe.rank_processes import RankProcesses
from megamoe.routing import DISTRIBUTIONS, FILLINGS, route_rank
from megamoe.runtime import Runtime
from megamoe.shape import MoeShape
from megamoe.step import Phase, PlanId, StepPlan
from megamoe.weights import LayerWeights, random_layer_weights, shard

_SEED = 11
_EXPERTS, _IDENTITY = 0, 1
"""Protocol slots: one layer of random experts, one of experts that give rows back."""
WRAPS = (1 << 31, 1 << 32)


@dataclass(frozen=True)
class Case:
    """One layer call. sequence: its number in the group, which its epoch follows from."""

    path: Path
    distribution: str
    filling: str
    slot_idx: int
    sequence: int
    num_rows_per_rank: tuple[int, ...]
    no_expert_share: float

    @property
    def name(self) -> str:
        """For people."""
        what = "transport" if self.slot_idx == _IDENTITY else self.distribution
        return f"{self.path} {what}, {self.filling}, call {self.sequence}"


@dataclass(frozen=True)
class Verdict:
    """How a case went. error: relative L2 over all ranks' rows; transport must have none. why: empty if it is right."""

    case: Case
    error: float
    why: str
    seconds: float
    num_done: int
    num_cases: int


def cases_of(bundle: Bundle) -> list[Case]:
    """Every case of a deployment, in the order in which they are run."""
    paths = [path for path in Path if bundle.capacities(path)]
    wanted = [
        (path, distribution, filling, slot_idx)
        for path in paths
        for filling in FILLINGS
        for distribution, slot_idx in [*((one, _EXPERTS) for one in DISTRIBUTIONS), ("uniform", _IDENTITY)]
    ]
    numbers = list(range(len(wanted)))
    around = [
        (paths[k % len(paths)], "uniform", "uneven", k // len(paths) % 2) for k in range(4 * len(paths))
    ]
    for wrap in WRAPS:
        first = wrap // bundle.deployment.max_sub_steps - len(around) // 2
        numbers += range(first, first + len(around))
        wanted += around
    return [_case(bundle, *one, sequence) for one, sequence in zip(wanted, numbers, strict=True)]


def _case(bundle: Bundle, path: Path, distribution: str, filling: str, slot_idx: int, sequence: int) -> Case:
    rows, share = FILLINGS[filling]
    capacity = bundle.capacities(path)[-1]
    counts = tuple(capacity if n < 0 else min(n, capacity) for n in rows[: bundle.shape.num_ranks])
    return Case(path, distribution, filling, slot_idx, sequence, counts, share)


def run_trial(deployment: Deployment, *, call_timeout_s: float = 60.0) -> Iterator[Verdict]:
    """Run every case on fresh rank processes and yield how each went.

    Raises PeerTimeoutError naming a rank process that ended or gave no answer.
    """
    deployment = replace(deployment, shape=replace(deployment.shape, num_layers=2))
    cases = cases_of(plan_bundle(deployment))
    with RankProcesses(deployment, _serve, name="trial", start_timeout_s=900.0) as ranks:
        for num_done, case in enumerate(cases, 1):
            started = time.perf_counter()
            error, why = judge(case, ranks.ask((case, call_timeout_s), 10 * call_timeout_s))
            yield Verdict(case, error, why, time.perf_counter() - started, num_done, len(cases))


Answer = tuple[str, float, float]
"""What went wrong on a rank, and sums of squares over its rows: of the difference, of what is right."""


def judge(case: Case, answers: Sequence[Answer]) -> tuple[float, str]:
    """(relative L2 over all ranks, what is wrong or "") of one case."""
    from megamoe.reference import QUANTIZED_REL_L2, tolerance

    wrong = sum(squares for _, squares, _ in answers) ** 0.5
    whole = sum(squares for _, _, squares in answers) ** 0.5
    error = wrong / max(whole, 1e-300) if wrong != 0 else 0.0
    transport = case.slot_idx == _IDENTITY
    bound = 0.0 if transport else tolerance(QUANTIZED_REL_L2, sum(case.num_rows_per_rank))
    why = next((text for text, _, _ in answers if text), "")
    if not why and not error <= bound:
        why = f"relative L2 must be at most {bound}, got {error:.3g}"
    return error, why


# ------------------------------------------------------------------------------------------------ a rank's process


def _serve(pipe: Connection, deployment: Deployment, rank: int, group_name: str) -> None:
    """One rank: open, bind, then run what is asked for until the pipe closes."""
    torch.set_num_threads(1)
    shape = deployment.shape
    every = random_layer_weights(shape, seed=_SEED)
    with Runtime.open(deployment, rank=rank, group_name=group_name, num_slots=2, timeout_s=600.0) as runtime:
        runtime.bind_layer(_EXPERTS, shard(every, shape, rank))
        runtime.bind_identity(_IDENTITY)
        for path in Path:
            runtime.stage_policy(_policy(path))
        pipe.send("ready")
        while True:
            try:
                case, timeout_s = pipe.recv()
            except EOFError:
                return
            pipe.send(_run(runtime, case, every, timeout_s))


def _policy(path: Path) -> PathPolicy:
    """Leaves `path` as the first choice of a prefill step."""
    return PathPolicy(
        version=1 + list(Path).index(path),
        small_m_enabled=path is Path.SMALL_M,
        fixed_slot_enabled=path is Path.FIXED_SLOT,
        large_m_enabled=path is Path.LARGE_M,
        large_m_min_tokens=1,
    )


def _run(runtime: Runtime, case: Case, weights: LayerWeights, timeout_s: float) -> Answer:
    from megamoe.reference import identity_moe, quantized_moe

    shape = runtime.bundle.shape
    batch = _batch(shape, case, runtime.rank)
    plan = StepPlan(
        plan_id=PlanId(0, case.sequence),
        num_rows_per_rank=case.num_rows_per_rank,
        phase=Phase.PREFILL,
        dtype="bfloat16",
        weights_version=0,
        placement_version=0,
        policy_version=_policy(case.path).version,
    )
    try:
        done = runtime.forward(batch, plan, case.slot_idx, sequence=case.sequence, timeout_s=timeout_s)
    except MegaMoeError as error:
        return f"rank {runtime.rank}: {type(error).__name__}: {error}", 0.0, 0.0
    took = {str(sub_step.path) for sub_step in done.sub_steps}
    if took - {str(case.path)}:
        return f"path must be {case.path}, got {', '.join(sorted(took))}", 0.0, 0.0
    if not batch.num_rows:
        return "", 0.0, 0.0
    formats = done.sub_steps[0].row_format_per_rank
    want = (
        identity_moe(batch, shape, formats)
        if case.slot_idx == _IDENTITY
        else quantized_moe(batch, weights, shape, formats)
    )
    wrong = (done.hidden_states.double() - want.double()).norm()
    return "", float(wrong) ** 2, float(want.double().norm()) ** 2


def _batch(shape: MoeShape, case: Case, rank: int) -> MoeBatch:
    rows, seed = case.num_rows_per_rank[rank], case.sequence % 997
    ids, weights = route_rank(
        shape, case.distribution, rows, seed=seed, rank=rank, no_expert_share=case.no_expert_share
    )
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if case.slot_idx == _IDENTITY:  # what MXFP8 holds exactly
        x = torch.randint(-15, 16, (rows, shape.hidden), generator=generator).bfloat16()
        weights = torch.exp2(torch.randint(-3, 2, weights.shape, generator=generator).float())
    else:
        x = torch.randn(rows, shape.hidden, generator=generator).bfloat16()
    return MoeBatch.of(shape, x, ids, weights)
