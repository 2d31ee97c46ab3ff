"""Random calls on random paths while ranks dawdle at random points: the same bits as an undisturbed compact call."""

from __future__ import annotations

import random
import time

import torch

from megamoe import Path
from tests.megamoe.groups import CAPACITY, SHAPE, Case, bind_all, call, deployment, open_runtime
from tests.ranks import Rank, run_ranks

NUM_CALLS = 120
NUM_KINDS = 6


def random_cases(seed: int) -> list[tuple[Case, int]]:
    """(case, sequence) of every call; sequences skip now and then, so that buffers are met again out of turn."""
    rng = random.Random(seed)
    kinds = [
        tuple(rng.choice((0, 1, rng.randint(0, CAPACITY), CAPACITY)) for _ in range(SHAPE.num_ranks))
        for _ in range(NUM_KINDS)
    ]
    kinds[-1] = tuple(2 * CAPACITY + rows for rows in kinds[-1])  # a step that is cut
    calls, sequence = [], 0
    for _ in range(NUM_CALLS):
        kind = rng.randrange(NUM_KINDS)
        case = Case(
            rng.choice(list(Path)),
            kinds[kind],
            rng.choice(("uniform", "one_rank")),
            no_expert_share=rng.choice((0.0, 0.3)),
            seed=kind,
            layer_idx=rng.randrange(SHAPE.num_layers),
        )
        sequence += rng.choice((1, 1, 1, 2, 3))
        calls.append((case, sequence))
    return calls


def stress_worker(rank: Rank, seed: int) -> list[int]:
    """Indices of calls whose bits differ from the reference call made in peace."""
    calls = random_cases(seed)
    rng = random.Random(1000 * seed + rank.rank)

    def dawdle(_: str) -> None:
        if rng.random() < 0.05:
            time.sleep(rng.choice((0.0, 0.0005, 0.003)))

    with open_runtime(rank, deployment()) as runtime:
        bind_all(runtime)
        want: dict[Case, torch.Tensor] = {}
        for case, _ in calls:
            peaceful = case.on(Path.COMPACT)
            if peaceful not in want:
                want[peaceful] = call(runtime, peaceful).hidden_states
        base = runtime.next_sequence
        runtime.backend.hook = dawdle  # type: ignore[attr-defined]
        wrong = []
        for idx, (case, sequence) in enumerate(calls):
            got = call(runtime, case, sequence=base + sequence, timeout_s=60.0).hidden_states
            if not torch.equal(got, want[case.on(Path.COMPACT)]):
                wrong.append(idx)
    return wrong


def test_random_calls_with_dawdling_ranks() -> None:
    assert run_ranks(8, stress_worker, 3, timeout_s=120.0) == [[]] * 8
