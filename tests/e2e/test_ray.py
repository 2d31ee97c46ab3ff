"""The core again with the launcher that `megamoe serve` uses by default: real Ray, eight actors, one host."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import psutil
import pytest

from service.client import AsyncMoeGroup, forward_step
from tests.e2e.harness import (
    SHAPE,
    ServiceProcess,
    call,
    check_numbers,
    group_rows,
    intent,
    next_plan_id,
    on_all,
    running,
    scrape,
    take_sequence,
    works,
)


@pytest.fixture(scope="module")
def ray_service() -> Iterator[ServiceProcess]:
    """Ends with Ctrl-C, and checks that nothing of the service or of its Ray cluster is left."""
    with running(launcher="ray") as service:
        family = service.family()
        assert any("raylet" in process.name() for process in family)
        yield service
        assert service.stop(signal.SIGINT) == 0
        assert service.lines[-1] == "megamoe has stopped"
        _, alive = psutil.wait_procs(family, timeout=20)
        assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE], alive
        assert service.segments() == []


async def test_all_paths_under_ray(ray_service: ServiceProcess) -> None:
    async with AsyncMoeGroup.connect(ray_service.front, holder="ray") as group:
        assert len(group.info.rank_addresses) == 8
        for counts, phase, path in (
            ([4, 0, 1, 0, 0, 16, 0, 2], "decode", "small_m"),
            ([40, 0, 1, 0, 0, 64, 0, 2], "decode", "fixed_slot"),
            ([40, 0, 1, 0, 0, 100, 0, 2], "decode", "compact"),
            ([140, 0, 1, 0, 0, 0, 0, 2], "prefill", "large_m"),
        ):
            batches = group_rows(counts, seed=80)
            async with group.step(counts, phase) as step:
                for layer_idx in range(SHAPE.num_layers):
                    outs = await step.layer(layer_idx, batches)
            assert {str(report.path) for report in outs.sub_steps} == {path}
            check_numbers(outs.hidden_states[0], batches[0], 3, outs.reports_per_rank[0])  # type: ignore[arg-type]
        samples = scrape(group.info.metrics_addresses)
    calls = [value for (name, _), value in samples.items() if name == "megamoe_group_layer_calls_total"]
    assert calls == [16.0]


async def test_refusals_and_forward_step_under_ray(ray_service: ServiceProcess) -> None:
    counts = [2, 0, 0, 0, 0, 0, 0, 3]
    async with AsyncMoeGroup.connect(ray_service.front, holder="ray") as group:
        plan_id = next_plan_id(group)
        await on_all(group, {r: intent(group, plan_id, counts, r) for r in (0, 7)})
        sequence = take_sequence(group)
        batches = group_rows([2, 0, 0, 0, 0, 0, 0, 4])
        results = await on_all(group, {r: call(group, plan_id, 0, sequence, batches[r]) for r in (0, 7)})
        assert {str(result) for result in results.values()} == {
            f"rank 7 refused: rows of the layer call must be 3, as plan {plan_id} agreed, got 4"
        }
        await works(group)
    outs = await forward_step(ray_service.front, 1, group_rows(counts))
    assert outs.hidden_states[7].shape == (3, SHAPE.hidden)
    assert ray_service.get("/readyz") == (200, "ready\n")
