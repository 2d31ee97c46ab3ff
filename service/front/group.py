"""What the front does with a running group: one-layer steps for ForwardStep callers, policies and draining.

Owns: ring 1 of every rank, and the one thread that runs ForwardStep calls one after the other (fairness is decided
here, in order of arrival, never per rank). While such calls are in flight the open ForwardStep callers hold the lease;
a caller group that holds it makes them fail with LeaseHeldError. Refuses with OverloadedError above a bounded number
of waiting calls.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megamoe import MoeBatch, PathPolicy, Phase, PlanId, StepPlan, SubStep
from megamoe.errors import InternalError, MegaMoeError, OverloadedError, PeerTimeoutError, UnavailableError
from service.messages import (
    CloseRequest,
    DrainRequest,
    ErrorReply,
    IntentRequest,
    LayerReply,
    LayerRequest,
    LeaseReply,
    LeaseRequest,
    PlanReply,
    PolicyRequest,
    Reply,
    Request,
)
from service.ring.ring import RingProducer, Ticket

HOLDER = "open ForwardStep callers"
MAX_WAITING = 32
"""ForwardStep calls that may wait for their turn."""
_MARGIN_S = 5.0


@dataclass(frozen=True, kw_only=True)
class StepJob:
    """A ForwardStep call as values: rows and phase of every rank."""

    layer_idx: int
    batches: tuple[MoeBatch, ...]
    phases: tuple[Phase, ...]
    timeout_s: float
    enqueued_s: float = field(default_factory=time.monotonic)

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(batch.num_rows for batch in self.batches)

    @property
    def dtype(self) -> str:
        scaled = any(b.num_rows and b.hidden_states_sf is not None for b in self.batches)
        return "mxfp8" if scaled else "bfloat16"


@dataclass(frozen=True, kw_only=True)
class StepDone:
    """A finished job. replies: per rank, None where a rank without rows was not called. Valid until `release`."""

    plan: StepPlan
    sub_steps: tuple[SubStep, ...]
    sequence: int
    replies: tuple[LayerReply | None, ...]


class FrontGroup:
    """One incarnation of the group, seen from the front. `rings`: producers of ring 1, in rank order."""

    def __init__(self, rings: Sequence[RingProducer], *, step_timeout_s: float) -> None:
        self._rings = list(rings)
        self._step_timeout_s = step_timeout_s
        self._jobs: queue.Queue[tuple[StepJob, Future[Any], Any] | None] = queue.Queue()
        self._lease: LeaseReply | None = None
        self._next_sequence = 0
        self._next_step_id = 0
        self._closed = False
        self._num_users = 0
        self._idle = threading.Condition()
        """Guards the two above: rings are closed when nobody is in them, and no job is queued behind the end."""
        self._thread = threading.Thread(target=self._run, name="ForwardStep", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------ ForwardStep

    def forward_step(self, job: StepJob, finish: Any) -> Future[Any]:
        """Queue a job; the future ends with `finish(StepDone)`, called while the rows are still in the rings.

        Raises OverloadedError when too many wait, UnavailableError when the group is gone.
        """
        future: Future[Any] = Future()
        with self._idle:
            if self._closed:
                raise UnavailableError("the group is restarting: no ForwardStep is taken")
            waiting = self._jobs.qsize()
            if waiting >= MAX_WAITING:
                raise OverloadedError(
                    f"ForwardStep calls waiting must be at most {MAX_WAITING}, got {waiting}: retry after a pause"
                )
            self._jobs.put((job, future, finish))
        return future

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future, finish = item
            tell = self._outcome(job, future, finish)
            # Before the answer: who has it may ask for the lease at once.
            if self._jobs.empty():
                self._give_back_lease()
            tell()

    def _outcome(self, job: StepJob, future: Future[Any], finish: Any) -> Callable[[], None]:
        """Run a job. Returns what ends its future."""
        if not future.set_running_or_notify_cancel():
            return lambda: None
        try:
            return partial(future.set_result, self._step(job, finish))
        except MegaMoeError as error:
            return partial(future.set_exception, error)
        except Exception as error:
            return partial(
                future.set_exception, InternalError(f"ForwardStep failed: {error!r}; this is a bug")
            )

    def _step(self, job: StepJob, finish: Any) -> Any:
        left_s = job.timeout_s - (time.monotonic() - job.enqueued_s)
        if left_s <= 0:
            raise PeerTimeoutError(
                f"the turn of this ForwardStep must come within {job.timeout_s} s, it did not"
            )
        lease = self._take_lease()
        plan_id = PlanId(lease.generation, self._next_step_id, 0)
        self._next_step_id += 1
        intents = [
            IntentRequest(
                lease_serial=lease.lease_serial,
                plan_id=plan_id,
                num_rows=count,
                phase=phase if count else Phase.IDLE,
                dtype=job.dtype,
                num_rows_per_rank=job.counts,
                timeout_s=left_s,
            )
            for count, phase in zip(job.counts, job.phases)
        ]
        planned = self._ask(dict(enumerate(intents)), 2 * left_s + _MARGIN_S)[0]
        if not isinstance(planned, PlanReply):
            raise InternalError(f"a StepIntent was answered by {type(planned).__name__}; this is a bug")
        try:
            return self._layer(job, lease, plan_id, planned, finish, left_s)
        finally:
            close = CloseRequest(lease_serial=lease.lease_serial, plan_id=plan_id)
            with contextlib.suppress(MegaMoeError):
                self._ask(dict.fromkeys(range(len(self._rings)), close), left_s)

    def _layer(
        self, job: StepJob, lease: LeaseReply, plan_id: PlanId, planned: PlanReply, finish: Any, left_s: float
    ) -> Any:
        sequence = self._next_sequence
        calls: dict[int, Request] = {
            rank: LayerRequest(
                lease_serial=lease.lease_serial,
                plan_id=plan_id,
                layer_idx=job.layer_idx,
                sequence=sequence,
                **(batch.tensors() if batch.num_rows else {}),
            )
            for rank, batch in enumerate(job.batches)
            if batch.num_rows or planned.plan.total_rows == 0
        }
        self._next_sequence += 1
        with self._in_flight(calls) as tickets:
            replies = self._wait(tickets, 2 * left_s + _MARGIN_S)
            ordered = tuple(replies.get(rank) for rank in range(len(self._rings)))
            done = StepDone(
                plan=planned.plan,
                sub_steps=planned.sub_steps,
                sequence=sequence,
                replies=ordered,  # type: ignore[arg-type]
            )
            return finish(done)

    # ------------------------------------------------------------------------------ lease

    def _take_lease(self) -> LeaseReply:
        if self._lease is None:
            reply = self._ask({0: LeaseRequest(holder=HOLDER)}, self._step_timeout_s)[0]
            if not isinstance(reply, LeaseReply):
                raise InternalError(f"a Lease was answered by {type(reply).__name__}; this is a bug")
            self._lease = reply
            self._next_sequence = reply.next_sequence
            self._next_step_id = reply.next_step_id
        return self._lease

    def _give_back_lease(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            request = LeaseRequest(holder=HOLDER, release=True, lease_serial=lease.lease_serial)
            with contextlib.suppress(MegaMoeError):
                self._ask({0: request}, self._step_timeout_s)

    # ------------------------------------------------------------------------------ Admin

    def stage_policy(self, policy: PathPolicy) -> None:
        """Every rank stages it; the next plan that is agreed afterwards takes it."""
        self._ask({rank: PolicyRequest(policy=policy) for rank in range(len(self._rings))}, _MARGIN_S)

    def probe(self, policy: PathPolicy) -> None:
        """Every rank's step loop must answer. Staging the present policy again changes nothing."""
        self.stage_policy(policy)

    def drain(self, draining: bool) -> None:
        self._ask({rank: DrainRequest(draining=draining) for rank in range(len(self._rings))}, _MARGIN_S)

    # ------------------------------------------------------------------------------ rings

    def _ask(self, requests: dict[int, Any], timeout_s: float) -> dict[int, Reply]:
        """Small requests to some ranks; all replies. Raises the most telling error."""
        with self._in_flight(requests) as tickets:
            return self._wait(tickets, timeout_s)

    @contextlib.contextmanager
    def _in_flight(self, requests: dict[int, Request]) -> Iterator[dict[int, Ticket]]:
        """Submit requests and give their records back; nothing closes the rings meanwhile."""
        with self._idle:
            if self._closed:
                raise UnavailableError("the group is restarting")
            self._num_users += 1
        tickets: dict[int, Ticket] = {}
        try:
            for rank, request in requests.items():
                tickets[rank] = self._rings[rank].submit(request)
            yield tickets
        finally:
            for rank, ticket in tickets.items():
                self._rings[rank].release(ticket)
            with self._idle:
                self._num_users -= 1
                self._idle.notify_all()

    def _wait(self, tickets: dict[int, Ticket], timeout_s: float) -> dict[int, Reply]:
        deadline = time.monotonic() + timeout_s
        replies: dict[int, Reply] = {}
        for rank, ticket in tickets.items():
            replies[rank] = self._wait_one(rank, ticket, deadline)
        errors = [reply for reply in replies.values() if isinstance(reply, ErrorReply)]
        if errors:
            raise min(errors, key=lambda error: error.code == "peer_refused").exception()
        return replies

    def _wait_one(self, rank: int, ticket: Ticket, deadline: float) -> Reply:
        while not self._closed:
            with contextlib.suppress(PeerTimeoutError):
                return self._rings[rank].wait(ticket, min(0.2, max(deadline - time.monotonic(), 0.001)))
            if time.monotonic() >= deadline:
                raise PeerTimeoutError(f"rank {rank} did not answer the front in time", [rank])
        raise UnavailableError("a rank is gone: the group restarts")

    def close(self) -> None:
        """The group is gone or stops: what waits fails with UnavailableError. Safe to call twice."""
        with self._idle:
            self._closed = True
            self._jobs.put(None)
        self._thread.join(_MARGIN_S)
        while not self._jobs.empty():
            item = self._jobs.get_nowait()
            if item is not None and item[1].set_running_or_notify_cancel():
                item[1].set_exception(UnavailableError("the group restarts: this ForwardStep was not run"))
        with self._idle:
            self._idle.wait_for(lambda: not self._num_users, _MARGIN_S)
        for ring in self._rings:
            ring.close()
