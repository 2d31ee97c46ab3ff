"""The protocol under trouble, on eight processes: refusals, missing, late and killed ranks, wraps, cuts, stalls."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import pytest
import torch

from megamoe import MoeBatch, Path, PathPolicy, Runtime
from megamoe.backends.cpu.experts import BLOCK_M
from megamoe.errors import (
    InvalidArgumentError,
    MegaMoeError,
    PeerRefusedError,
    StaleCallError,
)
from megamoe.reference import QUANTIZED_REL_L2, quantized_moe, relative_l2
from tests.megamoe.groups import (
    CAPACITY,
    SHAPE,
    Answer,
    Case,
    all_weights,
    batch_of,
    bind_all,
    call,
    deployment,
    open_runtime,
    plan_for,
    whole_batch,
    whole_output,
)
from tests.ranks import Rank, run_outcomes, run_ranks

ROWS = (20, 7, 0, 33, 12, 0, 1, 64)
TIMEOUT_S = 0.6


def want_of(case: Case) -> torch.Tensor:
    return quantized_moe(whole_batch(case, SHAPE), all_weights(SHAPE, case.layer_idx), SHAPE)


def assert_right(case: Case, outputs: Sequence[torch.Tensor]) -> None:
    assert relative_l2(torch.cat(list(outputs)), want_of(case)) <= QUANTIZED_REL_L2


def error_of(action: Callable[[], Any]) -> tuple[str, str, tuple[int, ...], float]:
    """(class, sentence, ranks it names, seconds) of what a call raised; ("", ...) if it returned."""
    started = time.monotonic()
    try:
        action()
    except MegaMoeError as error:
        named = getattr(error, "missing_ranks", getattr(error, "refusing_ranks", ()))
        return type(error).__name__, str(error), named, time.monotonic() - started
    return "", "", (), time.monotonic() - started


# ------------------------------------------------------------------------------------------------- sequences


def sequence_worker(rank: Rank, cases: Sequence[Case], sequences: Sequence[int]) -> list[torch.Tensor]:
    with open_runtime(rank, deployment()) as runtime:
        bind_all(runtime)
        return [
            call(runtime, case, sequence=sequence).hidden_states
            for case, sequence in zip(cases, sequences, strict=True)
        ]


@pytest.mark.parametrize("power", [31, 32, 63])
def test_epochs_wrap(power: int) -> None:
    """Launches just below and above 2^31 and 2^32 (max_sub_steps is 4), and at the end of 64-bit sequences."""
    first = (1 << power) // deployment().max_sub_steps - 5
    cases = [Case(path, ROWS, seed=seed) for seed in (1, 2, 3) for path in Path]
    values = run_ranks(8, sequence_worker, cases, range(first, first + len(cases)))
    for case, outputs in zip(cases, zip(*values, strict=True), strict=True):
        assert_right(case, outputs)


def test_skipped_sequences_may_use_the_same_buffer_again() -> None:
    """Even sequences only: each launch finds its buffer used by the one before, with nothing in between."""
    cases = [Case(path, ROWS, seed=seed) for seed in range(6) for path in Path]
    values = run_ranks(8, sequence_worker, cases, [2 * i for i in range(len(cases))])
    for case, outputs in zip(cases, zip(*values, strict=True), strict=True):
        assert_right(case, outputs)


def stale_worker(rank: Rank) -> list[Any]:
    with open_runtime(rank, deployment()) as runtime:
        bind_all(runtime)
        case = Case(Path.COMPACT, ROWS)
        first = call(runtime, case, sequence=7).hidden_states
        seen = [error_of(lambda s=s: call(runtime, case, sequence=s))[:2] for s in (7, 3)]
        seen.append(error_of(lambda: runtime.forward(None, plan_for((0,) * 8), 2))[:2])
        seen.append(error_of(lambda: runtime.forward(None, plan_for((0,) * 4), 0))[:2])
        empty = runtime.forward(None, plan_for((0,) * 8), 0)
        assert empty.sub_steps == ()
        assert empty.hidden_states.shape == (0, SHAPE.hidden)
        assert runtime.next_sequence == 9
        again = call(runtime, case).hidden_states
        assert torch.equal(first, again)
        return seen


def test_stale_and_impossible_calls_are_refused_before_anything_is_posted() -> None:
    for seen in run_ranks(8, stale_worker):
        assert seen == [
            ("StaleCallError", "sequence must be at least 8, got 7"),
            ("StaleCallError", "sequence must be at least 8, got 3"),
            ("InvalidArgumentError", "layer_idx must be from 0 to 1, got 2"),
            ("InvalidArgumentError", "ranks of the plan must be 8, got 4"),
        ]
    assert issubclass(StaleCallError, MegaMoeError)


def cut_worker(rank: Rank, cases: Sequence[Case]) -> list[Answer]:
    with open_runtime(rank, deployment()) as runtime:
        bind_all(runtime)
        outputs = [call(runtime, case) for case in cases]
        return [Answer(out.hidden_states, out.sub_steps) for out in outputs]


def test_steps_above_capacity_are_cut() -> None:
    """Up to four sub-steps, each on the agreed path; the last one of a cut step waits for the whole group."""
    rows = (200, 0, 64, 65, 256, 3, 130, 1)
    cases = [Case(path, rows, seed=seed) for seed in (1, 2) for path in Path]
    cases.insert(3, Case(Path.COMPACT, (70, 0, 0, 0, 0, 0, 0, 0)))
    values = run_ranks(8, cut_worker, cases)
    for case, answers in zip(cases, zip(*values, strict=True), strict=True):
        assert_right(case, [answer.hidden_states for answer in answers])
        own = 1 if case.path is Path.COMPACT else 0
        for answer in answers:
            barriers = [sub.counters.group_barriers for sub in answer.sub_steps]
            assert barriers == [own] * (len(answer.sub_steps) - 1) + [own + 1]
            counts = np.array([sub.num_rows_per_rank for sub in answer.sub_steps])
            assert counts.sum(0).tolist() == list(case.num_rows_per_rank)
            assert counts.max() <= CAPACITY


# ------------------------------------------------------------------------------------------------- refusals


def refusal_worker(rank: Rank) -> list[Any]:
    seen = []
    with open_runtime(rank, deployment()) as runtime:
        bind_all(runtime)
        for path in Path:
            case = Case(path, ROWS)
            good = call(runtime, case).hidden_states
            seen.append(error_of(lambda c=case: call(runtime, c, refusal=rank.rank in (3, 5)))[:3])
            short = MoeBatch.empty(SHAPE) if rank.rank == 3 else batch_of(case, SHAPE, rank.rank)
            seen.append(error_of(lambda b=short, p=path: runtime.forward(b, plan_for(ROWS, p), 0))[:3])
            there = batch_of(case, SHAPE, rank.rank)
            if rank.rank == 3:
                there = replace(there, topk_ids=there.topk_ids.to("meta"))
            seen.append(error_of(lambda b=there, p=path: runtime.forward(b, plan_for(ROWS, p), 0))[:3])
            assert torch.equal(call(runtime, case).hidden_states, good), (
                "the next call is as if nothing happened"
            )
    return seen


def test_a_refusal_is_the_same_error_everywhere_and_the_next_call_works() -> None:
    values = run_ranks(8, refusal_worker)
    for rank, seen in enumerate(values):
        for refused, mismatched, elsewhere in zip(seen[::3], seen[1::3], seen[2::3], strict=True):
            assert refused[0] == "PeerRefusedError"
            assert refused[2] == (3, 5)
            if rank == 3:
                assert mismatched[:2] == (
                    "InvalidArgumentError",
                    "rows of rank 3 must be the plan's 33, got 0",
                )
                assert elsewhere[:2] == (
                    "InvalidArgumentError",
                    "topk_ids.device must be the host, got meta",
                )
            else:
                for error in (mismatched, elsewhere):
                    assert (error[0], error[2]) == ("PeerRefusedError", (3,))
    assert issubclass(PeerRefusedError, MegaMoeError)
    assert issubclass(InvalidArgumentError, MegaMoeError)


def out_worker(rank: Rank) -> list[tuple[Any, ...]]:
    rows = torch.zeros((5, 2 * SHAPE.hidden), dtype=torch.bfloat16)
    wrong = (rows[:, : SHAPE.hidden], rows[:4, : SHAPE.hidden].clone(), torch.zeros((5, SHAPE.hidden)))
    case = Case(Path.COMPACT, (5,))
    with open_runtime(rank, deployment(SHAPE.with_ranks(1)), num_slots=1) as runtime:
        bind_all(runtime)
        seen = [error_of(lambda out=out: call(runtime, case, out=out))[:2] for out in wrong]
        out = torch.empty((5, SHAPE.hidden), dtype=torch.bfloat16)
        assert torch.equal(call(runtime, case, out=out).hidden_states, call(runtime, case).hidden_states)
    assert not rows.any()
    return seen


def test_memory_for_results_that_does_not_fit_is_refused_and_left_alone() -> None:
    [seen] = run_ranks(1, out_worker)
    assert [kind for kind, _ in seen] == ["InvalidArgumentError"] * 3
    assert [sentence for _, sentence in seen] == [
        "out strides must be contiguous, got [192, 1]",
        "out must be bfloat16 [5, 96], got torch.bfloat16 [4, 96]",
        "out must be bfloat16 [5, 96], got torch.float32 [5, 96]",
    ]


# ------------------------------------------------------------------------------------------------- missing ranks


def missing_worker(rank: Rank, missing: int, paths: Sequence[Path], late_s: float) -> list[Any]:
    """On each path: `missing` comes only after the others gave up; then a call in which all are there."""
    seen = []
    with open_runtime(rank, deployment()) as runtime:
        bind_all(runtime)
        for path in paths:
            case = Case(path, ROWS)
            if rank.rank == missing:
                time.sleep(late_s)
            cpu = time.process_time()
            error = error_of(lambda c=case: call(runtime, c, timeout_s=TIMEOUT_S))
            out = call(runtime, case, timeout_s=late_s + 10.0).hidden_states
            seen.append((*error, time.process_time() - cpu, out))
    return seen


@pytest.mark.parametrize(
    ("missing", "paths"),
    [(2, (Path.COMPACT, Path.LARGE_M)), (7, (Path.SMALL_M, Path.FIXED_SLOT))],
)
def test_a_missing_rank_is_named_on_all_ranks(missing: int, paths: tuple[Path, ...]) -> None:
    values = run_ranks(8, missing_worker, missing, paths, TIMEOUT_S + 1.4)
    for path, answers in zip(paths, zip(*values, strict=True), strict=True):
        sentences = set()
        for rank, (kind, sentence, named, seconds, cpu_s, _) in enumerate(answers):
            assert (kind, named) == ("PeerTimeoutError", (missing,)), (rank, sentence)
            if rank != missing:
                assert TIMEOUT_S - 0.1 <= seconds <= TIMEOUT_S + 1.0
                assert cpu_s < 0.2, "two seconds of waiting must leave the cores to others"
            sentences.add(sentence.split(":")[0])
        assert sentences == {f"ranks [{missing}] did not come in time"}
        assert_right(Case(path, ROWS), [answer[-1] for answer in answers])


def long_gone_worker(rank: Rank, path: Path, point: str) -> list[Any]:
    """Rank 4 sleeps through two calls, at a point of the first: it must not take part in either, nor disturb the
    third, which uses the buffer of the first."""
    with open_runtime(rank, deployment()) as runtime:
        bind_all(runtime)
        if rank.rank == 4:
            install(runtime, Fault(point, lambda: time.sleep(2 * TIMEOUT_S + 0.8)))
        cases = [Case(path, ROWS, seed=seed) for seed in (1, 2)]
        seen = [error_of(lambda c=case: call(runtime, c, timeout_s=TIMEOUT_S))[:3] for case in cases]
        return [seen, call(runtime, Case(path, ROWS, seed=3)).hidden_states]


@pytest.mark.parametrize(
    ("path", "point"),
    [
        (Path.FIXED_SLOT, "enter"),
        (Path.COMPACT, "payload"),
        (Path.LARGE_M, "tile"),
        (Path.SMALL_M, "payload"),
    ],
)
def test_a_rank_that_slept_through_several_calls(path: Path, point: str) -> None:
    values = run_ranks(8, long_gone_worker, path, point)
    for seen, _ in values:
        assert [(kind, named) for kind, _, named in seen] == [("PeerTimeoutError", (4,))] * 2
    assert_right(Case(path, ROWS, seed=3), [out for _, out in values])


# ------------------------------------------------------------------------------------------------- faults inside


class Fault:
    """A hook that does something at the first visit of a point."""

    def __init__(self, point: str, action: Callable[[], None]) -> None:
        self.point, self.action = point, action
        self.visits: list[str] = []

    def __call__(self, point: str) -> None:
        self.visits.append(point)
        if point == self.point and self.visits.count(point) == 1:
            self.action()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise RuntimeError("out of everything")


def install(runtime: Runtime, fault: Fault) -> Fault:
    runtime.backend.hook = fault  # type: ignore[attr-defined]
    return fault


def kill_worker(rank: Rank, path: Path, point: str) -> list[Any]:
    with open_runtime(rank, deployment()) as runtime:
        bind_all(runtime)
        case = Case(path, ROWS)
        call(runtime, case)
        if rank.rank == 3:
            install(runtime, Fault(point, die))
        return [error_of(lambda: call(runtime, case, timeout_s=TIMEOUT_S))[:3] for _ in range(2)]


@pytest.mark.parametrize(
    ("path", "point"),
    [
        (Path.COMPACT, "payload"),
        (Path.SMALL_M, "tile"),
        (Path.LARGE_M, "counts"),
        (Path.FIXED_SLOT, "returned"),
    ],
)
def test_a_killed_rank_is_named_by_the_survivors(path: Path, point: str) -> None:
    outcomes = run_outcomes(8, kill_worker, path, point, timeout_s=30)
    assert outcomes[3].died
    for rank in set(range(8)) - {3}:
        first, second = outcomes[rank].value
        if point != "returned":  # a rank that dies after its last post is missed only in the next call
            assert (first[0], first[2]) == ("PeerTimeoutError", (3,)), first
        assert (second[0], second[2]) == ("PeerTimeoutError", (3,)), second


def fail_worker(rank: Rank) -> list[Any]:
    seen = []
    with open_runtime(rank, deployment()) as runtime:
        bind_all(runtime)
        for path in Path:
            case = Case(path, ROWS)
            if rank.rank == 6:
                install(runtime, Fault("payload", fail))
                with pytest.raises(RuntimeError, match="out of everything"):
                    call(runtime, case, timeout_s=20.0)
                install(runtime, Fault("", fail))
            else:
                seen.append(error_of(lambda c=case: call(runtime, c, timeout_s=20.0)))
            seen.append(call(runtime, case).hidden_states)
    return seen


def test_a_rank_that_fails_tells_its_peers_at_once() -> None:
    values = run_ranks(8, fail_worker)
    for idx, path in enumerate(Path):
        for rank in set(range(8)) - {6}:
            kind, _, named, seconds = values[rank][2 * idx]
            assert (kind, named) == ("PeerTimeoutError", (6,))
            assert seconds < 5.0, "long before the deadline"
        outputs = [values[rank][idx if rank == 6 else 2 * idx + 1] for rank in range(8)]
        assert_right(Case(path, ROWS), outputs)


def oversleep_worker(rank: Rank, point: str) -> list[Any]:
    """Rank 4 sleeps past the deadline in the middle of a launch, on every path; the next call has all ranks."""
    seen = []
    with open_runtime(rank, deployment()) as runtime:
        bind_all(runtime)
        for path in Path:
            case = Case(path, (33,) * 8)
            if rank.rank == 4:
                install(runtime, Fault(point, lambda: time.sleep(TIMEOUT_S + 1.0)))
            error = error_of(lambda c=case: call(runtime, c, timeout_s=TIMEOUT_S))
            runtime.backend.hook = None  # type: ignore[attr-defined]
            seen.append((*error[:3], call(runtime, case).hidden_states))
    return seen


@pytest.mark.parametrize("point", ["payload", "tile"])
def test_a_rank_that_oversleeps_inside_a_launch_writes_nothing_afterwards(point: str) -> None:
    values = run_ranks(8, oversleep_worker, point)
    for path, answers in zip(Path, zip(*values, strict=True), strict=True):
        for rank, (kind, sentence, named, _) in enumerate(answers):
            assert (kind, named) == ("PeerTimeoutError", (4,)), (path, rank, sentence)
        assert_right(Case(path, (33,) * 8), [answer[-1] for answer in answers])


# ------------------------------------------------------------------------------------------------- a stalled source

STALLED = 5
STALL_ROWS = (CAPACITY,) * 8


def stall_worker(rank: Rank, path: Path) -> tuple[int, int, int, torch.Tensor]:
    """(tiles and combines before all rows were there, all tiles, output): one source sleeps before it sends rows."""
    with open_runtime(rank, deployment()) as runtime:
        bind_all(runtime)
        case = Case(path, STALL_ROWS, "hot60")
        stall = Fault("payload" if rank.rank == STALLED else "", lambda: time.sleep(1.0))
        visits = install(runtime, stall).visits
        out = call(runtime, case).hidden_states
        early = visits[: visits.index("received")]
        return early.count("tile"), early.count("combine"), visits.count("tile"), out


def tiles_without(case: Case, owner: int, source: int) -> tuple[int, int]:
    """(tiles that hold no row of source, all tiles) of an owner, counted from the routing alone."""
    free = total = 0
    for expert in range(owner * SHAPE.num_experts_per_rank, (owner + 1) * SHAPE.num_experts_per_rank):
        ids = [batch_of(case, SHAPE, rank).topk_ids for rank in range(8)]
        sources = np.repeat(range(8), [int((i == expert).sum()) for i in ids])
        tiles = [sources[start : start + BLOCK_M] for start in range(0, len(sources), BLOCK_M)]
        total += len(tiles)
        free += sum(source not in tile for tile in tiles)
    return free, total


def test_large_m_finishes_what_a_stalled_source_does_not_hold_up_and_compact_does_not() -> None:
    outputs = {}
    for path in (Path.LARGE_M, Path.COMPACT):
        values = run_ranks(8, stall_worker, path)
        outputs[path] = torch.cat([value[-1] for value in values])
        some_free = 0
        for rank, (early, combines, total, _) in enumerate(values):
            free, all_tiles = tiles_without(Case(path, STALL_ROWS, "hot60"), rank, STALLED)
            assert total == all_tiles
            if rank != STALLED:
                assert early == (free if path is Path.LARGE_M else 0), rank
                # Rank 0 owns the hot experts, so its own hot tokens come back to it early; compact sums nothing.
                assert (combines > 0) == (path is Path.LARGE_M) or rank > 0
                some_free += free
        assert some_free > 0, "the case must have tiles that can run"
    assert torch.equal(outputs[Path.LARGE_M], outputs[Path.COMPACT])
    assert_right(Case(Path.COMPACT, STALL_ROWS, "hot60"), [outputs[Path.COMPACT]])


# ------------------------------------------------------------------------------------------------- open and close


def open_worker(rank: Rank, absent: int, differing: int) -> Any:
    if rank.rank == absent:
        return None
    settings = {"swiglu_limit": 1.0} if rank.rank == differing else {}
    from dataclasses import replace

    deployed = deployment(replace(SHAPE, **settings))
    return error_of(
        lambda: Runtime.open(deployed, rank=rank.rank, group_name=rank.group_name, timeout_s=1.0).close()
    )[:3]


def test_opening_names_who_is_absent() -> None:
    values = run_ranks(8, open_worker, 6, -1)
    for rank in set(range(8)) - {6}:
        assert values[rank][0] == "PeerTimeoutError"
        assert 6 in values[rank][2]


def test_ranks_with_another_deployment_are_refused() -> None:
    values = run_ranks(8, open_worker, -1, 2)
    assert len({value[:2] for value in values}) == 1, "the same sentence everywhere"
    kind, sentence, _ = values[0]
    assert kind == "ConfigError"
    said = dict(part.split(": ") for part in sentence.split("got ")[1].split(", "))
    assert len(said) == 8
    assert [rank for rank in said if said[rank] != said["rank 0"]] == ["rank 2"]


def names_worker(rank: Rank) -> tuple[list[str], list[str]]:
    """Names of the group's segments while it runs, and after this rank has closed."""

    def names() -> list[str]:
        return [path.name for path in FilePath("/dev/shm").glob(f"{rank.group_name}-*")]

    with open_runtime(rank, deployment()) as runtime:
        bind_all(runtime)
        call(runtime, Case(Path.COMPACT, ROWS))
        during = names()
        call(runtime, Case(Path.COMPACT, ROWS))
    return during, names()


