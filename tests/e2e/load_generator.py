"""The load generator as a process that a test starts, reads and ends."""

from __future__ import annotations

import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.e2e.harness import PYTHONPATH, ROOT, ServiceProcess

SHORT = ("--concurrency", "6", "--warmup-requests", "1", "--token-scale", "0.004", "--grace-period", "3")


class LoadGenerator:
    """The command as a process; its lines can be waited for."""

    def __init__(self, service: ServiceProcess, out: Path, *options: str) -> None:
        self.out = out
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "loadgen.cli",
                "--target",
                service.front,
                "--out",
                str(out),
                *SHORT,
                *options,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONPATH": PYTHONPATH, "COLUMNS": "160"},
            cwd=ROOT,
        )
        self.lines: list[str] = []
        self._queue: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.lines.append(line.rstrip())
                self._queue.put(line)

    def wait_for(self, pattern: str, timeout_s: float) -> None:
        """Until it prints a line that begins like this."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                if re.match(pattern, self._queue.get(timeout=0.2)):
                    return
            except queue.Empty:
                assert self.process.poll() is None, self.text
        raise AssertionError(f"no line {pattern!r} within {timeout_s} s:\n{self.text}")

    def kill(self) -> None:
        """Whatever a test that failed has left running holds the lease of a service that others still use."""
        self.process.kill()
        self.process.wait()
        self._reader.join(5)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def end(self, timeout_s: float = 120.0) -> tuple[int, dict[str, Any]]:
        """(exit status, report)."""
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the load generator did not end:\n{self.text}") from None
        self._reader.join(5)
        assert (self.out / "report.json").exists(), self.text
        return status, json.loads((self.out / "report.json").read_text())
