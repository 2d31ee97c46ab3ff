"""Tokens of an engine without a model: one token is one byte of UTF-8, so that both sides count alike, offline.

Owns the tokenizer that clients load to count the same (`write_tokenizer`), the identity of prompt blocks for prefix
caches, and the text that stands for generated tokens.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from loadgen.trace.trace import BLOCK_SIZE, HashIds

FILLER = "every expert answers in turn and the step goes on; "
END_TOKEN = "<|end|>"


def num_tokens(text: str) -> int:
    """Tokens of a text."""
    return len(text.encode("utf-8"))


def block_ids(text: str) -> HashIds:
    """int64 identity of every block of BLOCK_SIZE tokens, the last one cut; it covers the block and all before it."""
    data = text.encode("utf-8")
    digest = hashlib.blake2b(digest_size=8)
    ids = np.empty(-(-len(data) // BLOCK_SIZE), dtype=np.int64)
    for idx in range(len(ids)):
        digest.update(data[idx * BLOCK_SIZE : (idx + 1) * BLOCK_SIZE])
        ids[idx] = int.from_bytes(digest.digest(), "big", signed=True)
    return ids


def filler(first: int, count: int) -> str:
    """Text of exactly `count` tokens, the ones from `first` on of an endless text."""
    start = first % len(FILLER)
    repeats = (start + count) // len(FILLER) + 1
    return (FILLER * repeats)[start : start + count]


def write_tokenizer(folder: Path) -> None:
    """Write the tokenizer in the Hugging Face format (tokenizer.json), for clients that count or make tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {letter: idx for idx, letter in enumerate(_byte_letters())}
    end_id = len(vocabulary)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    end = {
        "id": end_id, "content": END_TOKEN, "special": True,
        "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
    }  # fmt: skip
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_TOKEN, "pad_token": END_TOKEN}
    for name, value in (("tokenizer.json", tokenizer), ("tokenizer_config.json", settings)):
        (folder / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in byte-level vocabularies: itself where it prints, else from 256 on."""
    printing = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    letters = {byte: chr(byte) for byte in printing}
    letters |= {byte: chr(256 + idx) for idx, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]
