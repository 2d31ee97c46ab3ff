"""Starting, stopping and dying: what a service leaves behind, and what its callers are told."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path as FilePath

import pytest

from megamoe import Path
from megamoe.errors import PeerTimeoutError, UnavailableError
from service.client import AsyncFront, AsyncMoeGroup
from tests.e2e.harness import (
    PYTHONPATH,
    ROOT,
    STEP_TIMEOUT_S,
    ServiceProcess,
    gone,
    group_rows,
    running,
    scrape,
    works,
)
from tests.e2e.load_generator import LoadGenerator

pytestmark = pytest.mark.any_backend

COUNTS = [3, 0, 1, 0, 0, 2, 0, 4]


async def steps_for(group: AsyncMoeGroup, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        async with group.step(COUNTS) as step:
            await step.layer(0, group_rows(COUNTS))


def mapped(pid: int) -> list[FilePath]:
    """Shared memory of a service that a process has mapped."""
    lines = FilePath(f"/proc/{pid}/maps").read_text().splitlines()
    return sorted({FilePath(line.split()[5]) for line in lines if "/dev/shm/megamoe-" in line})


def test_a_signal_during_start_stops_it_cleanly(launcher: str) -> None:
    service = ServiceProcess(launcher=launcher)
    service.wait_for("megamoe starts")
    time.sleep(1.5)
    family = service.family()
    segments = mapped(service.process.pid)
    assert segments or launcher == "ray", "Ray itself takes longer to start"
    assert service.stop(signal.SIGTERM) == 0
    assert gone(family)
    assert not [path for path in segments if path.exists()]


@pytest.fixture(scope="module")
def breakable(launcher: str) -> Iterator[ServiceProcess]:
    """A service of its own: these tests kill parts of it."""
    with running(launcher=launcher) as service:
        yield service


def kill_a_caller_in_mid_step(front: str) -> None:
    script = (
        "import asyncio, os, sys\n"
        "from service.client import AsyncMoeGroup\n"
        "from tests.e2e.harness import group_rows\n"
        "async def main():\n"
        "    async with AsyncMoeGroup.connect(sys.argv[1], holder='victim') as moe:\n"
        "        counts = [60] * 8\n"
        "        while True:\n"
        "            async with moe.step(counts) as step:\n"
        "                for layer_idx in range(4):\n"
        "                    await step.layer(layer_idx, group_rows(counts))\n"
        "                    print('layer', flush=True)\n"
        "asyncio.run(main())\n"
    )
    env = os.environ | {"PYTHONPATH": PYTHONPATH}
    victim = subprocess.Popen(
        [sys.executable, "-c", script, front], stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT
    )
    assert victim.stdout is not None
    for _ in range(6):
        assert victim.stdout.readline() == "layer\n"
    victim.kill()
    victim.wait()
    victim.stdout.close()


async def test_a_caller_killed_in_mid_step_leaves_nothing(breakable: ServiceProcess) -> None:
    """The step finishes for the others; nothing leaks; the next caller group gets the lease."""
    await asyncio.to_thread(kill_a_caller_in_mid_step, breakable.front)
    deadline = time.monotonic() + 15
    while True:  # its lease ends by itself
        with contextlib.suppress(Exception):
            async with AsyncMoeGroup.connect(breakable.front, holder="next") as group:
                await works(group)
                break
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)
    async with AsyncFront(breakable.front) as front:
        samples = scrape((await front.info()).metrics_addresses)
    assert {value for (name, _), value in samples.items() if name == "megamoe_in_flight_requests"} == {0.0}


async def test_a_killed_rank_fails_callers_and_the_group_comes_back(breakable: ServiceProcess) -> None:
    async with AsyncFront(breakable.front) as front:
        before = await front.info()
        async with AsyncMoeGroup.connect(breakable.front, holder="test") as group:
            await works(group)
            await front.set_path_enabled("small_m", False)
            victim = breakable.rank_pids[3]
            start = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            with pytest.raises((UnavailableError, PeerTimeoutError)):
                await steps_for(group, 2 * STEP_TIMEOUT_S)
            assert time.monotonic() - start < 2 * STEP_TIMEOUT_S
        assert not (await front.info()).ready
        status, reason = breakable.get("/readyz")
        assert status == 503
        assert "restart" in reason
        with pytest.raises(UnavailableError):
            await front.forward_step(0, group_rows(COUNTS))
        after = await front.wait_ready(60)
    assert after.generation == before.generation + 1
    assert len(breakable.rank_pids) == 8
    assert all(f"-{after.generation}-" in name for name in breakable.segments()), "the old memory is gone"
    async with AsyncMoeGroup.connect(breakable.front, holder="test") as group:
        assert group.generation == after.generation
        await works(group)
        async with group.step(COUNTS) as step:
            assert step.sub_steps[0].path is Path.FIXED_SLOT, "what the operator said still holds"
        await group.front.set_path_enabled("small_m", True)
    async with AsyncFront(breakable.front) as front, AsyncFront(after.rank_addresses[6]) as rank:
        newest = await front.policy()
        await asyncio.sleep(0.5)  # a rank's answer is at most a health period old
        assert (await rank.info()).policy == newest


@pytest.mark.one_launcher("ray")
def test_a_load_generator_outlives_a_restart(
    breakable: ServiceProcess, start_loadgen: Callable[..., LoadGenerator], tmp_path: FilePath
) -> None:
    """It leases the new group and tries the step in flight again: no request fails, and the report tells of it."""
    generator = start_loadgen(breakable, tmp_path, "--duration", "12")
    generator.wait_for("profile", 90)
    os.kill(breakable.rank_pids[5], signal.SIGKILL)
    status, report = generator.end(120)
    assert status == 0, generator.text
    assert report["requests"]["failed"] == 0
    assert len(report["steps"]["service_restarts"]) == 1
    assert report["steps"]["retried"] >= 1
    assert report["service_steps_match"] is True
    check = report["service_check"]
    assert check["calls_before_restart"] + check["layer_calls"]["made"] == report["calls"]
    assert min(check["calls_before_restart"], check["layer_calls"]["made"]) > 0
    assert "the service's group restarted 1 time(s) in the run" in report["submission_invalid_reasons"]


async def test_a_stopped_rank_is_not_ready_and_recovers(breakable: ServiceProcess) -> None:
    """A process that lives but makes no progress: probes say so within seconds, and callers get the rank's name."""
    async with AsyncFront(breakable.front) as front:
        await front.wait_ready(60)
        victim = breakable.rank_pids[2]
        os.kill(victim, signal.SIGSTOP)
        try:
            deadline = time.monotonic() + 20
            while (await front.info()).ready:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.1)
            assert "progress" in (await front.info()).not_ready_reason
        finally:
            os.kill(victim, signal.SIGCONT)
        await front.wait_ready(60)
    async with AsyncMoeGroup.connect(breakable.front, holder="test") as group:
        await works(group)


def test_a_killed_supervisor_takes_its_ranks_and_memory_along(breakable: ServiceProcess) -> None:
    """The last test of this service: its ranks notice that their launcher is gone, stop and clean up.

    Ray's two agents wait a minute for a control store that has gone with its driver, and then end too; nobody waits
    for that here.
    """
    family = breakable.family()
    agents = [
        process for process in family if process.name() in ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
    ]
    assert len(breakable.segments()) > 8
    breakable.process.kill()
    try:
        assert gone([process for process in family if process not in agents])
        deadline = time.monotonic() + 5
        while breakable.segments():
            assert time.monotonic() < deadline, breakable.segments()
            time.sleep(0.05)
    finally:
        for process in agents:
            process.kill()
