"""One running service for all tests that do not break it: demo profile, local launcher, real processes and sockets."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator

import psutil
import pytest
import torch

from service.client import AsyncMoeGroup
from tests.e2e.harness import ServiceProcess, running

# The oracle's threads must not take the cores that eight ranks need.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/e2e/" in str(item.path):
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def running_service() -> Iterator[ServiceProcess]:
    """Ends with SIGTERM, and checks that nothing is left."""
    with running() as service:
        family = service.family()
        assert len(service.rank_pids) == 8
        yield service
        assert service.stop(signal.SIGTERM) == 0
        assert service.lines[-1] == "megamoe has stopped"
        _, alive = psutil.wait_procs(family, timeout=5)
        assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE], alive
        assert service.segments() == []


@pytest.fixture
async def group(running_service: ServiceProcess) -> AsyncIterator[AsyncMoeGroup]:
    """All ranks leased."""
    async with AsyncMoeGroup.connect(running_service.front, holder="test") as connected:
        yield connected
