"""What a bench keeps and shows: floors at measured rates, reports that read back alike, tables, plots."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path as FilePath

import pytest
import torch

from megamoe.backends.hopper.bench.group import deployment_of
from megamoe.backends.hopper.bench.layer import paths_at
from megamoe.backends.hopper.bench.plot import draw
from megamoe.backends.hopper.bench.report import MI355X, Report, read_reports
from megamoe.backends.hopper.bench.tables import main as tables
from megamoe.backends.hopper.bench.timing import BaselineTiming, Timing, achieved
from megamoe.backends.hopper.floors import Rates, busiest, ranks_of
from megamoe.bundle import Path, plan_bundle
from megamoe.errors import InvalidArgumentError
from megamoe.routing import DISTRIBUTIONS
from megamoe.shape import preset

V4_PRO = preset("deepseek-v4-pro")
RATES = Rates(4.0e12, 600e12)


def timing(path: str, tokens: int, us: float, distribution: str = "uniform") -> Timing:
    rows, hit = 6 * tokens, min(48, 6 * tokens)
    floor = RATES.floor_us(V4_PRO, rows, hit)
    speed = achieved(V4_PRO, rows, hit, us)
    return Timing("EP2 on 2 GPU", path, distribution, tokens, rows, hit, us, floor, *speed)


@pytest.fixture
def report() -> Report:
    times = {("small_m", 1): 120.0, ("compact", 1): 150.0, ("small_m", 128): 640.0, ("compact", 128): 600.0}
    return Report(
        {"GPU": "a GPU", "GPUs": 2},
        V4_PRO,
        2,
        RATES,
        [timing(path, tokens, us) for (path, tokens), us in times.items()]
        + [timing("compact", 128, 500.0, "zipf")],
        [
            BaselineTiming("grouped_mm", "uniform", 1, 480.0),
            BaselineTiming("grouped_mm", "uniform", 128, 1500.0),
        ],
    )


def test_the_floor_is_the_larger_of_bytes_and_operations() -> None:
    weights = 3 * 7168 * 3072
    assert RATES.floor_us(V4_PRO, 6, 6) == pytest.approx(1e6 * 6 * weights * 0.53125 / 4.0e12)
    assert RATES.floor_us(V4_PRO, 49152, 48) == pytest.approx(1e6 * 2 * 49152 * weights / 600e12)
    assert achieved(V4_PRO, 6, 6, RATES.floor_us(V4_PRO, 6, 6))[0] == pytest.approx(4.0)
    assert achieved(V4_PRO, 49152, 48, RATES.floor_us(V4_PRO, 49152, 48))[1] == pytest.approx(600.0)
    assert achieved(V4_PRO, 6, 6, 100.0, ranks_a_gpu=8)[0] == 8 * achieved(V4_PRO, 6, 6, 100.0)[0]


def test_the_busiest_rank_is_the_one_with_the_highest_floor() -> None:
    shape = replace(V4_PRO, num_experts=4, num_topk=2, num_ranks=2)
    ids = [torch.tensor([[0, 1], [0, -1]]), torch.tensor([[2, -1], [2, 2]])]
    assert busiest(shape, ids, RATES) == (3, 2), "rank 0 streams two experts, rank 1 one; -1 is no row"


def test_each_rank_of_a_smaller_group_has_the_experts_of_ep8() -> None:
    assert ranks_of(V4_PRO, 2).num_experts_per_rank == V4_PRO.num_experts_per_rank == 48


@pytest.mark.parametrize("capacity", [512, 8192])
def test_what_is_timed_is_built(capacity: int) -> None:
    bundle = plan_bundle(deployment_of(ranks_of(V4_PRO, 2), capacity))
    for path in paths_at(capacity):
        assert bundle.capacities(path)[-1] == capacity, path


def test_a_report_reads_back_alike(report: Report, tmp_path: FilePath) -> None:
    report.write(tmp_path / "a.json")
    assert read_reports([tmp_path / "a.json"]) == report
    both = read_reports([tmp_path / "a.json"] * 2)
    assert len(both.timings) == 2 * len(report.timings)
    replace(report, num_ranks=8).write(tmp_path / "b.json")
    with pytest.raises(InvalidArgumentError, match="reports must be 2 ranks of deepseek-v4-pro, got 8 of"):
        read_reports([tmp_path / "a.json", tmp_path / "b.json"])


def test_a_baseline_beside_no_path_is_kept_as_json_that_others_read(
    report: Report, tmp_path: FilePath
) -> None:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    replace(report, timings=[]).write(tmp_path / "a.json")
    kept = json.loads((tmp_path / "a.json").read_text(), parse_constant=refuse)
    assert [baseline["over_best_path"] for baseline in kept["baselines"]] == [None, None]
    assert read_reports([tmp_path / "a.json"]).baselines == report.baselines


@pytest.mark.parametrize("text", ["no JSON", "[]", "{}", '{"timings": [{}], "baselines": []}'])
def test_files_of_another_kind_are_refused_by_name(tmp_path: FilePath, text: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(InvalidArgumentError, match="what bench --json has left, got .*other.json"):
        read_reports([file])


def test_tables_have_every_path_and_baseline(report: Report) -> None:
    head, _, first, second = report.table("uniform")
    assert head == "| T | rows | hit | floor | small_m | compact | TB/s | TFLOP/s | grouped_mm |"
    assert first == "| 1 | 6 | 6 | 53 | 120 (0.44) | 150 (0.35) | 1.75 | 7 | 480 (4.00x) |"
    assert second.split(" | ")[4:6] == ["640 (0.66)", "600 (0.70)"]
    assert second.endswith("| 1500 (2.50x) |"), "over the best path, not the first"
    assert report.best("uniform", 128).path == "compact"
    assert report.ratio(BaselineTiming("grouped_mm", "zipf", 1, 480.0)) != report.ratio(report.baselines[0])


def test_the_published_machine_is_held_against_its_own_floor(report: Report) -> None:
    lines = report.beside_mi355x()
    # 1.685 GB at 8 TB/s are 211 us, and 314.7 us are published at 128 tokens a rank.
    assert lines[-1].startswith("| 128 | 314.7 | 0.67 | 600.0 | 0.70 | compact |")
    assert MI355X.floor_us(V4_PRO, 768, 48) == pytest.approx(211, abs=1)
    assert "MI355X" in "\n".join(report.markdown())
    assert "MI355X" not in "\n".join(replace(report, shape=replace(V4_PRO, name="other")).markdown())


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_plot_and_tables_of_a_kept_report(
    report: Report, tmp_path: FilePath, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    kept, plot = tmp_path / "bench.json", tmp_path / f"bench.{suffix}"
    report.write(kept)
    tables([str(kept), "--plot", str(plot)])
    assert capsys.readouterr().out.strip().splitlines() == "\n".join(report.markdown()).strip().splitlines()
    assert plot.read_bytes().startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
    draw(replace(report, baselines=[]), plot)


def test_every_distribution_can_be_asked_for() -> None:
    from megamoe import DeviceBench

    assert DeviceBench(shape=V4_PRO).distributions == DISTRIBUTIONS
    assert DeviceBench(shape=V4_PRO).tokens == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    assert {path for tokens in DeviceBench(shape=V4_PRO).tokens for path in paths_at(tokens)} == set(Path)
