"""Rows that the tier sends: right shapes, no copies, fixed by (seed, step, layer, rank) in any order."""

from __future__ import annotations

import pytest
import torch

from loadgen.moe.rows import RowSource
from megamoe import MoeShape, preset
from megamoe.errors import ConfigError

SHAPE = MoeShape(hidden=64, intermediate=32, num_experts=64, num_topk=6, num_ranks=8)


def test_shapes_and_dtypes() -> None:
    rows = RowSource(SHAPE, 2, 512).batches(3, 1, (5, 0, 512))
    assert rows[1] is None
    hidden, ids, weights = rows[0]
    assert (hidden.shape, hidden.dtype) == ((5, 64), torch.bfloat16)
    assert (ids.shape, ids.dtype) == ((5, 6), torch.int32)
    assert (weights.shape, weights.dtype) == ((5, 6), torch.float32)
    assert rows[2][0].shape[0] == 512
    assert all(tensor.is_contiguous() for tensor in (hidden, ids, weights))
    assert torch.allclose(weights.sum(-1), torch.ones(5))
    assert all(len(set(row)) == 6 for row in ids.tolist())


def test_rows_do_not_depend_on_the_order_of_execution() -> None:
    def ids(source: RowSource, step: int, layer: int) -> list[list[list[int]]]:
        return [rows[1].tolist() for rows in source.batches(step, layer, (4,) * 8)]

    one, two = RowSource(SHAPE, 4, 64, seed=9), RowSource(SHAPE, 4, 64, seed=9)
    later = {(step, layer): ids(one, step, layer) for step in (7, 0) for layer in (3, 1)}
    assert {key: ids(two, *key) for key in reversed(list(later))} == later
    assert ids(RowSource(SHAPE, 4, 64, seed=10), 7, 3) != later[7, 3]


def test_ranks_steps_and_layers_send_different_rows() -> None:
    source = RowSource(SHAPE, 4, 64)
    starts = {
        (step, layer, rank): rows[0].data_ptr()
        for step in range(6)
        for layer in range(4)
        for rank, rows in enumerate(source.batches(step, layer, (4,) * 8))
    }
    assert len(set(starts.values())) > 0.9 * len(starts)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_rows must be at least 1, got 0"):
        RowSource(preset("demo"), 1, 0)
    with pytest.raises(ConfigError, match="routing must be one of uniform, .*, drift, got 'odd'"):
        RowSource(preset("demo"), 1, 4, distribution="odd")
