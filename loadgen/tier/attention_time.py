"""How long attention and everything else outside the expert layers takes in one step: a model, not a measurement.

A step lasts as long as its slowest rank. The constants are what `loadgen calibrate` finds for 8 x MI355X serving
DeepSeek-V4-Pro; `calibrate` says from what.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, fields

from megamoe.errors import ConfigError, must_be


@dataclass(frozen=True, kw_only=True)
class AttentionTime:
    """Seconds outside the expert layers on one rank, in recorded time and at full context lengths.

    prefill of r rows at mean context c: base + r (per_row + c per_row_context).
    decode of q requests with r rows and t tokens of context in all: base + q per_request + r per_row + t per_context.
    """

    base_s: float = 20.63e-3
    prefill_row_s: float = 60.0e-6
    prefill_row_context_s: float = 0.0
    decode_request_s: float = 32.6e-6
    decode_row_s: float = 217.8e-6
    decode_context_s: float = 4.6e-10

    @classmethod
    def nothing(cls) -> AttentionTime:
        """Attention that takes no time: load for the expert layers alone."""
        return cls(**{constant.name: 0.0 for constant in fields(cls)})

    def prefill_s(self, num_rows: float, mean_context: float) -> float:
        if num_rows == 0:
            return 0.0
        return self.base_s + num_rows * (self.prefill_row_s + mean_context * self.prefill_row_context_s)

    def decode_s(self, num_requests: float, num_rows: float, total_context: float) -> float:
        if num_rows == 0:
            return 0.0
        of_requests = num_requests * self.decode_request_s + total_context * self.decode_context_s
        return self.base_s + of_requests + num_rows * self.decode_row_s


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """Now and then a rank is late: with probability `share` its attention takes `slowdown` times as long.

    Which rank in which step depends only on the seed. Raises ConfigError naming the field.
    """

    share: float = 0.0
    slowdown: float = 2.0
    seed: int = 42

    def __post_init__(self) -> None:
        if not 0.0 <= self.share <= 1.0:
            raise ConfigError(must_be("share of stragglers", "from 0 to 1", self.share))
        if not 1.0 <= self.slowdown < math.inf:
            raise ConfigError(must_be("slowdown of stragglers", "at least 1, and finite", self.slowdown))

    def factor(self, step_idx: int, rank: int) -> float:
        """What a rank's attention time is multiplied with in a step."""
        if not self.share:
            return 1.0
        digest = hashlib.sha256(f"{self.seed}:straggler:{step_idx}:{rank}".encode()).digest()
        return self.slowdown if int.from_bytes(digest[:8], "big") < self.share * 2**64 else 1.0
