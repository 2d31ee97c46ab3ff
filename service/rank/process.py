"""What every rank process runs, whoever started it: runtime, weights, warm-up, step loop, gRPC, metrics.

Owns: the order of these at start and stop. The step loop owns the runtime from the end of the warm-up; one thread runs
the event loop of the gRPC server. `python -m service.rank.process` is the process of the local launcher: it is told by
lines of JSON on standard input and stops when that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from megamoe import (
    LayerWeights,
    PathPolicy,
    Runtime,
    checkpoint_version,
    load_layer,
    random_layer_weights,
    random_version,
)
from megamoe.errors import BindingError, InternalError, MegaMoeError, must_be
from service.board.board import Board, board_name
from service.board.layout import RANKS_AT, rank_at
from service.config import threads_per_rank
from service.metrics import Balance, RankMetrics
from service.net.grpc_server import LAYER_SERVICE, Health, listen, make_server
from service.net.info import Addresses, State, service_info
from service.rank import warmup
from service.rank.colocated import Colocated
from service.rank.server import RankServicer
from service.rank.spec import RankSpec, RankUp, up_to_json
from service.rank.step_loop import LoopSettings, StepLoop
from service.ring.async_ring import AsyncRing
from service.ring.bell import FIRST_RING_WRITER
from service.ring.ring import RingConsumer, RingProducer
from service.ring.specs import SERVICER_RING, ring_specs

log = logging.getLogger("megamoe.rank")

_HEALTH_PERIOD_S = 0.25
_STUCK_GRACE_S = 5.0
"""What a step may take beyond twice its timeout, before its rank is not ready."""
_SWITCH_INTERVAL_S = 1e-4
"""How long another thread may keep the interpreter that the device thread wants; the default, 5 ms, is many layers."""
_EXIT_GRACE_S = 10.0
_START_SHARE = 0.8
"""Share of start_timeout_s that ranks wait for each other: they know who is missing, their launcher does not."""


class RankProcess:
    """One rank. `start` once; the other methods from any thread."""

    def __init__(self, spec: RankSpec) -> None:
        self.spec = spec
        self.config = spec.config
        self._ended = threading.Event()
        self._reason = ""
        self._open = contextlib.ExitStack()
        self._rpc: threading.Thread | None = None
        self._stop_rpc: Callable[[], None] = lambda: None
        self._serving = threading.Event()
        self.is_up = False
        self._stop_lock = threading.Lock()
        self._version = 0
        policy = warmup.served_policy(self.config.bundle, PathPolicy.of(self.config.deployment))
        self._state = State(generation=spec.generation, policy=policy)

    # ------------------------------------------------------------------------------ start and end

    def start(self) -> RankUp:
        """Open, bind, warm up, listen. Collective: returns when this rank is up, which needs all of them.

        Raises what made it impossible; nothing is left running then.
        """
        try:
            loop, metrics = self._open_device()
            port, metrics_port = self._open_rpc(loop, metrics)
        except BaseException:
            self._close()
            raise
        self.is_up = True
        return RankUp(
            rank=self.spec.rank,
            pid=os.getpid(),
            host=socket.gethostname(),
            port=port,
            metrics_port=metrics_port,
            weights_version=self._version,
        )

    def start_and_tell(self) -> dict[str, Any]:
        """`start` as a value that any launcher can carry: {"up": ...} or {"failed": {"code", "message"}}."""
        try:
            return {"up": up_to_json(self.start())}
        except MegaMoeError as error:
            return {"failed": {"code": error.code, "message": str(error)}}
        except Exception as error:
            log.exception("rank %d failed to start", self.spec.rank)
            return {"failed": {"code": InternalError.code, "message": f"{type(error).__name__}: {error}"}}

    def serve(self, addresses: Addresses) -> None:
        """All ranks are up: say SERVING."""
        self._state.addresses = addresses
        self._serving.set()

    def wait(self) -> str:
        """Block until the rank has ended; returns why."""
        self._ended.wait()
        return self._reason

    def stop(self) -> None:
        """End in order: no new requests, what was announced finishes or is refused, memory goes back. Idempotent.

        A rank that is not up yet has nobody to be orderly for: whoever stops it kills the process.
        """
        if self.is_up:
            self._close()
        else:
            self._end("stopped before it was up")

    def _close(self) -> None:
        with self._stop_lock:
            self._serving.clear()
            self._stop_rpc()
            if self._rpc is not None:
                self._rpc.join(_EXIT_GRACE_S)
            self._open.close()
            self._end("stopped")

    def _end(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._ended.set()

    # ------------------------------------------------------------------------------ the device

    def _weights(self, layer_idx: int) -> LayerWeights:
        config, shape, rank = self.config, self.config.moe_shape, self.spec.rank
        if config.checkpoint:
            return load_layer(Path(config.checkpoint), shape, layer_idx, rank=rank)
        return random_layer_weights(shape, seed=config.weights_seed, layer_idx=layer_idx, rank=rank)

    def _bind_all(self, runtime: Runtime) -> None:
        self._version = self._weights_version()
        for layer_idx in range(self.config.moe_shape.num_layers):
            runtime.bind_layer(layer_idx, self._weights(layer_idx))
        if self._weights_version() != self._version:
            wanted = f"left alone while rank {self.spec.rank} reads it"
            raise BindingError(must_be(f"checkpoint {self.config.checkpoint}", wanted, "files that changed"))

    def _weights_version(self) -> int:
        config = self.config
        if config.checkpoint:
            return checkpoint_version(Path(config.checkpoint), config.moe_shape.num_layers)
        return random_version(config.weights_seed)

    def _open_device(self) -> tuple[StepLoop, RankMetrics]:
        """Runtime, weights, warm-up and the running step loop; all closed with self._open, last opened first."""
        config, rank, group_name, opened = self.config, self.spec.rank, self.spec.group_name, self._open
        timeout_s, shape = _START_SHARE * config.start_timeout_s, config.moe_shape
        torch.set_num_threads(threads_per_rank(config))
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        board = Board.attach(group_name, rank, timeout_s=timeout_s)
        opened.callback(board.close)
        runtime = Runtime.open(config.deployment, rank=rank, group_name=group_name, timeout_s=timeout_s)
        opened.callback(runtime.close)
        self._bind_all(runtime)
        warmup.run(runtime, PathPolicy.of(config.deployment), timeout_s=timeout_s)

        balance = Balance.open(group_name, rank, shape.num_ranks, timeout_s=timeout_s)
        opened.callback(balance.close)
        metrics = RankMetrics(rank=rank, model_name=config.label, bundle=config.bundle, balance=balance)
        opened.callback(metrics.close)
        metrics.generation.set(self.spec.generation)
        metrics.weights_version.set(self._version)
        metrics.record_policy(runtime.policy)
        rings = []
        for ring_idx, ring_spec in enumerate(ring_specs(config)):
            rings.append(RingConsumer.create(group_name, rank, ring_idx, ring_spec))
            opened.callback(rings[-1].close)
        settings = LoopSettings(
            step_timeout_s=config.step_timeout_s,
            lease_timeout_s=config.lease_timeout_s,
            spin_s=config.loop_spin_s,
            weights_version=self._version,
        )
        loop = StepLoop(board, rank, runtime, rings, settings=settings, observer=metrics)
        for ring in rings:
            loop.door.pin(ring)
        opened.callback(loop.stop, _EXIT_GRACE_S)
        metrics.watch(
            {
                "in_flight": lambda: loop.in_flight,
                "queue_depth": lambda: loop.queue_depth,
                "last_progress": lambda: _unix_s(board.last_progress_s(rank)),
            }
        )
        board.mark_progress(rank)
        loop.start()
        return loop, metrics

    # ------------------------------------------------------------------------------ the rpc thread

    def _open_rpc(self, loop: StepLoop, metrics: RankMetrics) -> tuple[int, int]:
        """Start the event loop's thread; returns the gRPC and the metrics port once it listens."""
        up: Future[tuple[int, int]] = Future()

        def run() -> None:
            try:
                asyncio.run(self._serve_rpc(loop, metrics, up))
            except BaseException as error:
                if not up.done():
                    up.set_exception(error)
                    return
                log.exception("rank %d: the event loop failed", self.spec.rank)
                self._end(f"the event loop failed: {error!r}")

        self._rpc = threading.Thread(target=run, name="rpc", daemon=True)
        self._rpc.start()
        return up.result(_EXIT_GRACE_S)

    async def _serve_rpc(
        self, step_loop: StepLoop, metrics: RankMetrics, up: Future[tuple[int, int]]
    ) -> None:
        config, rank, group_name = self.config, self.spec.rank, self.spec.group_name
        loop, stopping = asyncio.get_running_loop(), asyncio.Event()
        self._stop_rpc = functools.partial(_call_soon, loop, stopping.set)
        with (
            contextlib.closing(Board.attach(group_name, FIRST_RING_WRITER + SERVICER_RING)) as board,
            contextlib.closing(
                RingProducer.attach(group_name, rank, SERVICER_RING, board.bell(rank))
            ) as producer,
        ):
            ring = AsyncRing(producer)
            servicer = RankServicer(
                shape=config.moe_shape,
                ring=ring,
                info=lambda: service_info(config, self._state),
                metrics=metrics,
                step_timeout_s=config.step_timeout_s,
                colocated=self._colocated(step_loop),
            )
            server, health = make_server(
                {LAYER_SERVICE: servicer.handlers()},
                max_receive_bytes=config.message_bytes,
                max_send_bytes=config.message_bytes,
            )
            try:
                port = listen(server, config.host, config.rank_port and config.rank_port + rank, "rank_port")
                await health.set(False)
                await server.start()
                metrics_port = metrics.serve(config.host, config.metrics_port and config.metrics_port + rank)
                up.set_result((port, metrics_port))
                await self._keep_health(health, board, ring, step_loop, metrics, stopping)
            finally:
                await server.stop(1.0)
                await ring.close()

    def _colocated(self, loop: StepLoop) -> Colocated:
        """The rings that callers on this host may ask for."""
        config, group_name, rank = self.config, self.spec.group_name, self.spec.rank
        return Colocated(
            loop.door,
            config.deployment,
            group_name=group_name,
            rank=rank,
            bell=(board_name(group_name), RANKS_AT, rank_at(rank) - RANKS_AT),
            max_rings=config.max_colocated_rings,
            num_control_slots=config.ring_slots,
            timeout_s=config.step_timeout_s,
        )

    async def _keep_health(
        self,
        health: Health,
        board: Board,
        ring: AsyncRing,
        loop: StepLoop,
        metrics: RankMetrics,
        stopping: asyncio.Event,
    ) -> None:
        """SERVING while steps make progress: all ranks are up, the group is not down, what waits is answered.

        A rank whose device hangs ends when it has not been ready for as long again, and its group starts anew: waiting
        for peers is bounded on the device, the driver's own waiting is not.
        """
        limit_s = 2 * self.config.step_timeout_s + _STUCK_GRACE_S
        idle_at, hung_s = time.monotonic(), 0.0
        while not stopping.is_set():
            if loop.failure is not None:
                self._end(f"the step loop failed: {loop.failure!r}")
            if not ring.num_waiting and not loop.in_flight:
                idle_at = time.monotonic()
            stuck = time.monotonic() - max(idle_at, board.last_progress_s(self.spec.rank)) > limit_s
            # Not by the clock: a process that was stopped (SIGSTOP) goes on with its step.
            hung_s = hung_s + _HEALTH_PERIOD_S if stuck else 0.0
            if hung_s > limit_s:
                self._end(f"the device hangs: a step has made no progress for more than {2 * limit_s:.1f} s")
            ready = self._serving.is_set() and board.down is None and not stuck
            self._state.not_ready_reason = "" if ready else "steps make no progress on this rank"
            self._state.draining = loop.draining
            self._state.policy = loop.policy
            metrics.ready.set(ready)
            await health.set(ready and not loop.draining)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), _HEALTH_PERIOD_S)
        await health.set(False)


