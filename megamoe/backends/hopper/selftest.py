"""Is the backend right on this GPU? Virtual ranks in threads on one device, against the oracles.

`python -m megamoe.backends.hopper.selftest` prints a line a check and exits with 1 if one failed. Every rank is a
HopperBackend with its own stream and heap, driven by its own thread through the Backend protocol as the runtime
does; kernels of all ranks really run side by side and wait for each other.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from megamoe import mx
from megamoe.backends import Launch
from megamoe.backends.hopper import open_backend
from megamoe.backends.hopper.backend import HopperBackend
from megamoe.batch import MoeBatch, SubStepReport
from megamoe.bundle import Bundle, Deployment, Path, RowFormat, plan_bundle
from megamoe.errors import MegaMoeError, PeerRefusedError, PeerTimeoutError
from megamoe.path import SubStep
from megamoe.reference import QUANTIZED_REL_L2, identity_moe, quantized_moe, relative_l2, tolerance
from megamoe.routing import DISTRIBUTIONS, route_rank
from megamoe.shape import MoeShape
from megamoe.weights import LayerWeights, random_layer_weights, shard

SHAPE = MoeShape(
    name="hopper-selftest",
    hidden=1024,
    intermediate=512,
    num_experts=64,
    num_topk=6,
    num_ranks=8,
    num_layers=3,
    swiglu_limit=10.0,
)
ODD_SHAPE = replace(SHAPE, name="hopper-odd", hidden=1056, intermediate=352, num_experts=40, num_topk=3)
"""Neither dimension is a multiple of 128, top-k is no power of two."""
CAPACITY, ODD_CAPACITY = 128, 32
PATHS = (Path.FIXED_SLOT, Path.COMPACT, Path.SMALL_M, Path.LARGE_M)
STAGED = (Path.FIXED_SLOT, Path.COMPACT)
"""Paths that launch the same GEMM kernels, and so agree bitwise."""
COUNTERS = {
    Path.FIXED_SLOT: (0, 0, 4, 0),
    Path.COMPACT: (1, 1, 5, 1),
    Path.SMALL_M: (0, 0, 1, 0),
    Path.LARGE_M: (1, 1, 2, 0),
}
"""Count exchanges, prepare passes, launches, group-wide barriers."""
IDENTITY_SLOT = 2


T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """One layer call: which rows, on which path, against which slot."""

    path: Path
    num_rows_per_rank: tuple[int, ...]
    distribution: str = "uniform"
    slot_idx: int = 0
    no_expert_share: float = 0.1
    duplicate_share: float = 0.1
    quantized: bool = False
    exact: bool = False
    """Rows that MXFP8 holds exactly and power-of-two weights: transport must be bitwise."""
    poison: bool = False
    """A NaN in rank 1's first row."""
    seed: int = 0

    def __str__(self) -> str:
        extra = "".join(f" {name}" for name in ("quantized", "exact", "poison") if getattr(self, name))
        return (
            f"{self.path} {self.distribution} slot {self.slot_idx} max {max(self.num_rows_per_rank)}{extra}"
        )


def batch_of(case: Case, shape: MoeShape, rank: int) -> MoeBatch:
    """The rows of one rank, on the host."""
    rows = case.num_rows_per_rank[rank]
    ids, weights = route_rank(
        shape,
        case.distribution,
        rows,
        seed=case.seed,
        rank=rank,
        no_expert_share=case.no_expert_share,
        duplicate_share=case.duplicate_share,
    )
    generator = torch.Generator().manual_seed(1000 * case.seed + rank)
    if case.exact:
        x = torch.randint(-8, 9, (rows, shape.hidden), generator=generator).bfloat16()
        weights = torch.exp2(torch.randint(-2, 2, weights.shape, generator=generator).float())
    else:
        x = torch.randn(rows, shape.hidden, generator=generator).bfloat16()
    if case.poison and rank == min(1, shape.num_ranks - 1):
        x[0, 5] = float("nan")
    if case.quantized:
        codes, scales = mx.quantize_mxfp8(x)
        return MoeBatch.of(shape, codes, ids, weights, scales)
    return MoeBatch.of(shape, x, ids, weights)


