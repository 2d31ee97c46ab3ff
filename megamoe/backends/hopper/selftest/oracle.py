"""Numbers: every path and distribution against the oracles, paths against each other, and a soak."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from megamoe.backends.hopper.selftest.cases import CAPACITY, IDENTITY_SLOT, PATHS, STAGED, Case, uneven
from megamoe.backends.hopper.selftest.ranks import Ranks, rows_of
from megamoe.backends.hopper.served import gemm_plan
from megamoe.bundle import Path
from megamoe.reference import QUANTIZED_REL_L2, relative_l2, tolerance
from megamoe.routing import DISTRIBUTIONS


@dataclass
class Checks:
    """Results so far, and who is told of each as it comes."""

    say: Callable[[str], None] = field(default=partial(print, flush=True))
    num_failed: int = 0
    num_passed: int = 0

    def check(self, name: str, passed: bool, detail: str = "") -> None:
        self.num_passed += passed
        self.num_failed += not passed
        self.say(f"{'ok  ' if passed else 'FAIL'} {name}{': ' if detail else ''}{detail}")

    def summary(self) -> str:
        return f"{self.num_passed} passed, {self.num_failed} failed"


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
            # With the ring, small_m has the bits of the staged paths.
            if path in STAGED or gemm_plan(ranks.bundle, path, max(rows)).ring is not None:
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
