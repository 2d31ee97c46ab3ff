"""A MoE tier whose answers come from a table of latencies: no service, no rows, only time.

The path of every step is chosen by the same rule that the service applies (`choose_path` on the deployment named in
the table). Its time is interpolated linearly between the table's entries, and held constant below the first. Entries
were measured with equally many rows on every rank; a step whose ranks differ takes the time of `max_weight` times its
largest rank plus the rest times its average: transfers wait for the largest rank, experts work on the sum. Nothing
here is measured: a report made with it says "simulated" and lists the entries that stand in for something else.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from loadgen.moe.tier import SubStepSeen, TierInfo
from megamoe import (
    Deployment,
    PathPolicy,
    Phase,
    PlanId,
    StepPlan,
    SubStep,
    choose_path,
    plan_bundle,
    preset,
)
from megamoe import Path as MoePath
from megamoe.errors import ConfigError, must_be

TABLES = Path(__file__).parent / "tables"
NOBODY = -1
"""Rank under which a table's latency is noted: it is the slowest rank's, whoever that is."""


@dataclass(frozen=True, kw_only=True)
class PathLatency:
    """Latency of one runtime of one path by agreed maximum of rows, ascending. proxy_rows: entries that were measured
    on something else, as `proxy` says."""

    path: MoePath
    capacity: int
    rows: tuple[int, ...]
    latency_us: tuple[float, ...]
    proxy: str = ""
    proxy_rows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        name = f"{self.path} {self.capacity}"
        if not self.rows or len(self.rows) != len(self.latency_us):
            raise ConfigError(
                must_be(f"latency_us of {name}", f"{len(self.rows)} numbers", len(self.latency_us))
            )
        if list(self.rows) != sorted(set(self.rows)) or self.rows[0] < 1 or min(self.latency_us) <= 0:
            raise ConfigError(
                must_be(f"rows of {name}", "ascending from 1, with latencies above 0", self.rows)
            )
        if self.rows[-1] != self.capacity:
            raise ConfigError(must_be(f"last rows of {name}", f"its capacity {self.capacity}", self.rows[-1]))
        if not set(self.proxy_rows) <= set(self.rows):
            raise ConfigError(must_be(f"proxy_rows of {name}", f"among {list(self.rows)}", self.proxy_rows))

    def at(self, num_rows: float) -> float:
        """Microseconds at a number of rows, which need not be whole."""
        above = bisect.bisect_left(self.rows, num_rows)
        if above == 0:
            return self.latency_us[0]
        low, high = self.rows[above - 1 : above + 1]
        share = (num_rows - low) / (high - low)
        return self.latency_us[above - 1] * (1 - share) + self.latency_us[above] * share


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Entry(_Strict):
    path: MoePath
    capacity: int
    rows: tuple[int, ...]
    latency_us: tuple[float, ...]
    proxy: str = ""
    proxy_rows: tuple[int, ...] = ()


class _Table(_Strict):
    """The file as it is written."""

    schema_name: Literal["megamoe.loadgen.moe_time/1"] = Field(alias="schema")
    name: str
    source: str
    max_weight: float = Field(ge=0, le=1)
    deployment: dict[str, Any]
    paths: tuple[_Entry, ...]


@dataclass(frozen=True, kw_only=True)
class MoeTimeTable:
    """A table file as values. deployment: whose runtimes and rule the steps follow. max_weight: from 0 (the average of
    rows over ranks decides the time) to 1 (their maximum does)."""

    name: str
    source: str
    max_weight: float
    deployment: Deployment
    paths: tuple[PathLatency, ...]

    @classmethod
    def read(cls, path: Path) -> MoeTimeTable:
        """Raises ConfigError naming the file and the field."""
        try:
            return cls.parse(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"moe_time {path}: must be a JSON file, got {error}") from error
        except ConfigError as error:
            raise ConfigError(f"moe_time {path}: {error}") from error

    @classmethod
    def named(cls, name: str) -> MoeTimeTable:
        """A table that ships (`tables/`, without .json), or else a file."""
        shipped = {path.stem: path for path in TABLES.glob("*.json")}
        if name not in shipped and not Path(name).is_file():
            raise ConfigError(
                must_be("moe_time", f"a file or one of {', '.join(sorted(shipped))}", repr(name))
            )
        return cls.read(shipped.get(name, Path(name)))

    @classmethod
    def parse(cls, fields: object) -> MoeTimeTable:
        """The values of a table's JSON. Raises ConfigError naming the field."""
        try:
            table = _Table.model_validate_json(
                json.dumps(fields)
            )  # in Python's mode a path would not be a string
            chosen = {**table.deployment, "shape": preset(str(table.deployment.get("shape")))}
            unknown = set(chosen) - {field.name for field in dataclass_fields(Deployment)}
            if unknown:
                raise ConfigError(must_be("deployment", "settings of a deployment", f"{min(unknown)!r}"))
            deployment = TypeAdapter(Deployment).validate_python(chosen)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = ".".join(map(str, first["loc"])) or "file"
            got = "nothing" if first["type"] == "missing" else repr(first["input"])[:100]
            raise ConfigError(f"{name}: {first['msg']}, got {got}") from None
        runtimes = [(entry.path, entry.capacity) for entry in table.paths]
        if len(set(runtimes)) < len(runtimes):
            raise ConfigError(must_be("paths", "one entry for each path and capacity", "one twice"))
        return cls(
            name=table.name,
            source=table.source,
            max_weight=table.max_weight,
            deployment=deployment,
            paths=tuple(PathLatency(**dict(entry)) for entry in table.paths),
        )

    @property
    def proxies(self) -> list[dict[str, Any]]:
        """Entries that stand in for what nobody measured, for the report."""
        return [
            {
                "path": str(entry.path),
                "capacity": entry.capacity,
                "rows": list(entry.proxy_rows),
                "why": entry.proxy,
            }
            for entry in self.paths
            if entry.proxy_rows
        ]