def deployment_of(shape: MoeShape, row_format: RowFormat) -> Deployment:
    """What is checked: all four paths, with fewer rows at the odd shape; with FP8 rows all but large_m."""
    capacity = ODD_CAPACITY if shape.hidden == ODD_SHAPE.hidden else CAPACITY
    return Deployment(
        shape=shape,
        backend="hopper",
        max_tokens_per_rank=capacity,
        fixed_slot_max=capacity,
        small_m_capacities=(capacity,),
        small_m_enabled=True,
        large_m_capacity=capacity if row_format is RowFormat.BF16 else 2 * capacity,
        large_m_min_tokens=capacity * 3 // 4,
        large_m_enabled=row_format is RowFormat.BF16,
        combine_row_format=row_format,
    )


class Ranks:
    """A group of backends, each owned by a thread. Context manager."""

    def __init__(self, shape: MoeShape, row_format: RowFormat) -> None:
        self.bundle: Bundle = plan_bundle(deployment_of(shape, row_format))
        self.shape, self.row_format = shape, row_format
        self.next_launch = 0
        self.weights = [random_layer_weights(shape, seed=5, layer_idx=layer) for layer in range(2)]
        self._threads = [ThreadPoolExecutor(1, f"rank{rank}") for rank in range(shape.num_ranks)]
        name = f"megamoe-selftest-{time.monotonic_ns()}"
        self.backends = self.all_ranks(
            lambda rank: open_backend(self.bundle, rank=rank, group_name=name, num_slots=3, timeout_s=300.0)
        )
        self.bind(0, self.weights[0])
        self.bind(1, self.weights[1])
        self.all_ranks(lambda rank: self.backends[rank].bind_identity(IDENTITY_SLOT))

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
        futures = [thread.submit(work, rank) for rank, thread in enumerate(self._threads)]
        return [future.result() for future in futures]

    def call(
        self,
        case: Case,
        *,
        refused: int | None = None,
        absent: int | None = None,
        late: int | None = None,
        held: threading.Event | None = None,
        timeout_s: float = 10.0,
    ) -> list[Outcome]:
        """One launch on all ranks. refused: joins with the error bit; absent: does not come at all; late: goes on after
        its first stage when `held` is set."""
        number = self.next_launch
        self.next_launch += 1
        capacity = min(c for c in self.bundle.capacities(case.path) if c >= max(case.num_rows_per_rank))
        sub_step = SubStep(
            sub_step_idx=0,
            start_row=0,
            stop_row=max(case.num_rows_per_rank),
            path=case.path,
            runtime_capacity=capacity,
            num_rows_per_rank=case.num_rows_per_rank,
        )
        deadline_s = time.monotonic() + timeout_s

        def work(rank: int) -> Outcome:
            if rank == absent:
                return Outcome()
            launch = Launch(
                slot_idx=case.slot_idx,
                epoch=number % (1 << 32),
                buffer_idx=number & 1,
                sub_step=sub_step,
                closing=False,
                refused=rank == refused,
                deadline_s=deadline_s,
            )
            batch = MoeBatch.empty(self.shape) if rank == refused else batch_of(case, self.shape, rank)
            return self._run(self.backends[rank], launch, batch, held if rank == late else None)

        return self.all_ranks(work)

    def _run(
        self, backend: HopperBackend, launch: Launch, batch: MoeBatch, held: threading.Event | None
    ) -> Outcome:
        out = torch.full((batch.num_rows, self.shape.hidden), float("nan")).bfloat16()
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


@dataclass(frozen=True)
class Outcome:
    """What one rank got: rows and report, or the error. Neither: it did not come."""

    out: torch.Tensor | None = None
    report: SubStepReport | None = None
    error: MegaMoeError | None = None


@dataclass
class Checks:
    """Results so far; prints as it goes."""

    num_failed: int = 0
    num_passed: int = 0

    def check(self, name: str, passed: bool, detail: str = "") -> None:
        self.num_passed += passed
        self.num_failed += not passed
        print(f"{'ok  ' if passed else 'FAIL'} {name}{': ' if detail else ''}{detail}", flush=True)


def rows_of(outcomes: Sequence[Outcome]) -> torch.Tensor:
    """All ranks' rows; raises the first error that a rank got."""
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return torch.cat([outcome.out for outcome in outcomes if outcome.out is not None])


