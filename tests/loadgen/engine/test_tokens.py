"""One token a byte: counts, block identities, filler, and the tokenizer that clients load."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from loadgen.engine.tokens import END_TOKEN, FILLER, block_ids, filler, num_tokens, write_tokenizer
from loadgen.trace.trace import BLOCK_SIZE


def test_tokens_are_bytes_of_utf8() -> None:
    assert num_tokens("abc") == 3
    assert num_tokens("é") == 2
    assert num_tokens("") == 0


@given(st.integers(0, 1000), st.integers(0, 200))
def test_filler_has_exactly_the_tokens_asked_for_and_goes_on_where_it_stopped(first: int, count: int) -> None:
    assert num_tokens(filler(first, count)) == count
    assert filler(0, first) + filler(first, count) == filler(0, first + count)


def test_filler_repeats() -> None:
    assert filler(0, 2 * len(FILLER)) == FILLER * 2


def test_every_block_has_an_identity_the_last_one_too() -> None:
    assert len(block_ids("")) == 0
    assert len(block_ids("a" * (3 * BLOCK_SIZE))) == 3
    cut = block_ids("a" * (3 * BLOCK_SIZE + 1))
    assert len(cut) == 4
    assert cut[3] != block_ids("a" * (4 * BLOCK_SIZE))[3]


def test_a_block_is_known_by_all_that_is_before_it() -> None:
    a, b = "a" * BLOCK_SIZE, "b" * BLOCK_SIZE
    assert list(block_ids(a + b)) == list(block_ids(a + b))
    assert block_ids(a + b)[0] == block_ids(a + a)[0]
    assert block_ids(a + b)[1] != block_ids(b + b)[1]


def test_the_tokenizer_has_one_token_a_byte(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(256))
    assert [vocabulary[letter] for letter in "aZ~"] == [ord(letter) for letter in "aZ~"]
    assert vocabulary["Ġ"] == ord(" ")  # the usual letter for the space in byte-level vocabularies
    assert vocabulary["Ċ"] == ord("\n")
    assert tokenizer["model"]["merges"] == []
    assert tokenizer["added_tokens"][0] == tokenizer["added_tokens"][0] | {"id": 256, "content": END_TOKEN}
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == END_TOKEN
