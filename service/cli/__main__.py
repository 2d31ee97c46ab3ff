"""`python -m service.cli` is `megamoe`."""

from service.cli.main import app

if __name__ == "__main__":
    app()
