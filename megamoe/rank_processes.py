"""A process a rank, each running one function that answers questions: what a bench and a trial have in common."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from megamoe.bundle import Deployment
from megamoe.errors import PeerTimeoutError
from megamoe.shm import unlink_all

Serve = Callable[[Connection, Deployment, int, str], None]
"""(pipe, deployment, rank, group name): sends one value when it is ready, then an answer a question until it ends."""


class RankProcesses:
    """The rank processes of one run. Context manager: enters when all are ready, leaves nothing behind.

    name: for shared memory and messages. Raises PeerTimeoutError naming a rank that is not ready, or has not answered,
    in time, or that has ended.
    """

    def __init__(
        self, deployment: Deployment, serve: Serve, *, name: str, start_timeout_s: float = 180.0
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._name, self._start_timeout_s = name, start_timeout_s
        self._group_name = group_name = f"megamoe-{name}-{os.getpid()}"
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(deployment.shape.num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, deployment, rank, group_name), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> RankProcesses:
        try:
            self._answers(self._start_timeout_s)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10.0)
            if process.is_alive():
                process.kill()
                process.join()
        unlink_all(self._group_name)

    def ask(self, question: object, timeout_s: float) -> list[Any]:
        """Every rank's answer, in rank order."""
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send(question)
            except OSError:
                raise self._ended(rank) from None
        return self._answers(timeout_s)

    def _answers(self, timeout_s: float) -> list[Any]:
        answers = []
        deadline = time.monotonic() + timeout_s
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(deadline - time.monotonic(), 0.0)):
                raise PeerTimeoutError(
                    f"{self._name} rank {rank} gave no answer in {timeout_s:.0f} s", [rank]
                )
            try:
                answers.append(pipe.recv())
            except EOFError:
                raise self._ended(rank) from None
        return answers

    def _ended(self, rank: int) -> PeerTimeoutError:
        return PeerTimeoutError(f"{self._name} rank {rank} ended early; its own output says why", [rank])
