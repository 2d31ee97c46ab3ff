"""Requests in, tokens out: the attention tier's schedulers driven by whoever submits, step after step on the service.

One loop runs steps while there is anything to do. Every step that emits tokens of a request wakes its `Generation`.
No HTTP here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

from loadgen.clock import RealClock
from loadgen.moe.tier import MoeTier
from loadgen.steps.records import RequestRecord, RunPhase, RunRecord, Status
from loadgen.steps.runner import ServiceGoneError, StepRunner, fit_tier, row_source
from loadgen.tier.attention_tier import AttentionTier, TierConfig
from loadgen.tier.attention_time import AttentionTime
from loadgen.tier.step import TierRequest
from loadgen.trace.trace import BLOCK_SIZE, HashIds
from megamoe.errors import MegaMoeError, UnavailableError

CACHE = "engine"
"""All requests share one name space of blocks: equal prefixes are equal."""


class Generation:
    """One request in the engine. Iterate to get (first token, count) as steps emit them, until num_output tokens."""

    def __init__(self, request: TierRequest, start_s: float, theoretical_hit_blocks: int) -> None:
        self.request = request
        self.start_s = start_s
        self.theoretical_hit_blocks = theoretical_hit_blocks
        self._changed = asyncio.Event()
        self._error: MegaMoeError | None = None

    def wake(self, error: MegaMoeError | None = None) -> None:
        """Tokens were emitted, or the request has failed."""
        self._error = error
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[tuple[int, int]]:
        """Raises the MegaMoeError that the request failed with."""
        sent = 0
        while sent < self.request.num_output:
            emitted = self.request.num_emitted
            if emitted > sent:
                yield sent, emitted - sent
                sent = emitted
            elif self._error is not None:
                raise self._error
            else:
                await self._changed.wait()
                self._changed.clear()


class Engine:
    """An attention tier over a leased service. `run` is the loop; `generate` and `abort` may be called meanwhile."""

    def __init__(
        self,
        moe: MoeTier,
        tier_config: TierConfig,
        *,
        time_scale: float = 1.0,
        token_scale: float = 1.0,
        step_retries: int = 1,
        seed: int = 42,
        distribution: str = "uniform",
    ) -> None:
        self.tier_config = fit_tier(tier_config, moe.info)
        self._clock = RealClock()
        now = self._clock.now()
        self.record = RunRecord(run_start_s=now, profile_start_s=now)
        self._tier = AttentionTier(moe.info.num_ranks, self.tier_config)
        rows = row_source(self.tier_config, moe.info, seed, distribution)
        self._runner = StepRunner(
            moe,
            self._tier,
            rows,
            self._clock,
            self.record,
            AttentionTime(),
            time_scale=time_scale,
            token_scale=token_scale,
            step_retries=step_retries,
        )
        self._generations: dict[str, Generation] = {}
        self._aborted: set[str] = set()
        self._known_blocks: set[int] = set()
        self._work = asyncio.Event()
        self._stopping = False
        self._step_idx = 0

    # ------------------------------------------------------------ the outside

    def generate(
        self, *, uid: str, agent_uid: str, num_input: int, hash_ids: HashIds, num_output: int
    ) -> Generation:
        """Queue a request. agent_uid: requests of one conversation prefer one rank.

        Raises InvalidArgumentError when prompt and output exceed the context limit, UnavailableError once stopping.
        """
        if self._stopping:
            raise UnavailableError("the engine is stopping")
        request = TierRequest(
            uid=uid,
            cache_uid=CACHE,
            agent_uid=agent_uid,
            hash_ids=hash_ids,
            block_size=BLOCK_SIZE,
            num_input=num_input,
            num_output=num_output,
        )
        self._tier.submit(request)
        generation = Generation(request, self._clock.now(), self._hit_blocks(hash_ids))
        self._generations[uid] = generation
        self._work.set()
        return generation

    def check_fits(self, num_input: int, num_output: int) -> None:
        """Raises InvalidArgumentError where `generate` would."""
        self._tier.check_fits(num_input + num_output)

    def abort(self, generation: Generation) -> None:
        """Its caller has gone: it leaves the tier after the step in flight. Nothing happens when it is over."""
        if generation.request.uid in self._generations:
            self._aborted.add(generation.request.uid)
            self._work.set()

    def now(self) -> float:
        """The clock's time."""
        return self._clock.now()

    @property
    def num_in_flight(self) -> int:
        return len(self._generations)

    def stop(self) -> None:
        """End `run` after the step in flight; requests in flight fail."""
        self._stopping = True
        self._work.set()

    async def run(self) -> None:
        """Run steps until `stop`."""
        try:
            while not self._stopping:
                self._drop_aborted()
                began_s = self._clock.now()
                if not await self._step(began_s):
                    self._work.clear()
                    await self._work.wait()
        finally:
            self._stopping = True
            gone = self._tier.remove(lambda request: True)
            self._end(gone, Status.CANCELLED, UnavailableError("the engine has stopped"))
            self.record.profile_end_s = self._clock.now()

    # ------------------------------------------------------------ inside

    async def _step(self, began_s: float) -> bool:
        """One step; False when there is nothing to do."""
        step = self._tier.next_step()
        if step is None:
            return False
        try:
            executed = await self._runner.run(
                step, self._step_idx, RunPhase.PROFILE, began_s, lambda: self._stopping
            )
        except MegaMoeError as error:
            self.record.num_failed_steps += 1
            self._end(self._tier.fail_step(step), Status.FAILED, error)
            if isinstance(error, ServiceGoneError):
                self.record.aborted, self._stopping = str(error), True
            return True
        finally:
            self._step_idx += 1
        now = self._clock.now()
        complete, num_tokens = self._tier.finish_step(step, now)
        self.record.steps.append(
            replace(executed, end_s=now, num_tokens=num_tokens, num_completed=len(complete))
        )
        for request in step.requests():
            self._generations[request.uid].wake()
        self._end(complete, Status.COMPLETED)
        return True

    def _drop_aborted(self) -> None:
        aborted, self._aborted = self._aborted, set()
        if aborted:
            self._end(self._tier.remove(lambda request: request.uid in aborted), Status.CANCELLED)

    def _end(self, requests: list[TierRequest], status: Status, error: MegaMoeError | None = None) -> None:
        """Requests have left the tier: write their records and tell who waits."""
        for request in requests:
            generation = self._generations.pop(request.uid)
            generation.wake(error)
            self.record.requests.append(self._record(generation, status, "" if error is None else str(error)))

    def _record(self, generation: Generation, status: Status, error: str) -> RequestRecord:
        request = generation.request
        return RequestRecord(
            uid=request.uid,
            trace_id="",
            session_uid=request.agent_uid,
            lane_idx=-1,
            stream_idx=0,
            turn_idx=0,
            phase=RunPhase.PROFILE,
            is_primer=False,
            status=status,
            rank=request.rank,
            num_input=request.num_input,
            num_output=request.num_output,
            num_emitted=request.num_emitted,
            num_cached=max(request.num_cached, 0),
            num_blocks=len(request.hash_ids),
            theoretical_hit_blocks=generation.theoretical_hit_blocks,
            num_verify_steps=request.num_verify_steps,
            num_accepted=request.num_accepted,
            start_s=generation.start_s,
            end_s=self._clock.now(),
            emissions=tuple(request.emissions),
            error=error,
        )

    def _hit_blocks(self, hash_ids: HashIds) -> int:
        """Leading blocks seen in any request so far; a block's identity covers all before it."""
        blocks = hash_ids.tolist()
        num_known = sum(block in self._known_blocks for block in blocks)
        self._known_blocks.update(blocks)
        return num_known
