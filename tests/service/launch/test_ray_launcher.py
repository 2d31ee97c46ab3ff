"""What Ray is asked to reserve, with a real cluster that believes that it has GPUs."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import ray

from service.config import load_config
from service.launch.ray_launcher import RayLauncher


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=4, num_gpus=2, include_dashboard=False, configure_logging=False)
    yield
    ray.shutdown()


def _free_gpus(wanted: float) -> float:
    """What Ray says is free, which lags a little behind what it has placed."""
    deadline_s = time.monotonic() + 10.0
    while time.monotonic() < deadline_s and ray.available_resources().get("GPU", 0.0) != wanted:
        time.sleep(0.1)
    return float(ray.available_resources().get("GPU", 0.0))


@pytest.mark.parametrize(("backend", "gpus"), [("hopper", 2.0), ("gfx950", 2.0), ("cpu", 0.0)])
def test_ranks_reserve_the_gpus_that_they_use(backend: str, gpus: float, cluster: None) -> None:
    config = load_config(overrides={"backend": backend}, env=False)
    launcher = RayLauncher(config)
    group = launcher._place(8, config)
    try:
        assert sum(bundle.get("GPU", 0.0) for bundle in group.bundle_specs) == gpus
        assert _free_gpus(2.0 - gpus) == 2.0 - gpus
    finally:
        ray.util.remove_placement_group(group)
        launcher.close()
    assert ray.is_initialized(), "the cluster is its owner's"