@dataclass
class TableTier:
    """The simulated service. enabled: paths that may serve besides compact, as an operator would switch them.

    Raises ConfigError when a runtime that the deployment builds and `enabled` admits has no latencies.
    """

    table: MoeTimeTable
    enabled: frozenset[MoePath]
    info: TierInfo = field(init=False)

    def __post_init__(self) -> None:
        deployment = self.table.deployment
        self._bundle = plan_bundle(deployment)
        self._policy = PathPolicy(
            small_m_enabled=MoePath.SMALL_M in self.enabled,
            fixed_slot_enabled=MoePath.FIXED_SLOT in self.enabled,
            large_m_enabled=MoePath.LARGE_M in self.enabled,
            large_m_min_tokens=deployment.large_m_min_tokens,
        )
        self._latency = {(entry.path, entry.capacity): entry for entry in self.table.paths}
        self._pieces: dict[tuple[int, bool], tuple[SubStep, ...]] = {}
        for spec in self._bundle.runtimes:
            if self._policy.allows(spec.path) and (spec.path, spec.capacity) not in self._latency:
                raise ConfigError(f"moe_time must have latencies of {spec.path} {spec.capacity}, got none")
        self.info = TierInfo(
            shape=deployment.shape,
            model_name=deployment.shape.name,
            profile=self.table.name,
            backend=deployment.backend,
            generation=0,
            max_tokens_per_rank=deployment.max_tokens_per_rank,
            max_step_rows=deployment.step_rows_limit,
        )

    @property
    def description(self) -> dict[str, Any]:
        """What a report says of it."""
        return {
            "table": self.table.name,
            "source": self.table.source,
            "paths": sorted(str(path) for path in self.enabled | {MoePath.COMPACT}),
            "max_weight": self.table.max_weight,
            "proxies": self.table.proxies,
        }

    def layer(self, num_rows_per_rank: Sequence[int], *, prefill: bool) -> tuple[SubStepSeen, ...]:
        """The pieces of one layer call, and how long each takes."""
        max_rows = max(num_rows_per_rank)
        pieces = self._pieces.get((max_rows, prefill))
        if pieces is None:
            pieces = self._pieces[max_rows, prefill] = self._choose(tuple(num_rows_per_rank), prefill)
        return tuple(
            SubStepSeen(
                path=str(piece.path),
                runtime_capacity=piece.runtime_capacity,
                max_rows=piece.max_rows,
                total_us_per_rank={NOBODY: self._latency_us(piece, num_rows_per_rank)},
                stages_us={},
            )
            for piece in pieces
        )

    def _latency_us(self, piece: SubStep, num_rows_per_rank: Sequence[int]) -> float:
        weight, start, stop = self.table.max_weight, piece.start_row, piece.stop_row
        total = sum(min(max(rows - start, 0), stop - start) for rows in num_rows_per_rank)
        rows = weight * piece.max_rows + (1 - weight) * total / len(num_rows_per_rank)
        return self._latency[piece.path, piece.runtime_capacity].at(rows)

    def _choose(self, num_rows_per_rank: tuple[int, ...], prefill: bool) -> tuple[SubStep, ...]:
        """Pieces and paths, which depend on the largest rank and the phase only."""
        plan = StepPlan(
            plan_id=PlanId(0, 0),
            num_rows_per_rank=num_rows_per_rank,
            phase=Phase.PREFILL if prefill else Phase.DECODE,
            dtype="bfloat16",
            weights_version=0,
            placement_version=0,
            policy_version=0,
        )
        return choose_path(plan, self._bundle, self._policy)
