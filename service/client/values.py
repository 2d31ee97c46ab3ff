"""What goes into a layer and what comes out, for all ranks at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megamoe import MoeBatch, Phase, StepPlan, SubStepReport
from megamoe.errors import InvalidArgumentError, must_be
from service.net import wire
from service.pb import moe_pb2 as pb

Rows = MoeBatch | Sequence[torch.Tensor] | None
"""Rows of one rank: a MoeBatch, or (hidden_states bf16 [n, hidden], topk_ids int32 [n, num_topk], topk_weights fp32
[n, num_topk]) with hidden_states_sf uint8 [n, hidden / 32] as a fourth for FP8 rows, or None for no rows.
The service checks them; nothing is checked here but their number."""

_NAMES = ("hidden_states", "topk_ids", "topk_weights", "hidden_states_sf")


@dataclass(frozen=True)
class GroupOutput:
    """The result of one layer on all ranks.

    hidden_states: per rank, [n, hidden] bf16; n = 0 for a rank without rows.
    reports_per_rank: per rank, one report for each executed sub-step; empty for a rank that was not called.
    """

    plan: StepPlan
    layer_idx: int
    hidden_states: tuple[torch.Tensor, ...]
    reports_per_rank: tuple[tuple[SubStepReport, ...], ...]

    @property
    def sub_steps(self) -> tuple[SubStepReport, ...]:
        """The reports of the lowest rank that was called; agreed facts are the same in all of them."""
        return next((reports for reports in self.reports_per_rank if reports), ())


def num_rows_of(rows: Rows) -> int:
    if rows is None:
        return 0
    return rows.num_rows if isinstance(rows, MoeBatch) else int(rows[0].shape[0])


def add_rows(writer: wire.PayloadWriter, rows: Rows) -> list[pb.Tensor]:
    """Descriptors of the rows, laid into the payload."""
    if rows is None:
        return []
    if isinstance(rows, MoeBatch):
        return writer.add_batch(rows)
    return [writer.add(name, tensor) for name, tensor in zip(_NAMES, rows)]


def phases_of(phase: str | Sequence[str], counts: Sequence[int]) -> list[Phase]:
    """One phase per rank from one for all or a list; a rank without rows is idle."""
    said = [phase] * len(counts) if isinstance(phase, str) else list(phase)
    if len(said) != len(counts):
        raise InvalidArgumentError(must_be("phase", f"one, or one per rank ({len(counts)})", len(said)))
    try:
        return [Phase(name) if rows else Phase.IDLE for name, rows in zip(said, counts)]
    except ValueError as error:
        raise InvalidArgumentError(must_be("phase", "'prefill' or 'decode'", said)) from error
