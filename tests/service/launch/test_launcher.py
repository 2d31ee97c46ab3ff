"""What every launcher must refuse or pass on, without starting anything."""

from __future__ import annotations

import os
import subprocess

import pytest

from megamoe.backends import hopper
from megamoe.errors import ConfigError, UnavailableError
from service.config import load_config
from service.launch.launcher import check_ranks, cpus_per_rank, gpus_per_rank, rank_environment
from service.launch.local_launcher import LocalLauncher
from service.rank.spec import RankSpec, RankUp


def up(rank: int, *, host: str = "here", weights_version: int = 5) -> RankUp:
    return RankUp(rank=rank, pid=1, host=host, port=1, metrics_port=1, weights_version=weights_version)


def test_ranks_on_different_hosts_are_refused_with_the_reason() -> None:
    ups = [up(r, host=f"host{r // 4}") for r in range(8)]
    with pytest.raises(ConfigError, match=r"one host, .* got 2 hosts \(rank 0: host0, .*rank 7: host1\)"):
        check_ranks(ups)
    check_ranks(ups[:4])


def test_ranks_with_different_weights_are_refused_naming_all() -> None:
    """A checkpoint that is written while the ranks start."""
    said = "weights_version must be equal on all ranks, got rank 0: 5, rank 1: 5, rank 2: 6, rank 3: 5"
    with pytest.raises(ConfigError, match=said):
        check_ranks([up(rank, weights_version=5 + (rank == 2)) for rank in range(4)])


@pytest.mark.parametrize(
    ("num_ranks", "have", "wanted", "share"),
    [
        (8, 2.0, 0.0, 0.25),
        (8, 3.0, 0.0, 0.375),
        (8, 64.0, 0.0, 1.0),
        (8, 1.0, 0.0, 0.125),
        (8, 2.0, 0.2, 0.2),
        (8, 0.7, 0, 0.0875),
    ],
)
def test_eight_ranks_fit_on_any_number_of_cores(
    num_ranks: int, have: float, wanted: float, share: float
) -> None:
    got = cpus_per_rank(num_ranks, have, "here", wanted)
    assert got == pytest.approx(share)
    assert got * num_ranks <= have + 1e-6


def test_more_than_the_host_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="one host must have 8 x 1 CPUs .* got 4 on here"):
        cpus_per_rank(8, 4.0, "here", 1.0)
    with pytest.raises(ConfigError, match="got 0 on here"):
        cpus_per_rank(8, 0.0, "here", 0.0)


@pytest.mark.parametrize(
    ("num_ranks", "have", "share"),
    [
        (8, 8.0, 1.0),
        (2, 8.0, 1.0),
        (8, 2.0, 0.25),
        (8, 3.0, 0.3333),
        (8, 1.0, 0.125),
        (1, 1.0, 1.0),
        (8, 0.0, 0.0),
    ],
)
def test_ranks_fit_on_gpus_that_each_take_equally_many(num_ranks: int, have: float, share: float) -> None:
    got = gpus_per_rank(num_ranks, have)
    assert got == share
    on_one = int(1.0 / got) if got else num_ranks
    assert on_one * max(have, 1.0) >= num_ranks


def test_a_rank_is_told_everything_by_value() -> None:
    config = load_config(overrides={"port": 7, "small_m_capacities": [8]}, env=False)
    spec = RankSpec(config=config, rank=3, generation=1 << 40, group_name="megamoe-x-1")
    assert RankSpec.from_json(spec.to_json()) == spec
    env = rank_environment(config, "/elsewhere")
    assert env["MALLOC_MMAP_THRESHOLD_"] == "1073741824"
    assert env["PYTHONPATH"].endswith(":/elsewhere")
    assert not [name for name in env if name.startswith("MEGAMOE_")]


def test_ranks_leave_a_gpu_queues_for_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's own default, whatever the supervisor has asked for by looking for GPUs as a process with many ranks."""
    queues = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setenv(queues, "7")
    monkeypatch.delenv(queues)  # as it is when a service starts; put back afterwards
    hopper.separate_queues()
    assert os.environ[queues] == "32"
    assert rank_environment(load_config(env=False))[queues] == "8"


def test_a_stop_before_a_rank_was_told_what_to_do_ends_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launching thread may write to a rank whose pipe the stopping thread has closed just now."""
    launcher, started, tell = LocalLauncher(), [], LocalLauncher._tell

    def stop_first(child: subprocess.Popen[str], line: str) -> None:
        if child not in started:
            started.append(child)
            launcher.stop(timeout_s=0.0)
        tell(child, line)

    monkeypatch.setattr(LocalLauncher, "_tell", staticmethod(stop_first))
    config = load_config(env=False)
    specs = [
        RankSpec(config=config, rank=rank, generation=1, group_name="megamoe-none-1") for rank in range(2)
    ]
    with pytest.raises(UnavailableError, match="stops while its ranks are being started"):
        launcher.launch(specs, timeout_s=20.0)
    assert [child.poll() is None for child in started] == [False]
