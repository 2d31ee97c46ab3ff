"""ServiceConfig: everything that a person chooses about a service, from one file, the environment and the command line.

Owns: the profiles, and reading the environment (nothing else in this product does). Highest first: command line,
`MEGAMOE_<FIELD>` variables, the YAML or TOML file, the profile, the defaults. Refuses unknown fields and impossible
values with ConfigError naming the field.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
import typing
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from megamoe import Bundle, Deployment, MoeShape, RowFormat, plan_bundle, preset
from megamoe.errors import ConfigError, must_be

ENV_PREFIX = "MEGAMOE_"
MIB = 1 << 20
DAY_S = 86400.0
"""The longest timeout: beyond a day it is a mistake, and beyond some the clocks overflow."""

PROFILES: dict[str, dict[str, Any]] = {
    # 8 ranks on 2 cores, small enough that all four paths serve steps within a minute.
    "demo": {
        "shape": "demo",
        "max_tokens_per_rank": 512,
        "fixed_slot_max": 64,
        "small_m_capacities": (16, 32),
        "small_m_enabled": True,
        "large_m_capacity": 512,
        "large_m_enabled": True,
        "large_m_min_tokens": 128,
    },
    # The headline layout (8 x MI355X): the decode runtime holds 256 rows, small_m stays opt-in as in its sources.
    "deepseek-v4-pro-ep8": {
        "shape": "deepseek-v4-pro",
        "max_tokens_per_rank": 8192,
        "fixed_slot_max": 511,
        "large_m_enabled": True,
    },
    # gfx950 code on its emulator: capacities that an emulator gets through.
    "emulated": {
        "shape": "demo",
        "backend": "gfx950",
        "device": "emulated",
        "max_tokens_per_rank": 64,
        "fixed_slot_max": 32,
        "small_m_capacities": (8, 16),
        "small_m_enabled": True,
        "large_m_capacity": 64,
        "large_m_enabled": True,
        "large_m_min_tokens": 48,
    },
}


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
    batch_invariant: bool = Field(False, description="a row's bits do not depend on its batch mates")
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
        0.0, ge=0, allow_inf_nan=False, description="CPUs reserved per rank with Ray; 0 = a share of the host"
    )
    torch_threads: int = Field(0, ge=0, description="torch threads per rank; 0 = a share of the cores")
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
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level logged")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_sentence(error)) from error

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
            batch_invariant=self.batch_invariant,
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


def load_config(
    file: Path | None = None, overrides: Mapping[str, Any] | None = None, *, env: bool = True
) -> ServiceConfig:
    """Read all sources and check the result. `overrides` are the command line's; None values count as not given.

    Raises ConfigError naming the field, what it must be and what it was.
    """
    given = {name: value for name, value in (overrides or {}).items() if value is not None}

    class Loader(BaseSettings, ServiceConfig):
        model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            sources: list[PydanticBaseSettingsSource] = [init_settings]
            if env:
                sources.append(_Environment(settings_cls))
            if file is not None:
                sources.append(InitSettingsSource(settings_cls, _read_file(file)))
            return (*sources, _Profile(settings_cls, {}))

    if env:
        _refuse_unknown_variables()
    try:
        loaded = Loader(**given)
    except ValidationError as error:
        raise ConfigError(_sentence(error)) from error
    values = {name: getattr(loaded, name) for name in ServiceConfig.model_fields}
    return ServiceConfig(**values).check()


class _Profile(InitSettingsSource):
    """The settings of the profile that the higher sources named."""

    def __call__(self) -> dict[str, Any]:
        name = self.current_state.get("profile", ServiceConfig.model_fields["profile"].default)
        if name not in PROFILES:
            raise ConfigError(must_be("profile", f"one of {', '.join(PROFILES)}", repr(name)))
        return dict(PROFILES[name])


class _Environment(EnvSettingsSource):
    """Variables, written as on the command line."""

    def decode_complex_value(self, field_name: str, field: Any, value: Any) -> Any:
        return parse_text(field_name, value)


def parse_text(name: str, value: Any) -> Any:
    """A setting as a person types it: 16,32 (or [16, 32]) for a list, JSON for a table. Raises ConfigError."""
    if not isinstance(value, str):
        return value
    if typing.get_origin(ServiceConfig.model_fields[name].annotation) is tuple:
        try:
            return tuple(
                int(part) for part in value.strip().removeprefix("[").removesuffix("]").split(",") if part
            )
        except ValueError:
            raise ConfigError(must_be(name, "numbers with commas between", repr(value))) from None
    if name == "shape" and value.lstrip().startswith("{"):
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            raise ConfigError(must_be(name, f"a preset or a JSON table ({error})", repr(value))) from None
    return value


def _read_file(file: Path) -> dict[str, Any]:
    """The settings of a YAML or TOML file."""
    readers: dict[str, typing.Callable[[str], Any]] = {
        ".yaml": yaml.safe_load, ".yml": yaml.safe_load, ".toml": tomllib.loads
    }  # fmt: skip
    if not file.is_file():
        raise ConfigError(must_be("config file", "a readable file", file))
    if file.suffix not in readers:
        raise ConfigError(must_be("config file", "a .yaml, .yml or .toml", file.name))
    try:
        table = readers[file.suffix](file.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"config file {file} cannot be read: {why}") from error
    if table is None:  # empty
        return {}
    if not isinstance(table, dict):
        raise ConfigError(must_be(f"config file {file}", "a table of settings", f"a {type(table).__name__}"))
    return {str(name): value for name, value in table.items()}


def default_text(name: str) -> str:
    """The default of a setting for help and README, with what profiles set instead; empty for no default."""

    def shown(value: Any) -> str:
        if isinstance(value, tuple):
            return ",".join(map(str, value))
        return str(value).lower() if isinstance(value, bool) else str(getattr(value, "value", value))

    own = shown(ServiceConfig.model_fields[name].default)
    parts = [own]
    for profile, table in PROFILES.items():
        if name in table and shown(table[name]) != own:
            parts.append(f"{profile}: {shown(table[name])}")
    return "; ".join(part for part in parts if part)


def _refuse_unknown_variables() -> None:
    """A misspelled variable must not be ignored in silence."""
    known = {ENV_PREFIX + name.upper() for name in ServiceConfig.model_fields}
    unknown = sorted(name for name in os.environ if name.startswith(ENV_PREFIX) and name.upper() not in known)
    if unknown:
        wanted = f"{ENV_PREFIX}<FIELD> with a known field" + _perhaps(unknown[0].upper(), known)
        raise ConfigError(must_be("environment variables", wanted, ", ".join(unknown)))


def _perhaps(word: str, known: Iterable[str]) -> str:
    """What a misspelled word may mean."""
    close = difflib.get_close_matches(word, known, n=1)
    return f" (perhaps {close[0]})" if close else ""


def _sentence(error: ValidationError) -> str:
    """pydantic's report as our one-sentence form."""
    parts = []
    for item in error.errors(include_url=False):
        field = ".".join(str(part) for part in item["loc"]) or "config"
        if item["type"] == "extra_forbidden":
            wanted = "a known setting" + _perhaps(field, ServiceConfig.model_fields)
            parts.append(must_be(field, wanted, repr(item["input"])))
        else:
            rule = re.sub(r"^\w+ should ", "must ", item["msg"])
            parts.append(f"{field} {rule}, got {item['input']!r}")
    return "; ".join(parts)


def child_environment(config: ServiceConfig) -> dict[str, str]:
    """Variables that a rank process must have before it starts.

    The malloc settings halve the cost of messages of 64 rows and more (measured on 2 cores with 14 KB rows): big
    buffers are kept instead of mapped and unmapped for every message. One OpenMP pool per rank, sized by
    torch_threads, so that 8 ranks do not fight for the cores.
    """
    threads = str(threads_per_rank(config))
    return {
        "MALLOC_MMAP_THRESHOLD_": "1073741824",
        "MALLOC_TRIM_THRESHOLD_": "4294967296",
        "MALLOC_TOP_PAD_": "67108864",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # Idle OpenMP workers must sleep at once: the cores belong to other ranks.
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def threads_per_rank(config: ServiceConfig) -> int:
    """torch_threads, or an equal share of the cores, at least 1."""
    if config.torch_threads:
        return config.torch_threads
    return max(1, len(os.sched_getaffinity(0)) // config.moe_shape.num_ranks)


def inherited_environment() -> dict[str, str]:
    """The environment for child processes, without our own settings: children get their config as a value."""
    return {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
