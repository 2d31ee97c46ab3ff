"""The full proof on emulated ranks: `python -m megamoe.backends.gfx950.selftest` prints a line a check.

Every path x every distribution x every way to fill ranks x its row formats against the quantization-aware oracle, the
fused paths against the bits of compact too; a sample of them under many schedules; transport bitwise; epochs over the
wraps; layers and paths in turn on one operator; every tile at the tuned shape. All detectors are on but for the longest
run of launches, and a report of one is a failure. Exits with 1 if a check failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megamoe import mx
from megamoe.backends.gfx950.lockstep import Ranks, batches_of, emulated, shape_of
from megamoe.batch import MoeBatch
from megamoe.bundle import Path, RowFormat
from megamoe.reference import QUANTIZED_REL_L2, identity_moe, quantized_moe, relative_l2, tolerance
from megamoe.routing import DISTRIBUTIONS, FILLINGS
from megamoe.shape import MoeShape

PATHS = (Path.SMALL_M, Path.FIXED_SLOT, Path.LARGE_M, Path.COMPACT)
FUSED = (Path.SMALL_M, Path.LARGE_M)
FORMATS = (RowFormat.BF16, RowFormat.FP8)
CAPACITY = {Path.SMALL_M: 16, Path.FIXED_SLOT: 32, Path.LARGE_M: 64, Path.COMPACT: 64}
HEAVY_ROWS, HEAVY_ROWS_OF_EXPERT = 40, 12
"""Routed rows, and rows of one expert, from which an owner sends FP8 where small_m's format is auto."""
WRAPS = (*range(2**31 - 2, 2**31 + 2), *range(2**32 - 2, 2**32 + 3))


@dataclass
class Log:
    """Lines printed, checks counted, failures kept."""

    num_checks: int = 0
    failures: int = 0

    def check(self, name: str, run: Callable[[], str]) -> None:
        """Run one check; it returns what to print, or raises."""
        started = time.perf_counter()
        self.num_checks += 1
        try:
            said, mark = run(), "ok  "
        except Exception as error:
            self.failures += 1
            said, mark = f"{type(error).__name__}: {str(error)[:500]}", "FAIL"
        print(f"{mark} {name}: {said} ({time.perf_counter() - started:.1f} s)", flush=True)


def right(outs: Sequence[torch.Tensor], wants: Sequence[torch.Tensor]) -> str:
    """Relative L2 of all ranks together. Raises AssertionError past the tolerance."""
    got, want = torch.cat(list(outs)), torch.cat(list(wants))
    error = relative_l2(got, want)
    bound = tolerance(QUANTIZED_REL_L2, len(want))
    if not error <= bound:
        raise AssertionError(f"relative L2 must be at most {bound}, got {error:.3g}")
    return f"{error:.2e}"


def silent(ranks: Ranks) -> None:
    """Raises AssertionError with what the detectors reported."""
    found = ranks.reports()
    if found:
        raise AssertionError(f"{len(found)} reports: {found[0]}")


def same_bits(outs: Sequence[torch.Tensor], wants: Sequence[torch.Tensor]) -> None:
    for rank, (out, want) in enumerate(zip(outs, wants, strict=True)):
        if not torch.equal(out, want):
            raise AssertionError(f"rank {rank} must give the same bits, {int((out != want).sum())} differ")


def fillings(path: Path) -> Iterator[tuple[str, list[int], float]]:
    for name, (rows, share) in FILLINGS.items():
        yield name, [CAPACITY[path] if count < 0 else count for count in rows], share


def expected_formats(
    batches: Sequence[MoeBatch], shape: MoeShape, row_format: RowFormat
) -> tuple[RowFormat, ...]:
    """Of each owner rank, by the routing alone."""
    if row_format is not RowFormat.AUTO:
        return (row_format,) * shape.num_ranks
    ids = torch.cat([batch.topk_ids.flatten() for batch in batches])
    counts = torch.bincount(ids[ids >= 0].long(), minlength=shape.num_experts).view(shape.num_ranks, -1)
    heavy = (counts.sum(1) >= HEAVY_ROWS) | (counts.amax(1) >= HEAVY_ROWS_OF_EXPERT)
    return tuple(RowFormat.FP8 if one else RowFormat.BF16 for one in heavy.tolist())


