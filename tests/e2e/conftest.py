"""One running service a launcher for all tests that do not break it: demo profile, real processes and sockets.

Every test of this folder that takes `running_service`, `group` or `launcher` runs twice: with the launcher that
`megamoe serve` uses by default, a real Ray cluster of its own, and with the one that needs no Ray. A test whose mark
`one_launcher` says that who started the ranks is nothing it could see runs with that one, or with both when pytest is
called with `--every-launcher`.

With `--backend hopper`, on a machine with H100s or H200s, what is marked `any_backend` runs, with the local launcher
and all ranks on the GPUs that are there; the rest is about CPUs, or about nothing that a backend could change.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import torch

from service.client import AsyncMoeGroup
from tests.e2e import harness
from tests.e2e.harness import ServiceProcess, gone, running
from tests.e2e.load_generator import LoadGenerator

# The oracle's threads must not take the cores that eight ranks need.
torch.set_num_threads(1)


def is_repeat(item: pytest.Item) -> bool:
    """Whether a test is meant for the other launcher."""
    mark = item.get_closest_marker("one_launcher")
    callspec = getattr(item, "callspec", None)
    return mark is not None and callspec is not None and callspec.params["launcher"] != mark.args[0]


def is_for_any_backend(item: pytest.Item) -> bool:
    """Whether a test says so, and starts the ranks without Ray."""
    callspec = getattr(item, "callspec", None)
    local = callspec is None or callspec.params.get("launcher", "local") == "local"
    return local and item.get_closest_marker("any_backend") is not None


def pytest_configure(config: pytest.Config) -> None:
    if config.option.backend != "cpu":
        harness.settings.append(f"--backend={config.option.backend}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/e2e/" in str(item.path):
            item.add_marker(pytest.mark.e2e)
    if config.option.backend != "cpu":
        others = [item for item in items if "tests/e2e/" in str(item.path) and not is_for_any_backend(item)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]
    elif not config.option.every_launcher:
        repeats = [item for item in items if is_repeat(item)]
        config.hook.pytest_deselected(items=repeats)
        items[:] = [item for item in items if not is_repeat(item)]


@pytest.fixture(scope="session", params=["local", "ray"])
def launcher(request: pytest.FixtureRequest) -> str:
    """Who starts the rank processes."""
    return str(request.param)


@pytest.fixture(scope="session")
def running_service(launcher: str) -> Iterator[ServiceProcess]:
    """Ends with SIGTERM or Ctrl-C, and checks that nothing is left of the service, nor of its Ray cluster."""
    with running(launcher=launcher) as service:
        family = service.family()
        assert len(service.rank_pids) == 8
        assert any("raylet" in process.name() for process in family) == (launcher == "ray")
        yield service
        assert service.stop(signal.SIGINT if launcher == "ray" else signal.SIGTERM) == 0
        assert service.lines[-1] == "megamoe has stopped"
        assert gone(family)
        assert service.segments() == []


@pytest.fixture
async def group(running_service: ServiceProcess) -> AsyncIterator[AsyncMoeGroup]:
    """All ranks leased."""
    async with AsyncMoeGroup.connect(running_service.front, holder="test") as connected:
        yield connected


@pytest.fixture
def start_loadgen() -> Iterator[Callable[..., LoadGenerator]]:
    """Starts load generators: (service, folder of the report, options); none outlives its test."""
    started: list[LoadGenerator] = []

    def start(service: ServiceProcess, out: Path, *options: str) -> LoadGenerator:
        started.append(LoadGenerator(service, out, *options))
        return started[-1]

    yield start
    for generator in started:
        generator.kill()
