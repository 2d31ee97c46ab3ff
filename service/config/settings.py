"""ServiceConfig: everything that a person chooses about a service, and what follows from it.

Refuses unknown fields and impossible values with ConfigError naming the field.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megamoe import Bundle, Deployment, MoeShape, RowFormat, plan_bundle, preset
from megamoe.errors import ConfigError, must_be
from service.config.profiles import PROFILES
from service.config.sentences import sentence

MIB = 1 << 20
DAY_S = 86400.0
"""The longest timeout: beyond a day it is a mistake, and beyond some the clocks overflow."""


class ServiceConfig(BaseModel):
    """All settings, each with its meaning; `megamoe serve --help` and the README show the same table."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    profile: str = Field("demo", description="preset of the settings below: " + ", ".join(PROFILES))
    model_name: str = Field("", description="label of metrics and GetInfo; default: name of the shape")

    shape: str | dict[str, Any] = Field(
        "demo", description="preset of the layer's dimensions, or a table of hidden, intermediate, ..."
    )
    num_ranks: int = Field(0, description="ranks, 1, 2, 4 or 8; 0 = as the shape says")
    num_layers: int = Field(0, description="MoE layers to bind; 0 = as the shape says")
    backend: str = Field("cpu", description="cpu, hopper or gfx950")
    max_tokens_per_rank: int = Field(8192, description="capacity of compact, tokens per rank; a power of two")
    fixed_slot_max: int = Field(255, description="largest decode step meant for fixed slots, rows a rank")
    small_m_capacities: tuple[int, ...] = Field((256, 512), description="runtimes of small_m")
    small_m_enabled: bool = Field(False, description="whether small_m serves at start")
    large_m_capacity: int = Field(8192, description="capacity of large_m's runtime")
    large_m_enabled: bool = Field(False, description="whether large_m serves at start")
    large_m_min_tokens: int = Field(1024, description="smallest prefill step, rows a rank, for large_m")
    max_step_rows: int = Field(
        0, le=2**31 - 1, description="most rows a rank in one step; 0 = 4 x max_tokens_per_rank"
    )
    combine_row_format: RowFormat = Field(RowFormat.BF16, description="bf16, fp8 or auto")
    auto_fp8_min_rows: int = Field(
        2048, ge=1, description="routed rows received from which a rank is heavy: small_m's auto sends FP8"
    )
    auto_fp8_min_rows_of_expert: int = Field(512, ge=1, description="the same, rows of its largest expert")
    batch_invariant: bool = Field(False, description="a row's bits do not depend on its batch mates")
    num_compute_units: int = Field(
        256, ge=1, description="compute units of a gfx950 device; other than 256: compact alone"
    )
    device: Literal["real", "emulated"] = Field(
        "real", description="what backend gfx950 runs on: real, or emulated on a CPU"
    )
    gfx950_kernels: str = Field(
        "", description="folder that `megamoe compile` filled; empty = kernels are compiled at first use"
    )

    checkpoint: str = Field(
        "",
        description="folder of layer-NNNNN.safetensors (megamoe.save_layer); empty = random by weights_seed",
    )
    weights_seed: int = Field(0, description="seed of random weights")

    host: str = Field("127.0.0.1", min_length=1, pattern=r"^\S+$", description="address to listen on")
    advertise_host: str = Field("", description="address given to callers in GetInfo; empty = host")
    port: int = Field(50051, ge=0, le=65535, description="gRPC port of the front; 0 = any free")
    http_port: int = Field(
        9400, ge=0, le=65535, description="HTTP port of the front (/sd, /healthz, /readyz)"
    )
    rank_port: int = Field(0, ge=0, le=65535, description="gRPC port of rank 0, rank r takes + r; 0 = any")
    metrics_port: int = Field(0, ge=0, le=65535, description="metrics port of rank 0, rank r + r; 0 = any")
    max_message_bytes: int = Field(
        0, ge=0, le=2**31 - 1, description="largest Forward message; 0 = what a step can need"
    )
    forward_step_max_bytes: int = Field(
        64 * MIB, gt=0, le=2**31 - 1, description="largest ForwardStep message"
    )

    launcher: Literal["ray", "local"] = Field("ray", description="who starts the rank processes")
    ray_address: str = Field("", description="Ray cluster to use; empty = start one and stop it at the end")
    rank_cpus: float = Field(
        0.0,
        ge=0,
        le=1024,
        allow_inf_nan=False,
        description="CPUs reserved per rank with Ray; 0 = a share of the host",
    )
    torch_threads: int = Field(
        0, ge=0, le=1024, description="torch threads per rank; 0 = a share of the cores"
    )
    start_timeout_s: float = Field(300.0, gt=0, le=DAY_S, description="how long the whole start may take")
    stop_timeout_s: float = Field(
        15.0, gt=0, le=DAY_S, description="how long ranks may take to stop before SIGKILL"
    )
    restart: bool = Field(True, description="start the group again with a new generation when a rank dies")

    step_timeout_s: float = Field(
        10.0, gt=0, le=DAY_S, description="how long a rank waits for the others of its step"
    )
    lease_timeout_s: float = Field(
        10.0, gt=0, le=DAY_S, description="a lease without traffic ends after this"
    )
    max_micro_batches: int = Field(4, ge=1, le=16, description="micro-batches with an open plan at a time")
    ring_slots: int = Field(32, ge=8, le=256, description="control messages that a request ring holds")
    max_colocated_rings: int = Field(
        4, ge=0, le=64, description="rings in shared memory that a rank opens for callers on its host"
    )
    loop_spin_us: float = Field(
        -1.0,
        ge=-1,
        le=1e6,
        description="how long a rank looks for its next request before it sleeps, which keeps a core busy; -1 = 1000 "
        "where ranks are on GPUs, else 0",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level logged")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(sentence(error, type(self).model_fields)) from error

    # ------------------------------------------------------------------------------ derived

    @cached_property
    def moe_shape(self) -> MoeShape:
        """The validated dimensions, with num_ranks and num_layers applied."""
        if isinstance(self.shape, str):
            base = preset(self.shape)
            table = {name: getattr(base, name) for name in MoeShape.__dataclass_fields__}
        else:
            table = dict(self.shape)
            unknown = sorted(set(table) - set(MoeShape.__dataclass_fields__))
            if unknown:
                raise ConfigError(
                    must_be("shape", f"a table of {', '.join(MoeShape.__dataclass_fields__)}", unknown)
                )
        if self.num_ranks:
            table["num_ranks"] = self.num_ranks
        if self.num_layers:
            table["num_layers"] = self.num_layers
        missing = [
            name for name in ("hidden", "intermediate", "num_experts", "num_topk") if name not in table
        ]
        if missing:
            raise ConfigError(
                must_be("shape", "a preset or a full table", f"{self.shape} without {', '.join(missing)}")
            )
        return MoeShape(**table)

    @cached_property
    def deployment(self) -> Deployment:
        """What the runtime library needs of all this. Raises ConfigError naming field and rule."""
        return Deployment(
            shape=self.moe_shape,
            backend=self.backend,
            max_tokens_per_rank=self.max_tokens_per_rank,
            fixed_slot_max=self.fixed_slot_max,
            small_m_capacities=self.small_m_capacities,
            small_m_enabled=self.small_m_enabled,
            large_m_capacity=self.large_m_capacity,
            large_m_enabled=self.large_m_enabled,
            large_m_min_tokens=self.large_m_min_tokens,
            max_step_rows=self.max_step_rows,
            combine_row_format=self.combine_row_format,
            auto_fp8_min_rows=self.auto_fp8_min_rows,
            auto_fp8_min_rows_of_expert=self.auto_fp8_min_rows_of_expert,
            batch_invariant=self.batch_invariant,
            num_compute_units=self.num_compute_units,
            gfx950_emulated=self.device == "emulated",
            gfx950_kernels=str(Path(self.gfx950_kernels).absolute()) if self.gfx950_kernels else "",
        )

    @cached_property
    def bundle(self) -> Bundle:
        return plan_bundle(self.deployment)

    @property
    def label(self) -> str:
        """The model_name label."""
        return self.model_name or self.moe_shape.name

    @property
    def row_bytes(self) -> int:
        """Bytes of one row on the wire: bf16 values, ids and weights."""
        return 2 * self.moe_shape.hidden + 8 * self.moe_shape.num_topk

    @property
    def message_bytes(self) -> int:
        """The one number behind every message limit of Forward, on both sides.

        By default what the largest step of one rank needs, at least gRPC's own 4 MiB and at most 512 MiB.
        """
        wanted = self.deployment.step_rows_limit * self.row_bytes + 64 * 1024
        return self.max_message_bytes or min(max(wanted, 4 * MIB), 512 * MIB)

    @property
    def public_host(self) -> str:
        return self.advertise_host or self.host

    @property
    def loop_spin_s(self) -> float:
        """How long a rank looks for its next request before it sleeps.

        On a GPU a layer and the attention before the next one take less than a millisecond, and hosts have cores.
        """
        spin_us = self.loop_spin_us if self.loop_spin_us >= 0 else 1000.0 * self.on_gpu
        return spin_us * 1e-6

    @property
    def on_gpu(self) -> bool:
        """Whether weights and heaps lie in the memory of GPUs, not in this host's."""
        return self.backend != "cpu" and self.device == "real"

    def check(self) -> ServiceConfig:
        """Build everything derived, so that impossible settings are refused before anything starts."""
        _ = self.bundle
        if self.rank_port and self.rank_port + self.moe_shape.num_ranks > 65536:
            raise ConfigError(must_be("rank_port", "below 65536 for every rank", self.rank_port))
        if self.metrics_port and self.metrics_port + self.moe_shape.num_ranks > 65536:
            raise ConfigError(must_be("metrics_port", "below 65536 for every rank", self.metrics_port))
        least = self.row_bytes + 64 * 1024
        if self.message_bytes < least:
            raise ConfigError(must_be("max_message_bytes", f"at least {least}, one row", self.message_bytes))
        if self.checkpoint and not Path(self.checkpoint).is_dir():
            raise ConfigError(must_be("checkpoint", "a folder of safetensors files", self.checkpoint))
        return self