def forward_checks(log: Log, shape: MoeShape, path: Path, row_format: RowFormat) -> None:
    deployment = emulated(
        shape, combine_row_format=row_format, auto_fp8_min_rows=HEAVY_ROWS,
        auto_fp8_min_rows_of_expert=HEAVY_ROWS_OF_EXPERT,
    )  # fmt: skip
    with Ranks(deployment, seed=1) as ranks:
        weights = ranks.bind()
        epoch = 0
        for distribution in DISTRIBUTIONS:
            for filling, rows, share in fillings(path):
                batches = batches_of(shape, rows, distribution, seed=epoch, no_expert_share=share)

                def run(batches: list[MoeBatch] = batches, epoch: int = epoch) -> str:
                    ranks.schedule(epoch + 1)
                    outs, reports = ranks.run(path, batches, epoch=2 * epoch)
                    formats = expected_formats(batches, shape, row_format)
                    if {report.row_format_per_rank for report in reports} != {formats}:
                        raise AssertionError(f"every rank must report row formats {formats}")
                    if path in FUSED and row_format is not RowFormat.AUTO:
                        same_bits(outs, ranks.run(Path.COMPACT, batches, epoch=2 * epoch + 1)[0])
                    silent(ranks)
                    return right(outs, [quantized_moe(batch, weights, shape, formats) for batch in batches])

                log.check(f"{path} {row_format} {distribution}, {filling}", run)
                epoch += 1


def schedule_checks(log: Log, shape: MoeShape, num_schedules: int) -> None:
    for path in PATHS:
        for distribution, filling in (("uniform", "uneven"), ("one_rank", "even"), ("zipf", "idle")):
            rows = list(FILLINGS[filling][0])
            batches = batches_of(shape, rows, distribution, seed=7, no_expert_share=0.1)

            def run(path: Path = path, batches: list[MoeBatch] = batches) -> str:
                with Ranks(emulated(shape)) as ranks:
                    ranks.bind()
                    first, _ = ranks.run(path, batches)
                    for seed in range(1, num_schedules):
                        ranks.schedule(seed)
                        outs, _ = ranks.run(path, batches, epoch=seed)
                        same_bits(outs, first)
                    silent(ranks)
                return f"{num_schedules} schedules, the same bits"

            log.check(f"{path} {distribution}, {filling}", run)


def transport_checks(log: Log, shape: MoeShape) -> None:
    for path in PATHS:
        for row_format in FORMATS:

            def run(path: Path = path, row_format: RowFormat = row_format) -> str:
                with Ranks(emulated(shape, combine_row_format=row_format), seed=3) as ranks:
                    ranks.bind_identity()
                    for epoch, (_, rows, share) in enumerate(fillings(path)):
                        batches = batches_of(
                            shape, rows, seed=epoch, exact=True, no_expert_share=share, duplicate_share=0.2
                        )
                        outs, _ = ranks.run(path, batches, epoch=epoch)
                        same_bits(outs, [identity_moe(batch, shape, row_format) for batch in batches])
                    silent(ranks)
                return "bitwise"

            log.check(f"{path} {row_format} transport", run)


