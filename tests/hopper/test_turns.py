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
def kernel(out, counters, program, num_slots, taken, TILES: tl.constexpr, OCCUPANCY: tl.constexpr):
    first, stop = turns.tile_range(counters, program, num_slots, TILES)
    place = turns.place_of(program, num_slots, OCCUPANCY)
    tl.store(out, first)
    tl.store(out + 1, stop)
    tl.store(out + 2, place)
    tl.store(out + 3, turns.after(place, taken, num_slots * OCCUPANCY))
    tl.store(out + 4, turns.halved(counters, num_slots * OCCUPANCY, TILES).to(tl.int32))
    tl.store(out + 5, turns.num_entries(counters))

answers = []
for counters, tiles, num_slots, occupancy, taken in json.load(sys.stdin):
    words = torch.tensor(counters, dtype=torch.int32)
    rows = torch.zeros((num_slots * occupancy, 6), dtype=torch.int32)
    for program, row in enumerate(rows):
        kernel[(1,)](row, words, program, num_slots, taken, TILES=tiles, OCCUPANCY=occupancy)
    answers.append(rows.tolist())
json.dump(answers, sys.stdout)
"""
COUNTERS = [(0, 0, 0), (6, 0, 0), (5, 0, 0), (1, 2, 3), (0, 0, 4), (20, 7, 0)]
"""Numbers of entries of up to 8, 16 and 24 rows."""
CASES = [
    (counters, tiles, num_slots, occupancy, taken)
    for (counters, tiles), (num_slots, occupancy), taken in product(
        product(COUNTERS, (7, 12)), ((6, 2), (3, 4)), (13,)
    )
]


@pytest.fixture(scope="module")
def answers() -> list[list[list[int]]]:
    """Of every case and program: first tile, stop, place, place after, halved, entries."""
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
    for (counters, tiles, num_slots, _, _), programs in zip(CASES, answers, strict=True):
        numbers = tuple(count * tiles for count in counters)
        for program, (first, stop, *_) in enumerate(programs):
            begin, end = plan.stream_range(program % num_slots, num_slots, numbers)
            assert (first, stop) == (begin + program // num_slots, end)


def test_every_tile_is_taken_once(answers: list[list[list[int]]]) -> None:
    for (counters, tiles, num_slots, occupancy, taken), programs in zip(CASES, answers, strict=True):
        everything = list(range(sum(counters) * tiles))
        shared = [tile for first, stop, *_ in programs for tile in range(first, stop, occupancy)]
        assert sorted(shared) == everything
        for column in (2, 3):
            in_turn = [
                tile
                for program in programs
                for tile in range(program[column], len(everything), num_slots * occupancy)
            ]
            assert sorted(in_turn) == everything
        # Whoever would have had the next tile has the first one that comes after those.
        turn = {program[2]: program[3] for program in programs}
        assert turn[taken % (num_slots * occupancy)] == 0
        assert all(entries == sum(counters) for *_, entries in programs)


def test_neighbours_in_turn_share_a_multiprocessor(answers: list[list[list[int]]]) -> None:
    for (_, _, num_slots, occupancy, _), programs in zip(CASES, answers, strict=True):
        for program, row in enumerate(programs):
            assert row[2] // occupancy == program % num_slots


def test_tiles_are_halved_where_the_plan_says(answers: list[list[list[int]]]) -> None:
    chosen = set()
    for (counters, tiles, num_slots, occupancy, _), programs in zip(CASES, answers, strict=True):
        numbers = (counters[0] * tiles, counters[1] * tiles, counters[2] * tiles)
        expected = plan.halves_tiles(numbers, num_slots * occupancy)
        assert {halved for *_, halved, _ in programs} == {int(expected)}
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
