"""The one place that validates tensors: every refusal names the field, what was wanted and what came."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch

from megamoe import MoeBatch, preset
from megamoe.errors import InvalidArgumentError

SHAPE = preset("demo")
N = 5


def tensors(quantized: bool = False) -> dict[str, torch.Tensor]:
    made = {
        "hidden_states": torch.zeros(N, SHAPE.hidden, dtype=torch.uint8 if quantized else torch.bfloat16),
        "topk_ids": torch.arange(N * SHAPE.num_topk, dtype=torch.int32).view(N, -1),
        "topk_weights": torch.ones(N, SHAPE.num_topk),
    }
    if quantized:
        made["hidden_states_sf"] = torch.full((N, SHAPE.hidden // 32), 127, dtype=torch.uint8)
    return made


def test_good_batches_pass_as_views() -> None:
    given = tensors()
    batch = MoeBatch.of(SHAPE, **given)
    assert batch.num_rows == N
    assert batch.hidden_states.data_ptr() == given["hidden_states"].data_ptr()
    part = batch.rows(3, 9)
    assert part.num_rows == 2
    assert torch.equal(part.topk_ids, given["topk_ids"][3:])
    assert batch.rows(7, 9).num_rows == 0


@pytest.mark.parametrize("typed", [False, True])
def test_quantized_rows_come_as_bytes_or_typed(typed: bool) -> None:
    given = tensors(quantized=True)
    if typed:
        given["hidden_states"] = given["hidden_states"].view(torch.float8_e4m3fn)
        given["hidden_states_sf"] = given["hidden_states_sf"].view(torch.float8_e8m0fnu)
    batch = MoeBatch.of(SHAPE, **given)
    assert batch.hidden_states.dtype is torch.uint8
    assert batch.hidden_states_sf is not None
    assert batch.hidden_states_sf.dtype is torch.uint8
    assert batch.rows(1, 3).hidden_states_sf is not None


@pytest.mark.parametrize("quantized", [False, True])
def test_empty(quantized: bool) -> None:
    batch = MoeBatch.empty(SHAPE, quantized=quantized)
    checked = MoeBatch.of(
        SHAPE,
        batch.hidden_states,
        batch.topk_ids,
        batch.topk_weights,
        batch.hidden_states_sf,
    )
    assert checked.num_rows == 0


def strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


BAD: list[tuple[str, str, Callable[[torch.Tensor], torch.Tensor], list[str]]] = [
    (
        "hidden_dtype",
        "hidden_states",
        lambda t: t.float(),
        ["hidden_states.dtype", "bfloat16", "float32"],
    ),
    (
        "hidden_width",
        "hidden_states",
        lambda t: t[:, :64].contiguous(),
        ["hidden_states.shape", "[5, 256]", "[5, 64]"],
    ),
    ("hidden_rank", "hidden_states", lambda t: t[0], ["hidden_states.shape", "[256]"]),
    (
        "hidden_scalar",
        "hidden_states",
        lambda t: t[0, 0],
        ["hidden_states.shape", "[]"],
    ),
    (
        "hidden_strides",
        "hidden_states",
        strided,
        ["hidden_states strides", "contiguous"],
    ),
    ("ids_dtype", "topk_ids", lambda t: t.long(), ["topk_ids.dtype", "int32", "int64"]),
    (
        "ids_rows",
        "topk_ids",
        lambda t: t[:3].contiguous(),
        ["topk_ids.shape", "[5, 6]", "[3, 6]"],
    ),
    (
        "ids_slots",
        "topk_ids",
        lambda t: t[:, :4].contiguous(),
        ["topk_ids.shape", "[5, 6]", "[5, 4]"],
    ),
    (
        "weights_dtype",
        "topk_weights",
        lambda t: t.bfloat16(),
        ["topk_weights.dtype", "float32", "bfloat16"],
    ),
    (
        "weights_rows",
        "topk_weights",
        lambda t: t[:2].contiguous(),
        ["topk_weights.shape", "[5, 6]", "[2, 6]"],
    ),
]


@pytest.mark.parametrize(
    ("field", "change", "words"),
    [case[1:] for case in BAD],
    ids=[case[0] for case in BAD],
)
def test_refuses(field: str, change: Callable[[torch.Tensor], torch.Tensor], words: list[str]) -> None:
    given = tensors()
    given[field] = change(given[field])
    with pytest.raises(InvalidArgumentError) as caught:
        MoeBatch.of(SHAPE, **given)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn, torch.float32])
def test_scales_are_one_byte_e8m0(dtype: torch.dtype) -> None:
    given: dict[str, Any] = tensors(quantized=True)
    given["hidden_states_sf"] = given["hidden_states_sf"].to(torch.float32).to(dtype)
    with pytest.raises(InvalidArgumentError, match=r"hidden_states_sf\.dtype"):
        MoeBatch.of(SHAPE, **given)


@pytest.mark.parametrize("bad", [-2, 64, 2**31 - 1, -(2**31)])
def test_ids_out_of_range_name_token_and_slot(bad: int) -> None:
    given = tensors()
    given["topk_ids"][3, 2] = bad
    given["topk_ids"][4, 0] = bad
    with pytest.raises(InvalidArgumentError, match=rf"token 3, slot 2.*got {bad}"):
        MoeBatch.of(SHAPE, **given)


def test_minus_one_and_the_last_expert_are_legal() -> None:
    given = tensors()
    given["topk_ids"][0] = -1
    given["topk_ids"][1] = SHAPE.num_experts - 1
    MoeBatch.of(SHAPE, **given)


def test_tensors_are_all_fields_and_only_these() -> None:
    batch = MoeBatch.of(SHAPE, **tensors(quantized=True))
    assert (batch.num_rows, batch.devices) == (N, frozenset())  # kept beside the fields once asked for
    assert list(batch.tensors()) == [field.name for field in fields(MoeBatch)]
    assert all(tensor is getattr(batch, name) for name, tensor in batch.tensors().items())


def test_another_device_is_refused() -> None:
    given = tensors()
    given["topk_weights"] = given["topk_weights"].to("meta")
    with pytest.raises(InvalidArgumentError, match=r"topk_weights\.device must be cpu, got meta"):
        MoeBatch.of(SHAPE, **given)
