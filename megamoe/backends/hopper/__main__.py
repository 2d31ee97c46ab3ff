"""`python -m megamoe.backends.hopper`: status 0 where ranks can open here, else 1 and what they lack."""

import sys

from megamoe.backends.hopper import check_gpu, check_triton, exit_status


def main() -> None:
    check_gpu()
    check_triton()


if __name__ == "__main__":
    sys.exit(exit_status(main))