def _unix_s(monotonic_s: float) -> float:
    """A time.monotonic() value as Unix time."""
    return time.time() - time.monotonic() + monotonic_s


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended already
        loop.call_soon_threadsafe(call)


def main() -> int:
    """The process of the local launcher; returns its exit status."""
    # Standard output is the launcher's; whatever else prints goes to standard error.
    tell = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    spec = RankSpec.from_json(sys.stdin.readline())
    logging.basicConfig(
        level=spec.config.log_level.upper(),
        format=f"%(asctime)s %(levelname).1s rank {spec.rank} %(name)s: %(message)s",
    )
    process = RankProcess(spec)
    threading.Thread(target=_follow, args=(process,), name="lifeline", daemon=True).start()
    said = process.start_and_tell()
    with contextlib.suppress(BrokenPipeError):
        tell.write(json.dumps(said) + "\n")
        tell.flush()
    if "failed" in said:
        return 1
    reason = process.wait()
    if reason != "stopped":
        log.error("rank %d ends: %s", spec.rank, reason)
        process.stop()
        return 1
    return 0


def _follow(process: RankProcess) -> None:
    """Do what the launcher says; when it says nothing more, because it is done or dead, end."""
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        if "serve" in order:
            process.serve(Addresses.from_table(order["serve"]))
    if process.is_up:
        guard = threading.Timer(_EXIT_GRACE_S + 2.0, os._exit, (1,))
        guard.daemon = True
        guard.start()
    process.stop()
    if not process.is_up:
        os._exit(1)


if __name__ == "__main__":
    raise SystemExit(main())
