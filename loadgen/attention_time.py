"""How long attention and everything else outside the expert layers takes in one step: a model, not a measurement.

A step lasts as long as its slowest rank. The constants are starting values that put a step of the published shape
(12 requests a rank at 114k tokens of context, 7 rows each) near the published 74 ms of pure verify plus scheduling;
they are not fitted to a machine.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AttentionTime:
    """Seconds of attention on one rank, in recorded time and at full context lengths.

    prefill of r rows at mean context c: base + r (per_row + c per_row_context).
    decode of r rows over a total context of t tokens: base + t per_context + r per_decode_row.
    """

    base_s: float = 0.040
    prefill_row_s: float = 8e-6
    prefill_row_context_s: float = 3e-11
    decode_context_s: float = 25e-9
    decode_row_s: float = 40e-6

    def prefill_s(self, num_rows: float, mean_context: float) -> float:
        if num_rows == 0:
            return 0.0
        return self.base_s + num_rows * (self.prefill_row_s + mean_context * self.prefill_row_context_s)

    def decode_s(self, num_rows: float, total_context: float) -> float:
        if num_rows == 0:
            return 0.0
        return self.base_s + total_context * self.decode_context_s + num_rows * self.decode_row_s
