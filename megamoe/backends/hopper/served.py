"""What this backend serves, and with which GEMMs: questions that are answered before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from megamoe.backends.hopper.board import MAX_EXPERTS_PER_RANK, plan_large_m
from megamoe.backends.hopper.plan import GemmPlan, plan_gemms, plan_small_m
from megamoe.bundle import Bundle, Path, RowFormat
from megamoe.errors import ConfigError, must_be

MAX_HIDDEN = 8192
"""Widest row that every path's kernels were written for."""


def check_served(bundle: Bundle) -> None:
    """Raises ConfigError for settings that this backend does not serve."""
    deployment = bundle.deployment
    if deployment.combine_row_format is RowFormat.AUTO:
        raise ConfigError(
            must_be("combine_row_format on hopper", "bf16 or fp8", deployment.combine_row_format)
        )
    if deployment.shape.activation != "silu":
        raise ConfigError(must_be("activation on hopper", "silu", deployment.shape.activation))
    if deployment.shape.hidden > MAX_HIDDEN:
        raise ConfigError(must_be("hidden on hopper", f"at most {MAX_HIDDEN}", deployment.shape.hidden))
    experts = deployment.shape.num_experts_per_rank
    if experts > MAX_EXPERTS_PER_RANK and bundle.capacities(Path.LARGE_M):
        # Its metadata has an expert's number in so many bits.
        need = f"at most {MAX_EXPERTS_PER_RANK} where large_m is built"
        raise ConfigError(must_be("experts per rank on hopper", need, experts))


def check_switch(bundle: Bundle, path: Path) -> None:
    """Raises ConfigError for large_m where it was off at the start and compact has FP8 GEMMs for steps of its sizes."""
    deployment = bundle.deployment
    if path is not Path.LARGE_M or deployment.large_m_enabled:
        return
    most = max(bundle.capacities(path), default=0)
    for rows in range(deployment.large_m_min_tokens, most + 1):
        if gemm_plan(bundle, Path.COMPACT, rows).is_fp8:
            need = "on from the start (large_m_enabled) or off"
            why = f"(from {rows} rows a rank on compact has FP8 GEMMs, and other bits)"
            raise ConfigError(must_be("large_m on hopper", need, f"switched on {why}"))


def reach_peers(heaps: Iterable[torch.Tensor], device: torch.device) -> None:
    """Let kernels on `device` store into the heaps of other GPUs. Raises ConfigError where there is no peer access."""
    for heap in heaps:
        if heap.device == device:
            continue
        if not torch.cuda.can_device_access_peer(device, heap.device):
            raise ConfigError(must_be(f"peer access from {device} to {heap.device}", "possible", "none"))
        # torch switches peer access on at the first copy between two devices.
        torch.empty(1, dtype=torch.uint8, device=device).copy_(heap[:1])
    # The copies alone: a peer that shares this GPU may have opened already, and launch kernels that wait for this rank.
    torch.cuda.current_stream(device).synchronize()


def gemm_plan(bundle: Bundle, path: Path, max_rows: int) -> GemmPlan:
    """The GEMMs of a sub-step with an agreed maximum of rows a rank.

    Where large_m may serve instead, all rows go to the tiled kernel, so that both paths have the same bits; to the FP8
    kernel, which large_m does not have, only if it is off when the service starts.
    """
    deployment = bundle.deployment
    plan = {Path.SMALL_M: plan_small_m, Path.LARGE_M: plan_large_m}.get(path, plan_gemms)
    gemms = plan(
        bundle.shape,
        max_rows,
        batch_invariant=deployment.batch_invariant,
        fp8_rows=deployment.combine_row_format is RowFormat.FP8,
    )
    if (
        path is not Path.SMALL_M
        and bundle.capacities(Path.LARGE_M)
        and max_rows >= deployment.large_m_min_tokens
    ):
        gemms = replace(gemms, stream_max_rows=0)
        if deployment.large_m_enabled:
            gemms = gemms.bf16
    return gemms


def gemm_plans(bundle: Bundle, path: Path) -> list[GemmPlan]:
    """All that sub-steps of this deployment can have on a path, in order of rows."""
    most = max(bundle.capacities(path), default=0)
    plans = dict.fromkeys(gemm_plan(bundle, path, rows) for rows in range(1, most + 1))
    return list(dict.fromkeys(gemms for plan in plans for gemms in (plan, plan.bf16)))
