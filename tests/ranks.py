"""Runs a worker function on N ranks, each a real process of its own, and returns every rank's value.

Rank processes come from a fork server, a clean process that has only imported megamoe: torch is imported once, and
nothing of the test process (gRPC, threads) is ever forked. They are kept for the whole test session. A rank that
died, or does not answer in time and is killed for it, is replaced in the next run. Whatever a run leaves in shared
memory under its group name is removed.

    values = run_ranks(8, worker, shape, seed)      # worker(Rank(rank, num_ranks, group_name), shape, seed)
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from megamoe import unlink_all

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["megamoe"])
_START_TIMEOUT_S = 300.0
"""For the first rank of a session, which waits for torch to be imported on cores that others may be using."""
_group_numbers = itertools.count()


@dataclass(frozen=True)
class Rank:
    """Who a worker is: its rank, how many there are, and a group name that no other run uses."""

    rank: int
    num_ranks: int
    group_name: str


@dataclass(frozen=True)
class Outcome:
    """What one rank did: its value, or the traceback of what it raised, or died=True (killed, or no answer)."""

    value: Any = None
    error: str = ""
    died: bool = False


class RanksFailedError(AssertionError):
    """Some rank raised, died or did not answer; the message has every such rank's traceback."""


@dataclass
class _Process:
    process: BaseProcess
    pipe: Connection


_pool: list[_Process] = []


def _serve(pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    pipe.send("ready")
    while True:
        try:
            worker, rank, args = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            outcome = Outcome(value=worker(rank, *args))
        except BaseException:
            outcome = Outcome(error=traceback.format_exc())
        try:
            pipe.send(outcome)
        except (BrokenPipeError, OSError):
            return


def _start() -> _Process:
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return _Process(process, ours)


def _stop(member: _Process) -> None:
    member.pipe.close()
    member.process.kill()
    member.process.join()


def close_pool() -> None:
    """Stop all rank processes."""
    while _pool:
        _stop(_pool.pop())


atexit.register(close_pool)


def run_outcomes(
    num_ranks: int, worker: Callable[..., Any], *args: Any, timeout_s: float = 60.0
) -> list[Outcome]:
    """Every rank's outcome, in rank order. worker must be importable (a module-level function)."""
    group_name = f"megamoe-test-{os.getpid()}-{next(_group_numbers)}"
    new = [_start() for _ in range(num_ranks - len(_pool))]
    _pool.extend(new)
    for member in new:
        if not member.pipe.poll(_START_TIMEOUT_S) or member.pipe.recv() != "ready":
            raise RanksFailedError(f"a rank process did not start in {_START_TIMEOUT_S} s")
    members = _pool[:num_ranks]
    outcomes: list[Outcome] = [Outcome(died=True)] * num_ranks
    waiting = {}
    for rank, member in enumerate(members):
        member.pipe.send((worker, Rank(rank, num_ranks, group_name), args))
        waiting[member.pipe] = rank
    deadline = time.monotonic() + timeout_s
    lost = []
    while waiting and (left_s := deadline - time.monotonic()) > 0:
        for ready in wait(list(waiting), timeout=left_s):
            rank = waiting.pop(ready)  # type: ignore[arg-type]
            try:
                outcomes[rank] = ready.recv()  # type: ignore[union-attr]
            except (EOFError, OSError):
                lost.append(rank)
    for rank in [*lost, *waiting.values()]:
        _stop(members[rank])
        _pool.remove(members[rank])
    with contextlib.suppress(FileNotFoundError):
        unlink_all(group_name)
    return outcomes


def run_ranks(num_ranks: int, worker: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Every rank's value, in rank order. Raises RanksFailedError with the tracebacks if any rank failed."""
    outcomes = run_outcomes(num_ranks, worker, *args, timeout_s=timeout_s)
    bad = [
        f"rank {rank}: {outcome.error or f'died, or gave no answer in {timeout_s} s'}"
        for rank, outcome in enumerate(outcomes)
        if outcome.error or outcome.died
    ]
    if bad:
        raise RanksFailedError("\n".join(bad))
    return [outcome.value for outcome in outcomes]
