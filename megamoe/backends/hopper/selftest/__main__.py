"""`python -m megamoe.backends.hopper.selftest`."""

import sys

from megamoe.backends.hopper import exit_status


def main() -> int | None:
    from megamoe.backends.hopper.selftest.run import main as run  # needs Triton

    return run()


if __name__ == "__main__":
    sys.exit(exit_status(main))
