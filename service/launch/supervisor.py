"""The supervisor: `megamoe serve`. Hosts the front, has a launcher start the ranks, again when one dies.

Owns: the life of a group from its board to the last segment in /dev/shm. A group is one incarnation (generation): when
a rank ends, everyone who waits is told, all ranks are stopped and a new group with a new generation takes over.
Nothing of a service outlives `run`: no process, no shared memory, no Ray cluster that it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any

from megamoe import PathPolicy, unlink_all
from megamoe.errors import MegaMoeError, UnavailableError
from service.board.board import Board
from service.config import ServiceConfig
from service.front.front import Front
from service.front.group import FrontGroup
from service.launch import leftovers
from service.launch.launcher import Launcher, open_launcher
from service.launch.memory import check_fits
from service.messages import ErrorReply
from service.net.info import Addresses, State
from service.rank import warmup
from service.rank.spec import RankSpec, RankUp
from service.ring.bell import FIRST_RING_WRITER
from service.ring.ring import RingProducer
from service.ring.specs import FRONT_RING

log = logging.getLogger("megamoe.supervisor")

_WATCH_PERIOD_S = 0.1
_PROBE_PERIOD_S = 1.0
_RESTART_PAUSES_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
_STABLE_S = 60.0
"""A group that served this long starts the pauses between restarts afresh."""


class Supervisor:
    """One service. `on_up` is told the addresses each time that a group is ready."""

    def __init__(self, config: ServiceConfig, *, on_up: Callable[[State], None] | None = None) -> None:
        self.config = config
        self._on_up = on_up or (lambda state: None)
        self._stop = asyncio.Event()
        self._name = f"megamoe-{secrets.token_hex(4)}"
        policy = warmup.served_policy(config.bundle, PathPolicy.of(config.deployment))
        # Seconds of now: a restarted service never repeats a generation that some caller still holds.
        self.state = State(generation=int(time.time()), policy=policy)
        self.front = Front(config, self.state)
        self._was_up = False
        self._board: Board | None = None
        self._front_board: Board | None = None

    def stop(self) -> None:
        """End `run`. Safe from a signal handler of the event loop."""
        self._stop.set()

    async def run(self) -> None:
        """Serve until `stop`, SIGINT or SIGTERM. Raises what made the first start impossible; with restart off also
        UnavailableError when a rank dies."""
        self._take_signals()
        leftovers.remove_leftovers()
        with leftovers.marked(self._name), leftovers.with_janitor(self._name):
            try:
                await self._serve()
            finally:
                await self.front.stop()

    async def _serve(self) -> None:
        launcher: Launcher | None = None
        try:
            host, http_port = self.config.public_host, self.front.start_http()
            # Before any gRPC server: a launcher may fork what it starts, and gRPC's threads do not survive a fork.
            launcher = await asyncio.to_thread(open_launcher, self.config)
            port = await self.front.start()
            self.state.addresses = Addresses(front=f"{host}:{port}", http=f"{host}:{http_port}")
            self._take_signals()
            await self._serve_groups(launcher)
        finally:
            await self.front.set_ready("stopping")
            await self._down("the service stops")
            if launcher is not None:
                await asyncio.to_thread(launcher.stop, timeout_s=self.config.stop_timeout_s)
                await asyncio.to_thread(launcher.close)
            self._clean_up()

    def _take_signals(self) -> None:
        """SIGINT and SIGTERM mean `stop`. Again whenever Ray may have started: it sets handlers of its own."""
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(NotImplementedError, RuntimeError):
                asyncio.get_running_loop().add_signal_handler(number, self.stop)

    async def _serve_groups(self, launcher: Launcher) -> None:
        num_failures = 0
        while not self._stop.is_set():
            started_s = time.monotonic()
            try:
                ups = await self._until_stop(launcher, self._start_group(launcher))
                self._take_signals()
                if ups is None:
                    return
                self._was_up = True
                self._on_up(self.state)
                reason = await self._watch(launcher)
            except MegaMoeError as error:
                if not self._was_up:
                    raise
                reason = str(error)
            if self._stop.is_set():
                return
            log.error("group %s failed: %s", self.state.generation, reason)
            await self.front.set_ready(f"the group restarts: {reason}")
            await self._down(reason)
            await asyncio.to_thread(launcher.stop, timeout_s=2.0)
            self._clean_up()
            if not self.config.restart:
                raise UnavailableError(f"a rank is gone and restart is off: {reason}")
            if time.monotonic() - started_s > _STABLE_S:
                num_failures = 0
            pause_s = _RESTART_PAUSES_S[min(num_failures, len(_RESTART_PAUSES_S) - 1)]
            num_failures += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), pause_s)
            self.state.generation += 1

    async def _until_stop(
        self, launcher: Launcher, start: Coroutine[Any, Any, list[RankUp]]
    ) -> list[RankUp] | None:
        """The ranks once they are up, or None when the service is stopped first."""
        task = asyncio.create_task(start)
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if self._stop.is_set():
            # The launcher's thread cannot be cancelled; without ranks it ends by itself.
            await asyncio.to_thread(launcher.stop, timeout_s=2.0)
            with contextlib.suppress(MegaMoeError):
                await task
            return None
        return task.result()

    # ------------------------------------------------------------------------------ one group

    async def _start_group(self, launcher: Launcher) -> list[RankUp]:
        config, state = self.config, self.state
        check_fits(config)
        state.group_name = group_name = f"{self._name}-{state.generation}"
        num_ranks = config.moe_shape.num_ranks
        num_warm_up = len(warmup.warm_up_steps(config.bundle, PathPolicy.of(config.deployment)))
        self._board = Board.create(
            group_name,
            num_ranks=num_ranks,
            max_micro_batches=config.max_micro_batches,
            generation=state.generation,
            first_sequence=num_warm_up + 1,
        )
        specs = [
            RankSpec(config=config, rank=rank, generation=state.generation, group_name=group_name)
            for rank in range(num_ranks)
        ]
        ups = await asyncio.to_thread(launcher.launch, specs, timeout_s=config.start_timeout_s)
        host = config.public_host
        state.addresses = Addresses(
            front=state.addresses.front,
            http=state.addresses.http,
            ranks=tuple(f"{host}:{up.port}" for up in ups),
            metrics=tuple(f"{host}:{up.metrics_port}" for up in ups),
        )
        await asyncio.to_thread(launcher.serve, state.addresses)
        self.front.group = await asyncio.to_thread(self._open_front_group, group_name)
        # What an operator said to an earlier generation still holds.
        await asyncio.to_thread(self.front.group.stage_policy, state.policy)
        if state.draining:
            await asyncio.to_thread(self.front.group.drain, True)
        await self.front.set_ready("")
        return ups

    def _open_front_group(self, group_name: str) -> FrontGroup:
        board = Board.attach(group_name, FIRST_RING_WRITER + FRONT_RING)
        self._front_board = board
        rings = [
            RingProducer.attach(group_name, rank, FRONT_RING, board.bell(rank))
            for rank in range(board.num_ranks)
        ]
        return FrontGroup(rings, step_timeout_s=self.config.step_timeout_s)

    async def _watch(self, launcher: Launcher) -> str:
        """Returns why the group failed, or "" on stop. Keeps readiness in step with what the ranks really do."""
        next_probe_s = time.monotonic() + _PROBE_PERIOD_S
        probe: asyncio.Task[str] | None = None
        while not self._stop.is_set():
            failures = await asyncio.to_thread(launcher.failures)
            if failures:
                return "; ".join(f"rank {rank}: {why}" for rank, why in sorted(failures.items()))
            assert self._board is not None
            down = self._board.down
            if down is not None:
                return str(down.message)
            if probe is None and time.monotonic() >= next_probe_s:
                probe = asyncio.create_task(asyncio.to_thread(self._probe))
            if probe is not None and probe.done():
                reason = probe.result()
                probe, next_probe_s = None, time.monotonic() + _PROBE_PERIOD_S
                if reason != self.state.not_ready_reason:
                    log.warning("readiness: %s", reason or "ready")
                await self.front.set_ready(reason)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _WATCH_PERIOD_S)
        return ""

    def _probe(self) -> str:
        """Why the group is not ready: a step loop that does not answer, though its process lives."""
        group = self.front.group
        if group is None:
            return "no group is up"
        try:
            group.probe(self.state.policy)
        except MegaMoeError as error:
            return f"steps make no progress: {error}"
        return ""

    async def _down(self, reason: str) -> None:
        """Everybody who waits for this group is told why it will not answer."""
        group, self.front.group = self.front.group, None
        if self._board is not None:
            with contextlib.suppress(MegaMoeError):
                self._board.post_down(ErrorReply(code="unavailable", message=f"the group is down: {reason}"))
        if group is not None:
            await asyncio.to_thread(group.close)

    def _clean_up(self) -> None:
        for board in (self._front_board, self._board):
            if board is not None:
                board.close()
        self._board = self._front_board = None
        unlink_all(self._name)
