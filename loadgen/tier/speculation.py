"""Speculative decoding as the load generator sees it: how many tokens a verify step accepts.

With K drafts a decode request carries K+1 rows and a step accepts `acceptance_length(K)` tokens on average. The
schedule has the least variance that whole numbers allow: every step accepts floor or ceil of the mean.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from megamoe.errors import ConfigError, must_be

ACCEPTANCE_LENGTH: dict[int, float] = {
    0: 1.0,
    1: 1.84,
    2: 2.51,
    3: 3.01,
    4: 3.36,
    5: 3.61,
    6: 3.77,
    7: 3.73,
    8: 3.47,
}
"""Mean tokens a step, the bonus token included, by number of drafts: published for the AgentX workload.
0 drafts is plain decoding."""


@dataclass(frozen=True)
class Speculation:
    """num_drafts K from 0 to 8; mean overrides the published acceptance length (1 <= mean <= K+1).

    Raises ConfigError naming the field.
    """

    num_drafts: int = 6
    mean: float = 0.0

    def __post_init__(self) -> None:
        if self.num_drafts not in ACCEPTANCE_LENGTH:
            raise ConfigError(must_be("num_drafts", f"from 0 to {max(ACCEPTANCE_LENGTH)}", self.num_drafts))
        if self.mean and not 1.0 <= self.mean <= self.num_drafts + 1:
            wanted = f"from 1 to num_drafts + 1 = {self.num_drafts + 1}"
            raise ConfigError(must_be("acceptance length", wanted, self.mean))

    @property
    def acceptance_length(self) -> float:
        """Mean tokens that one verify step accepts."""
        return self.mean or ACCEPTANCE_LENGTH[self.num_drafts]

    @property
    def rows_per_request(self) -> int:
        """Rows that one decode request brings to a step: its drafts and the token they follow."""
        return self.num_drafts + 1

    def schedule(self, request_uid: str, seed: int = 0) -> AcceptanceSchedule:
        """The acceptances of one request, fixed by its name and the seed."""
        digest = hashlib.sha256(f"{seed}:acceptance:{request_uid}".encode()).digest()
        return AcceptanceSchedule(self.acceptance_length, int.from_bytes(digest[:8], "big") / 2**64)


class AcceptanceSchedule:
    """Systematic sampling: after i steps floor(phase + i * mean) tokens are accepted, phase uniform in [0, 1).

    Each step then accepts floor(mean) or ceil(mean), P(ceil) = the fraction of the mean, and no run of steps is off
    its share by a whole token.
    """

    __slots__ = ("_mean", "_phase", "_steps", "_total")

    def __init__(self, mean: float, phase: float) -> None:
        self._mean = mean
        self._phase = phase
        self._steps = 0
        self._total = 0

    def next(self) -> int:
        """Tokens that the next verify step accepts."""
        before = self._total
        self._steps += 1
        self._total = int(self._phase + self._steps * self._mean)
        return self._total - before
