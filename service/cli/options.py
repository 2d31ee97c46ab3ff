"""Command-line options made of ServiceConfig: every field is an option of the same name, with the same help."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from pydantic.fields import FieldInfo

from megamoe.errors import ConfigError
from service.config import ServiceConfig, default_text, load_config, parse_text

_SIMPLE = (bool, int, float)
_SHORT = {"num_ranks": ("--ranks",)}
"""Other spellings of an option."""


def with_config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command, whose first parameter is `config`, an option per setting, --config, and errors as a line."""
    own = list(inspect.signature(command).parameters.values())[1:]
    hints = typing.get_type_hints(command, include_extras=True)
    parameters = [parameter.replace(annotation=hints[parameter.name]) for parameter in own]
    parameters.append(
        _option("config_file", Optional[Path], "--config", "-c", text="YAML or TOML file of settings")  # noqa: UP045
    )
    for name, field in ServiceConfig.model_fields.items():
        parameters.append(_setting(name, field))

    def run(**given: Any) -> Any:
        own_values = {parameter.name: given.pop(parameter.name) for parameter in own}
        file = given.pop("config_file")
        try:
            overrides = {name: parse_text(name, value) for name, value in given.items()}
            return command(load_config(file, overrides), **own_values)
        except ConfigError as error:
            typer.secho(str(error), fg="red", err=True)
            raise typer.Exit(2) from error

    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _option(name: str, kind: Any, *flags: str, text: str) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind, typer.Option(*flags, help=text, show_default=False)],
    )


def _setting(name: str, field: FieldInfo) -> inspect.Parameter:
    kind = field.annotation if field.annotation in _SIMPLE else str
    flag = "--" + name.replace("_", "-")
    flags = (f"{flag}/--no-{flag[2:]}",) if kind is bool else (flag, *_SHORT.get(name, ()))
    default = default_text(name)
    text = f"{field.description} [{default}]" if default else str(field.description)
    return _option(name, Optional[kind], *flags, text=text)  # noqa: UP045
