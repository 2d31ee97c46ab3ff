"""The whole selftest, shape after shape and row format after row format."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch

from megamoe.backends.hopper.selftest import cases
from megamoe.backends.hopper.selftest.cases import SHAPE
from megamoe.backends.hopper.selftest.memory import check_lent_memory, check_places
from megamoe.backends.hopper.selftest.oracle import Checks, check_cases, soak
from megamoe.backends.hopper.selftest.protocol import check_in_flight, check_late_source, check_protocol
from megamoe.backends.hopper.selftest.ranks import Ranks
from megamoe.bundle import RowFormat
from megamoe.shape import MoeShape

SHAPES = {shape.name: shape for shape in cases.SHAPES}
ROW_FORMATS = (RowFormat.BF16, RowFormat.FP8)


def run(
    checks: Checks,
    *,
    num_ranks: int,
    shapes: Sequence[MoeShape] = tuple(SHAPES.values()),
    row_formats: Sequence[RowFormat] = ROW_FORMATS,
    num_soak_steps: int = 50,
) -> None:
    """Check the backend on this machine's GPUs; ranks share them where there are fewer. Protocol and soak once."""
    # Each rank's thread would have a pool of as many threads as there are cores, which wait for work by spinning.
    torch.set_num_threads(1)
    for shape in shapes:
        for row_format in row_formats:
            started = time.monotonic()
            with Ranks(shape.with_ranks(num_ranks), row_format) as ranks:
                checks.say(f"opened {shape.name} {row_format} in {time.monotonic() - started:.1f} s")
                check_cases(ranks, checks)
                check_places(ranks, checks)
                if shape is SHAPE and row_format is RowFormat.BF16:
                    check_protocol(ranks, checks)
                    check_in_flight(ranks, checks)
                    check_lent_memory(ranks, checks)
                    if num_ranks > 1:
                        check_late_source(ranks, checks)
                    soak(ranks, checks, num_soak_steps)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 1 if a check failed."""
    parser = argparse.ArgumentParser(description="check the Hopper backend on this machine's GPUs")
    parser.add_argument(
        "--ranks", type=int, default=8, help="1, 2, 4 or 8; they share GPUs where there are fewer"
    )
    parser.add_argument("--soak", type=int, default=50, help="mixed steps of the soak")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--row-formats", nargs="+", choices=ROW_FORMATS, type=RowFormat, default=ROW_FORMATS)
    chosen = parser.parse_args(arguments)
    checks = Checks()
    run(
        checks,
        num_ranks=chosen.ranks,
        shapes=[SHAPES[name] for name in chosen.shapes],
        row_formats=chosen.row_formats,
        num_soak_steps=chosen.soak,
    )
    print(checks.summary())
    return 1 if checks.num_failed else 0
