"""Routing's index arithmetic against plain loops, with stale rows and foreign ids in between."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from megamoe import MoeShape, plan_bundle, plan_layout
from megamoe.backends.cpu.routed import Outgoing, Received, routed_rows
from tests.megamoe.groups import deployment

SHAPE = MoeShape(hidden=32, intermediate=32, num_experts=12, num_topk=3, num_ranks=4)
LAYOUT = plan_layout(plan_bundle(deployment(SHAPE, capacity=8)))
PER_RANK = SHAPE.num_experts_per_rank

ids_of_rows = st.lists(
    st.lists(st.integers(-1, SHAPE.num_experts - 1), min_size=3, max_size=3), min_size=0, max_size=8
)


@given(ids=ids_of_rows, bases=st.lists(st.integers(0, 20), min_size=4, max_size=4))
def test_outgoing(ids: list[list[int]], bases: list[int]) -> None:
    topk_ids = torch.tensor(ids, dtype=torch.int32).view(-1, 3)
    outgoing = Outgoing.of(SHAPE, topk_ids, torch.empty(0), torch.empty(0))
    slots = outgoing.dense_slots(np.array(bases))
    got = list(zip(outgoing.dst_rank.tolist(), outgoing.token.tolist(), slots.tolist(), strict=True))
    want = []
    for dst_rank in range(4):
        tokens = [t for t, row in enumerate(ids) if any(e >= 0 and e // PER_RANK == dst_rank for e in row)]
        want += [(dst_rank, token, bases[dst_rank] + i) for i, token in enumerate(tokens)]
        assert outgoing.rows_per_rank[dst_rank] == len(tokens)
    assert got == want


@given(
    rank=st.integers(0, 3),
    per_source=st.lists(ids_of_rows, min_size=4, max_size=4),
    fixed=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_routed_rows(rank: int, per_source: list[list[list[int]]], fixed: bool, seed: int) -> None:
    """What lies outside the announced rows is full of valid ids of older launches and must not be seen."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, SHAPE.num_experts, (LAYOUT.max_rows_received, LAYOUT.meta_words), dtype=np.int32)
    blocks, want, first = [], [], 0
    for src_rank, rows in enumerate(per_source):
        first = src_rank * 8 if fixed else first
        for i, ids in enumerate(rows):
            weights = rng.random(3, dtype=np.float32)
            words[first + i, 0] = token = 7 - i
            words[first + i, 1:4] = ids
            words[first + i, 4:7] = weights.view(np.int32)
            want += [
                (
                    expert - rank * PER_RANK,
                    src_rank,
                    i,
                    slot,
                    first + i,
                    token * 3 + slot,
                    float(weights[slot]),
                )
                for slot, expert in enumerate(ids)
                if rank * PER_RANK <= expert < (rank + 1) * PER_RANK
            ]
        blocks.append(Received(src_rank, first, len(rows)))
        first += len(rows)
    want.sort()
    got = routed_rows(LAYOUT, rank, words, blocks)
    assert got.num_rows == len(want)
    assert got.src_rank.tolist() == [entry[1] for entry in want]
    assert got.payload_row.tolist() == [entry[4] for entry in want]
    assert got.result_index.tolist() == [entry[5] for entry in want]
    assert got.weights.tolist() == [entry[6] for entry in want]
    assert got.rows_per_expert.tolist() == [sum(e[0] == x for e in want) for x in range(PER_RANK)]
