"""What every rank process runs, whoever started it: runtime, weights, warm-up, step loop, gRPC, metrics.

Owns: the order of these at start and stop. One thread owns the device (it opens the runtime, binds, warms up and then
is the step loop); one thread runs the event loop of the gRPC server. `python -m service.rank_process` is the process of
the local launcher: it is told by lines of JSON on standard input and stops when that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from megamoe import PathPolicy, Runtime, random_layer_weights
from megamoe.errors import InternalError, MegaMoeError, PeerTimeoutError
from service import warmup
from service.board import FIRST_RING_WRITER, Board
from service.config import threads_per_rank
from service.grpc_server import LAYER_SERVICE, Health, listen, make_server
from service.info import Addresses, State, service_info
from service.launcher import RankSpec, RankUp, up_to_json
from service.metrics import RankMetrics
from service.rank_rings import SERVICER_RING
from service.rank_server import RankServicer
from service.ring import RingProducer
from service.ring_async import AsyncRing
from service.step_loop import StepLoop

log = logging.getLogger("megamoe.rank")

_HEALTH_PERIOD_S = 0.25
_EXIT_GRACE_S = 10.0


class RankProcess:
    """One rank. Methods may be called from any thread; `start` once."""

    def __init__(self, spec: RankSpec) -> None:
        self.spec = spec
        self.config = spec.config
        self._ended = threading.Event()
        self._reason = ""
        self._device = _Thread("device", self._own_device, self._end)
        self._rpc = _Thread("rpc", self._own_rpc, self._end)
        self._stop_rpc: Callable[[], None] = lambda: None
        self._serving = threading.Event()
        self._step_loop: StepLoop | None = None
        policy = warmup.served_policy(self.config.bundle, PathPolicy.of(self.config.deployment))
        self._state = State(generation=spec.generation, policy=policy)
        self._ports = (0, 0)
        self._metrics: RankMetrics | None = None

    # ------------------------------------------------------------------------------ life

    def start(self) -> RankUp:
        """Open, bind, warm up, listen. Collective: returns when this rank is up, which needs all of them.

        Raises what made it impossible; nothing is left running then.
        """
        timeout_s = self.config.start_timeout_s
        try:
            self._device.start_and_wait(timeout_s)
            self._rpc.start_and_wait(timeout_s)
        except BaseException:
            self.stop()
            raise
        port, metrics_port = self._ports
        return RankUp(
            rank=self.spec.rank,
            pid=os.getpid(),
            host=socket.gethostname(),
            port=port,
            metrics_port=metrics_port,
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
        """End in order: no new requests, what was announced finishes or is refused, memory goes back. Idempotent."""
        self._serving.clear()
        self._stop_rpc()
        self._rpc.join(_EXIT_GRACE_S)
        if self._step_loop is not None:
            self._step_loop.stop()
        self._device.join(_EXIT_GRACE_S)
        self._end("stopped")

    def _end(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._ended.set()

    # ------------------------------------------------------------------------------ the device thread

    def _own_device(self, started: Callable[[], None]) -> None:
        config, rank, group_name = self.config, self.spec.rank, self.spec.group_name
        torch.set_num_threads(threads_per_rank(config))
        timeout_s = config.start_timeout_s
        metrics = RankMetrics(rank=rank, model_name=config.label, bundle=config.bundle)
        self._metrics = metrics
        with (
            contextlib.closing(metrics),
            contextlib.closing(Board.attach(group_name, rank, timeout_s=timeout_s)) as board,
            Runtime.open(config.deployment, rank=rank, group_name=group_name, timeout_s=timeout_s) as runtime,
        ):
            shape = config.moe_shape
            for layer_idx in range(shape.num_layers):
                runtime.bind_layer(
                    layer_idx,
                    random_layer_weights(shape, seed=config.weights_seed, layer_idx=layer_idx, rank=rank),
                )
            warmup.run(runtime, PathPolicy.of(config.deployment), timeout_s=timeout_s)
            metrics.record_policy(runtime.policy)
            self._step_loop = make_step_loop(config, runtime, board, metrics)
            with contextlib.closing(self._step_loop):
                started()
                self._step_loop.run()

    # ------------------------------------------------------------------------------ the rpc thread

    def _own_rpc(self, started: Callable[[], None]) -> None:
        asyncio.run(self._serve_rpc(started))

    async def _serve_rpc(self, started: Callable[[], None]) -> None:
        config, rank, group_name, metrics = self.config, self.spec.rank, self.spec.group_name, self._metrics
        assert metrics is not None
        loop, stopping = asyncio.get_running_loop(), asyncio.Event()
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
            )
            server, health = make_server(
                {LAYER_SERVICE: servicer.handlers()},
                max_receive_bytes=config.message_bytes,
                max_send_bytes=config.message_bytes,
            )
            port = listen(server, config.host, config.rank_port and config.rank_port + rank, "rank_port")
            await health.set(False)
            await server.start()
            metrics_port = metrics.serve(config.host, config.metrics_port and config.metrics_port + rank)
            metrics.generation.set(self.spec.generation)
            self._ports = (port, metrics_port)
            self._stop_rpc = lambda: loop.call_soon_threadsafe(stopping.set)
            started()
            await self._keep_health(health, board, ring, stopping)
            await server.stop(1.0)
            await ring.close()

    async def _keep_health(
        self, health: Health, board: Board, ring: AsyncRing, stopping: asyncio.Event
    ) -> None:
        """SERVING while steps make progress: all ranks are up, the group is not down, the ring is answered."""
        limit_s = 2 * self.config.step_timeout_s + 5.0
        waiting_since = time.monotonic()
        while not stopping.is_set():
            if not ring.num_waiting or board.last_progress_s(self.spec.rank) > waiting_since:
                waiting_since = time.monotonic()
            stuck = time.monotonic() - waiting_since > limit_s
            ready = self._serving.is_set() and board.down is None and not stuck
            self._state.not_ready_reason = "" if ready else "steps make no progress"
            assert self._metrics is not None
            self._metrics.ready.set(ready)
            await health.set(ready)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), _HEALTH_PERIOD_S)
        await health.set(False)


class _Thread:
    """A thread with a start that can fail and an end that is noticed."""

    def __init__(
        self, name: str, target: Callable[[Callable[[], None]], None], on_end: Callable[[str], None]
    ) -> None:
        self._name = name
        self._target = target
        self._on_end = on_end
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start_and_wait(self, timeout_s: float) -> None:
        """Start; returns when the target said so. Raises what it raised, PeerTimeoutError after timeout_s."""
        self._thread.start()
        if not self._started.wait(timeout_s):
            raise PeerTimeoutError(f"the {self._name} thread must start within {timeout_s} s, it did not")
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._target(self._started.set)
        except BaseException as error:
            self._error = error
            if self._started.is_set():
                log.exception("the %s thread failed", self._name)
            self._on_end(f"{self._name} thread: {type(error).__name__}: {error}")
        else:
            self._on_end(f"{self._name} thread ended")
        finally:
            self._started.set()

    def join(self, timeout_s: float) -> None:
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
