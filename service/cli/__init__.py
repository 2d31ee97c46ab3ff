"""The command `megamoe`; `app` is its door."""

from service.cli.main import app

__all__ = ["app"]
