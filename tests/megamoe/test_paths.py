"""The four paths against the oracles, against each other, and by their counters."""

from __future__ import annotations

import torch

from megamoe import Path
from megamoe.reference import QUANTIZED_REL_L2, quantized_moe, relative_l2, tolerance
from tests.megamoe.groups import SHAPE, Answer, Case, all_weights, batch_of, cases_worker, deployment
from tests.ranks import run_ranks

UNEVEN = (64, 3, 0, 17, 40, 0, 1, 29)


def run_cases(cases: list[Case], **settings: object) -> list[list[Answer]]:
    """Answers [case][rank]."""
    per_rank = run_ranks(8, cases_worker, deployment(**settings), cases)
    return [list(answers) for answers in zip(*per_rank, strict=True)]


def test_paths_agree() -> None:
    case = Case(Path.COMPACT, UNEVEN)
    paths = [Path.COMPACT, Path.FIXED_SLOT, Path.SMALL_M, Path.LARGE_M]
    per_path = run_cases([case.on(path) for path in paths])
    for path, answers in zip(paths, per_path, strict=True):
        for rank in range(8):
            batch = batch_of(case, SHAPE, rank)
            want = quantized_moe(batch, all_weights(SHAPE), SHAPE, answers[rank].row_formats)
            got = answers[rank].hidden_states
            assert relative_l2(got, want) <= tolerance(QUANTIZED_REL_L2, batch.num_rows)
            assert torch.equal(got, per_path[0][rank].hidden_states)
            assert answers[rank].report.path is path
