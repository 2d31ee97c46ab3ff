"""The command `loadgen`; `app` is its door."""

from loadgen.cli.main import app

__all__ = ["app"]
