"""A group of backends in this process, each owned by a thread and driven through the Backend protocol."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

import torch

from megamoe.backends import Launch
from megamoe.backends.hopper import open_backend
from megamoe.backends.hopper.backend import HopperBackend
from megamoe.backends.hopper.selftest.cases import (
    IDENTITY_SLOT,
    UNBOUND_SLOT,
    Case,
    batch_of,
    deployment_of,
    weights_of,
)
from megamoe.batch import MoeBatch, SubStepReport
from megamoe.bundle import Bundle, RowFormat, plan_bundle
from megamoe.errors import MegaMoeError
from megamoe.path import SubStep
from megamoe.reference import identity_moe, quantized_moe
from megamoe.shape import MoeShape
from megamoe.weights import LayerWeights, shard

T = TypeVar("T")
Place = Callable[[HopperBackend, MoeBatch, torch.Tensor], tuple[MoeBatch, torch.Tensor]]
"""Brings a rank's rows and its memory for results from the host to where they shall lie."""


@dataclass(frozen=True)
class Outcome:
    """What one rank got: rows and report, or the error. Neither: it did not come."""

    out: torch.Tensor | None = None
    report: SubStepReport | None = None
    error: MegaMoeError | None = None


class Ranks:
    """A group of backends, each owned by a thread. Context manager."""

    def __init__(self, shape: MoeShape, row_format: RowFormat) -> None:
        self.bundle: Bundle = plan_bundle(deployment_of(shape, row_format))
        self.shape, self.row_format = shape, row_format
        self.next_launch = 0
        self.weights = weights_of(shape)
        self._threads = [ThreadPoolExecutor(1, f"rank{rank}") for rank in range(shape.num_ranks)]
        name = f"megamoe-selftest-{time.monotonic_ns()}"
        self.backends = self.all_ranks(
            lambda rank: open_backend(self.bundle, rank=rank, group_name=name, num_slots=4, timeout_s=300.0)
        )
        self.bind(0, self.weights[0])
        self.bind(1, self.weights[1])
        self.all_ranks(lambda rank: self.backends[rank].bind_identity(IDENTITY_SLOT))
        for backend in self.backends[:-1]:
            backend.bind_identity(UNBOUND_SLOT)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.all_ranks(lambda rank: self.backends[rank].close())
        for thread in self._threads:
            thread.shutdown()

    def bind(self, slot_idx: int, weights: LayerWeights) -> None:
        if slot_idx < len(self.weights):
            self.weights[slot_idx] = weights
        self.all_ranks(lambda rank: self.backends[rank].bind(slot_idx, shard(weights, self.shape, rank)))

    def all_ranks(self, work: Callable[[int], T]) -> list[T]:
        """What `work` returns for each rank, on its thread. Raises the first error that comes: the others' may be that
        this rank did not."""
        futures = [thread.submit(work, rank) for rank, thread in enumerate(self._threads)]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            if (error := future.exception()) is not None:
                raise error
        return [future.result() for future in futures]

    def call(
        self,
        case: Case,
        *,
        refused: int | None = None,
        absent: int | None = None,
        late: int | None = None,
        held: threading.Event | None = None,
        place: Place | None = None,
        timeout_s: float = 10.0,
    ) -> list[Outcome]:
        """One launch on all ranks. refused: joins with the error bit; absent: does not come at all; late: goes on after
        its first stage when `held` is set; place: None = rows on the host."""
        [number] = self._take(1)

        def bring(rank: int) -> tuple[MoeBatch, torch.Tensor]:
            batch = MoeBatch.empty(self.shape) if rank == refused else batch_of(case, self.shape, rank)
            out = self._room(batch)
            return (batch, out) if place is None else place(self.backends[rank], batch, out)

        # Before any rank launches: memory may be allocated only while no kernel waits for a peer.
        brought = self.all_ranks(bring)
        deadline_s = time.monotonic() + timeout_s

        def work(rank: int) -> Outcome:
            if rank == absent:
                return Outcome()
            launch = self._launch(case, number, deadline_s, refused=rank == refused)
            return self._run(self.backends[rank], launch, *brought[rank], held if rank == late else None)

        return self.all_ranks(work)

    def flow(self, cases: Sequence[Case], pauses_s: Sequence[Sequence[float]]) -> list[list[Outcome]]:
        """One launch a case, each rank going on to the next as soon as it is done with one, after a pause of its own
        (pauses_s[rank][number]). Outcomes by case, then rank."""
        numbers = self._take(len(cases))
        batches = [[batch_of(case, self.shape, rank) for case in cases] for rank in range(len(self.backends))]

        def work(rank: int) -> list[Outcome]:
            outcomes = []
            for case, number, batch, pause_s in zip(
                cases, numbers, batches[rank], pauses_s[rank], strict=True
            ):
                time.sleep(pause_s)
                launch = self._launch(case, number, time.monotonic() + 10.0)
                outcomes.append(self._run(self.backends[rank], launch, batch, self._room(batch)))
            return outcomes

        return [list(outcomes) for outcomes in zip(*self.all_ranks(work), strict=True)]

    def _take(self, count: int) -> range:
        """The next launches' numbers."""
        first = self.next_launch
        self.next_launch += count
        return range(first, self.next_launch)

    def _launch(self, case: Case, number: int, deadline_s: float, *, refused: bool = False) -> Launch:
        capacity = min(c for c in self.bundle.capacities(case.path) if c >= max(case.num_rows_per_rank))
        sub_step = SubStep.whole(case.path, capacity, case.num_rows_per_rank)
        return Launch(
            slot_idx=case.slot_idx,
            epoch=number % (1 << 32),
            buffer_idx=number & 1,
            sub_step=sub_step,
            closing=False,
            refused=refused,
            deadline_s=deadline_s,
        )

    def _room(self, batch: MoeBatch) -> torch.Tensor:
        """For a batch's results, of which none is there yet."""
        return torch.full((batch.num_rows, self.shape.hidden), float("nan")).bfloat16()

    def _run(
        self,
        backend: HopperBackend,
        launch: Launch,
        batch: MoeBatch,
        out: torch.Tensor,
        held: threading.Event | None = None,
    ) -> Outcome:
        try:
            backend.begin(launch, batch, out)
            for number, stage in enumerate(backend.stages(launch.sub_step.path)):
                if held is not None and number == 1:
                    held.wait(5.0)
                backend.launch(stage)
            return Outcome(out, backend.finish())
        except MegaMoeError as error:
            backend.abandon(error)
            return Outcome(error=error)

    def wanted(self, case: Case) -> torch.Tensor:
        """The oracle's outputs of all ranks, one after the other."""
        batches = [batch_of(case, self.shape, rank) for rank in range(self.shape.num_ranks)]
        if case.slot_idx == IDENTITY_SLOT:
            return torch.cat([identity_moe(batch, self.shape, self.row_format) for batch in batches])
        weights = self.weights[case.slot_idx]
        return torch.cat([quantized_moe(batch, weights, self.shape, self.row_format) for batch in batches])


def rows_of(outcomes: Sequence[Outcome]) -> torch.Tensor:
    """All ranks' rows, on the host; raises the first error that a rank got."""
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return torch.cat([outcome.out.cpu() for outcome in outcomes if outcome.out is not None])
