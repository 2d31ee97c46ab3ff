"""Which thread block takes which streaming tiles: the device's functions, in Triton's interpreter, and plan.py's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from megamoe.backends.hopper import plan

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, sys
import torch
import triton
import triton.language as tl
from megamoe.backends.hopper.device import turns

@triton.jit
def kernel(out, counters, program, num_slots, TILES: tl.constexpr, OCCUPANCY: tl.constexpr):
    first, stop = turns.tile_range(counters, program, num_slots, TILES)
    tl.store(out, first)
    tl.store(out + 1, stop)
    tl.store(out + 2, turns.halved(counters, num_slots * OCCUPANCY, TILES).to(tl.int32))

answers = []
for counters, tiles, num_slots, occupancy in json.load(sys.stdin):
    words = torch.tensor(counters, dtype=torch.int32)
    rows = torch.zeros((num_slots * occupancy, 3), dtype=torch.int32)
    for program, row in enumerate(rows):
        kernel[(1,)](row, words, program, num_slots, TILES=tiles, OCCUPANCY=occupancy)
    answers.append(rows.tolist())
json.dump(answers, sys.stdout)
"""
COUNTERS = [(0, 0, 0), (6, 0, 0), (5, 0, 0), (1, 2, 3), (0, 0, 4), (20, 7, 0)]
"""Numbers of entries of up to 8, 16 and 24 rows."""
CASES = [
    (counters, tiles, num_slots, occupancy)
    for counters, tiles, (num_slots, occupancy) in product(COUNTERS, (7, 12), ((6, 2), (3, 4)))
]


@pytest.fixture(scope="module")
def answers() -> list[list[list[int]]]:
    """Of every case and program: first tile, stop, halved."""
    command = [sys.executable, "-c", SCRIPT]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        input=json.dumps(CASES),
    )
    return json.loads(done.stdout)


def test_ranges_are_those_of_the_plan(answers: list[list[list[int]]]) -> None:
    for (counters, tiles, num_slots, _), programs in zip(CASES, answers, strict=True):
        numbers = tuple(count * tiles for count in counters)
        for program, (first, stop, *_) in enumerate(programs):
            begin, end = plan.stream_range(program % num_slots, num_slots, numbers)
            assert (first, stop) == (begin + program // num_slots, end)


def test_every_tile_is_taken_once(answers: list[list[list[int]]]) -> None:
    for (counters, tiles, _, occupancy), programs in zip(CASES, answers, strict=True):
        everything = list(range(sum(counters) * tiles))
        shared = [tile for first, stop, *_ in programs for tile in range(first, stop, occupancy)]
        assert sorted(shared) == everything


def test_tiles_are_halved_where_the_plan_says(answers: list[list[list[int]]]) -> None:
    chosen = set()
    for (counters, tiles, num_slots, occupancy), programs in zip(CASES, answers, strict=True):
        numbers = (counters[0] * tiles, counters[1] * tiles, counters[2] * tiles)
        expected = plan.halves_tiles(numbers, num_slots * occupancy)
        assert {halved for *_, halved in programs} == {int(expected)}
        chosen.add(expected)
    assert chosen == {False, True}


@pytest.mark.parametrize(
    ("num_tiles", "num_programs", "expected"),
    [
        ((288, 0, 0), 264, True),  # GEMM1 of 6 experts of V4-Pro: only 24 would have a second tile
        ((336, 0, 0), 528, False),  # one tile a program at most
        ((528, 0, 0), 264, False),  # two each
        ((288, 1, 0), 264, False),
        ((2304, 0, 0), 264, False),  # 9 rounds: halves would save little, and cost more sums
    ],
)
def test_halving(num_tiles: tuple[int, int, int], num_programs: int, expected: bool) -> None:
    assert plan.halves_tiles(num_tiles, num_programs) is expected
