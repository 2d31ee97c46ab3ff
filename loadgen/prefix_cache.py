"""Prefix caches by block identity: how much of a prompt is already known.

A cached prompt is stored whole, from its first block; the longest match of a new prompt is the longest common prefix
with any of them. That equals a per-block tree, and compares arrays instead of walking nodes.
"""

from __future__ import annotations

import numpy as np

from loadgen.trace import HashIds


def common_prefix(a: HashIds, b: HashIds) -> int:
    """Number of leading blocks that are equal."""
    length = min(len(a), len(b))
    if length == 0 or a[0] != b[0]:
        return 0
    differs = a[:length] != b[:length]
    first = int(differs.argmax())
    return first if differs[first] else length


class PrefixCache:
    """Cached prompts of one rank, by session: block identities mean nothing across sessions.

    Nothing is evicted before its session ends: the tier models unlimited KV memory.
    """

    def __init__(self) -> None:
        self._prompts: dict[str, list[HashIds]] = {}

    def match(self, cache_uid: str, hash_ids: HashIds) -> int:
        """Leading blocks of `hash_ids` that are cached for the session."""
        return max((common_prefix(hash_ids, known) for known in self._prompts.get(cache_uid, ())), default=0)

    def insert(self, cache_uid: str, hash_ids: HashIds) -> None:
        """Remember a prompt; prompts that it extends are replaced by it."""
        known = self._prompts.setdefault(cache_uid, [])
        if len(hash_ids) == 0 or any(common_prefix(hash_ids, prompt) == len(hash_ids) for prompt in known):
            return
        known[:] = [prompt for prompt in known if common_prefix(hash_ids, prompt) < len(prompt)]
        known.append(np.asarray(hash_ids, dtype=np.int64))

    def drop(self, cache_uid: str) -> None:
        """Forget a session."""
        self._prompts.pop(cache_uid, None)

    def __len__(self) -> int:
        """Sessions with something cached."""
        return len(self._prompts)
