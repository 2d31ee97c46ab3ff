"""The closed-loop driver: sessions in, MoE steps out, on an injected clock.

One step of the attention tier at a time: the modelled attention time passes on the clock (times time_scale), every
MoE layer is a real call to the service, and the tokens of the step exist when its last layer has answered. Warm-up
(primers, then warmup_requests a lane without delays) comes first and is marked in the records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from loadgen.clock import Clock
from loadgen.moe.table import TableTier
from loadgen.moe.tier import MoeTier
from loadgen.replay.lanes import Lane, Lanes
from loadgen.replay.session import Turn, stopped_length
from loadgen.scenario.scenario import ScenarioConfig
from loadgen.steps.records import RequestRecord, RunPhase, RunRecord, Status
from loadgen.steps.runner import ServiceGoneError, StepRunner, fit_tier, row_source
from loadgen.tier.attention_tier import AttentionTier, TierConfig
from loadgen.tier.attention_time import AttentionTime
from loadgen.tier.prefix_cache import PrefixCache
from loadgen.tier.step import TierRequest, TierStep
from loadgen.trace.trace import TraceSource
from megamoe.errors import InvalidArgumentError, MegaMoeError

CANCEL_POLL_S = 0.2
"""How long an idle driver sleeps at most before it looks at its cancel flag."""


@dataclass(slots=True, eq=False)
class _Active:
    """A request in flight: where it came from, and its place in the tier."""

    lane: Lane
    turn: Turn
    session_uid: str
    trace_id: str
    request: TierRequest
    is_primer: bool
    start_s: float
    theoretical_hit_blocks: int


class Replay:
    """One run. Call `run` once; `cancel` from anywhere in the same event loop ends it early with what there is."""

    def __init__(
        self,
        moe: MoeTier | TableTier,
        traces: TraceSource,
        config: ScenarioConfig,
        tier_config: TierConfig,
        clock: Clock,
        *,
        attention: AttentionTime | None = None,
        distribution: str = "uniform",
        num_micro_batches: int = 1,
    ) -> None:
        self.config = config
        self.tier_config = fit_tier(tier_config, moe.info)
        self.record = RunRecord(run_start_s=clock.now())
        self.phase = RunPhase.WARMUP
        self._traces = traces
        self._clock = clock
        self._tier = AttentionTier(moe.info.num_ranks, self.tier_config)
        rows = None
        if not isinstance(moe, TableTier):
            rows = row_source(self.tier_config, moe.info, config.seed, distribution)
        self._runner = StepRunner(
            moe,
            self._tier,
            rows,
            clock,
            self.record,
            attention or AttentionTime(),
            time_scale=config.time_scale,
            token_scale=config.token_scale,
            step_retries=config.step_retries,
            num_micro_batches=num_micro_batches,
        )
        self._lanes: Lanes | None = None
        self._active: dict[str, _Active] = {}
        self._theoretical = PrefixCache()
        self._stop = False
        self._sending = True
        self._idle_since = clock.now()
        self._next_send_s = 0.0
        self._began_s = 0.0
        self._step_idx = 0
        self._num_failed = 0
        self._sessions_when_sent = 0

    # ------------------------------------------------------------ the outside

    def cancel(self) -> None:
        """End the run after the step in flight; the record says cancelled."""
        self.record.cancelled = True
        self._stop = True

    def now(self) -> float:
        """The clock's time."""
        return self._clock.now()

    @property
    def num_in_flight(self) -> int:
        return self._tier.num_in_flight

    @property
    def num_running(self) -> int:
        """Requests that decode."""
        return self._tier.num_running

    @property
    def num_live_trees(self) -> int:
        return self._lanes.num_live if self._lanes else 0

    async def run(self) -> RunRecord:
        """Warm up, profile, drain. Returns the record, also of a run that was cancelled or aborted."""
        record, clock = self.record, self._clock
        lanes = self._lanes = Lanes(self._traces, self.config, clock.now())
        await self._warm_up(lanes)
        if not self._stop:
            self.phase = RunPhase.PROFILE
            record.profile_start_s = clock.now()
            lanes.begin_profile(clock.now())
            self._idle_since = clock.now()
            deadline = record.profile_start_s + self.config.duration_wall_s
            await self._pump(lanes, lambda: clock.now() >= deadline, deadline)
            self._sending = False
            grace_end = clock.now() + self.config.grace_wall_s
            await self._pump(lanes, lambda: clock.now() >= grace_end or not self._active, grace_end)
            record.profile_end_s = clock.now()
        self._sending = False
        for request in self._tier.remove(lambda request: True):
            self._finish(lanes, request, Status.CANCELLED)
        record.num_sessions = lanes.num_sessions
        record.num_idle_skips, record.idle_skipped_s = lanes.num_idle_skips, lanes.idle_skipped_s
        return record

    # ------------------------------------------------------------ phases

    async def _warm_up(self, lanes: Lanes) -> None:
        self._sending = False
        for lane in lanes.lanes:
            for turn in lane.session.primers():
                self._send(lanes, lane, turn, is_primer=True)
        await self._pump(lanes, lambda: not self._active, float("inf"))
        self._sending = True
        await self._pump(lanes, lambda: not self._active and lanes.due_at() == float("inf"), float("inf"))

    async def _pump(self, lanes: Lanes, done: Callable[[], bool], wake_s: float) -> None:
        """Send what is due and run steps until done() or the run stops. wake_s: when done() may become true."""
        clock = self._clock
        while not self._stop:
            self._began_s = clock.now()
            self._send_due(lanes)
            if done():
                return
            step = self._tier.next_step()
            if step is not None:
                await self._run_step(lanes, step)
                continue
            if self._active:
                raise AssertionError("requests in flight and nothing to do: this is a bug")
            if self._sending:
                lanes.cap_idle(self._idle_since)
            next_s = max(lanes.due_at(), self._next_send_s) if self._sending else float("inf")
            target = min(next_s, wake_s)
            if target == float("inf"):
                return
            if target > clock.now():
                await clock.sleep_until(min(target, clock.now() + CANCEL_POLL_S))

    def _send_due(self, lanes: Lanes) -> None:
        now = self._clock.now()
        while self._sending and not self._stop and now >= self._next_send_s:
            taken = lanes.take_due(now)
            if taken is None:
                return
            if self.config.request_rate:
                self._next_send_s = max(self._next_send_s, now) + 1.0 / self.config.request_rate
            self._send(lanes, *taken)

    # ------------------------------------------------------------ requests

    def _send(self, lanes: Lanes, lane: Lane, turn: Turn, *, is_primer: bool = False) -> None:
        session, trace = lane.session, lane.session.trace
        uid = f"{session.uid}/{turn.stream_idx}/{turn.turn_idx}"
        num_output = turn.request.num_output
        if not self.config.ignore_eos:
            num_output = stopped_length(num_output, self.config.seed, uid)
        request = TierRequest(
            uid=uid + ("/primer" if is_primer else ""),
            # The marker of the scenario: what an earlier pass over the same trace has cached is never found again.
            cache_uid=session.uid if self.config.cache_bust else trace.id,
            agent_uid=f"{session.uid}/{turn.stream_idx}",
            hash_ids=turn.request.hash_ids,
            block_size=trace.block_size,
            num_input=turn.request.num_input,
            num_output=1 if is_primer else num_output,
        )
        hit = self._theoretical.match(request.cache_uid, request.hash_ids)
        self._theoretical.insert(request.cache_uid, request.hash_ids)
        active = _Active(lane, turn, session.uid, trace.id, request, is_primer, self._clock.now(), hit)
        self._active[request.uid] = active
        try:
            self._tier.submit(request)
            self._sessions_when_sent = lanes.num_sessions
        except InvalidArgumentError as error:
            self._finish(lanes, request, Status.CONTEXT_OVERFLOW, str(error))
            # Without requests no time passes: sessions of which nothing fits would follow each other for ever.
            if lanes.num_sessions - self._sessions_when_sent > len(self._traces) + self.config.concurrency:
                self.record.aborted = f"no request of {len(self._traces)} sessions fits; the last: {error}"
                self._stop = True

    def _finish(self, lanes: Lanes, request: TierRequest, status: Status, error: str = "") -> None:
        """A request has left the tier: write its record and tell its lane."""
        now = self._clock.now()
        active = self._active.pop(request.uid)
        streamed = self.config.streaming
        self.record.requests.append(
            RequestRecord(
                uid=request.uid,
                trace_id=active.trace_id,
                session_uid=active.session_uid,
                lane_idx=active.lane.lane_idx,
                stream_idx=active.turn.stream_idx,
                turn_idx=active.turn.turn_idx,
                phase=self.phase,
                is_primer=active.is_primer,
                status=status,
                rank=request.rank,
                num_input=request.num_input,
                num_output=request.num_output,
                num_emitted=request.num_emitted,
                num_cached=max(request.num_cached, 0),
                num_blocks=len(request.hash_ids),
                theoretical_hit_blocks=active.theoretical_hit_blocks,
                num_verify_steps=request.num_verify_steps,
                num_accepted=request.num_accepted,
                start_s=active.start_s,
                end_s=now,
                emissions=tuple(request.emissions if streamed else request.emissions[-1:]),
                error=error,
            )
        )
        if not self._active:
            self._idle_since = now
        if active.is_primer:
            return
        drained = lanes.complete(active.lane, active.turn.stream_idx, now, refill=self._sending)
        if drained and self.config.cache_bust:
            self._tier.drop_session(drained)
            self._theoretical.drop(drained)

    # ------------------------------------------------------------ steps

    async def _run_step(self, lanes: Lanes, step: TierStep) -> None:
        try:
            executed = await self._runner.run(
                step, self._step_idx, self.phase, self._began_s, lambda: self._stop
            )
        except MegaMoeError as error:
            self._fail(lanes, step, f"{error.code}: {error}")
            if isinstance(error, ServiceGoneError):
                self.record.aborted, self._stop = str(error), True
            return
        now = self._clock.now()
        complete, num_tokens = self._tier.finish_step(step, now)
        self.record.steps.append(
            replace(executed, end_s=now, num_tokens=num_tokens, num_completed=len(complete))
        )
        self._step_idx += 1
        for request in complete:
            self._finish(lanes, request, Status.COMPLETED)

    def _fail(self, lanes: Lanes, step: TierStep, sentence: str) -> None:
        """Every request of a step that failed for good has failed; too many of them end the run."""
        record = self.record
        record.num_failed_steps += 1
        self._step_idx += 1
        for request in self._tier.fail_step(step):
            self._num_failed += 1
            self._finish(lanes, request, Status.FAILED, sentence)
        finished = len(record.requests)
        if (
            finished >= self.config.min_requests_to_abort
            and self._num_failed > self.config.max_failed_share * finished
        ):
            record.aborted = f"{self._num_failed} of {finished} requests failed; the last error: {sentence}"
            self._stop = True
