"""Ranks side by side in threads of the core: right results, the same findings, faults and deadlocks."""

from __future__ import annotations

import numpy as np
import pytest

from megamoe.backends.gfx950.emulator.device import DeviceConfig, DeviceGroup
from megamoe.backends.gfx950.emulator.errors import BudgetError, DeadlockError, MemoryFaultError

from .assembly import kernel_of
from .test_device import DOUBLE, RAISE, WAIT
from .test_flydsl import R, exchange_kernel, mutant, run_exchange


@pytest.mark.parametrize("num_threads", [2, 3, 8])
@pytest.mark.parametrize("seed", [0, 5])
def test_exchange_between_ranks_in_threads(num_threads: int, seed: int) -> None:
    result = run_exchange(exchange_kernel(), seed, epochs=(1, 2, -(2**31), -1), num_threads=num_threads)
    assert result == ([], True)


def test_a_missing_fence_is_found_in_threads() -> None:
    kernel = exchange_kernel()
    dropped = [one for one in kernel.instructions if one.mnemonic == "buffer_wbl2"]
    assert dropped
    reports, _ = run_exchange(mutant(kernel, dropped), 1, num_threads=4)
    assert any("global-memory race" in text for text in reports)


def test_number_of_workers() -> None:
    assert DeviceConfig(num_ranks=8).num_workers == 1
    assert DeviceConfig(num_ranks=8, num_threads=3).num_workers == 3
    assert DeviceConfig(num_ranks=2, num_threads=5).num_workers == 2
    assert 1 <= DeviceConfig(num_ranks=8, num_threads=0).num_workers <= 8


@pytest.fixture
def group() -> DeviceGroup:
    return DeviceGroup(DeviceConfig.checked(num_ranks=R, num_threads=4))


def test_events_order_launches_of_different_workers(group: DeviceGroup) -> None:
    """A chain through all ranks: each doubles what the one before left."""
    with group:
        kernel, heap = kernel_of(DOUBLE), group.symmetric_heap(256)
        heap[0].view(np.uint32)[:] = np.arange(64)
        streams = [device.stream() for device in group.devices]
        for rank in range(R):
            if rank:
                streams[rank].wait_event(streams[rank - 1].record_event())
            source, target = heap[rank], heap[(rank + 1) % R]
            streams[rank].launch(kernel, (1,), (64,), [source.address, target.address])
        group.synchronize()
        np.testing.assert_array_equal(heap[0].view(np.uint32), np.arange(64) << R)
        assert group.reports() == []


def test_a_fault_of_one_rank_stops_all(group: DeviceGroup) -> None:
    with group:
        wait, bad = kernel_of(WAIT, name="wait"), kernel_of(DOUBLE, name="bad")
        flag, one = group.symmetric_heap(4), group.devices[0].upload(np.ones(1, np.uint32))
        group.devices[0].default_stream.launch(wait, (1,), (64,), [flag[0].address, one.address])
        small = group.devices[5].allocate(128)
        group.devices[5].default_stream.launch(bad, (1,), (64,), [small.address, small.address])
        with pytest.raises(MemoryFaultError, match="bad, workgroup 0, wave 0"):
            group.synchronize()


def test_a_deadlock_is_found_when_every_worker_rests(group: DeviceGroup) -> None:
    with group:
        wait, raise_ = kernel_of(WAIT, name="wait"), kernel_of(RAISE, name="raise")
        flag = group.symmetric_heap(4)
        for rank in range(R):
            two = group.devices[rank].upload(np.full(1, 2, np.uint32))
            group.devices[rank].default_stream.launch(wait, (1,), (64,), [flag[rank].address, two.address])
        for rank in range(1, R):  # every rank waits for two; rank 0 and the last one get one
            for peer in (rank, rank - 1):
                group.devices[rank].stream().launch(raise_, (1,), (1,), [flag[peer].address, 0])
        with pytest.raises(DeadlockError, match="wait .* polls") as caught:
            group.synchronize(30)
        text = str(caught.value)
        assert text.startswith("2 waves cannot go on")
        assert "heap[0]+0) and sees 0x1" in text
        assert f"heap[{R - 1}]+0) and sees 0x1" in text


def test_the_budget_holds_for_all_workers_together() -> None:
    forever = kernel_of("loop:\nv_mov_b32_e32 v2, v3\ns_branch loop", name="forever")
    with DeviceGroup(DeviceConfig(num_ranks=4, num_threads=4, max_instructions=100_000)) as group:
        for device in group.devices:
            device.default_stream.launch(forever, (1,), (64,), [0, 0])
        with pytest.raises(BudgetError, match="within 100000 instructions"):
            group.synchronize()
        assert 100_000 <= group.num_executed < 100_000 + 4 * 4000 + 4
