"""Which rank takes a request: the one that holds its prefix, unless that rank is overloaded.

Cache-aware and DP-aware: a stream (agent) sticks to the rank that holds the longest part of its prompt; a prompt that
nobody holds goes to the least loaded rank. Overloaded = ahead of the least loaded rank by more than abs_margin
requests and by more than rel_margin times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megamoe.errors import ConfigError, must_be


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Raises ConfigError naming the field."""

    abs_margin: int = 4
    rel_margin: float = 1.5

    def __post_init__(self) -> None:
        if self.abs_margin < 0:
            raise ConfigError(must_be("abs_margin", "at least 0", self.abs_margin))
        if self.rel_margin < 1:
            raise ConfigError(must_be("rel_margin", "at least 1", self.rel_margin))


class Router:
    """Remembers where each stream went last, which breaks ties between ranks that hold equally much."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._home: dict[str, dict[str, int]] = {}

    def choose(self, cache_uid: str, agent_uid: str, matches: Sequence[int], loads: Sequence[int]) -> int:
        """The rank for a request. matches: cached leading blocks per rank. loads: requests per rank."""
        homes = self._home.setdefault(cache_uid, {})
        home = homes.get(agent_uid, -1)
        least = min(range(len(loads)), key=lambda rank: (loads[rank], rank != home, rank))
        best = max(range(len(matches)), key=lambda rank: (matches[rank], rank == home, -loads[rank], -rank))
        chosen = best if matches[best] > 0 and not self._overloaded(loads[best], loads[least]) else least
        homes[agent_uid] = chosen
        return chosen

    def drop(self, cache_uid: str) -> None:
        """A session has ended."""
        self._home.pop(cache_uid, None)

    def _overloaded(self, load: int, least: int) -> bool:
        return load - least > self._config.abs_margin and load > self._config.rel_margin * least
