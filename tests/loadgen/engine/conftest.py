"""An engine over a fake service that answers at once, and its HTTP face on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient, TestServer

from loadgen.engine.core import Engine
from loadgen.engine.http import ChatServer
from loadgen.tier.attention_tier import TierConfig
from loadgen.tier.speculation import Speculation
from megamoe.errors import MegaMoeError
from tests.loadgen.fake_tier import FakeStep, FakeTier

MODEL = "fake"


class InstantTier(FakeTier):
    """Computes nothing; each agreement lets other tasks run, as a real one would."""

    def __init__(self, fail: Callable[[int, int], MegaMoeError | None]) -> None:
        super().__init__(self, fail=fail)

    @contextlib.asynccontextmanager
    async def step(self, **plan: Any) -> AsyncIterator[FakeStep]:
        await asyncio.sleep(0.001)
        async with super().step(**plan) as step:
            yield step

    def advance(self, seconds: float) -> None:
        """The fake lets its clock pass; here real time passes by itself."""


@dataclass
class Served:
    """What a test holds: the fake service, the engine, a client of its HTTP face."""

    tier: InstantTier
    engine: Engine
    client: TestClient

    async def in_flight(self, count: int) -> None:
        """Wait until the engine holds so many requests."""
        async with asyncio.timeout(5):
            while True:
                if self.engine.num_in_flight == count:
                    return
                await asyncio.sleep(0.005)

    async def chat(self, **fields: Any) -> ClientResponse:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]} | fields
        return await self.client.post("/v1/chat/completions", json=body)


@contextlib.asynccontextmanager
async def serving(
    fail: Callable[[int, int], MegaMoeError | None] = lambda step_idx, layer_idx: None,
    num_drafts: int = 6,
    time_scale: float = 0.01,
    **config: Any,
) -> AsyncIterator[Served]:
    tier = InstantTier(fail)
    engine = Engine(
        tier, TierConfig(speculation=Speculation(num_drafts), **config), time_scale=time_scale, step_retries=0
    )
    loop = asyncio.create_task(engine.run())
    server = TestServer(ChatServer(engine, MODEL).app, handler_cancellation=True)
    async with TestClient(server) as client:
        yield Served(tier, engine, client)
        engine.stop()
        await asyncio.wait_for(loop, timeout=5)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as one:
        yield one
