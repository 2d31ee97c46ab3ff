"""`python -m loadgen.cli` is `loadgen`."""

from loadgen.cli.main import app

if __name__ == "__main__":
    app()
