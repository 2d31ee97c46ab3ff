"""The one thread that owns a rank's runtime: it reads the rank's rings and the board, and nothing else.

Event-driven: it sleeps on the rank's doorbell, which rings and other ranks ring; on waking it takes what is in the
rings, moves plans on, and executes layer calls strictly in sequence order. A second thread stands in for it while it
is inside a layer call, so that plans of other micro-batches are agreed and refusals answered meanwhile: a layer
call that waits for a peer never keeps that peer's caller waiting for a plan. The stand-in never touches the runtime.
What the rank knows is a RankState; a bug here brings the group down, loudly, and so does a device that is lost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import torch

from megamoe import MoeOutput, PathPolicy
from megamoe.errors import MegaMoeError, UnavailableError
from service.board.board import Board
from service.messages import ErrorReply
from service.rank.call_state import Work
from service.rank.loop_door import LoopDoor
from service.rank.runtime_like import RuntimeLike
from service.rank.state import LoopSettings, Observer, RankState
from service.ring.consumer import RingConsumer

__all__ = ["LoopSettings", "Observer", "StepLoop"]

log = logging.getLogger(__name__)

STAND_IN_S = 0.25
"""How long the stand-in sleeps when nothing rings: the latest moment at which a plan times out during a layer call."""
_SPINS_PER_LOOK = 16
"""Looks at the doorbell between two at the clock."""


class StepLoop:
    """Runs a RankState with its runtime: the device thread and its stand-in. `start`, `stop`; safe from any thread."""

    def __init__(
        self,
        board: Board,
        rank: int,
        runtime: RuntimeLike,
        rings: Sequence[RingConsumer],
        *,
        settings: LoopSettings | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.board = board
        self.rank = rank
        self._runtime = runtime
        self._lock = threading.Lock()
        # A warm-up has used sequences of the runtime already: the group's order goes on above them.
        board.raise_sequence(runtime.next_sequence)
        self.state = RankState(
            board,
            rank,
            runtime.bundle,
            policy=runtime.policy,
            rings=rings,
            settings=settings,
            observer=observer,
        )
        doorbell_at, control_at = board.doorbell(rank)
        self._doorbell = board.segment.word(doorbell_at)
        self._control = board.segment.word(control_at)
        self._bell = board.bell(rank)
        self.door = LoopDoor(rank, runtime, self.state, self._lock, self._bell)
        self._stopping = False
        self._spin_s = settings.spin_s if settings is not None else 0.0
        self._in_forward = False
        self._ended = threading.Event()
        self._ended.set()
        self.failure: BaseException | None = None
        """What ended the loop: a bug, or UnavailableError when the device was lost."""

    def start(self) -> None:
        """Run on a thread of its own."""
        self._ended.clear()
        threading.Thread(target=self.run, name=f"step-loop-{self.rank}", daemon=True).start()

    def run(self) -> None:
        """Be the device thread, until `stop`: for a thread that opened the runtime itself. Raises nothing."""
        self._ended.clear()
        stand_in = threading.Thread(target=self._stand_in_run, name=f"stand-in-{self.rank}", daemon=True)
        stand_in.start()
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._turn()
            self._end(ErrorReply(code="unavailable", message=f"rank {self.rank} stops"))
        except BaseException as error:
            self._fail(error)
        finally:
            self._stopping = True
            self._control.wake_all()
            stand_in.join()
            self._ended.set()

    def stop(self, timeout_s: float = 15.0) -> bool:
        """Finish the running layer call, answer what waits with UnavailableError and end. False if it still runs."""
        self._stopping = True
        self._bell(True)
        self._control.wake_all()
        return self._ended.wait(timeout_s)

    def close(self) -> None:
        """Stop, and give the rings' memory back: only when nothing of theirs is in use any more."""
        if self.stop():
            for ring in self.state.rings:
                ring.close()

    @property
    def draining(self) -> bool:
        return self.state.plans.draining

    @property
    def policy(self) -> PathPolicy:
        """The newest policy that this rank has staged."""
        with self._lock:
            return self.state.policies.newest

    @property
    def in_flight(self) -> int:
        """Requests taken and not answered: layer calls and intents."""
        return len(self.state.calls) + self.state.plans.num_waiting()

    @property
    def queue_depth(self) -> int:
        """Layer calls that wait for their turn."""
        return max(len(self.state.calls) - int(self._in_forward), 0)

    # ------------------------------------------------------------------------------ the device thread

    def _fail(self, error: BaseException) -> None:
        """It ends service on all ranks: better than a rank that looks alive and answers nothing."""
        if isinstance(error, UnavailableError):
            message = f"rank {self.rank} is lost: {error}"
            log.error(message, exc_info=error)
        else:
            message = f"rank {self.rank}'s step loop failed: {type(error).__name__}: {error}"
            log.error("%s; this is a bug", message, exc_info=error)
        self.failure = error
        down = ErrorReply(code="unavailable", message=message)
        # First of all: what follows may need the device.
        self.board.post_down(down)
        self._end(down)

    def _end(self, error: ErrorReply) -> None:
        self._stopping = True
        with self._lock:
            self.door.shut()
            self.state.go_down(error)
            self.state.turn()  # what came in between is answered too
        self.door.run_jobs()

    def _turn(self) -> None:
        seen = self._doorbell.load()
        with self._lock:
            self.state.turn()
            if self.state.to_stage:
                self._stage()
            work = self.state.next_work()
            idle_s = self.state.idle_s() if work is None else 0.0
            has_jobs = bool(self.state.jobs)
        if has_jobs:
            self.door.run_jobs()
        if work is None:
            self._sleep(seen, idle_s)
            return
        self._in_forward = True
        self.board.set_busy(self.rank, True)
        if self._doorbell.load() != seen:  # whoever rang before we were busy did not wake the stand-in
            with self._lock:
                self.state.turn()
        result, queue_us, total_us = self._execute(work)
        self._in_forward = False
        self.board.set_busy(self.rank, False)
        with self._lock:
            self.state.finish(work, result, queue_us, total_us)
        if isinstance(result, UnavailableError):
            raise result

    def _sleep(self, seen: int, idle_s: float) -> None:
        """Until somebody rings, idle_s at most: spins for spin_s, then sleeps and says so."""
        doorbell, clock = self._doorbell, time.monotonic
        if self._spin_s:
            until = clock() + min(self._spin_s, idle_s)
            while clock() < until:
                for _ in range(_SPINS_PER_LOOK):
                    if doorbell.load() != seen:
                        return
        self.board.set_awake(self.rank, False)
        doorbell.wait_while(seen, idle_s)
        self.board.set_awake(self.rank, True)

    def _execute(self, work: Work) -> tuple[MoeOutput | Exception, float, float]:
        plan, call = work.plan.plan, work.call
        assert plan is not None
        batch, out, queue_us = None, None, 0.0
        start_ns = time.monotonic_ns()
        if call is not None:
            queue_us = (start_ns - call.record.submitted_ns) * 1e-3
            if not work.refused and call.record.num_rows:
                batch, out = call.record.batch(), call.record.out()
        result: MoeOutput | Exception
        try:
            result = self._runtime.forward(
                batch,
                plan,
                work.layer_idx,
                sequence=work.sequence,
                refusal=work.refused,
                timeout_s=work.timeout_s,
                out=out,
            )
        except MegaMoeError as error:
            result = error
        except Exception as error:
            log.exception("rank %d: layer %d of plan %s failed", self.rank, work.layer_idx, plan.plan_id)
            result = error
        return result, queue_us, (time.monotonic_ns() - start_ns) * 1e-3

    def _stage(self) -> None:
        for record, policy in self.state.to_stage:
            try:
                self._runtime.stage_policy(policy)
            except MegaMoeError as error:
                self.state.answer(record, ErrorReply.of(error))
            else:
                self.state.staged(record, policy)
        self.state.to_stage.clear()

    # ------------------------------------------------------------------------------ the stand-in

    def _stand_in_run(self) -> None:
        """Serve plans and refusals while the device thread is inside a layer call."""
        while not self._stopping:
            seen = self._control.load()
            if self._in_forward:
                try:
                    with self._lock:
                        if not self._stopping:
                            self.state.turn()
                except Exception as error:
                    self._fail(error)
                    return
            self._control.wait_while(seen, STAND_IN_S)
