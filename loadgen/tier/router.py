"""Which rank takes a request: the one that holds its prefix, unless ranks are far from balanced.

The policy that public routers call cache-aware, with their defaults. Where one rank holds more than `cache_threshold`
of the prompt, the rank that holds most takes it; a prompt that nobody holds goes to the rank with the fewest tokens
held or promised. That balances memory, not running requests. Only when the busiest rank is ahead of the idlest by
more than abs_margin requests and by more than rel_margin times does the idlest rank take everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megamoe.errors import ConfigError, must_be


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Raises ConfigError naming the field."""

    cache_threshold: float = 0.3
    abs_margin: int = 64
    rel_margin: float = 1.5

    def __post_init__(self) -> None:
        if not 0.0 <= self.cache_threshold <= 1.0:
            raise ConfigError(must_be("cache_threshold", "from 0 to 1", self.cache_threshold))
        if self.abs_margin < 0:
            raise ConfigError(must_be("abs_margin", "at least 0", self.abs_margin))
        if self.rel_margin < 1:
            raise ConfigError(must_be("rel_margin", "at least 1", self.rel_margin))


@dataclass(frozen=True, slots=True)
class RankState:
    """What the router knows of a rank when a prompt comes. match: share of the prompt that it holds. num_requests:
    waiting or running. num_tokens: of KV memory held, or needed by what waits."""

    match: float
    num_requests: int
    num_tokens: int


class Router:
    """Remembers where each stream went last, which breaks ties."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._home: dict[str, dict[str, int]] = {}

    def choose(self, cache_uid: str, agent_uid: str, ranks: Sequence[RankState]) -> int:
        """The rank for a request."""
        homes = self._home.setdefault(cache_uid, {})
        home = homes.get(agent_uid, -1)
        chosen = homes[agent_uid] = self._choose(home, ranks)
        return chosen

    def drop(self, cache_uid: str) -> None:
        """A session has ended."""
        self._home.pop(cache_uid, None)

    def _choose(self, home: int, ranks: Sequence[RankState]) -> int:
        loads = [state.num_requests for state in ranks]
        idlest = min(range(len(ranks)), key=lambda rank: (loads[rank], rank != home, rank))
        ahead = max(loads) - loads[idlest]
        if ahead > self._config.abs_margin and max(loads) > self._config.rel_margin * loads[idlest]:
            return idlest
        best = max(range(len(ranks)), key=lambda rank: (ranks[rank].match, rank == home, -loads[rank], -rank))
        if ranks[best].match > self._config.cache_threshold:
            return best
        return min(range(len(ranks)), key=lambda rank: (ranks[rank].num_tokens, rank != home, rank))
