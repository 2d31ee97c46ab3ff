"""PTX snippets: operands and constraints fit each other (what they compute is tested on a GPU)."""

from __future__ import annotations

import re

import pytest

from megamoe.backends.hopper import fragments


def operands(text: str) -> set[int]:
    return {int(number) for number in re.findall(r"\$(\d+)", text)}


@pytest.mark.parametrize("num_steps", [2, 4])
@pytest.mark.parametrize("num_blocks", [1, 2, 3])
@pytest.mark.parametrize("odd_tile", [False, True])
def test_mma_steps(num_steps: int, num_blocks: int, odd_tile: bool) -> None:
    text, constraints = fragments.mma_steps(num_steps, num_blocks, odd_tile)
    kinds = constraints.split(",")
    assert operands(text) == set(range(len(kinds)))
    assert kinds.count("=f") == kinds.count("f") == 4 * num_blocks
    assert kinds.count("r") == num_steps + 1 + 2 * num_steps * num_blocks
    assert text.count("mma.sync") == num_steps * num_blocks
    assert text.count("mul.bf16x2") == 4 * num_steps


@pytest.mark.parametrize("half", [0, 1])
def test_decode_pair(half: int) -> None:
    text, constraints = fragments.decode_pair(half)
    # The scale comes twice, as an element of each half of the pack; the first is read.
    assert operands(text) == set(range(11))
    assert len(constraints.split(",")) == 12
    assert text.count("mul.bf16x2") == 8


@pytest.mark.parametrize("num_words", [1, 2, 4])
def test_loads(num_words: int) -> None:
    text, constraints = fragments.load(num_words, 48, fragments.STREAM)
    assert operands(text) == set(range(num_words + 1))
    assert constraints.count("=r") == num_words
    assert "+48]" in text


def test_instructions_a_word() -> None:
    """8 weights: 10 integer instructions, which bound the kernels at 16 rows and more, and 4 multiplications."""
    lines = fragments.decode("$0", ("a0", "a1", "a2", "a3"), ("m0", "m1"))
    assert sum("mul" in line for line in lines) == 4
    assert len(lines) - 4 == 10
