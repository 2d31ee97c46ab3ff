"""Blocking twins of the async client: the same calls on an event loop in a background thread."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from megamoe import Path, PathPolicy, StepPlan, SubStep
from megamoe.errors import UnavailableError, must_be
from service.client.front import AsyncFront
from service.client.group import AsyncMoeGroup, AsyncStep
from service.client.info import ServiceInfo
from service.client.values import GroupOutput, Rows

T = TypeVar("T")
_SETTLE_S = 1.0
"""How long tasks may go on when their loop is closed."""


class Loop:
    """An event loop in a thread. Calls from several threads are fine."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="megamoe-client", daemon=True)
        self._thread.start()

    @classmethod
    @functools.cache
    def shared(cls) -> Loop:
        """The one of this process, which stays: gRPC does not like loops that come and go."""
        return cls()

    def _check_process(self) -> None:
        """Raises UnavailableError in a forked process: neither this thread nor gRPC came along."""
        if self._pid != os.getpid():
            got = f"process {os.getpid()}, forked from {self._pid}, which has one"
            raise UnavailableError(must_be("process of a client", "a new one (spawn, not fork)", got))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Raises UnavailableError in a forked process."""
        try:
            self._check_process()
        except UnavailableError:
            work.close()
            raise
        # Bounded by the timeouts inside the client: every exchange has one.
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def submit(self, work: Callable[[], Awaitable[T]]) -> Future[T]:
        """Call `work` on the loop's thread and await what it gives; what is submitted first begins first.

        Raises UnavailableError in a forked process.
        """
        self._check_process()

        async def run() -> T:
            return await work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop)

    def close(self) -> None:
        """What gRPC still does for calls that have ended comes to its end first, or is cancelled: asyncio says of tasks
        of a closed loop that they were destroyed."""
        if self._pid == os.getpid():
            asyncio.run_coroutine_threadsafe(_settle(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        self._loop.close()


async def _settle() -> None:
    """Let all other tasks of this loop end; cancel those that go on."""
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    if rest:
        _, rest = await asyncio.wait(rest, timeout=_SETTLE_S)
    if rest:
        for task in rest:
            task.cancel()
        await asyncio.wait(rest, timeout=_SETTLE_S)


class MoeGroup:
    """AsyncMoeGroup for callers without an event loop."""

    def __init__(self, group: AsyncMoeGroup, loop: Loop) -> None:
        self._group = group
        self._loop = loop

    @classmethod
    @contextlib.contextmanager
    def connect(
        cls, front: str, *, holder: str, wait_ready_s: float = 30.0, transport: str = "grpc"
    ) -> Iterator[MoeGroup]:
        """See AsyncMoeGroup.connect."""
        loop = Loop()
        try:
            manager = AsyncMoeGroup.connect(
                front, holder=holder, wait_ready_s=wait_ready_s, transport=transport
            )
            group = loop.run(manager.__aenter__())
            try:
                yield cls(group, loop)
            finally:
                loop.run(manager.__aexit__(None, None, None))
        finally:
            loop.close()

    @property
    def info(self) -> ServiceInfo:
        return self._group.info

    @contextlib.contextmanager
    def step(
        self,
        num_rows_per_rank: Sequence[int],
        phase: str | Sequence[str] = "decode",
        micro_batch_idx: int = 0,
        **options: Any,
    ) -> Iterator[Step]:
        """See AsyncMoeGroup.step."""
        manager = self._group.step(num_rows_per_rank, phase, micro_batch_idx, **options)
        step = self._loop.run(manager.__aenter__())
        try:
            yield Step(step, self._loop)
        finally:
            self._loop.run(manager.__aexit__(None, None, None))


class Step:
    """AsyncStep, blocking."""

    def __init__(self, step: AsyncStep, loop: Loop) -> None:
        self._step = step
        self._loop = loop

    @property
    def plan(self) -> StepPlan:
        return self._step.plan

    @property
    def sub_steps(self) -> tuple[SubStep, ...]:
        return self._step.sub_steps

    def layer(self, layer_idx: int, batches: Sequence[Rows]) -> GroupOutput:
        """See AsyncStep.layer."""
        return self._loop.run(self._step.layer(layer_idx, batches))


class Front:
    """AsyncFront, blocking: GetInfo, ForwardStep, Admin."""

    def __init__(self, address: str) -> None:
        self._loop = Loop()
        self._front = self._loop.run(self._open(address))

    async def _open(self, address: str) -> AsyncFront:
        return AsyncFront(address)

    def __enter__(self) -> Front:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._loop.run(self._front.close())
        self._loop.close()

    def info(self) -> ServiceInfo:
        return self._loop.run(self._front.info())

    def wait_ready(self, timeout_s: float) -> ServiceInfo:
        return self._loop.run(self._front.wait_ready(timeout_s))

    def forward_step(
        self, layer_idx: int, batches: Sequence[Rows], phase: str | Sequence[str] = "decode"
    ) -> GroupOutput:
        return self._loop.run(self._front.forward_step(layer_idx, batches, phase))

    def policy(self) -> PathPolicy:
        return self._loop.run(self._front.policy())

    def set_path_enabled(self, path: Path | str, enabled: bool) -> PathPolicy:
        return self._loop.run(self._front.set_path_enabled(path, enabled))

    def drain(self, *, resume: bool = False) -> bool:
        return self._loop.run(self._front.drain(resume=resume))
