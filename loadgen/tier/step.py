"""Values of the simulated attention tier: a request inside it, one rank's part of a step, a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from loadgen.tier.prefix_cache import KvLease
from loadgen.trace.trace import HashIds


class Work(StrEnum):
    """What one rank does in a step."""

    EXTEND = "extend"
    VERIFY = "verify"
    IDLE = "idle"


PHASE_OF_WORK = {Work.EXTEND: "prefill", Work.VERIFY: "decode", Work.IDLE: "idle"}


def _nothing() -> int:
    raise AssertionError("a request that was never submitted cannot decode: this is a bug")


@dataclass(slots=True, eq=False, kw_only=True)
class TierRequest:
    """A request inside the tier, from submission to its last token. Times are the clock's, set by finish_step.

    cache_uid: within it block identities mean something. agent_uid: requests of one agent extend each other.
    num_cached: tokens found cached when its prefill began, -1 before.
    emissions: clock time of each step that emitted tokens of it. accept: how many tokens its next decode step accepts.
    """

    uid: str
    cache_uid: str
    agent_uid: str
    hash_ids: HashIds
    block_size: int
    num_input: int
    num_output: int
    rank: int = -1
    num_cached: int = -1
    num_prefilled: int = 0
    num_emitted: int = 0
    num_verify_steps: int = 0
    num_accepted: int = 0
    emissions: list[float] = field(default_factory=list)
    accept: Callable[[], int] = _nothing
    lease: KvLease | None = None

    @property
    def context(self) -> int:
        """Tokens in its KV cache now."""
        return max(self.num_cached, 0) + self.num_prefilled + self.num_emitted

    @property
    def prefill_left(self) -> int:
        return self.num_input - max(self.num_cached, 0) - self.num_prefilled

    @property
    def done(self) -> bool:
        return self.num_emitted >= self.num_output


@dataclass(frozen=True, slots=True)
class RankWork:
    """One rank's part of a step: (request, rows) pairs in order, and the sum of their rows.

    row_context: what attention reads. In EXTEND the sum over rows of their request's context so far, in VERIFY the sum
    over requests of theirs; tokens.
    """

    work: Work
    parts: tuple[tuple[TierRequest, int], ...] = ()
    num_rows: int = 0
    row_context: int = 0


@dataclass(frozen=True, slots=True)
class StepRows:
    """What one pass through MoE layers asks of the service: rows and phase of every rank."""

    num_rows_per_rank: tuple[int, ...]
    phases: tuple[str, ...]

    @property
    def is_prefill(self) -> bool:
        return "prefill" in self.phases

    def split(self, num_parts: int, rows_per_request: int) -> list[StepRows]:
        """Micro-batches: every rank's rows shared out evenly, decode rows by whole requests. Parts in which no rank
        has rows are left out."""
        if num_parts == 1:
            return [self]
        units = [rows_per_request if phase == "decode" else 1 for phase in self.phases]
        shares = [
            [rows // unit // num_parts + (part < rows // unit % num_parts) for part in range(num_parts)]
            for rows, unit in zip(self.num_rows_per_rank, units)
        ]
        parts = []
        for part in range(num_parts):
            counts = tuple(share[part] * unit for share, unit in zip(shares, units))
            if any(counts):
                phases = tuple(phase if count else "idle" for phase, count in zip(self.phases, counts))
                parts.append(StepRows(counts, phases))
        return parts


@dataclass(frozen=True)
class TierStep:
    """One step of the whole tier. step_idx counts steps of the tier, also those that fail."""

    step_idx: int
    ranks: tuple[RankWork, ...]

    @cached_property
    def num_rows_per_rank(self) -> tuple[int, ...]:
        return tuple(rank.num_rows for rank in self.ranks)

    @cached_property
    def phase(self) -> str:
        """Phase of the agreed step: prefill if any rank with rows extends."""
        return "prefill" if any(rank.work is Work.EXTEND for rank in self.ranks) else "decode"

    def requests(self) -> list[TierRequest]:
        return [request for rank in self.ranks for request, _ in rank.parts]

    def target_pass(self) -> StepRows:
        """Rows of the model itself."""
        return StepRows(self.num_rows_per_rank, tuple(PHASE_OF_WORK[rank.work] for rank in self.ranks))

    def draft_passes(self, num_drafts: int) -> list[StepRows]:
        """Rows of the draft model, one pass a draft: a decoding request carries one row, not num_drafts + 1. The first
        pass also takes the prompts of ranks that extend."""
        if num_drafts == 0:
            return []
        decode = [len(rank.parts) if rank.work is Work.VERIFY else 0 for rank in self.ranks]
        first = [
            rank.num_rows if rank.work is Work.EXTEND else rows for rank, rows in zip(self.ranks, decode)
        ]
        others = [self._draft_pass(decode)] * (num_drafts - 1) if any(decode) else []
        return [self._draft_pass(first), *others]

    def _draft_pass(self, counts: list[int]) -> StepRows:
        phases = (PHASE_OF_WORK[rank.work] if rows else "idle" for rank, rows in zip(self.ranks, counts))
        return StepRows(tuple(counts), tuple(phases))
