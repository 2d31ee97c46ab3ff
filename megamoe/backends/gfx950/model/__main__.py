"""The model's tables: `python -m megamoe.backends.gfx950.model` prints them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megamoe.backends.gfx950.model.counts import write_record
from megamoe.backends.gfx950.model.tables import all_tables, refreshed


def main(arguments: Sequence[str] | None = None) -> int:
    """Print, write, check or count; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m megamoe.backends.gfx950.model", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the tables between FILE's markers")
    parser.add_argument("--check", type=Path, metavar="FILE", help="exit with 1 if FILE's tables are stale")
    parser.add_argument("--count", action="store_true", help="count instructions on the emulator again first")
    options = parser.parse_args(arguments)
    if options.count:
        write_record()
    if options.write:
        options.write.write_text(refreshed(options.write.read_text()))
    if options.check and refreshed(options.check.read_text()) != options.check.read_text():
        print(f"the tables of {options.check} are stale: run with --write {options.check}", file=sys.stderr)
        return 1
    if not (options.write or options.check or options.count):
        print(all_tables())
    return 0


if __name__ == "__main__":
    sys.exit(main())
