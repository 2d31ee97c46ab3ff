"""What a rank process is told at its start, and what it says back when it is up; both travel as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from service.config import ServiceConfig


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """All that one rank process needs to know at start. group_name: prefix of the group's shared memory."""

    config: ServiceConfig
    rank: int
    generation: int
    group_name: str

    def to_json(self) -> str:
        table = {name: getattr(self, name) for name in ("rank", "generation", "group_name")}
        return json.dumps(table | {"config": self.config.model_dump(mode="json")})

    @classmethod
    def from_json(cls, text: str) -> RankSpec:
        table: dict[str, Any] = json.loads(text)
        return cls(**table | {"config": ServiceConfig(**table["config"])})


@dataclass(frozen=True, kw_only=True)
class RankUp:
    """A rank that has opened, bound its layers, warmed up and listens. host: name of the machine it runs on.
    weights_version: of what it has bound."""

    rank: int
    pid: int
    host: str
    port: int
    metrics_port: int
    weights_version: int


def up_to_json(up: RankUp) -> dict[str, Any]:
    return asdict(up)
