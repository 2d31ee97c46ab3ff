"""Reading settings: a YAML or TOML file, the environment, the profile; and how a person writes and reads a value.

Highest first: command line, `MEGAMOE_<FIELD>` variables, the file, the profile, the defaults.
"""

from __future__ import annotations

import json
import os
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from megamoe.errors import ConfigError, must_be
from service.config.profiles import PROFILES
from service.config.sentences import perhaps, sentence
from service.config.settings import ServiceConfig

ENV_PREFIX = "MEGAMOE_"


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
        raise ConfigError(sentence(error, ServiceConfig.model_fields)) from error
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
            text = value.strip()
            inside = text[1:-1] if text[:1] + text[-1:] == "[]" else text
            return tuple(int(part) for part in inside.split(",") if part)
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
        wanted = f"{ENV_PREFIX}<FIELD> with a known field" + perhaps(unknown[0].upper(), known)
        raise ConfigError(must_be("environment variables", wanted, ", ".join(unknown)))
