"""`python -m megamoe.backends.hopper.selftest`."""

import sys

from megamoe.backends.hopper import exit_status
from megamoe.backends.hopper.selftest.run import main

if __name__ == "__main__":
    sys.exit(exit_status(main))
