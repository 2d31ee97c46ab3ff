"""Rows going in and coming out of a layer; the one place that validates tensors.

Refuses wrong dtype, shape, layout, device and expert ids with a sentence that names the field, and for ids the
token and the slot. Nothing behind this file checks again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from megamoe.bundle import Path, RowFormat
from megamoe.errors import InvalidArgumentError, must_be
from megamoe.shape import MX_BLOCK, MoeShape

NO_EXPERT = -1
"""A slot of topk_ids that nobody serves."""


@dataclass(frozen=True)
class MoeBatch:
    """The rows of one rank for one layer, validated. Build it with `MoeBatch.of`.

    hidden_states: [n, hidden] bfloat16, or uint8 e4m3 codes when hidden_states_sf is given.
    hidden_states_sf: None, or [n, hidden / 32] uint8 E8M0 scales of pre-quantized MXFP8 rows.
    topk_ids: [n, num_topk] int32 global expert ids, -1 = nobody. Duplicates in a row are legal and summed.
    topk_weights: [n, num_topk] float32.
    """

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    hidden_states_sf: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        shape: MoeShape,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        hidden_states_sf: torch.Tensor | None = None,
        *,
        device: torch.device | str = "cpu",
        rows_device: torch.device | str | None = None,
    ) -> MoeBatch:
        """Check everything that can be wrong with a batch. Raises InvalidArgumentError naming field, wanted, got.

        FP8 rows and scales may come as their typed forms (float8_e4m3fn, float8_e8m0fnu) or as bytes.
        rows_device: where hidden_states and their scales lie when that is not `device`: memory that a caller lends.
        """
        rows_device = device if rows_device is None else rows_device
        num_rows = hidden_states.shape[0] if hidden_states.dim() else -1
        if hidden_states_sf is None:
            _check(
                "hidden_states",
                hidden_states,
                (num_rows, shape.hidden),
                (torch.bfloat16,),
                rows_device,
            )
        else:
            _check(
                "hidden_states",
                hidden_states,
                (num_rows, shape.hidden),
                (torch.uint8, torch.float8_e4m3fn),
                rows_device,
            )
            sf_shape = (num_rows, shape.hidden // MX_BLOCK)
            _check(
                "hidden_states_sf",
                hidden_states_sf,
                sf_shape,
                (torch.uint8, torch.float8_e8m0fnu),
                rows_device,
            )
            hidden_states = hidden_states.view(torch.uint8)
            hidden_states_sf = hidden_states_sf.view(torch.uint8)
        _check("topk_ids", topk_ids, (num_rows, shape.num_topk), (torch.int32,), device)
        _check(
            "topk_weights",
            topk_weights,
            (num_rows, shape.num_topk),
            (torch.float32,),
            device,
        )
        HostIds(topk_ids).check(shape)
        return cls(hidden_states, topk_ids, topk_weights, hidden_states_sf)

    @classmethod
    def empty(
        cls,
        shape: MoeShape,
        *,
        quantized: bool = False,
        device: torch.device | str = "cpu",
    ) -> MoeBatch:
        """The batch of a rank without rows."""
        dtype = torch.uint8 if quantized else torch.bfloat16
        return cls(
            torch.empty((0, shape.hidden), dtype=dtype, device=device),
            torch.empty((0, shape.num_topk), dtype=torch.int32, device=device),
            torch.empty((0, shape.num_topk), dtype=torch.float32, device=device),
            torch.empty((0, shape.hidden // MX_BLOCK), dtype=torch.uint8, device=device)
            if quantized
            else None,
        )

    @cached_property
    def num_rows(self) -> int:
        return int(self.hidden_states.shape[0])

    @cached_property
    def devices(self) -> frozenset[torch.device]:
        """Where tensors of it lie that are not on the host."""
        tensors = self.tensors().values()
        return frozenset(tensor.device for tensor in tensors if tensor is not None and not tensor.is_cpu)

    def tensors(self) -> dict[str, Any]:
        """Its fields by name: torch.Tensor each, or None."""
        return {
            "hidden_states": self.hidden_states,
            "topk_ids": self.topk_ids,
            "topk_weights": self.topk_weights,
            "hidden_states_sf": self.hidden_states_sf,
        }

    def rows(self, start: int, stop: int) -> MoeBatch:
        """The rows [start, stop) as views; what lies past the end is not there."""
        if start == 0 and stop >= self.num_rows:
            return self
        scales = self.hidden_states_sf
        return MoeBatch(
            self.hidden_states[start:stop],
            self.topk_ids[start:stop],
            self.topk_weights[start:stop],
            None if scales is None else scales[start:stop],
        )


def _check(
    name: str,
    tensor: torch.Tensor,
    wanted_shape: tuple[int, ...],
    wanted_dtypes: tuple[torch.dtype, ...],
    device: torch.device | str,
) -> None:
    if tensor.dtype not in wanted_dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in wanted_dtypes)
        raise InvalidArgumentError(must_be(f"{name}.dtype", wanted, str(tensor.dtype).removeprefix("torch.")))
    if tuple(tensor.shape) != wanted_shape:
        shown = ["n" if size < 0 else size for size in wanted_shape]
        raise InvalidArgumentError(must_be(f"{name}.shape", shown, list(tensor.shape)))
    if tensor.device.type != torch.device(device).type:
        raise InvalidArgumentError(must_be(f"{name}.device", device, tensor.device))
    if not tensor.is_contiguous():
        raise InvalidArgumentError(must_be(f"{name} strides", "contiguous", list(tensor.stride())))


class HostIds:
    """topk_ids of one place, to be checked again whenever it is written anew.

    Device tensors are not read, since that would synchronise; the kernels treat bad ids as -1 and the service checks
    ids before they go to a device.
    """

    __slots__ = ("_ids", "_plain")

    def __init__(self, topk_ids: torch.Tensor) -> None:
        """topk_ids: [n, num_topk] int32, contiguous."""
        self._ids = topk_ids
        readable = topk_ids.is_cpu and topk_ids.numel()
        self._plain: np.ndarray | None = topk_ids.numpy().reshape(-1) if readable else None

    def check(self, shape: MoeShape) -> None:
        """Raise InvalidArgumentError naming the first token and slot outside [-1, num_experts)."""
        # Of numpy's ways to the ends of a small array, the one that costs least: it counts at 61 layers a step.
        plain = self._plain
        if plain is None or (
            plain.item(plain.argmax()) < shape.num_experts and plain.item(plain.argmin()) >= NO_EXPERT
        ):
            return
        ids = self._ids
        bad = ((ids < NO_EXPERT) | (ids >= shape.num_experts)).nonzero()[0]
        token, slot = int(bad[0]), int(bad[1])
        raise InvalidArgumentError(
            must_be(
                f"topk_ids[{token}][{slot}] (token {token}, slot {slot})",
                f"-1 or an expert id below {shape.num_experts}",
                int(ids[token, slot]),
            )
        )


class StageTimes(NamedTuple):
    """Where one sub-step's time went on this rank, in microseconds; total_us is measured, not summed.

    wait_us is time asleep or spinning for peers, inside whichever stage; the stages exclude it.
    """

    quantize_us: float = 0.0
    dispatch_us: float = 0.0
    gemm1_us: float = 0.0
    gemm2_us: float = 0.0
    combine_us: float = 0.0
    wait_us: float = 0.0
    total_us: float = 0.0

    @classmethod
    def stages(cls) -> tuple[str, ...]:
        return tuple(name.removesuffix("_us") for name in cls._fields if name != "total_us")


class Counters(NamedTuple):
    """The proof that a path is what it says (protocol): what one sub-step did on this rank.

    count_exchanges: times that row counts were sent to peers before payload. prepare_passes: passes over ids to
    count and pack. launches: entries from runtime into backend. group_barriers: waits for the whole group.
    bytes_sent: bytes written into peers' memory (payload, rows and flags), own rank excluded.
    padded_rows: rows of GEMM tiles that belong to nobody. dropped_slots: -1 slots of this rank's rows.
    rows_received: routed rows that this rank computed.
    """

    count_exchanges: int = 0
    prepare_passes: int = 0
    launches: int = 0
    group_barriers: int = 0
    bytes_sent: int = 0
    padded_rows: int = 0
    dropped_slots: int = 0
    rows_received: int = 0


class SubStepReport(NamedTuple):
    """What one executed sub-step was: agreed facts first, then this rank's own measurements."""

    path: Path
    runtime_capacity: int
    num_rows_per_rank: tuple[int, ...]
    row_format_per_rank: tuple[RowFormat, ...]
    """Format of the rows that each OWNER rank sent back, by owner rank."""
    counters: Counters
    times: StageTimes


@dataclass(frozen=True)
class MoeOutput:
    """hidden_states: [n, hidden] bfloat16, the weighted sum of the experts, per input row in order."""

    hidden_states: torch.Tensor
    sub_steps: tuple[SubStepReport, ...] = field(default=())
