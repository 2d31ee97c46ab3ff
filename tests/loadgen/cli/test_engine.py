"""`loadgen engine` as a command: what it leaves when it ends, however it ends. The tier is a fake."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest
from rich.console import Console

import loadgen.steps.service_count as service_count
from loadgen.cli.engine import EngineOptions, serve
from loadgen.moe.live import LiveTier
from loadgen.moe.scrape import Counters
from megamoe.errors import MegaMoeError
from tests.loadgen.engine.conftest import InstantTier

Fail = Callable[[int, int], MegaMoeError | None]


@pytest.fixture
def started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[Fail], tuple[EngineOptions, Console]]:
    """The command's options, over a tier that fails as told."""

    def start(fail: Fail) -> tuple[EngineOptions, Console]:
        @contextlib.asynccontextmanager
        async def connected(target: str, *, holder: str, wait_ready_s: float) -> AsyncIterator[InstantTier]:
            yield InstantTier(fail)

        async def scrape(*arguments: object) -> Counters:
            return Counters()

        monkeypatch.setattr(LiveTier, "connect", connected)
        monkeypatch.setattr(service_count, "scrape", scrape)
        monkeypatch.setattr(service_count, "scrape_settled", scrape)
        options = EngineOptions(
            target="", host="127.0.0.1", port=0, out=tmp_path, profile="auto", holder="", wait_ready_s=1.0,
            routing="uniform", seed=1, num_drafts=None, time_scale=0.001, tier={},
        )  # fmt: skip
        return options, Console(record=True, width=200)

    return start


async def ask(console: Console, max_tokens: int) -> int:
    """Send a request to the address that the command has printed; returns the status."""
    async with asyncio.timeout(10):
        while True:
            if "http://" in (text := console.export_text(clear=False)):
                break
            await asyncio.sleep(0.01)
        name, _, url, *_ = text.split()
        body = {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": max_tokens}
        async with (
            aiohttp.ClientSession() as client,
            client.post(f"{url.rstrip(',')}/chat/completions", json=body) as reply,
        ):
            return reply.status


async def test_a_crash_still_leaves_a_report(
    started: Callable[[Fail], tuple[EngineOptions, Console]], tmp_path: Path
) -> None:
    def fail(step_idx: int, layer_idx: int) -> MegaMoeError | None:
        raise ZeroDivisionError("bug")

    options, console = started(fail)
    asked = asyncio.create_task(ask(console, 5))
    with pytest.raises(ZeroDivisionError, match="bug"):
        await serve(options, console)
    assert await asked == 503
    assert json.loads((tmp_path / "report.json").read_text())["run_aborted"] == "ZeroDivisionError: bug"


async def test_ctrl_c_tells_who_waits_and_leaves_a_report(
    started: Callable[[Fail], tuple[EngineOptions, Console]], tmp_path: Path
) -> None:
    options, console = started(lambda step_idx, layer_idx: None)
    serving = asyncio.create_task(serve(options, console))
    assert await ask(console, 5) == 200
    waiting = asyncio.create_task(ask(console, 1_000_000))
    await asyncio.sleep(0.2)
    os.kill(os.getpid(), signal.SIGINT)
    report = await asyncio.wait_for(serving, 20)
    assert await waiting == 503
    assert report["requests"] == {"completed": 1, "failed": 0, "cancelled": 1, "context_overflow": 0}
    assert (tmp_path / "report.html").exists()
