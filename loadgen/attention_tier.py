"""The attention tier being simulated: data-parallel ranks with continuous batching, chunked prefill, prefix caches.

Every step each rank is EXTEND (prefill chunks), VERIFY (decode: K+1 rows a request) or IDLE, and brings n rows to
every MoE layer. A step with prefill is slow for all ranks, so prefill comes in rounds that they share: between two of
them lie at least `decode_rounds_per_prefill` steps of pure decode while anybody decodes, which trades time to first
token for the interval between tokens. In a prefill round a rank without prompts goes on decoding. Pure: no clock, no
I/O; the driver says when a step ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from loadgen.attention_time import AttentionTime
from loadgen.prefix_cache import PrefixCache
from loadgen.router import Router, RouterConfig
from loadgen.speculation import AcceptanceSchedule, Speculation
from loadgen.trace import HashIds
from megamoe.errors import ConfigError, InvalidArgumentError, must_be


class Work(StrEnum):
    """What one rank does in a step."""

    EXTEND = "extend"
    VERIFY = "verify"
    IDLE = "idle"


@dataclass(frozen=True, kw_only=True)
class TierConfig:
    """chunk_rows: prefill rows per rank and step (SGLang divides its global chunk by the DP size).
    max_running: decode requests a rank runs at most. context_limit: longest prompt + output, in the trace's scale.
    Raises ConfigError naming the field."""

    chunk_rows: int = 8192
    decode_rounds_per_prefill: int = 8
    max_running: int = 256
    context_limit: int = 1 << 20
    seed: int = 42
    speculation: Speculation = field(default_factory=Speculation)
    router: RouterConfig = field(default_factory=RouterConfig)

    def __post_init__(self) -> None:
        for name in ("chunk_rows", "max_running", "context_limit"):
            if getattr(self, name) < 1:
                raise ConfigError(must_be(name, "at least 1", getattr(self, name)))
        if self.decode_rounds_per_prefill < 0:
            raise ConfigError(
                must_be("decode_rounds_per_prefill", "at least 0", self.decode_rounds_per_prefill)
            )


@dataclass(slots=True, eq=False, kw_only=True)
class TierRequest:
    """A request inside the tier, from submission to its last token. Times are the clock's, set by finish_step.

    cache_uid: within it block identities mean something. agent_uid: requests of one agent extend each other.
    num_cached: tokens found cached when its prefill began, -1 before.
    emissions: clock time of each step that emitted tokens of it.
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
    acceptance: AcceptanceSchedule | None = None

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
    """One rank's part of a step: (request, rows) pairs in order."""

    work: Work
    parts: tuple[tuple[TierRequest, int], ...] = ()

    @property
    def num_rows(self) -> int:
        return sum(rows for _, rows in self.parts)


@dataclass(frozen=True, slots=True)
class TierStep:
    """One step of the whole tier."""

    ranks: tuple[RankWork, ...]

    @property
    def num_rows_per_rank(self) -> tuple[int, ...]:
        return tuple(rank.num_rows for rank in self.ranks)

    @property
    def phase(self) -> str:
        """Phase of the agreed step: prefill if any rank with rows extends."""
        return "prefill" if any(rank.work is Work.EXTEND for rank in self.ranks) else "decode"

    def requests(self) -> list[TierRequest]:
        return [request for rank in self.ranks for request, _ in rank.parts]


class _Rank:
    """Queues and cache of one data-parallel rank."""

    def __init__(self) -> None:
        self.waiting: deque[TierRequest] = deque()
        self.running: list[TierRequest] = []
        self.cache = PrefixCache()

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.running)


