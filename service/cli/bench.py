"""`megamoe bench`: the library's own benchmark of a deployment, printed as it is measured."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from megamoe import (
    DISTRIBUTIONS,
    BenchConfig,
    Deployment,
    Path,
    bench_deployment,
    check_backend,
    count_work,
    plan_bundle,
    run_bench,
)
from megamoe.errors import InvalidArgumentError, must_be
from service.cli.words import counted
from service.config import ServiceConfig

_TABLE_WIDTH = 100
"""Of the table of counts, wherever it goes."""
_MAX_SIZE = 8192
"""Capacity of the largest runtime that can be built."""


def print_bench(
    config: ServiceConfig, *, sizes: str, paths: str, distribution: str, num_calls: int, as_deployed: bool
) -> None:
    """Run and print it. Raises InvalidArgumentError for sizes or paths that cannot be."""
    numbers = numbers_of(sizes)
    if distribution not in DISTRIBUTIONS:
        raise InvalidArgumentError(
            must_be("distribution", f"one of {', '.join(DISTRIBUTIONS)}", repr(distribution))
        )
    deployment = config.deployment
    if config.backend == "gfx950" and config.device == "emulated":
        _print_work(deployment, numbers, paths_of(paths), distribution)
        return
    if not as_deployed:
        capacity = 1 << (max(numbers) - 1).bit_length()
        deployment = bench_deployment(config.moe_shape, max_tokens_per_rank=capacity, backend=config.backend)
    check_backend(plan_bundle(deployment))
    wanted = BenchConfig(
        deployment=deployment,
        sizes=numbers,
        paths=paths_of(paths),
        distribution=distribution,
        num_calls=num_calls,
    )
    shape = config.moe_shape
    out = Console()
    out.print(
        f"{config.backend}, {shape.name}: hidden {shape.hidden}, intermediate {shape.intermediate}, "
        f"{shape.num_experts} experts, top-{shape.num_topk}, {counted(shape.num_ranks, 'rank')}, "
        f"{distribution} routing",
        highlight=False,
    )
    table = Table(
        "path", "tokens\na rank", "p50 ms", "p90 ms", "rows/s", "plain\ntorch ms", "of torch's\nspeed"
    )
    with out.status("measuring ..."):
        for result in run_bench(wanted):
            table.add_row(
                str(result.path),
                str(result.tokens_per_rank),
                f"{result.p50_ms:.2f}",
                f"{result.p90_ms:.2f}",
                f"{result.rows_per_s:,.0f}",
                f"{result.torch_p50_ms:.2f}",
                f"{result.torch_ratio:.2f}",
            )
    out.print(table)
    out.print(
        "plain torch: one process, fp32 matmuls on weights dequantized beforehand, no activation quantization",
        highlight=False,
    )


def _print_work(
    deployment: Deployment, sizes: tuple[int, ...], paths: tuple[Path, ...] | None, distribution: str
) -> None:
    """What an emulated device counts: it has no time to give. Sizes above a path's capacity are left out."""
    bundle = plan_bundle(deployment)
    capacities = {path: max(bundle.capacities(path), default=0) for path in paths or Path}
    wanted = {
        path: [size for size in sizes if size <= capacity]
        for path, capacity in capacities.items()
        if capacity
    }
    out = Console(width=max(Console().width, _TABLE_WIDTH))
    table = Table(
        "path", "tokens\na rank", "kernel", "wave\ninstructions", "mfma", "weight bytes\n/ needed",
        "by 16\nbytes", "bytes\nto peers",
    )  # fmt: skip
    with out.status("counting ..."):
        for work in count_work(deployment, wanted, distribution):
            table.add_row(*work.cells())
    out.print(table)
    out.print(
        "counts of all ranks on the emulated device, waits left out; it has no time to give", highlight=False
    )


def numbers_of(text: str) -> tuple[int, ...]:
    """Tokens a rank. Raises InvalidArgumentError."""
    try:
        numbers = tuple(sorted({int(part) for part in text.split(",") if part}))
    except ValueError:
        numbers = ()
    if not numbers or numbers[0] < 1 or numbers[-1] > _MAX_SIZE:
        wanted = f"numbers from 1 to {_MAX_SIZE} with commas between"
        raise InvalidArgumentError(must_be("sizes", wanted, repr(text)))
    return numbers


def paths_of(text: str) -> tuple[Path, ...] | None:
    """None for none. Raises InvalidArgumentError."""
    try:
        asked = {Path(part.strip()) for part in text.split(",") if part}
        return tuple(path for path in Path if path in asked) or None
    except ValueError:
        raise InvalidArgumentError(must_be("paths", f"of {', '.join(Path)}", repr(text))) from None
