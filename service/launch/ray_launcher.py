"""RayLauncher: rank processes as actors of a Ray placement group. The only importer of ray.

Owns: the actors, their placement group (STRICT_PACK: all on one host) and, if it started one, the local Ray cluster.
Ray is lifecycle only: it places, starts, watches and kills; requests never go through it. Actors are not restarted by
Ray (a rank alone cannot rejoin): the supervisor starts the whole group again with a new generation.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megamoe.errors import (
    ConfigError,
    MegaMoeError,
    PeerTimeoutError,
    UnavailableError,
    error_from_code,
    must_be,
)
from service.config import ServiceConfig
from service.launch.launcher import check_ranks, cpus_per_rank, gpus_per_rank, rank_environment
from service.net.info import Addresses
from service.rank.process import RankProcess
from service.rank.spec import RankSpec, RankUp

log = logging.getLogger("megamoe.launcher")

_PLACE_TIMEOUT_S = 60.0
_NAMESPACE = "megamoe"
_ALL_GPUS = {
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES": "1",
}
"""Ray else hides from a rank all GPUs but its own, or all where it reserves none; ranks write into each other's."""


class _RankActor:
    """A rank process in Ray's hands: the same RankProcess as everywhere."""

    def __init__(self, spec_json: str) -> None:
        self._process = RankProcess(RankSpec.from_json(spec_json))

    def start(self) -> dict[str, Any]:
        """{"up": ...} or {"failed": {code, message}}: errors travel as values, not pickled."""
        return self._process.start_and_tell()

    def serve(self, addresses: Addresses) -> None:
        self._process.serve(addresses)

    def wait(self) -> str:
        """Returns why the rank ended; the call dies with the process, which is how its death is noticed."""
        return self._process.wait()

    def stop(self) -> None:
        self._process.stop()


