"""The event loop behind the blocking client leaves nothing when it is closed."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest

from service.client import blocking


def test_tasks_end_before_their_loop_is_closed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As gRPC's own, which outlive the call that they belong to."""
    monkeypatch.setattr(blocking, "_SETTLE_S", 0.3)
    ended = []

    async def task(seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
            ended.append("done")
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def leave_tasks() -> list[asyncio.Task[None]]:
        tasks = [asyncio.create_task(task(seconds)) for seconds in (0.05, 60.0)]
        await asyncio.sleep(0)
        return tasks

    loop = blocking.Loop()
    tasks = loop.run(leave_tasks())
    started = time.monotonic()
    loop.close()
    assert time.monotonic() - started < 5
    assert ended == ["done", "cancelled"]
    del tasks
    gc.collect()
    assert "destroyed" not in caplog.text
