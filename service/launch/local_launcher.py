"""LocalLauncher: rank processes as children of this one, without Ray.

Owns: the children and their two pipes. A child's standard input is its lifeline: it carries lines of JSON to the rank
and, at its end, tells the rank to stop, also when this process is killed. A child's standard output carries lines of
JSON back; its standard error is ours. Children have sessions of their own, so that Ctrl-C reaches only us.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megamoe.errors import PeerTimeoutError, UnavailableError, error_from_code
from service.config import inherited_environment
from service.launch.launcher import check_ranks, rank_environment
from service.net.info import Addresses
from service.rank.spec import RankSpec, RankUp

log = logging.getLogger("megamoe.launcher")

_KILL_TIMEOUT_S = 60.0
"""How long a killed process may take to be gone: the kernel gives back gigabytes of memory first."""
_Event = tuple[int, dict[str, Any] | None]


class LocalLauncher:
    """See Launcher."""

    def __init__(self) -> None:
        self._children: list[subprocess.Popen[str]] = []
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._stopping = False
        self._lock = threading.Lock()

    def launch(self, specs: Sequence[RankSpec], *, timeout_s: float) -> list[RankUp]:
        self._stopping = False
        self._events = queue.SimpleQueue()
        inherited = inherited_environment()
        env = inherited | rank_environment(specs[0].config, inherited.get("PYTHONPATH", ""))
        for spec in specs:
            self._spawn(spec, env)
        try:
            ups = self._wait_up(len(specs), timeout_s)
            check_ranks(ups)
        except BaseException:
            self.stop(timeout_s=2.0)
            raise
        return ups

    def _spawn(self, spec: RankSpec, env: dict[str, str]) -> None:
        with self._lock:
            if self._stopping:
                raise UnavailableError("the service stops while its ranks are being started")
            try:
                child = subprocess.Popen(
                    [sys.executable, "-m", "service.rank.process"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=env,
                    start_new_session=True,
                )
            except OSError as error:  # no memory, processes or files left: another try may find some
                raise UnavailableError(f"rank {spec.rank} cannot be started: {error}") from error
            self._children.append(child)
        reader = (child, spec.rank, self._events)
        threading.Thread(target=_read, args=reader, name=f"rank {spec.rank}", daemon=True).start()
        self._tell(child, spec.to_json())

    def _wait_up(self, num_ranks: int, timeout_s: float) -> list[RankUp]:
        deadline = time.monotonic() + timeout_s
        ups: dict[int, RankUp] = {}
        while len(ups) < num_ranks:
            try:
                rank, event = self._events.get(timeout=max(deadline - time.monotonic(), 0.001))
            except queue.Empty:
                missing = sorted(set(range(num_ranks)) - set(ups))
                raise PeerTimeoutError(
                    f"all ranks must be up within {timeout_s} s, ranks {missing} are not", missing
                ) from None
            if event is None:
                raise UnavailableError(f"rank {rank} ended before it was up (its last words are in the log)")
            if "failed" in event:
                failed = event["failed"]
                raise error_from_code(failed["code"], f"rank {rank}: {failed['message']}")
            ups[rank] = RankUp(**event["up"])
        return [ups[rank] for rank in range(num_ranks)]

    def serve(self, addresses: Addresses) -> None:
        for child in self._children:
            self._tell(child, json.dumps({"serve": asdict(addresses)}))

    def failures(self) -> dict[int, str]:
        if self._stopping:
            return {}
        return {
            rank: f"exit status {child.returncode}"
            for rank, child in enumerate(self._children)
            if child.poll() is not None
        }

    def stop(self, *, timeout_s: float) -> None:
        with self._lock:
            self._stopping = True
            children, self._children = self._children, []
        for child in children:
            with contextlib.suppress(OSError):
                assert child.stdin is not None
                child.stdin.close()
        deadline = time.monotonic() + timeout_s
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(deadline - time.monotonic(), 0.0))
        for child in children:
            child.kill()  # does nothing to who has ended
        for child in children:
            try:
                child.wait(_KILL_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                log.error("rank process %d is killed and does not end: it hangs in the kernel", child.pid)

    def close(self) -> None:
        self.stop(timeout_s=0.0)

    @staticmethod
    def _tell(child: subprocess.Popen[str], line: str) -> None:
        assert child.stdin is not None
        # A dead child is found by its exit; another thread may be stopping it, and has closed the pipe.
        with contextlib.suppress(OSError, ValueError):
            child.stdin.write(line + "\n")
            child.stdin.flush()


def _read(child: subprocess.Popen[str], rank: int, events: queue.SimpleQueue[_Event]) -> None:
    assert child.stdout is not None
    with child.stdout as lines:
        for line in lines:
            events.put((rank, json.loads(line)))
    events.put((rank, None))
