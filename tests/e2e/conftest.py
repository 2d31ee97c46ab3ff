"""One running service for all tests that do not break it: demo profile, local launcher, real processes and sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from service.client import AsyncMoeGroup
from tests.e2e.harness import ServiceProcess, running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/e2e/" in str(item.path):
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def running_service() -> Iterator[ServiceProcess]:
    with running() as service:
        yield service


@pytest.fixture
async def group(running_service: ServiceProcess) -> AsyncIterator[AsyncMoeGroup]:
    """All ranks leased."""
    async with AsyncMoeGroup.connect(running_service.front, holder="test") as connected:
        yield connected
