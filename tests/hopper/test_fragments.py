"""PTX snippets: operands and constraints fit each other, and what is decoded is what was packed.

Loads and MMAs are tested on a GPU.
"""

from __future__ import annotations

import re

import pytest
import torch

from megamoe.backends.hopper import fragments, packing


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


MASK = 0xFFFFFFFF


def played(lines: list[str], registers: dict[str, int]) -> dict[str, tuple[int, str]]:
    """Run integer instructions on registers; of each multiplication, what is multiplied and with which register."""
    products = {}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name)

    for line in lines:
        name, rest = line.rstrip(";").split(" ", 1)
        out, *operands = rest.split(",")
        a, b = (operand.strip() for operand in operands[:2])
        if name == "mul.bf16x2":
            products[out.strip()] = (value(a), b)
        elif name in ("shf.l.wrap.b32", "shf.r.wrap.b32"):
            assert a == b, "a rotation"
            left = int(operands[2]) if ".l." in name else 32 - int(operands[2])
            registers[out] = (value(a) << left | value(a) >> 32 - left) & MASK
        elif name == "prmt.b32":
            source = value(b) << 32 | value(a)
            picks = [int(operands[2]) >> 4 * byte & 7 for byte in range(4)]
            registers[out] = sum((source >> 8 * pick & 255) << 8 * byte for byte, pick in enumerate(picks))
        else:
            run = {
                "and.b32": int.__and__,
                "or.b32": int.__or__,
                "shl.b32": int.__lshift__,
                "shr.u32": int.__rshift__,
            }
            registers[out] = run[name](value(a), value(b)) & MASK
    return products


def test_words_are_taken_apart_as_their_packing_says() -> None:
    """The PTX that takes a word apart is packing.decode_words, and rows g and g + 8 get their own factors."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(-(1 << 31), 1 << 31, (64,), generator=generator).int()
    lines = fragments.decode("w", ("a0", "a1", "a2", "a3"), ("low", "high"))
    for word, wanted in zip(words.tolist(), packing.decode_words(words).tolist(), strict=True):
        products = played(lines, {"w": word & MASK})
        assert [products[f"a{number}"] for number in range(4)] == [
            (part & MASK, factor) for part, factor in zip(wanted, ("low", "high") * 2, strict=True)
        ]


@pytest.mark.parametrize("byte", range(4))
def test_a_scale_byte_is_the_exponent_of_both_halves_of_its_factor(byte: int) -> None:
    registers = {"s": 0x81_7F_02_FE}
    played(fragments.multiplier("m", "s", byte), registers)
    exponent = registers["s"] >> 8 * byte & 255
    assert registers["m"] == exponent << 7 | exponent << 23


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