def test_nothing_is_left_in_shared_memory() -> None:
    """Not even while the group runs: ranks that are killed leave nothing behind."""
    assert run_ranks(8, names_worker) == [([], [])] * 8


# ------------------------------------------------------------------------------------------------- policies


def policy_worker(rank: Rank) -> list[str]:
    with Runtime.open(deployment(), rank=rank.rank, group_name=rank.group_name) as runtime:
        assert runtime.policy == PathPolicy.of(runtime.bundle.deployment)
        newer = runtime.policy.with_path(Path.SMALL_M, True)
        runtime.stage_policy(newer)
        runtime.stage_policy(newer)
        assert runtime.policy == newer
        assert runtime.policy_of(0) == PathPolicy.of(runtime.bundle.deployment)
        other = PathPolicy(version=newer.version)
        return [
            error_of(lambda: runtime.stage_policy(other))[1],
            error_of(lambda: runtime.policy_of(9))[1],
            error_of(lambda: call(runtime, Case(Path.COMPACT, ROWS)))[1],
        ]


def test_policies_are_staged_by_version() -> None:
    for staged, unknown, unplanned in run_ranks(8, policy_worker):
        assert staged == "policy.version must be above the staged 1, got 1"
        assert unknown == "policy_version of the plan must be one staged here (0, 1), got 9"
        assert "policy_version of the plan" in unplanned


def test_outputs_helper_orders_ranks() -> None:
    answers = [Answer(torch.full((1, 1), float(rank)), ()) for rank in range(3)]
    assert whole_output(answers).ravel().tolist() == [0.0, 1.0, 2.0]
