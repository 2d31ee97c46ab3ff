"""`megamoe demo`: the main job on this machine, through public doors only.

Starts `megamoe serve` (Ray, 8 ranks, CPU, demo profile) as a process of its own, waits until it is ready, runs
`loadgen --scenario agentx` against it as another, and stops everything. Nothing here imports what it starts. Refuses
to go on, with the service's own last words, when the service does not become ready or dies.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from megamoe.errors import ConfigError, UnavailableError, must_be
from service.cli.words import counted
from service.config import ServiceConfig, load_config

LAUNCHERS = get_args(ServiceConfig.model_fields["launcher"].annotation)
DAY_S = 86400.0
READY_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 40.0
REPORT_TIMEOUT_S = 20.0


def run_demo(*, out: Path, launcher: str, duration_s: float | None) -> int:
    """Run the demo; returns the load generator's exit status. The report is left under `out`.

    Ctrl-C and SIGTERM end it like its end: the load generator writes its report, the service stops.
    Raises ConfigError, before anything starts, for what cannot be; UnavailableError when the service does not become
    ready within READY_TIMEOUT_S.
    """
    with _sigterm_as_exit():
        return _run(out=out, launcher=launcher, duration_s=duration_s)


def _run(*, out: Path, launcher: str, duration_s: float | None) -> int:
    if launcher not in LAUNCHERS:
        raise ConfigError(must_be("launcher", " or ".join(LAUNCHERS), repr(launcher)))
    if duration_s is not None and not 0 < duration_s <= DAY_S:
        raise ConfigError(must_be("duration", f"above 0 and at most {DAY_S:.0f} s", duration_s))
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "service.log").open("wb").close()
    except OSError as error:
        raise ConfigError(must_be("out", "a folder that can be written", error)) from error
    port, http_port = _free_ports(2)
    log = out / "service.log"
    serve = [
        sys.executable, "-m", "service.cli", "serve", "--profile", "demo", "--launcher", launcher,
        "--port", str(port), "--http-port", str(http_port),
    ]  # fmt: skip
    load = [
        sys.executable, "-m", "loadgen.cli", "--scenario", "agentx", "--profile", "demo",
        "--target", f"127.0.0.1:{port}", "--out", str(out),
    ]  # fmt: skip
    if duration_s is not None:
        load += ["--duration", str(duration_s)]
    with _service(serve, log) as process:
        started = time.monotonic()
        config = load_config(overrides={"profile": "demo"})
        where = "the CPU" if config.backend == "cpu" else config.backend
        ranks = f"{counted(config.moe_shape.num_ranks, 'rank')} on {where}"
        print(f"starting the service: {ranks}, {launcher} launcher (log: {log})", flush=True)
        _wait_ready(process, f"http://127.0.0.1:{http_port}/readyz", log)
        print(f"ready after {time.monotonic() - started:.0f} s on 127.0.0.1:{port}", flush=True)
        status = _load(load)
    print("stopped", flush=True)
    return status


@contextlib.contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that what was started is stopped."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _load(command: list[str]) -> int:
    """Run the load generator; a signal for us reaches it exactly once: its second one would end it without a report."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait()
    except BaseException:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(REPORT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise


@contextlib.contextmanager
def _service(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The service as a process group of its own, so that Ctrl-C reaches it through us and in order."""
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            yield process
        finally:
            print("stopping the service", flush=True)
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                print(
                    f"the service did not stop within {STOP_TIMEOUT_S:.0f} s and is killed", file=sys.stderr
                )
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise UnavailableError(f"the service ended with status {process.returncode}:\n{_last_words(log)}")
        with (
            contextlib.suppress(OSError, urllib.error.URLError),
            urllib.request.urlopen(url, timeout=2) as answer,
        ):
            if answer.status == 200:
                return
        time.sleep(0.25)
    raise UnavailableError(f"the service was not ready within {READY_TIMEOUT_S:.0f} s:\n{_last_words(log)}")


def _last_words(log: Path, num_lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
