"""The attention tier being simulated: data-parallel ranks with continuous batching, chunked prefill, prefix caches.

Every step each rank is EXTEND (prefill chunks), VERIFY (decode: K+1 rows a request) or IDLE, and brings n rows to
every MoE layer. A step with prefill is slow for all ranks, so prefill comes in rounds that they share: between two of
them lie at least `decode_rounds_per_prefill` steps of pure decode while anybody decodes, which trades time to first
token for the interval between tokens. In a prefill round a rank without prompts goes on decoding. Pure: no clock, no
I/O; the driver says when a step ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from loadgen.tier.attention_time import AttentionTime, Stragglers
from loadgen.tier.dp_rank import DpRank
from loadgen.tier.router import Router, RouterConfig
from loadgen.tier.speculation import Speculation
from loadgen.tier.step import TierRequest, TierStep, Work
from megamoe.errors import ConfigError, InvalidArgumentError, must_be


@dataclass(frozen=True, kw_only=True)
class TierConfig:
    """chunk_rows: prefill rows per rank and step (SGLang divides its global chunk by the DP size).
    max_running: decode requests a rank runs at most. context_limit: longest prompt + output, in the trace's scale.
    kv_capacity_tokens: KV memory of a rank, in the trace's scale; 0 = unlimited, a session's cache then goes with
    it.
    draft_moe_layers: MoE layers of the draft model, each called once a draft with n rows; 0 = it has none.
    Raises ConfigError naming the field."""

    chunk_rows: int = 8192
    decode_rounds_per_prefill: int = 8
    max_running: int = 256
    context_limit: int = 1 << 20
    kv_capacity_tokens: int = 0
    draft_moe_layers: int = 0
    seed: int = 42
    speculation: Speculation = field(default_factory=Speculation)
    router: RouterConfig = field(default_factory=RouterConfig)
    stragglers: Stragglers = field(default_factory=Stragglers)

    def __post_init__(self) -> None:
        for name in ("chunk_rows", "max_running", "context_limit"):
            if getattr(self, name) < 1:
                raise ConfigError(must_be(name, "at least 1", getattr(self, name)))
        for name in ("decode_rounds_per_prefill", "kv_capacity_tokens", "draft_moe_layers"):
            if getattr(self, name) < 0:
                raise ConfigError(must_be(name, "at least 0", getattr(self, name)))


class AttentionTier:
    """num_ranks schedulers under one round counter. Submit requests, take steps, report their end."""

    def __init__(self, num_ranks: int, config: TierConfig) -> None:
        self.config = config
        self._ranks = [
            DpRank(
                chunk_rows=config.chunk_rows,
                max_running=config.max_running,
                rows_per_request=config.speculation.rows_per_request,
                kv_capacity_tokens=config.kv_capacity_tokens,
            )
            for _ in range(num_ranks)
        ]
        self._router = Router(config.router)
        self._decode_rounds = config.decode_rounds_per_prefill  # the first prefill need not wait
        self._step_idx = 0
        self._step_open = False

    @property
    def num_in_flight(self) -> int:
        """Requests submitted and not finished."""
        return sum(rank.load for rank in self._ranks)

    @property
    def num_running(self) -> int:
        """Requests that decode."""
        return sum(len(rank.running) for rank in self._ranks)

    @property
    def num_evicted_tokens(self) -> int:
        """Cached tokens that had to make room, so far."""
        return sum(rank.cache.num_evicted_tokens for rank in self._ranks)

    def submit(self, request: TierRequest) -> int:
        """Queue a request on the rank that the router chooses; returns the rank.

        Raises InvalidArgumentError when prompt and output exceed the context limit or a rank's KV memory.
        """
        self.check_fits(request.num_input + request.num_output)
        states = [rank.state(request) for rank in self._ranks]
        request.rank = self._router.choose(request.cache_uid, request.agent_uid, states)
        request.accept = self.config.speculation.schedule(request.uid, self.config.seed).next
        self._ranks[request.rank].waiting.append(request)
        return request.rank

    def check_fits(self, num_tokens: int) -> None:
        """Raises InvalidArgumentError when a request of so many tokens, prompt and output, can never be run."""
        for name in ("context_limit", "kv_capacity_tokens"):
            limit = getattr(self.config, name)
            if limit and num_tokens > limit:
                raise InvalidArgumentError(
                    must_be("prompt and output", f"at most {name} = {limit} tokens", num_tokens)
                )

    def next_step(self) -> TierStep | None:
        """What each rank does next; None when no rank has anything to do. finish_step or fail_step must follow."""
        if self._step_open:
            raise AssertionError("the step before was neither finished nor failed: this is a bug")
        decodes = any(rank.running for rank in self._ranks)
        due = not decodes or self._decode_rounds >= self.config.decode_rounds_per_prefill
        works = [
            (rank.extend() if due and rank.wants_prefill else None) or rank.verify() for rank in self._ranks
        ]
        prefill = any(work.work is Work.EXTEND for work in works)
        if not prefill and not decodes:
            return None
        self._decode_rounds = 0 if prefill else self._decode_rounds + 1
        self._step_open = True
        self._step_idx += 1
        return TierStep(self._step_idx - 1, tuple(works))

    def finish_step(self, step: TierStep, now: float) -> tuple[list[TierRequest], int]:
        """The step's last layer ended at `now`: emit tokens. Returns the complete requests, and tokens emitted."""
        self._step_open = False
        complete = []
        num_tokens = 0
        for rank, work in zip(self._ranks, step.ranks):
            done, emitted = rank.finish(work, now)
            complete += done
            num_tokens += emitted
        return complete, num_tokens

    def fail_step(self, step: TierStep) -> list[TierRequest]:
        """The step failed for good: its requests leave the tier unfinished. Returns them."""
        self._step_open = False
        failed = set(map(id, step.requests()))
        return self.remove(lambda request: id(request) in failed)

    def remove(self, doomed: Callable[[TierRequest], bool]) -> list[TierRequest]:
        """Take requests out of all queues, unfinished. Returns them."""
        return [request for rank in self._ranks for request in rank.remove(doomed)]

    def drop_session(self, cache_uid: str) -> None:
        """A session has ended. No server is told: what it cached stays until something needs the room, and only
        goes with it where room is unlimited."""
        self._router.drop(cache_uid)
        if not self.config.kv_capacity_tokens:
            for rank in self._ranks:
                rank.cache.drop(cache_uid)

    def attention_s(self, step: TierStep, model: AttentionTime, token_scale: float) -> float:
        """Modelled attention seconds of a step at full context lengths: the slowest rank's."""
        slowest = 0.0
        for rank_idx, rank in enumerate(step.ranks):
            if rank.work is Work.IDLE:
                continue
            if rank.work is Work.EXTEND:
                mean_context = rank.row_context / token_scale / rank.num_rows
                took = model.prefill_s(rank.num_rows / token_scale, mean_context)
            else:
                # Decode rows are requests times K+1 and do not shrink with token_scale.
                took = model.decode_s(len(rank.parts), rank.num_rows, rank.row_context / token_scale)
            slowest = max(slowest, took * self.config.stragglers.factor(step.step_idx, rank_idx))
        return slowest