class RayLauncher:
    """See Launcher."""

    def __init__(self, config: ServiceConfig) -> None:
        self._connected_here = not ray.is_initialized()
        self._config = config
        # Its warnings at start are about signals and tokens, which are ours to see to; its errors are raised.
        logging.getLogger("ray").setLevel(logging.ERROR)
        self._connect()
        self._group: Any = None
        self._actors: list[Any] = []
        self._waits: list[Any] = []
        self._stopping = False

    def _connect(self) -> None:
        config = self._config
        try:
            ray.init(
                address=config.ray_address or "local",
                namespace=_NAMESPACE,
                include_dashboard=False if not config.ray_address else None,
                ignore_reinit_error=True,
                log_to_driver=True,
                logging_level=logging.WARNING,
                configure_logging=False,
            )
        except Exception as error:  # Ray raises bare Exceptions when its own processes do not start
            if config.ray_address:
                wanted = "a reachable Ray cluster, or empty to start one"
                raise ConfigError(
                    f"{must_be('ray_address', wanted, repr(config.ray_address))}: {error}"
                ) from error
            raise UnavailableError(
                f"Ray did not start on this host (--launcher local does without): {error}"
            ) from error

    def _reconnect(self) -> None:
        """A cluster of our own whose node has died is started again; another's is its owner's business."""
        if not self._connected_here or self._config.ray_address:
            return
        try:
            here = ray.get_runtime_context().get_node_id()
            if any(node["NodeID"] == here and node["Alive"] for node in ray.nodes()):
                return
        except Exception as error:  # whatever Ray raises without its own processes
            log.warning("Ray does not answer: %s", error)
        log.warning("Ray's node on this host is gone: Ray is started again")
        ray.shutdown()
        self._connect()

    def launch(self, specs: Sequence[RankSpec], *, timeout_s: float) -> list[RankUp]:
        self._stopping = False
        config = specs[0].config
        try:
            self._reconnect()
            self._group = self._place(len(specs), config)
            options = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": 4}
            make: Any = ray.remote
            # Variables given here replace a worker's: the path that this process was given goes along.
            variables = rank_environment(config, os.environ.get("PYTHONPATH", ""))
            env = {"env_vars": variables | _ALL_GPUS}
            actor_type = make(**options, runtime_env=env)(_RankActor)
            bundle = self._group.bundle_specs[0]
            self._actors = [
                actor_type.options(
                    num_cpus=bundle["CPU"],
                    num_gpus=bundle.get("GPU", 0.0),
                    name=f"{spec.group_name}-{spec.rank}",
                    scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, spec.rank),
                ).remote(spec.to_json())
                for spec in specs
            ]
            ups = self._wait_up(timeout_s)
            check_ranks(ups)
            self._waits = [actor.wait.remote() for actor in self._actors]
        except BaseException as error:
            self.stop(timeout_s=2.0)
            if isinstance(error, MegaMoeError) or not isinstance(error, Exception):
                raise
            raise UnavailableError(f"Ray did not start the ranks: {type(error).__name__}: {error}") from error
        return ups

    def _place(self, num_ranks: int, config: ServiceConfig) -> Any:
        """A placement group with a bundle per rank, all on this host: the front shares the ranks' memory too. Of GPUs
        that Ray knows of, backends on GPUs reserve what they use.

        Raises ConfigError when this host has not the room.
        """
        here_id = ray.get_runtime_context().get_node_id()
        here = next(node for node in ray.nodes() if node["NodeID"] == here_id)
        name, have = here["NodeManagerHostname"], here["Resources"].get("CPU", 0.0)
        cpus = cpus_per_rank(num_ranks, have, name, config.rank_cpus)
        gpus = gpus_per_rank(num_ranks, here["Resources"].get("GPU", 0.0)) if config.on_gpu else 0.0
        bundle = {"CPU": cpus, f"node:{here['NodeManagerAddress']}": 0.001} | ({"GPU": gpus} if gpus else {})
        group = placement_group([bundle] * num_ranks, strategy="STRICT_PACK")
        if not group.wait(_PLACE_TIMEOUT_S):
            remove_placement_group(group)
            free = ray.available_resources()
            raise ConfigError(
                f"this host must have {num_ranks} x {cpus:g} free CPUs and {num_ranks} x {gpus:g} free GPUs "
                f"within {_PLACE_TIMEOUT_S} s, got {free.get('CPU', 0.0):g} free CPUs and "
                f"{free.get('GPU', 0.0):g} free GPUs in the cluster"
            )
        return group

    def _wait_up(self, timeout_s: float) -> list[RankUp]:
        rank_of = {actor.start.remote(): rank for rank, actor in enumerate(self._actors)}
        ups: dict[int, RankUp] = {}
        pending = list(rank_of)
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=timeout_s)
            if not done:
                missing = sorted(rank_of[ref] for ref in pending)
                raise PeerTimeoutError(
                    f"all ranks must be up within {timeout_s} s, ranks {missing} are not", missing
                )
            rank = rank_of[done[0]]
            try:
                said = ray.get(done[0])
            except RayError as error:
                raise UnavailableError(f"rank {rank} ended before it was up: {error}") from error
            if "failed" in said:
                failed = said["failed"]
                raise error_from_code(failed["code"], f"rank {rank}: {failed['message']}")
            ups[rank] = RankUp(**said["up"])
        return [ups[rank] for rank in range(len(ups))]

    def serve(self, addresses: Addresses) -> None:
        with contextlib.suppress(RayError):  # a dead or stopped rank is found by `failures`, or by the probes
            ray.get([actor.serve.remote(addresses) for actor in self._actors], timeout=10.0)

    def failures(self) -> dict[int, str]:
        if self._stopping or not self._waits:
            return {}
        try:
            done, _ = ray.wait(self._waits, num_returns=len(self._waits), timeout=0)
        except Exception as error:
            raise UnavailableError(f"Ray does not answer: {type(error).__name__}: {error}") from error
        return {self._waits.index(ref): _why(ref) for ref in done}

    def stop(self, *, timeout_s: float) -> None:
        self._stopping = True
        stops = [actor.stop.remote() for actor in self._actors]
        with contextlib.suppress(RayError):
            ray.get(stops, timeout=max(timeout_s, 0.1))
        for actor in self._actors:
            with contextlib.suppress(RayError, ValueError):
                ray.kill(actor, no_restart=True)
        if self._group is not None:
            with contextlib.suppress(RayError):
                remove_placement_group(self._group)
        self._actors, self._waits, self._group = [], [], None

    def close(self) -> None:
        """Stops the cluster that this launcher started; one that was there before only loses a connection."""
        self.stop(timeout_s=0.1)
        if self._connected_here:
            ray.shutdown()


def _why(ref: Any) -> str:
    try:
        return str(ray.get(ref))
    except RayError as error:
        return str(error).splitlines()[0]
