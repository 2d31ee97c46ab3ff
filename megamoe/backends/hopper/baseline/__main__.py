"""`python -m megamoe.backends.hopper.baseline`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path as FilePath

from megamoe.backends.hopper import check_gpu, exit_status
from megamoe.backends.hopper.floors import ranks_of
from megamoe.routing import DISTRIBUTIONS
from megamoe.shape import preset


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="time the layer from others' parts, joined by NCCL all-to-all"
    )
    parser.add_argument("--shape", default="deepseek-v4-pro")
    parser.add_argument("--ranks", type=int, default=1, help="one GPU each")
    parser.add_argument(
        "--tokens", type=int, nargs="*", default=[1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192]
    )
    parser.add_argument("--distributions", nargs="*", default=["uniform"], choices=DISTRIBUTIONS)
    parser.add_argument(
        "--triton-kernels", type=FilePath, help="folder of that package: MXFP4 instead of bf16"
    )
    chosen = parser.parse_args(arguments)
    from megamoe.backends.hopper.baseline.ranks import BaselineConfig, time_baseline  # needs Triton

    config = BaselineConfig(
        shape=ranks_of(preset(chosen.shape), chosen.ranks),
        tokens=chosen.tokens,
        distributions=chosen.distributions,
        triton_kernels=chosen.triton_kernels,
    )
    check_gpu()
    for timing in time_baseline(config):
        print(timing, flush=True)


if __name__ == "__main__":
    sys.exit(exit_status(main))
