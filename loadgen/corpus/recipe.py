"""What synthetic sessions are made of: distributions, their fitted parameters, and seeded stratified draws.

The structure comes from the published starting recipe (lognormal turns, contexts, outputs; compaction; sub-agents). It
is refined where that misses its targets: sessions have one of two context windows, long sessions more often the wide
one; gaps have a tail of their own; draws are stratified, so that two corpora of 393 sessions scatter little.
`tools/fit_recipe.py` fits the parameters to the published statistics and says what they were fitted to.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_NORMAL = NormalDist()
_STEPS = (5**0.5 % 1 / 2 + 0.5, 2**0.5 % 1, 3**0.5 % 1)
"""Steps of the quasi-random sequences: the golden ratio and two other irrationals that are badly approximable."""


@dataclass(frozen=True)
class LogNormal:
    """Lognormal with this median and this standard deviation of the logarithm."""

    median: float
    sigma: float

    def at(self, quantile: float) -> float:
        """The value that a share `quantile` of draws stays below."""
        return self.median * math.exp(self.sigma * _NORMAL.inv_cdf(quantile))

    def draw(self, rng: np.random.Generator) -> float:
        return self.median * math.exp(self.sigma * rng.standard_normal())

    def draws(self, rng: np.random.Generator, count: int) -> Floats:
        """`count` stratified draws in random order."""
        return self.median * np.exp(self.sigma * normal_scores(stratified(rng, count)))


@dataclass(frozen=True)
class LogPieces:
    """Lognormal pieces through (quantile, value) knots: the logarithm is linear in the normal score between knots and
    beyond the first; nothing lies above the last."""

    knots: tuple[tuple[float, float], ...]

    def draws(self, rng: np.random.Generator, count: int) -> Floats:
        """`count` stratified draws in random order."""
        return self.at(stratified(rng, count))

    def at(self, quantiles: Floats) -> Floats:
        """The values that these shares of draws stay below."""
        scores = normal_scores(quantiles)
        at = [_NORMAL.inv_cdf(quantile) for quantile, _ in self.knots]
        logs = [math.log(value) for _, value in self.knots]
        below = logs[0] + (scores - at[0]) * (logs[1] - logs[0]) / (at[1] - at[0])
        return np.exp(np.where(scores < at[0], below, np.interp(scores, at, logs)))


@dataclass(frozen=True)
class Window:
    """Context window of a session: how long its prompts grow, and how long they are after a compaction."""

    peak: LogNormal
    compacted: LogNormal


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Parameters of the generator. Lengths in tokens, times in seconds; sub-agents are called groups."""

    turns: LogNormal = LogNormal(65, 1.27)
    min_turns: int = 20
    max_turns: int = 3000
    shared_prefix: int = 17_000
    start_context: LogNormal = LogNormal(66_000, 0.45)
    output: LogNormal = LogNormal(616, 1.33)
    pace_growth: float = 0.26
    appended: LogNormal = LogNormal(550, 1.2)
    narrow: Window = Window(LogNormal(176_000, 0.05), LogNormal(103_000, 0.2))
    wide: Window = Window(LogNormal(812_000, 0.10), LogNormal(217_000, 0.4))
    wide_turns: float = 228.0
    wide_sharpness: float = 20.0
    compaction_probability: float = 0.0007
    gap_s: LogPieces = LogPieces(
        ((0.5, 4.8), (0.9, 123.0), (0.955, 250.0), (0.99, 3150.0), (0.999, 70_000.0), (0.9999, 604_800.0))
    )
    subagent_share: float = 0.445
    groups: LogNormal = LogNormal(4.0, 1.09)
    max_groups: int = 100
    group_growth: float = 0.6
    group_requests: LogPieces = LogPieces(((0.5, 16), (0.9, 48), (0.99, 200), (0.9999, 789)))
    max_group_requests: int = 789
    group_prefix: int = 6_000
    group_start_context: LogNormal = LogNormal(16_800, 0.55)
    narrow_group: Window = Window(LogNormal(212_000, 0.1), LogNormal(55_000, 0.4))
    wide_group: Window = Window(LogNormal(815_000, 0.1), LogNormal(55_000, 0.4))
    group_output: LogNormal = LogNormal(352, 1.33)
    group_appended: LogNormal = LogNormal(1_420, 1.1)
    group_gap_s: LogNormal = LogNormal(2.0, 1.2)
    fan_out: LogNormal = LogNormal(3, 0.6)
    max_concurrent_groups: int = 10
    in_flight_share: float = 1 / 3
    join_next_share: float = 0.7
    max_output: int = 17_000
    # How long recorded calls took: no published figure fixes it, it only shapes which of them overlap.
    output_tokens_per_s: LogNormal = LogNormal(75, 0.25)
    prefill_tokens_per_s: float = 20_000.0
    base_ttft_s: LogNormal = LogNormal(1.2, 0.5)

    def pace(self, num_turns: int) -> float:
        """Factor on outputs and appended tokens of a session: 1 where the median main turn is, more in longer ones."""
        usual = self.turns.median * math.exp(self.turns.sigma**2)
        return float((num_turns / usual) ** self.pace_growth)

    def wide_share(self, num_turns: int) -> float:
        """Probability that a session of num_turns main turns has the wide window: one half at wide_turns."""
        return float(1.0 / (1.0 + (self.wide_turns / num_turns) ** self.wide_sharpness))


def seeded(*parts: object) -> np.random.Generator:
    """A generator that depends on the parts only (first 8 bytes of the sha256 of their colon-joined text)."""
    digest = hashlib.sha256(":".join(str(part) for part in parts).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "big"))


def stratified(rng: np.random.Generator, count: int) -> Floats:
    """`count` uniforms, one in each of `count` equal slices of (0, 1), in random order."""
    return (rng.permutation(count) + rng.uniform(1e-9, 1 - 1e-9, count)) / count


@dataclass(frozen=True)
class SessionDraws:
    """Uniforms in (0, 1) that decide one session as a whole."""

    turns: float
    subagents: float
    window: float
    start_context: float


@cache
def session_draws(seed: int, count: int) -> tuple[SessionDraws, ...]:
    """The uniforms of `count` sessions, spread evenly alone and together.

    turns is stratified; the others are additive quasi-random sequences along its order, each with a seeded shift, so
    that long and short sessions alike get their share of everything.
    """
    rng = seeded(seed, "sessions", count)
    ranks = rng.permutation(count)
    turns = (ranks + rng.uniform(1e-9, 1 - 1e-9, count)) / count
    others = np.clip((rng.random(len(_STEPS)) + np.outer(ranks, _STEPS)) % 1.0, 1e-9, 1 - 1e-9)
    return tuple(
        SessionDraws(float(first), *(float(value) for value in rest)) for first, rest in zip(turns, others)
    )


def normal_scores(quantiles: Floats) -> Floats:
    """Quantiles of the standard normal distribution."""
    return np.array([_NORMAL.inv_cdf(quantile) for quantile in quantiles])
