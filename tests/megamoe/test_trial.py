"""The trial of a deployment: what it covers, what it objects to, and how it ends when a rank does."""

from __future__ import annotations

import json
import math
import os
from multiprocessing.connection import Connection

import pytest
from typer.testing import CliRunner

from megamoe.bundle import Deployment, Path, plan_bundle
from megamoe.errors import PeerTimeoutError
from megamoe.rank_processes import RankProcesses
from megamoe.routing import DISTRIBUTIONS, FILLINGS
from megamoe.shape import MoeShape
from megamoe.trial import WRAPS, cases_of, judge, run_trial
from service.cli import app

TINY = MoeShape(
    hidden=64, intermediate=64, num_experts=8, num_topk=2, num_ranks=2, num_layers=1, swiglu_limit=10.0
)
SETTINGS = dict(
    max_tokens_per_rank=8,
    fixed_slot_max=8,
    small_m_capacities=(4, 8),
    large_m_capacity=8,
    large_m_min_tokens=4,
)


GFX950 = dict(backend="gfx950", gfx950_emulated=True, combine_row_format="fp8")


def deployment(**settings: object) -> Deployment:
    return Deployment(shape=TINY, **{**SETTINGS, **settings})  # type: ignore[arg-type]


def test_all_paths_fillings_distributions_and_wraps_are_covered() -> None:
    bundle = plan_bundle(deployment())
    cases = cases_of(bundle)
    assert {case.path for case in cases} == set(Path)
    matrix = {(case.path, case.filling, case.distribution) for case in cases if case.slot_idx == 0}
    assert matrix >= {(path, filling, one) for path in Path for filling in FILLINGS for one in DISTRIBUTIONS}
    transport = {(case.path, case.filling) for case in cases if case.slot_idx == 1}
    assert transport == {(path, filling) for path in Path for filling in FILLINGS}
    assert [case.sequence for case in cases] == sorted({case.sequence for case in cases})
    for wrap in WRAPS:
        epochs = [case.sequence * bundle.deployment.max_sub_steps - wrap for case in cases]
        around = [case for case, epoch in zip(cases, epochs, strict=True) if abs(epoch) < 100]
        for path in Path:
            assert {(case.slot_idx, case.sequence * bundle.deployment.max_sub_steps >= wrap) for case in around
                    if case.path is path} == {(0, False), (0, True), (1, False), (1, True)}  # fmt: skip


def test_a_wrong_answer_is_named() -> None:
    cases = cases_of(plan_bundle(deployment()))
    layer, transport = (next(case for case in cases if case.slot_idx == slot_idx) for slot_idx in (0, 1))
    assert judge(layer, [("", 0.0, 4.0), ("", 1e-5, 5.0)]) == (pytest.approx(math.sqrt(1e-5) / 3), "")
    assert "relative L2 must be at most 0.02, got 0.333" in judge(layer, [("", 0.0, 4.0), ("", 1.0, 5.0)])[1]
    assert "got nan" in judge(layer, [("", math.nan, 4.0), ("", 0.0, 5.0)])[1]
    assert "relative L2 must be at most 0.0" in judge(transport, [("", 1e-12, 4.0), ("", 0.0, 5.0)])[1]
    assert (
        judge(layer, [("", 0.0, 4.0), ("rank 1: PeerTimeoutError", 0.0, 0.0)])[1]
        == "rank 1: PeerTimeoutError"
    )
    assert judge(layer, [("", 0.0, 0.0), ("", 0.0, 0.0)]) == (0.0, "")


@pytest.mark.e2e
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"combine_row_format": "fp8"},
        GFX950,
    ],
    ids=["cpu", "fp8", "gfx950"],
)
def test_every_case_is_right(settings: dict[str, object]) -> None:
    wanted = deployment(**settings)
    verdicts = list(run_trial(wanted))
    assert [(verdict.case.name, verdict.why) for verdict in verdicts if verdict.why] == []
    assert len(verdicts) == verdicts[-1].num_cases == len(cases_of(plan_bundle(wanted)))


@pytest.mark.e2e
def test_selftest_prints_cases_and_its_verdict() -> None:
    names = ("hidden", "intermediate", "num_experts", "num_topk", "num_ranks")
    shape = json.dumps({name: getattr(TINY, name) for name in names})
    settings = ["--shape", shape, "--max-tokens-per-rank", "4", "--fixed-slot-max", "0", "--small-m-capacities", "",
                "--no-small-m-enabled", "--large-m-capacity", "8", "--no-large-m-enabled"]  # fmt: skip
    done = CliRunner().invoke(app, ["selftest", *settings], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "fixed_slot is not built" in done.output
    assert "57 of 57 cases are right" in done.output


def dies(pipe: Connection, deployment: Deployment, rank: int, group_name: str) -> None:
    pipe.send("ready")
    pipe.recv()
    if rank == 1:
        os._exit(1)
    pipe.send("answer")


@pytest.mark.e2e
def test_a_rank_process_that_ends_is_named() -> None:
    with RankProcesses(deployment(), dies, name="test") as ranks:
        with pytest.raises(PeerTimeoutError, match="test rank 1 ended early") as error:
            ranks.ask("question", 60.0)
        assert error.value.missing_ranks == (1,)
