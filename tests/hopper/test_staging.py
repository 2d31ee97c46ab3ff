"""Rows on their way: what kernels reach stays where it lies, the rest takes one exact copy. On the CPU.

Every tensor here counts as one on the host; "device" buffers of a staging are host memory too.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megamoe import MoeBatch, MoeShape, mx
from megamoe.backends.hopper import staging
from megamoe.backends.hopper.staging import Staging

SHAPE = MoeShape(hidden=96, intermediate=64, num_experts=16, num_topk=4)
CPU = torch.device("cpu")
STREAM: Any = SimpleNamespace(current=nullcontext)


def batch_of(num_rows: int = 5, *, quantized: bool = False) -> MoeBatch:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(num_rows, SHAPE.hidden, generator=generator).bfloat16()
    ids = torch.randint(-1, 16, (num_rows, 4), generator=generator).int()
    weights = torch.rand(num_rows, 4, generator=generator)
    if quantized:
        codes, scales = mx.quantize_mxfp8(rows)
        return MoeBatch.of(SHAPE, codes, ids, weights, scales)
    return MoeBatch.of(SHAPE, rows, ids, weights)


def read(address: int, like: torch.Tensor) -> list[object]:
    """What lies at an address, as a tensor of the same kind has it."""
    import ctypes

    raw = ctypes.string_at(address, like.nbytes)
    return torch.frombuffer(bytearray(raw), dtype=like.dtype).view(like.shape).tolist()


def pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all host memory count as pinned."""
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("in_place_bytes", [0, 1 << 20])
def test_ordinary_rows_take_one_copy_each_way(quantized: bool, in_place_bytes: int) -> None:
    rooms, batch = Staging(SHAPE, 16, CPU, STREAM), batch_of(quantized=quantized)
    rooms.in_place_bytes = in_place_bytes
    out = torch.zeros((5, SHAPE.hidden), dtype=torch.bfloat16)
    result = rooms.outgoing(out)
    at = rooms.bring(batch, result)
    assert at.num_rows == 5
    assert at.hidden != batch.hidden_states.data_ptr()
    assert read(at.hidden, batch.hidden_states) == batch.hidden_states.tolist()
    if batch.hidden_states_sf is not None:
        assert read(at.scales, batch.hidden_states_sf) == batch.hidden_states_sf.tolist()
    assert read(at.ids_src, batch.topk_ids) == batch.topk_ids.tolist()
    assert read(at.weights_src, batch.topk_weights) == batch.topk_weights.tolist()
    assert at.out == result.written.data_ptr()
    assert result.needs_copy is (in_place_bytes == 0)
    answer = torch.randn(5, SHAPE.hidden).bfloat16()
    result.written.copy_(answer)
    result.queue()
    result.take()
    assert torch.equal(out, answer)


def test_a_few_pinned_rows_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned(monkeypatch)
    batch, out = batch_of(), torch.zeros((5, SHAPE.hidden), dtype=torch.bfloat16)
    rooms = Staging(SHAPE, 16, CPU, STREAM)
    result = rooms.outgoing(out)
    assert result == (out, out, out)
    at = rooms.bring(batch, result)
    assert (at.hidden, at.out) == (batch.hidden_states.data_ptr(), out.data_ptr())
    assert (at.ids_src, at.weights_src) == (batch.topk_ids.data_ptr(), batch.topk_weights.data_ptr())
    assert at.ids not in (0, at.ids_src)


def test_many_pinned_rows_are_copied_to_the_device_and_back_without_a_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned(monkeypatch)
    batch, out = batch_of(), torch.zeros((5, SHAPE.hidden), dtype=torch.bfloat16)
    rooms = Staging(SHAPE, 16, CPU, STREAM)
    rooms.in_place_bytes = 100
    result = rooms.outgoing(out)
    at = rooms.bring(batch, result)
    assert at.hidden != batch.hidden_states.data_ptr()
    assert read(at.hidden, batch.hidden_states) == batch.hidden_states.tolist()
    assert result.landed is out
    assert result.written is not out


def test_memory_that_begins_between_pieces_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels move 16 bytes at a time."""
    pinned(monkeypatch)
    odd = torch.ones(5 * SHAPE.hidden + 1, dtype=torch.bfloat16)[1:].view(5, SHAPE.hidden)
    rooms, batch = Staging(SHAPE, 16, CPU, STREAM), batch_of()
    result = rooms.outgoing(odd)
    assert result.landed is not odd
    at = rooms.bring(MoeBatch(odd, batch.topk_ids, batch.topk_weights), result)
    assert at.hidden % staging.ALIGNMENT == 0
