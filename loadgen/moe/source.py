"""Where the MoE time of a run comes from: a service that is leased, or a table that tells it on a virtual clock."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from loadgen.clock import Clock, RealClock, VirtualClock
from loadgen.moe.live import LiveTier
from loadgen.moe.table import MoeTimeTable, TableTier
from loadgen.moe.tier import MoeTier
from megamoe import Path as MoePath
from megamoe.errors import ConfigError, must_be


@dataclass(frozen=True, kw_only=True)
class SimulatedMoe:
    """A table of latencies, and the paths that may serve in it; compact always may."""

    table: MoeTimeTable
    enabled: frozenset[MoePath]

    @classmethod
    def read(cls, table: str, paths: str | None) -> SimulatedMoe:
        """table: a file, or the name of one that ships. paths: names joined by commas; None = all.

        Raises ConfigError naming the option.
        """
        names = [name.strip() for name in paths.split(",")] if paths is not None else list(MoePath)
        unknown = [name for name in names if name not in set(MoePath)]
        if unknown:
            raise ConfigError(must_be("paths", f"among {', '.join(MoePath)}", repr(unknown[0])))
        return cls(table=MoeTimeTable.named(table), enabled=frozenset(map(MoePath, names)))


@contextlib.asynccontextmanager
async def open_moe(
    simulated: SimulatedMoe | None,
    target: str,
    *,
    holder: str,
    wait_ready_s: float,
    transport: str = "grpc",
) -> AsyncIterator[tuple[MoeTier | TableTier, Clock]]:
    """The MoE tier of a run and the clock that goes with it. Raises MegaMoeError when the service cannot be leased."""
    if simulated is not None:
        yield TableTier(simulated.table, simulated.enabled), VirtualClock()
        return
    async with LiveTier.connect(
        target, holder=holder, wait_ready_s=wait_ready_s, transport=transport
    ) as live:
        yield live, RealClock()
