"""The selftest's own checks, with ranks of the CPU backend in the place of GPUs: right ones pass, wrong ones do not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from megamoe.backends import open_backend
from megamoe.backends.hopper.selftest import ranks as rooms
from megamoe.backends.hopper.selftest.cases import SHAPE, Case, uneven
from megamoe.backends.hopper.selftest.oracle import Checks, check_case, check_cases, soak
from megamoe.backends.hopper.selftest.protocol import check_in_flight, check_protocol
from megamoe.backends.hopper.selftest.ranks import Ranks
from megamoe.bundle import Bundle, Path, RowFormat, plan_bundle
from megamoe.errors import HeapError, PeerTimeoutError

TINY = replace(SHAPE, hidden=64, intermediate=32, num_experts=8, num_topk=2, num_ranks=2)


def open_cpu(bundle: Bundle, **options: Any) -> Any:
    return open_backend("cpu", plan_bundle(replace(bundle.deployment, backend="cpu")), **options)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(rooms, "open_backend", open_cpu)
    with Ranks(TINY, RowFormat.BF16) as opened:
        yield opened


def failed(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("FAIL")]


def test_every_check_passes_on_ranks_that_are_right(ranks: Ranks) -> None:
    said: list[str] = []
    checks = Checks(said.append)
    check_cases(ranks, checks)
    check_protocol(ranks, checks)
    check_in_flight(ranks, checks)
    soak(ranks, checks, 10)
    # Launches are counted per backend.
    assert [line for line in failed(said) if "counters" not in line] == []
    assert any("two micro-batches in flight" in line for line in said)
    assert checks.summary() == f"{checks.num_passed} passed, {checks.num_failed} failed"
    assert checks.num_passed > 100


@pytest.mark.parametrize("which", ["second", "every"])
def test_wrong_rows_fail(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    """Rows of one rank that are another token's: at every launch, or at each second one alone."""
    run = Ranks._run

    def wrong(self: Ranks, backend: Any, launch: Any, *rest: Any) -> Any:
        outcome = run(self, backend, launch, *rest)
        if which == "every" or launch.epoch % 2:
            outcome = replace(outcome, out=outcome.out.roll(1, 0))
        return outcome

    monkeypatch.setattr(Ranks, "_run", wrong)
    said: list[str] = []
    check_case(ranks, Checks(said.append), Case(Path.COMPACT, uneven(TINY, 9)))
    assert any(line.endswith("another result in the second run") for line in said) == (which == "second")
    assert failed(said)


def test_a_micro_batch_that_gets_the_rows_of_the_other_fails(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = Ranks.flow

    def swapped(self: Ranks, cases: Any, pauses_s: Any) -> Any:
        outcomes = flow(self, cases, pauses_s)
        return [*outcomes[2:], *outcomes[:2]]

    monkeypatch.setattr(Ranks, "flow", swapped)
    checks = Checks(lambda line: None)
    check_in_flight(ranks, checks, num_layers=3)
    assert (checks.num_passed, checks.num_failed) == (0, 1)


def test_the_error_of_the_rank_that_fails_is_told_not_that_others_missed_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = threading.Event()

    def open_or_fail(bundle: Bundle, *, rank: int, **_: object) -> Any:
        if rank == 1:
            raise HeapError("free device memory must be more")
        told.wait(10.0)
        raise PeerTimeoutError("ranks [1] did not open", [1])

    monkeypatch.setattr(rooms, "open_backend", open_or_fail)
    with pytest.raises(HeapError, match="free device memory"):
        Ranks(TINY, RowFormat.BF16)
    told.set()


def test_ranks_go_on_without_each_other(ranks: Ranks) -> None:
    """A rank that pauses before each of its launches is waited for, and every launch has its own rows."""
    cases = [Case(Path.FIXED_SLOT, (3, 2), seed=seed, slot_idx=seed % 2) for seed in range(6)]
    outcomes = ranks.flow(cases, [[0.0] * 6, [0.01] * 6])
    for case, of_case in zip(cases, outcomes):
        want = ranks.wanted(case)
        got = torch.cat([outcome.out for outcome in of_case if outcome.out is not None])
        assert torch.allclose(got.float(), want.float(), atol=2e-2), case
