"""`python -m megamoe.backends.hopper.bench`."""

import sys

from megamoe.backends.hopper import exit_status


def main() -> int | None:
    from megamoe.backends.hopper.bench.run import main as run  # needs Triton

    return run()


if __name__ == "__main__":
    sys.exit(exit_status(main))