def uneven(shape: MoeShape, maximum: int) -> tuple[int, ...]:
    """Counts with a full rank, empty ones and odd ones."""
    pattern = (maximum, 0, 1, maximum, maximum // 3, 7, maximum // 2, 0)
    return tuple(min(pattern[rank % 8], maximum) for rank in range(shape.num_ranks))


def check_case(ranks: Ranks, checks: Checks, case: Case) -> torch.Tensor:
    """Run a case twice: bits repeat; identity is bitwise the oracle, weights are within its tolerance."""
    got = rows_of(ranks.call(case))
    again = rows_of(ranks.call(case))
    want = ranks.wanted(case)
    name = f"{ranks.shape.name} {ranks.row_format} {case}"
    if not torch.equal(got.view(torch.int16), again.view(torch.int16)):
        checks.check(name, False, "another result in the second run")
    if case.slot_idx == IDENTITY_SLOT and case.exact:
        checks.check(name, torch.equal(got, want), "bitwise")
    else:
        nan = torch.isnan(want)
        same_nan = torch.equal(torch.isnan(got), nan)
        error = relative_l2(got[~nan], want[~nan])
        bound = tolerance(QUANTIZED_REL_L2, len(want))
        checks.check(name, same_nan and error <= bound, f"relative L2 {error:.2e}")
    return got


def check_cases(ranks: Ranks, checks: Checks) -> None:
    shape, most = ranks.shape, ranks.bundle.deployment.max_tokens_per_rank
    paths = [path for path in PATHS if ranks.bundle.capacities(path)]
    for distribution in DISTRIBUTIONS:
        by_path = []
        for path in paths:
            rows = uneven(shape, min(most, 48))
            check_case(ranks, checks, Case(path, rows, distribution, IDENTITY_SLOT, exact=True))
            got = check_case(ranks, checks, Case(path, rows, distribution))
            if path in STAGED:
                by_path.append(got)
        same = all(torch.equal(by_path[0], other) for other in by_path[1:])
        checks.check(f"{shape.name} {ranks.row_format} {distribution}: paths agree bitwise", same)
        large = Case(Path.COMPACT, uneven(shape, most), distribution, seed=7)
        compact = check_case(ranks, checks, large)
        for _ in range(2 if Path.LARGE_M in paths else 0):
            got = rows_of(ranks.call(replace(large, path=Path.LARGE_M)))
            same = torch.equal(compact.view(torch.int16), got.view(torch.int16))
            checks.check(f"{shape.name} {ranks.row_format} {distribution}: large_m is compact bitwise", same)
    for path in paths:
        check_case(ranks, checks, Case(path, (1,) * shape.num_ranks, seed=1))
        check_case(ranks, checks, Case(path, (most,) * shape.num_ranks, seed=2, slot_idx=1))
        check_case(ranks, checks, Case(path, uneven(shape, most), "hot60", seed=3, quantized=True))
        check_case(ranks, checks, Case(path, (16,) * shape.num_ranks, seed=4, poison=True))
        check_case(
            ranks, checks, Case(path, (0, 5, *[0] * shape.num_ranks)[: shape.num_ranks], "one_rank", seed=5)
        )


def check_protocol(ranks: Ranks, checks: Checks) -> None:
    """Refusals, absent ranks, counters, rebinding, epochs that wrap."""
    shape = ranks.shape
    case = Case(Path.FIXED_SLOT, uneven(shape, 32))
    for path in PATHS:
        on_path = replace(case, path=path)
        refusing = shape.num_ranks // 2
        outcomes = ranks.call(on_path, refused=refusing)
        refused = all(
            isinstance(o.error, PeerRefusedError) and o.error.refusing_ranks == (refusing,) for o in outcomes
        )
        checks.check(f"{path}: a refusal reaches all ranks", refused, str(outcomes[0].error))
        check_case(ranks, checks, on_path)
        started = time.monotonic()
        if shape.num_ranks > 1:
            absent = shape.num_ranks * 3 // 4
            outcomes = ranks.call(on_path, absent=absent, timeout_s=0.5)
            late_s = time.monotonic() - started
            named = [o.error for rank, o in enumerate(outcomes) if rank != absent]
            told = all(
                isinstance(error, PeerTimeoutError) and absent in error.missing_ranks for error in named
            )
            checks.check(f"{path}: all ranks name the absent one", told, f"{late_s:.2f} s, {named[0]}")
        check_case(ranks, checks, on_path)
        counters = [o.report.counters for o in ranks.call(on_path) if o.report is not None]
        got = {(c.count_exchanges, c.prepare_passes, c.launches, c.group_barriers) for c in counters}
        checks.check(
            f"{path}: counters", got == {COUNTERS[path]}, f"{got}, rank 0 sent {counters[0].bytes_sent} bytes"
        )
    # Captured graphs of the old weights must not come again.
    ranks.bind(0, ranks.weights[1])
    check_case(ranks, checks, replace(case, seed=9))
    for first in ((1 << 31) - 3, (1 << 32) - 3):
        ranks.next_launch = first
        for number in range(6):
            check_case(
                ranks,
                checks,
                replace(case, path=PATHS[number % len(PATHS)], seed=number, slot_idx=number % 3),
            )


def check_late_source(ranks: Ranks, checks: Checks) -> None:
    """large_m: a source that has counted its rows and does not send them holds up the entries that hold them, only."""
    shape, most = ranks.shape, ranks.bundle.deployment.max_tokens_per_rank
    late = shape.num_ranks - 1
    case = Case(Path.LARGE_M, (*[most] * late, 1), seed=21, no_expert_share=0.0, duplicate_share=0.0)
    touched = set(batch_of(case, shape, late).topk_ids.flatten().tolist())
    held = threading.Event()
    with ThreadPoolExecutor(1) as caller:
        running = caller.submit(ranks.call, case, late=late, held=held)
        time.sleep(0.5)
        finished = [num_finished_entries(ranks.backends[rank]) for rank in range(late)]
        held.set()
        rows = rows_of(running.result())
    per_rank = shape.num_experts_per_rank
    wanted = [
        per_rank - sum(rank * per_rank <= expert < (rank + 1) * per_rank for expert in touched)
        for rank in range(late)
    ]
    checks.check("large_m: a late source holds up its own entries, only", finished == wanted, f"{finished}")
    compact = rows_of(ranks.call(replace(case, path=Path.COMPACT)))
    checks.check("large_m: after a late source, the bits of compact", torch.equal(rows, compact))


def num_finished_entries(backend: HopperBackend) -> int:
    """Entries whose GEMM1 is done, in the launch under way."""
    buffers = backend.buffers
    with torch.cuda.stream(torch.cuda.Stream(backend.device)):
        board = buffers.board.cpu()
    lists = buffers.board_layout
    return int((board[lists.done : lists.queue1] == buffers.sizes.gemm1_groups).sum())


def soak(ranks: Ranks, checks: Checks, num_steps: int) -> None:
    """Mixed steps without pause: every result is that of the same case run before."""
    # Epochs that no check before has used: one that a peer once gave up must not come again.
    ranks.next_launch = 1 << 20
    generator = torch.Generator().manual_seed(17)
    cases = [
        Case(
            PATHS[number % len(PATHS)],
            tuple(torch.randint(0, CAPACITY + 1, (ranks.shape.num_ranks,), generator=generator).tolist()),
            DISTRIBUTIONS[number % len(DISTRIBUTIONS)],
            slot_idx=number % 3,
            seed=number,
        )
        for number in range(9)
    ]
    first = [rows_of(ranks.call(case)) for case in cases]
    wrong = 0
    started = time.monotonic()
    for _ in range(num_steps):
        which = int(torch.randint(0, len(cases), (1,), generator=generator))
        wrong += not torch.equal(rows_of(ranks.call(cases[which])), first[which])
    took_s = time.monotonic() - started
    checks.check(f"soak of {num_steps} mixed steps", wrong == 0, f"{wrong} differ, {took_s:.1f} s")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="check the Hopper backend on this GPU")
    parser.add_argument(
        "--ranks", type=int, default=8, help="1, 2, 4 or 8; they share GPUs where there are fewer"
    )
    parser.add_argument("--soak", type=int, default=50, help="mixed steps of the soak")
    shapes = {shape.name: shape for shape in (SHAPE, ODD_SHAPE)}
    formats = [RowFormat.BF16, RowFormat.FP8]
    parser.add_argument("--shapes", nargs="+", choices=list(shapes), default=list(shapes))
    parser.add_argument("--row-formats", nargs="+", choices=formats, type=RowFormat, default=formats)
    chosen = parser.parse_args(arguments)
    checks = Checks()
    for shape in [shapes[name] for name in chosen.shapes]:
        for row_format in chosen.row_formats:
            started = time.monotonic()
            with Ranks(shape.with_ranks(chosen.ranks), row_format) as ranks:
                print(f"opened {shape.name} {row_format} in {time.monotonic() - started:.1f} s", flush=True)
                check_cases(ranks, checks)
                if shape is SHAPE and row_format is RowFormat.BF16:
                    check_protocol(ranks, checks)
                    if chosen.ranks > 1:
                        check_late_source(ranks, checks)
                    soak(ranks, checks, chosen.soak)
    print(f"{checks.num_passed} passed, {checks.num_failed} failed")
    return 1 if checks.num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
