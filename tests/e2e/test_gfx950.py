"""The whole service on gfx950 machine code: eight rank processes with an emulated MI355X each."""

from __future__ import annotations

from megamoe import Path
from service.client import MoeGroup
from tests.e2e.harness import check_numbers, group_rows, running

STEPS = {
    Path.SMALL_M: ("decode", [2, 0, 3, 1, 0, 1, 9, 2]),
    Path.FIXED_SLOT: ("decode", [2, 0, 3, 1, 17, 0, 9, 2]),
    Path.COMPACT: ("decode", [40, 0, 3, 1, 0, 1, 9, 2]),
    Path.LARGE_M: ("prefill", [50, 0, 3, 1, 0, 1, 9, 2]),
}


def test_a_service_whose_ranks_are_emulated_gpus() -> None:
    with (
        running("--step-timeout-s=60", "--profile=emulated") as service,
        MoeGroup.connect(service.front, holder="gfx950-test") as group,
    ):
        for path, (phase, counts) in STEPS.items():
            batches = group_rows(counts, seed=3)
            with group.step(counts, phase) as step:
                for layer_idx in (0, 3):
                    outs = step.layer(layer_idx, batches)
                    assert [report.path for report in outs.sub_steps] == [path]
                    for rank, batch in enumerate(batches):
                        if batch is not None:
                            reports = outs.reports_per_rank[rank]
                            check_numbers(outs.hidden_states[rank], batch, layer_idx, reports)
