"""The performance model: counts are the emulator's, bytes those of a run, limits hold, the docs' tables are fresh."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path as FilePath

import pytest

from megamoe.backends.gfx950.device.emulated import WEIGHTS_CLASS, EmulatedStream
from megamoe.backends.gfx950.lockstep import Ranks, batches_of, emulated, shape_of
from megamoe.backends.gfx950.model.__main__ import main
from megamoe.backends.gfx950.model.counts import TILES, measure, unit_counts
from megamoe.backends.gfx950.model.machine import Mi355x
from megamoe.backends.gfx950.model.predict import predict, scaled
from megamoe.backends.gfx950.model.published import FUSED, SEVERAL_LAUNCHES
from megamoe.backends.gfx950.model.tables import CLEARLY, SHAPE, alternatives, refreshed, us_of
from megamoe.backends.gfx950.model.work import expected, work_of
from megamoe.backends.gfx950.plan import plan_launch
from megamoe.bundle import Path, plan_bundle
from megamoe.layout import plan_layout
from megamoe.routing import DISTRIBUTIONS
from megamoe.shape import MoeShape

ROOT = FilePath(__file__).resolve().parents[2]
SIZES = {
    Path.FIXED_SLOT: (1, 2, 8, 32, 128), Path.COMPACT: (8, 64, 512, 2048), Path.SMALL_M: (1, 4, 64, 512),
    Path.LARGE_M: (512, 1024, 4096),
}  # fmt: skip


def test_the_tables_of_the_docs_are_fresh(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", str(ROOT / "docs/gfx950.md")]) == 0, capsys.readouterr().err


def test_a_document_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="one pair of markers"):
        refreshed("no markers")


@pytest.mark.parametrize(("kernel", "block_m"), sorted(unit_counts()))
def test_the_record_is_what_the_emulator_counts(kernel: str, block_m: int) -> None:
    """A change of a GEMM kernel needs `--count`, and then `--write`."""
    assert measure(kernel, block_m) == unit_counts()[kernel, block_m]


def test_matrix_instructions_of_the_record_are_those_of_full_tiles() -> None:
    for (kernel, block_m), unit in unit_counts().items():
        columns = 64 * (8 if block_m == 64 else 4)
        assert unit.matrix == block_m // 16 * (columns // 16) * (unit.k // 128), kernel
        # Where two waves share columns both load their weights.
        assert unit.weight_bytes == columns * unit.k * 17 // 32 * (2 if block_m == 128 else 1), kernel


def test_work_is_that_of_a_run() -> None:
    """Matrix instructions, weights and bytes to peers of compact on eight emulated ranks."""
    shape = shape_of()
    batches = batches_of(shape, [8] * 8, "uniform", seed=3)
    work = work_of(shape, 8, [batch.topk_ids for batch in batches])
    with Ranks(emulated(shape), checked=False) as ranks:
        ranks.bind()
        ranks.run(Path.COMPACT, batches)
        meta_bytes = 4 * plan_layout(plan_bundle(ranks.deployment)).meta_words
        for rank, backend in enumerate(ranks.backends):
            assert backend.launches.rows_per_expert() == list(work.rows[rank])
            stream = backend.device.stream
            assert isinstance(stream, EmulatedStream)
            of = {one.kernel.name: one.traffic for one in stream.take_handles()}
            gemm1, gemm2 = of["dispatch_gemm1_kernel_0"], of["gemm2_kernel_0"]
            tiles = sum(-(-count // 32) for count in work.rows[rank])
            units = unit_counts()
            assert gemm1.num_mfma == tiles * scaled(units["gemm1", 32], shape.hidden).matrix
            assert gemm2.num_mfma == tiles * scaled(units["gemm2", 32], shape.intermediate).matrix
            weights = gemm1.loaded(WEIGHTS_CLASS) + gemm2.loaded(WEIGHTS_CLASS)
            assert work.weight_bytes(rank) <= weights <= 1.3 * work.weight_bytes(rank)
            rows = sum(count for owner, count in enumerate(work.sent[rank]) if owner != rank)
            # Codes and scales of a row are padded to 16 bytes; flags are 8 bytes a peer.
            assert sum(work.payload_bytes()[rank]) == rows * work.row_bytes
            sent = rows * (-(-work.row_bytes // 16) * 16 + meta_bytes)
            assert sent <= gemm1.remote_bytes[1] <= sent + 8 * 8


def test_one_case_by_hand() -> None:
    """16 rows of one expert on one rank: 24 and 28 units, each alone on a compute unit, bound by what is in flight."""
    shape = MoeShape(hidden=7168, intermediate=3072, num_experts=1, num_topk=1, num_ranks=1)
    work = expected(shape, 16)
    assert work.rows == ((16,),)
    one = predict(Path.FIXED_SLOT, work)
    us = {stage.name: stage.us for stage in one.stages}
    assert one.latency == pytest.approx(4 * 4 + 2 * 3 + 3 * 3 + 6 * 2 + 1 * 1.8)
    assert us["quantize"] == pytest.approx(16 * (14336 + 7392) / 6.4e6)
    assert us["dispatch"] == pytest.approx(2 * 16 * 7392 / 6.4e6)
    assert us["list"] == pytest.approx(16 * 16 / 64 / 2400)
    assert us["gemm1"] == pytest.approx(56 / 4 * 0.8)
    assert us["gemm2"] == pytest.approx(24 / 2 * 0.8)
    assert us["combine"] == pytest.approx(2 * 16 * 14336 / 6.4e6)
    assert one.us == pytest.approx(65.765, abs=0.001)
    # Without the wait for memory: what it loads, at 64 bytes a cycle, and 14 K groups. Or the bytes of memory alone.
    near = predict(Path.FIXED_SLOT, work, machine=Mi355x(latency_us=0.0)).stages[3]
    assert near.us == pytest.approx(((974_848 + 297_344) / 64 + 14 * 200) / 2400)
    assert near.hbm == pytest.approx((23_396_352 + 16 * 3168 + 16 * 7392) / 6.4e6)


@pytest.mark.parametrize("path", SIZES)
def test_limits(path: Path) -> None:
    """More tokens are never faster, the memory floor and each link's bytes are never undercut, and a better machine or
    smaller result rows never cost time."""
    before = 0.0
    for tokens in SIZES[path]:
        us = us_of(path, tokens)
        assert us >= before
        before = us
        work = expected(SHAPE, tokens)
        one = predict(path, work)
        machine = Mi355x()
        links = max(map(max, work.payload_bytes())) + max(work.return_bytes(rank, False) for rank in range(8))
        assert one.us >= max(work.memory_floor_us(machine.hbm_peak), links / machine.link_peak)
        products = 3 * SHAPE.hidden * SHAPE.intermediate * max(map(work.routed, range(8)))
        assert one.us >= 2 * products / (8192 * machine.num_cus * machine.clock_mhz)
        assert predict(path, work, fp8=True).us <= one.us
        for better in (
            replace(machine, hbm_peak=9e6), replace(machine, link_peak=1e5), replace(machine, clock_mhz=2600.0),
            replace(machine, launch_us=1.0), replace(machine, flag_us=1.0), replace(machine, latency_us=0.5),
        ):  # fmt: skip
            assert predict(path, work, machine=better).us <= one.us


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_skewed_routing_keeps_the_floor_of_its_busiest_rank(distribution: str) -> None:
    work = expected(SHAPE, 256, distribution)
    assert sum(map(sum, work.rows)) == 8 * 256 * 6
    for path in Path:
        assert predict(path, work).us > work.memory_floor_us(Mi355x().hbm_peak)


def test_no_other_tile_or_grid_is_clearly_better() -> None:
    """What plan.py chooses stands by the model; nothing else would be clearly faster."""
    for path, sizes in SIZES.items():
        for tokens in sizes:
            now = us_of(path, tokens, plan=plan_launch(SHAPE, tokens, 256))
            others = alternatives(path, tokens)
            assert {f"{size} rows" for size in TILES} <= set(others)
            assert min(others.values()) > CLEARLY * now, (path, tokens, others)


def test_published_times_are_those_that_load_generation_ships() -> None:
    table = json.loads((ROOT / "loadgen/moe/tables/mi355x-v4-pro.json").read_text())
    seen = 0
    for entry in table["paths"]:
        for tokens, us in zip(entry["rows"], entry["latency_us"], strict=True):
            if entry["path"] == "fixed_slot" or (entry["path"] == "compact" and tokens >= 1024):
                assert SEVERAL_LAUNCHES[tokens] == us
                seen += 1
            if entry["path"] == "large_m":
                assert FUSED[tokens] == us
                seen += 1
    assert seen == 16
