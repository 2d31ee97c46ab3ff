"""Replies of the public client as the load generator sees them."""

from __future__ import annotations

import torch

from loadgen.moe.live import outcome_of
from megamoe import Counters, Path, Phase, PlanId, RowFormat, StageTimes, StepPlan, SubStepReport
from service.client import GroupOutput


def report(path: Path, total_us: float, gemm1_us: float) -> SubStepReport:
    return SubStepReport(
        path=path,
        runtime_capacity=512,
        num_rows_per_rank=(300, 0),
        row_format_per_rank=(RowFormat.BF16, RowFormat.BF16),
        counters=Counters(),
        times=StageTimes(total_us=total_us, gemm1_us=gemm1_us),
    )


def output(*reports_per_rank: tuple[SubStepReport, ...], rows: tuple[int, ...] = (300, 0)) -> GroupOutput:
    plan = StepPlan(
        plan_id=PlanId(1, 2),
        num_rows_per_rank=rows,
        phase=Phase.PREFILL,
        dtype="bfloat16",
        weights_version=0,
        placement_version=0,
        policy_version=0,
    )
    hidden = tuple(torch.zeros((count, 32), dtype=torch.bfloat16) for count in rows)
    return GroupOutput(plan, 0, hidden, reports_per_rank)


def test_a_piece_takes_as_long_as_its_slowest_rank() -> None:
    outcome = outcome_of(output((report(Path.LARGE_M, 10.0, 4.0),), (report(Path.LARGE_M, 30.0, 9.0),)))
    (piece,) = outcome.sub_steps
    assert (piece.path, piece.total_us, piece.max_rows) == ("large_m", 30.0, 300)
    assert piece.total_us_per_rank == {0: 10.0, 1: 30.0}
    assert piece.stages_us["gemm1"] == 9.0
    assert set(piece.stages_us) == {"quantize", "dispatch", "gemm1", "gemm2", "combine", "wait"}
    assert outcome.num_rows_per_rank == (300, 0)


def test_a_rank_that_was_not_called_says_nothing() -> None:
    outcome = outcome_of(output((), (report(Path.COMPACT, 5.0, 1.0),), rows=(0, 300)))
    assert outcome.sub_steps[0].total_us_per_rank == {1: 5.0}


def test_a_cut_step_has_several_pieces() -> None:
    pieces = (report(Path.LARGE_M, 10.0, 1.0), report(Path.SMALL_M, 2.0, 1.0))
    outcome = outcome_of(output(pieces, ()))
    assert [piece.path for piece in outcome.sub_steps] == ["large_m", "small_m"]