class AttentionTier:
    """num_ranks schedulers under one round counter. Submit requests, take steps, report their end."""

    def __init__(self, num_ranks: int, config: TierConfig) -> None:
        self.config = config
        self._ranks = [_Rank() for _ in range(num_ranks)]
        self._router = Router(config.router)
        self._decode_rounds = config.decode_rounds_per_prefill  # the first prefill need not wait
        self._step_open = False

    @property
    def num_in_flight(self) -> int:
        """Requests submitted and not finished."""
        return sum(rank.load for rank in self._ranks)

    @property
    def num_running(self) -> int:
        """Requests that decode."""
        return sum(len(rank.running) for rank in self._ranks)

    def submit(self, request: TierRequest) -> int:
        """Queue a request on the rank that the router chooses; returns the rank.

        Raises InvalidArgumentError when prompt and output exceed the context limit.
        """
        if request.num_input + request.num_output > self.config.context_limit:
            wanted = f"at most context_limit = {self.config.context_limit} tokens"
            raise InvalidArgumentError(
                must_be("prompt and output", wanted, request.num_input + request.num_output)
            )
        matches = [rank.cache.match(request.cache_uid, request.hash_ids) for rank in self._ranks]
        request.rank = self._router.choose(
            request.cache_uid, request.agent_uid, matches, [rank.load for rank in self._ranks]
        )
        request.acceptance = self.config.speculation.schedule(request.uid, self.config.seed)
        self._ranks[request.rank].waiting.append(request)
        return request.rank

    def next_step(self) -> TierStep | None:
        """What each rank does next; None when no rank has anything to do. finish_step or fail_step must follow."""
        if self._step_open:
            raise AssertionError("the step before was neither finished nor failed: this is a bug")
        anybody_decodes = any(rank.running for rank in self._ranks)
        anybody_extends = any(self._can_extend(rank) for rank in self._ranks)
        prefill = anybody_extends and (
            not anybody_decodes or self._decode_rounds >= self.config.decode_rounds_per_prefill
        )
        if not prefill and not anybody_decodes:
            return None
        self._decode_rounds = 0 if prefill else self._decode_rounds + 1
        self._step_open = True
        if prefill:
            return TierStep(
                tuple(
                    self._extend(rank) if self._can_extend(rank) else self._verify(rank)
                    for rank in self._ranks
                )
            )
        return TierStep(tuple(self._verify(rank) for rank in self._ranks))

    def finish_step(self, step: TierStep, now: float) -> tuple[list[TierRequest], int]:
        """The step's last layer ended at `now`: emit tokens. Returns the complete requests, and tokens emitted."""
        self._step_open = False
        complete = []
        num_tokens = 0
        for rank, work in zip(self._ranks, step.ranks):
            for request, rows in work.parts:
                num_tokens -= request.num_emitted
                if work.work is Work.EXTEND:
                    self._prefilled(rank, request, rows, now)
                else:
                    self._verified(request, now)
                num_tokens += request.num_emitted
                if request.done:
                    complete.append(request)
            rank.running = [request for request in rank.running if not request.done]
        return complete, num_tokens

    def fail_step(self, step: TierStep) -> list[TierRequest]:
        """The step failed for good: its requests leave the tier unfinished. Returns them."""
        self._step_open = False
        failed = step.requests()
        self.remove(lambda request: request in failed)
        return failed

    def remove(self, doomed: Callable[[TierRequest], bool]) -> list[TierRequest]:
        """Take requests out of all queues, unfinished. Returns them."""
        gone = []
        for rank in self._ranks:
            gone += [request for request in (*rank.waiting, *rank.running) if doomed(request)]
            rank.waiting = deque(request for request in rank.waiting if not doomed(request))
            rank.running = [request for request in rank.running if not doomed(request)]
        return gone

    def drop_cache(self, cache_uid: str) -> None:
        """A session has ended: its cache entries can never be asked for again."""
        for rank in self._ranks:
            rank.cache.drop(cache_uid)
        self._router.drop(cache_uid)

    def attention_s(self, step: TierStep, model: AttentionTime, token_scale: float) -> float:
        """Modelled attention seconds of a step at full context lengths: the slowest rank's."""
        slowest = 0.0
        for rank in step.ranks:
            rows = rank.num_rows / token_scale
            contexts = [(request.context / token_scale, part) for request, part in rank.parts]
            if rank.work is Work.EXTEND:
                weighted = sum(context * part for context, part in contexts)
                slowest = max(slowest, model.prefill_s(rows, weighted / max(rank.num_rows, 1)))
            elif rank.work is Work.VERIFY:
                # Decode rows are requests times K+1 and do not shrink with token_scale.
                total_context = sum(context for context, _ in contexts)
                slowest = max(slowest, model.decode_s(rank.num_rows, total_context))
        return slowest

    # ------------------------------------------------------------ inside

    def _can_extend(self, rank: _Rank) -> bool:
        return bool(rank.waiting) and len(rank.running) < self.config.max_running

    def _extend(self, rank: _Rank) -> RankWork:
        """Fill one chunk from the head of the queue; the last request in it may be cut."""
        parts: list[tuple[TierRequest, int]] = []
        left = self.config.chunk_rows
        room = self.config.max_running - len(rank.running)
        for request in rank.waiting:
            if left == 0 or len(parts) == room:
                break
            if request.num_cached < 0:
                # At least the last block is computed, for its logits.
                blocks = rank.cache.match(request.cache_uid, request.hash_ids)
                blocks = min(blocks, (request.num_input - 1) // request.block_size)
                request.num_cached = blocks * request.block_size
            rows = min(left, request.prefill_left)
            parts.append((request, rows))
            left -= rows
        return RankWork(Work.EXTEND, tuple(parts))

    def _verify(self, rank: _Rank) -> RankWork:
        if not rank.running:
            return RankWork(Work.IDLE)
        rows = self.config.speculation.rows_per_request
        return RankWork(Work.VERIFY, tuple((request, rows) for request in rank.running))

    def _prefilled(self, rank: _Rank, request: TierRequest, rows: int, now: float) -> None:
        request.num_prefilled += rows
        if request.prefill_left > 0:
            return
        rank.waiting.remove(request)
        rank.cache.insert(request.cache_uid, request.hash_ids)
        request.num_emitted = 1
        request.emissions.append(now)
        if not request.done:
            rank.running.append(request)

    def _verified(self, request: TierRequest, now: float) -> None:
        if request.acceptance is None:
            raise AssertionError("a running request has no acceptance schedule: this is a bug")
        accepted = request.acceptance.next()
        request.num_verify_steps += 1
        request.num_accepted += accepted
        request.num_emitted = min(request.num_emitted + accepted, request.num_output)
        request.emissions.append(now)