def epoch_checks(log: Log, shape: MoeShape, num_epochs: int, num_unchecked: int) -> None:
    def wraps() -> str:
        with Ranks(emulated(shape), seed=5) as ranks:
            ranks.bind_identity()
            for path in PATHS:
                for epoch in WRAPS:
                    batches = batches_of(shape, [2, 0, 1, 3, 2, 0, 1, 2], seed=epoch % 97, exact=True)
                    outs, _ = ranks.run(path, batches, epoch=epoch)
                    same_bits(outs, [identity_moe(batch, shape) for batch in batches])
            silent(ranks)
        return f"{len(WRAPS)} epochs a path round 2^31 and 2^32"

    def many(num_epochs: int, checked: bool) -> str:
        """Layers and paths in turn, half of the launches before the wrap."""
        with Ranks(emulated(shape), checked=checked, seed=6) as ranks:
            layers = [ranks.bind(slot_idx, slot_idx) for slot_idx in range(2)]
            for i in range(num_epochs):
                path, slot_idx = PATHS[i // 2 % len(PATHS)], i % 2
                batches = batches_of(shape, [i % 3 + 1] * 8, DISTRIBUTIONS[i // 6 % 6], seed=i)
                epoch = 2**32 - num_epochs // 2 + i
                outs, _ = ranks.run(path, batches, epoch=epoch, slot_idx=slot_idx)
                right(outs, [quantized_moe(batch, layers[slot_idx], shape) for batch in batches])
            silent(ranks)
        return f"{num_epochs} launches, layers and paths in turn"

    log.check("epochs wrap", wraps)
    log.check("one operator", lambda: many(num_epochs, True))
    log.check("one operator, detectors off", lambda: many(num_unchecked, False))


def quantized(shape: MoeShape, batch: MoeBatch) -> MoeBatch:
    """The same rows as a caller would send them in MXFP8."""
    codes, sf = mx.quantize_mxfp8(batch.hidden_states)
    return MoeBatch.of(shape, codes, batch.topk_ids, batch.topk_weights, sf)


def tuned_shape_checks(log: Log) -> None:
    """7168 x 3072 on two ranks, every variant: tiles of 32, 64 and 128 rows by their numbers of rows, both row formats;
    with FP8 results the rows come quantized too."""
    shape = MoeShape(
        hidden=7168,
        intermediate=3072,
        num_experts=2,
        num_topk=1,
        num_ranks=2,
        num_layers=1,
        swiglu_limit=10.0,
    )
    for path, row_format, rows in (
        (Path.SMALL_M, RowFormat.AUTO, (9, 4)),
        (Path.SMALL_M, RowFormat.BF16, (64, 61)),
        (Path.FIXED_SLOT, RowFormat.BF16, (9, 4)),
        (Path.FIXED_SLOT, RowFormat.FP8, (32, 20)),
        (Path.COMPACT, RowFormat.BF16, (128, 40)),
        (Path.COMPACT, RowFormat.FP8, (16, 5)),
        (Path.COMPACT, RowFormat.BF16, (64, 64)),
        (Path.COMPACT, RowFormat.FP8, (200, 60)),
        (Path.LARGE_M, RowFormat.BF16, (200, 60)),
    ):

        def run(path: Path = path, row_format: RowFormat = row_format, rows: tuple[int, ...] = rows) -> str:
            settings = dict(
                max_tokens_per_rank=256, large_m_capacity=256, small_m_capacities=(64,), combine_row_format=row_format
            )  # fmt: skip
            with Ranks(emulated(shape, **settings), seed=1, num_cus=64) as ranks:
                weights = ranks.bind()
                batches = batches_of(shape, rows, seed=2)
                if row_format is RowFormat.FP8:
                    batches = [quantized(shape, batch) for batch in batches]
                outs, reports = ranks.run(path, batches, timeout_s=1000)
                silent(ranks)
                formats = reports[0].row_format_per_rank
                return right(outs, [quantized_moe(batch, weights, shape, formats) for batch in batches])

        log.check(f"7168 x 3072 {path} {row_format} {rows} rows", run)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks that the arguments ask for; 0 if all of them passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=8, help="orders of waves for each sampled case")
    parser.add_argument("--epochs", type=int, default=64, help="launches in a row on one operator")
    parser.add_argument("--unchecked-epochs", type=int, default=1000, help="the same with the detectors off")
    parser.add_argument(
        "--path", choices=PATHS, default=None, help="of the forward checks, one path instead of all"
    )
    parser.add_argument(
        "--only", choices=("forward", "schedules", "transport", "epochs", "tuned"), default=None
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    log, shape, started = Log(), shape_of(), time.perf_counter()
    if options.only in (None, "transport"):
        transport_checks(log, shape)
    if options.only in (None, "epochs"):
        epoch_checks(log, shape, options.epochs, options.unchecked_epochs)
    if options.only in (None, "schedules"):
        schedule_checks(log, shape, options.schedules)
    if options.only in (None, "forward"):
        for path in PATHS if options.path is None else (Path(options.path),):
            for row_format in (*FORMATS, RowFormat.AUTO) if path is Path.SMALL_M else FORMATS:
                forward_checks(log, shape, path, row_format)
    if options.only in (None, "tuned"):
        tuned_shape_checks(log)
    spent = time.perf_counter() - started
    print(f"{log.num_checks - log.failures} of {log.num_checks} checks passed in {spent:.0f} s")
    return 1 if log.failures else 0


if __name__ == "__main__":
    sys.exit(main())
