"""The prefix cache against a per-block tree written down as a set of prefixes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loadgen.tier.prefix_cache import PrefixCache

prompts = st.lists(st.integers(0, 2), max_size=6)
operations = st.lists(st.tuples(st.sampled_from(["insert", "match", "drop"]), st.sampled_from("ab"), prompts))


@given(operations)
def test_hits_equal_brute_force(steps: list[tuple[str, str, list[int]]]) -> None:
    cache = PrefixCache()
    blocks: dict[str, set[tuple[int, ...]]] = {"a": set(), "b": set()}
    for operation, uid, prompt in steps:
        ids = np.asarray(prompt, dtype=np.int64)
        if operation == "insert":
            cache.insert(uid, ids)
            blocks[uid] |= {tuple(prompt[:length]) for length in range(1, len(prompt) + 1)}
        elif operation == "drop":
            cache.drop(uid)
            blocks[uid] = set()
        expected = 0
        while expected < len(prompt) and tuple(prompt[: expected + 1]) in blocks[uid]:
            expected += 1
        assert cache.match(uid, ids) == expected


def test_a_growing_prompt_is_kept_once() -> None:
    cache = PrefixCache()
    for length in range(1, 50):
        cache.insert("a", np.arange(length))
    assert len(cache._prompts["a"]) == 1
    assert len(cache) == 1
    cache.drop("a")
    assert len(cache) == 0
