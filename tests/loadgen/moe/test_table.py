"""MoE time from a table: the paths are the service's, the times are the table's, wrong tables are refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadgen.moe.source import SimulatedMoe
from loadgen.moe.table import TABLES, MoeTimeTable, TableTier
from megamoe import Path as MoePath
from megamoe.errors import ConfigError

SHIPPED = "mi355x-v4-pro"
FIELDS = json.loads((TABLES / f"{SHIPPED}.json").read_text())


def tier(*enabled: MoePath) -> TableTier:
    return TableTier(MoeTimeTable.named(SHIPPED), frozenset(enabled))


@pytest.mark.parametrize(
    ("enabled", "rows", "prefill", "path", "latency_us"),
    [
        ((), 16, False, "compact", 412.5),
        ((MoePath.FIXED_SLOT,), 16, False, "fixed_slot", 322.0),
        ((MoePath.FIXED_SLOT,), 128, False, "fixed_slot", 364.3),
        ((MoePath.FIXED_SLOT,), 129, False, "compact", 474.9 + (594.1 - 474.9) / 128),
        ((MoePath.FIXED_SLOT,), 192, False, "compact", (474.9 + 594.1) / 2),
        (tuple(MoePath), 128, False, "small_m", 314.7),
        (tuple(MoePath), 512, True, "small_m", 564.1),
        (tuple(MoePath), 513, False, "compact", 730.0 + (970.2 - 730.0) / 512),
        (tuple(MoePath), 8192, False, "compact", 5186.0),
        (tuple(MoePath), 8192, True, "large_m", 4211.8),
        ((MoePath.FIXED_SLOT,), 8192, True, "compact", 5186.0),
    ],
)
def test_a_step_takes_the_path_of_the_service_and_the_time_of_the_table(
    enabled: tuple[MoePath, ...], rows: int, prefill: bool, path: str, latency_us: float
) -> None:
    (piece,) = tier(*enabled).layer((rows,) * 8, prefill=prefill)
    assert piece.path == path
    assert piece.total_us == pytest.approx(latency_us)


def test_the_largest_rank_chooses_the_path_and_the_average_has_a_say_in_the_time() -> None:
    moe = tier(MoePath.FIXED_SLOT)
    (piece,) = moe.layer((128, 0, 0, 0, 0, 0, 0, 0), prefill=False)
    assert (piece.path, piece.max_rows) == ("fixed_slot", 128)
    assert piece.total_us == pytest.approx(
        346.5 + (364.3 - 346.5) * 8 / 64
    )  # at (128 + 128 / 8) / 2 = 72 rows
    (piece,) = moe.layer((256, 128, 128, 128, 128, 128, 128, 0), prefill=False)
    assert (piece.path, piece.max_rows) == ("compact", 256)
    assert piece.total_us == pytest.approx((474.9 + 594.1) / 2)


def test_a_step_above_every_capacity_is_cut() -> None:
    pieces = tier(*MoePath).layer((8192 + 100,) * 8, prefill=True)
    assert [(piece.path, piece.max_rows) for piece in pieces] == [("large_m", 8192), ("small_m", 100)]


def test_the_description_names_proxies_and_paths() -> None:
    said = tier(MoePath.FIXED_SLOT).description
    assert said["paths"] == ["compact", "fixed_slot"]
    fixed = next(proxy for proxy in said["proxies"] if proxy["path"] == "fixed_slot")
    assert fixed["rows"] == [1, 2, 4, 8, 16, 32, 64]  # at 128 rows the runtime itself was measured


def broken(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    fields = copy.deepcopy(FIELDS)
    change(fields)
    return fields


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda table: table.update(schema="other/1"),
            "schema: Input should be 'megamoe.loadgen.moe_time/1', got",
        ),
        (
            lambda table: table["paths"][0]["latency_us"].pop(),
            "latency_us of compact 8192 must be 14 numbers",
        ),
        (lambda table: table["paths"][0]["rows"].reverse(), "rows of compact 8192 must be ascending"),
        (lambda table: table["paths"][1].update(capacity=256), "last rows of fixed_slot 256 must be"),
        (lambda table: table["paths"][1].update(proxy_rows=[3]), "proxy_rows of fixed_slot 128 must be"),
        (lambda table: table["deployment"].update(max_tokens_per_rank=100), "max_tokens_per_rank must be"),
        (lambda table: table.update(max_weight=2), "max_weight: .*less than or equal to 1, got 2"),
        (lambda table: table.update(max_weight=float("nan")), "max_weight: .*finite number, got nan"),
        (lambda table: table.pop("paths"), "paths: Field required, got nothing"),
        (lambda table: table.update(deployment=[]), "deployment: Input should be an object"),
        (lambda table: table["deployment"].update(speed=1), "deployment must be settings .* got 'speed'"),
        (
            lambda table: table["deployment"].update(fixed_slot_max="x"),
            "fixed_slot_max: .*integer.*, got 'x'",
        ),
        (lambda table: table["deployment"].update(shape="mine"), "shape preset must be one of"),
        (lambda table: table["paths"][0].update(path="middle_m"), "paths.0.path: Input should be 'small_m'"),
        (
            lambda table: table["paths"][0]["latency_us"].__setitem__(2, float("inf")),
            "paths.0.latency_us.2: .*finite",
        ),
        (
            lambda table: table["paths"][0]["latency_us"].__setitem__(2, "3"),
            "paths.0.latency_us.2: .*number, got '3'",
        ),
        (lambda table: table["paths"][0]["rows"].__setitem__(0, True), "paths.0.rows.0: .*integer, got True"),
        (lambda table: table["paths"].append(table["paths"][0]), "paths must be one entry for each path"),
    ],
)
def test_a_wrong_table_is_refused_with_file_and_field(
    change: Callable[[dict[str, Any]], None], sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(broken(change)))
    with pytest.raises(ConfigError, match=f"moe_time .*table.json: .*{sentence}"):
        MoeTimeTable.named(str(path))


@pytest.mark.parametrize("text", ["", "[" * 100_000, '{"schema": "megamoe', "\xff", "null", "[]"])
def test_what_is_no_table_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(
        ConfigError, match="table.json: (must be a JSON file|file: Input should be an object)"
    ):
        MoeTimeTable.named(str(path))


def test_an_enabled_runtime_without_latencies_is_refused() -> None:
    table = MoeTimeTable.parse(broken(lambda fields: fields["paths"].pop()))
    TableTier(table, frozenset({MoePath.SMALL_M}))
    with pytest.raises(ConfigError, match="must have latencies of large_m 8192, got none"):
        TableTier(table, frozenset({MoePath.LARGE_M}))


def test_names_of_tables_and_paths_are_checked() -> None:
    assert SimulatedMoe.read(SHIPPED, "small_m, fixed_slot").enabled == {MoePath.SMALL_M, MoePath.FIXED_SLOT}
    assert SimulatedMoe.read(SHIPPED, None).enabled == set(MoePath)
    with pytest.raises(ConfigError, match="moe_time must be a file or one of mi355x-v4-pro"):
        SimulatedMoe.read("nothing", None)
    with pytest.raises(ConfigError, match="paths must be among .*, got 'middle_m'"):
        SimulatedMoe.read(SHIPPED, "middle_m")
