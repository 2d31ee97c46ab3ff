"""One data-parallel rank of the attention tier: its queues, its KV memory, and what it brings to a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from loadgen.tier.prefix_cache import PrefixCache
from loadgen.tier.router import RankState
from loadgen.tier.step import RankWork, TierRequest, Work


class DpRank:
    """Continuous batching with chunked prefill. max_running: decode requests at most. kv_capacity_tokens: 0 =
    unlimited.

    A request is admitted when KV memory has room for all it will compute and generate, in order of arrival; so a
    running request is never pushed out again (real schedulers admit more and retract).
    """

    def __init__(
        self, *, chunk_rows: int, max_running: int, rows_per_request: int, kv_capacity_tokens: int
    ) -> None:
        self.waiting: deque[TierRequest] = deque()
        self.running: list[TierRequest] = []
        self.cache = PrefixCache(kv_capacity_tokens)
        self._chunk_rows = chunk_rows
        self._max_running = max_running
        self._rows_per_request = rows_per_request
        self._parts: tuple[tuple[TierRequest, int], ...] = ()  # of the running ones, while they stay the same
        self._context = 0

    @property
    def load(self) -> int:
        """Requests waiting or running."""
        return len(self.waiting) + len(self.running)

    def state(self, request: TierRequest) -> RankState:
        """What a router weighs when it places a request."""
        match = self.cache.match(request.cache_uid, request.hash_ids) / max(len(request.hash_ids), 1)
        waiting = sum(other.num_input for other in self.waiting if other.lease is None)
        held = self.cache.num_cached_tokens + self.cache.num_reserved_tokens
        return RankState(match, self.load, held + waiting)

    @property
    def wants_prefill(self) -> bool:
        return bool(self.waiting) and len(self.running) < self._max_running

    def extend(self) -> RankWork | None:
        """Fill one chunk from the head of the queue; the last request in it may be cut. None when nothing is waiting
        that may run, or KV memory has no room for it now."""
        parts: list[tuple[TierRequest, int]] = []
        left = self._chunk_rows
        room = self._max_running - len(self.running)
        for request in self.waiting:
            if left == 0 or len(parts) >= room or not self._admit(request):
                break
            rows = min(left, request.prefill_left)
            parts.append((request, rows))
            left -= rows
        if not parts:
            return None
        row_context = sum(request.context * rows for request, rows in parts)
        return RankWork(Work.EXTEND, tuple(parts), self._chunk_rows - left, row_context)

    def verify(self) -> RankWork:
        """One decode step of everything that runs."""
        if not self.running:
            return RankWork(Work.IDLE)
        rows = self._rows_per_request
        if not self._parts:
            self._parts = tuple([(request, rows) for request in self.running])
            self._context = sum(request.context for request in self.running)
        return RankWork(Work.VERIFY, self._parts, rows * len(self._parts), self._context)

    def finish(self, work: RankWork, now: float) -> tuple[list[TierRequest], int]:
        """The step has ended at `now`: emit tokens. Returns the complete requests, and tokens emitted."""
        if work.work is Work.VERIFY:
            return self._verified(work, now)
        num_tokens = 0
        complete = []
        for request, rows in work.parts:
            self._prefilled(request, rows, now)
            num_tokens += request.num_emitted
            if request.done:
                complete.append(request)
                self._release(request)
        return complete, num_tokens

    def remove(self, doomed: Callable[[TierRequest], bool]) -> list[TierRequest]:
        """Take requests out of the queues, unfinished. Returns them."""
        gone = [request for request in (*self.waiting, *self.running) if doomed(request)]
        for request in gone:
            self._release(request)
        self.waiting = deque(request for request in self.waiting if request not in gone)
        self.running = [request for request in self.running if request not in gone]
        self._parts = ()
        return gone

    # ------------------------------------------------------------ inside

    def _admit(self, request: TierRequest) -> bool:
        if request.lease is not None:
            return True
        lease = self.cache.reserve(
            request.cache_uid, request.hash_ids, request.block_size, request.num_output
        )
        if lease is None:
            return False
        request.lease = lease
        request.num_cached = lease.num_cached_blocks * request.block_size
        return True

    def _release(self, request: TierRequest) -> None:
        if request.lease is not None:
            self.cache.release(request.lease)
            request.lease = None

    def _prefilled(self, request: TierRequest, rows: int, now: float) -> None:
        request.num_prefilled += rows
        if request.prefill_left > 0:
            return
        if request.lease is None:
            raise AssertionError("a request was prefilled without KV memory: this is a bug")
        self.waiting.remove(request)
        self.cache.commit(request.lease)
        request.num_emitted = 1
        request.emissions.append(now)
        if not request.done:
            self.running.append(request)
            self._parts = ()

    def _verified(self, work: RankWork, now: float) -> tuple[list[TierRequest], int]:
        """Every request of the step accepts tokens. The innermost loop of a simulation."""
        num_tokens = 0
        complete = []
        for request, _ in work.parts:
            accepted = request.accept()
            request.num_verify_steps += 1
            request.num_accepted += accepted
            request.emissions.append(now)
            left = request.num_output - request.num_emitted
            if accepted >= left:
                accepted = left
                complete.append(request)
            request.num_emitted += accepted
            num_tokens += accepted
        self._context += num_tokens
        if complete:
            self.running = [request for request in self.running if not request.done]
            self._parts = ()
            for request in complete:
                self._release(request)
        return complete, num_tokens
