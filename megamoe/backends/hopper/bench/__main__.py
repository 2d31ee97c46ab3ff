"""`python -m megamoe.backends.hopper.bench`."""

import sys

from megamoe.backends.hopper import exit_status
from megamoe.backends.hopper.bench.run import main

if __name__ == "__main__":
    sys.exit(exit_status(main))
