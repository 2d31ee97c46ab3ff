"""Launchers: who starts, watches and stops the rank processes of a group. Lifecycle only; no data goes through here.

Owns the choice between `local` and `ray`, and what both do alike.
Both launchers start fresh interpreters (never fork: a forked child of a process with live gRPC threads hangs), set
malloc and thread settings before they start, and refuse ranks on different hosts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from megamoe.errors import ConfigError, must_be
from service.config import ServiceConfig, child_environment
from service.net.info import Addresses
from service.rank.spec import RankSpec, RankUp


class Launcher(Protocol):
    """Starts one group at a time. Methods block and are called from one thread; `failures` from any."""

    def launch(self, specs: Sequence[RankSpec], *, timeout_s: float) -> list[RankUp]:
        """Start all ranks and wait until each is up, in rank order.

        Raises the error of the rank that failed, PeerTimeoutError naming ranks that are not up within timeout_s,
        ConfigError when the ranks cannot all run on one host. Nothing runs afterwards then.
        """

    def serve(self, addresses: Addresses) -> None:
        """Tell all ranks that all are up: from now on they say SERVING."""

    def failures(self) -> dict[int, str]:
        """Ranks that ended without being asked, each with what is known; empty while all live.

        Raises UnavailableError when the launcher's own processes are gone.
        """

    def stop(self, *, timeout_s: float) -> None:
        """Ask all ranks to stop; who has not within timeout_s is killed. Safe to call twice."""

    def close(self) -> None:
        """Give back what the launcher itself started."""


def open_launcher(config: ServiceConfig) -> Launcher:
    """The launcher that the configuration names. Raises ConfigError when it cannot work here."""
    if config.launcher == "local":
        from service.launch.local_launcher import LocalLauncher

        return LocalLauncher()
    try:
        from service.launch.ray_launcher import RayLauncher
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"launcher ray needs the package {error.name}: install it, or use --launcher local"
        ) from error
    return RayLauncher(config)


def rank_environment(config: ServiceConfig, inherited_path: str = "") -> dict[str, str]:
    """Variables for a rank process; this checkout comes first on its path, so that all ranks run the same code."""
    root = str(Path(__file__).resolve().parents[2])
    path = root if not inherited_path else f"{root}:{inherited_path}"
    return {**child_environment(config), "PYTHONPATH": path}


def check_ranks(ups: Sequence[RankUp]) -> None:
    """What only all ranks together tell. Raises ConfigError.

    Expert parallelism here means one host: the ranks write into each other's memory. And one set of weights, also when
    somebody writes a checkpoint while it is read.
    """
    hosts = {up.host for up in ups}
    if len(hosts) > 1:
        said = ", ".join(f"rank {up.rank}: {up.host}" for up in ups)
        raise ConfigError(
            f"all ranks must run on one host, since they share its memory, got {len(hosts)} hosts ({said})"
        )
    if len({up.weights_version for up in ups}) > 1:
        said = ", ".join(f"rank {up.rank}: {up.weights_version}" for up in ups)
        raise ConfigError(must_be("weights_version", "equal on all ranks", said))


def cpus_per_rank(num_ranks: int, have: float, host: str, wanted: float) -> float:
    """CPUs that a scheduler reserves for each rank: `wanted`, or with 0 an equal share of the host's, at most 1.

    Raises ConfigError when the ranks do not fit on that one host.
    """
    # Ray counts CPUs in ten-thousandths; a share must be rounded down or eight of them do not fit.
    cpus = wanted or min(1.0, math.floor(have / num_ranks * 1e4) / 1e4)
    if cpus <= 0 or cpus * num_ranks > have + 1e-6:
        raise ConfigError(
            f"one host must have {num_ranks} x {cpus:g} CPUs (all ranks and the front share one host's memory; expert "
            f"parallelism across hosts is not supported), got {have:g} on {host}"
        )
    return cpus


def gpus_per_rank(num_ranks: int, have: float) -> float:
    """What a scheduler reserves of a GPU for each rank, of `have` on the host: all of it, or an equal share with the
    other ranks on it. 0 where the scheduler knows of no GPU: ranks then use what they find, unreserved."""
    return math.floor(1e4 / math.ceil(num_ranks / int(have))) / 1e4 if have >= 1 else 0.0
