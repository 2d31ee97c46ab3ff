"""Prefix caches by block identity: how much of a prompt is already known, and what the KV memory has room for.

A cached prompt is stored whole, from its first block; the longest match of a new prompt is the longest common prefix
with any of them. That equals a per-block tree, and compares arrays instead of walking nodes. With a capacity, a
request reserves room for what it will compute and generate before its prefill begins, and the least recently used
prompts that no request in flight needs are cut from their tails to make it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loadgen.trace.trace import HashIds


def common_prefix(a: HashIds, b: HashIds) -> int:
    """Number of leading blocks that are equal."""
    length = min(len(a), len(b))
    if length == 0 or a[0] != b[0]:
        return 0
    differs = a[:length] != b[:length]
    first = int(differs.argmax())
    return first if differs[first] else length


@dataclass(slots=True, eq=False)
class _Prompt:
    """A cached prompt. locks: leading blocks that requests in flight need, one entry a request. heir: the prompt that
    holds these blocks now, where another has taken this one in."""

    cache_uid: str
    hash_ids: HashIds
    block_size: int
    locks: list[int]
    heir: _Prompt | None = None

    @property
    def num_locked(self) -> int:
        """Leading blocks that must stay."""
        return max(self.locks, default=0)


@dataclass(slots=True, eq=False)
class KvLease:
    """KV memory of one request in flight: a locked prefix, and tokens reserved beyond it."""

    cache_uid: str
    hash_ids: HashIds
    block_size: int
    num_cached_blocks: int
    num_reserved: int
    num_locked_blocks: int
    prompt: _Prompt | None


class PrefixCache:
    """Cached prompts of one rank, by session: block identities mean nothing across sessions.

    capacity_tokens: KV memory that cached prompts and requests in flight share; 0 = unlimited, then nothing is evicted.
    """

    def __init__(self, capacity_tokens: int = 0) -> None:
        self.capacity_tokens = capacity_tokens
        self.num_reserved_tokens = 0
        self.num_evicted_tokens = 0
        self._num_cached_tokens = 0
        self._prompts: dict[str, list[_Prompt]] = {}
        self._tokens: dict[str, int] = {}
        self._by_use: dict[_Prompt, None] = {}  # the least recently used first

    def match(self, cache_uid: str, hash_ids: HashIds) -> int:
        """Leading blocks of `hash_ids` that are cached for the session."""
        return self._best(cache_uid, hash_ids)[0]

    def insert(self, cache_uid: str, hash_ids: HashIds, block_size: int = 1) -> None:
        """Remember a prompt; prompts that it extends are replaced by it."""
        self._insert(cache_uid, hash_ids, block_size)

    def reserve(self, cache_uid: str, hash_ids: HashIds, block_size: int, num_output: int) -> KvLease | None:
        """Lock the cached prefix of a prompt and make room for the rest of it and its output.

        At least the last block is left to compute, for its logits. None when the requests in flight leave no room.
        """
        blocks, prompt = self._best(cache_uid, hash_ids)
        blocks = min(blocks, max(len(hash_ids) - 1, 0))
        need = (len(hash_ids) - blocks) * block_size + num_output
        if prompt is not None:
            prompt.locks.append(blocks)
            self._touch(prompt)
        if not self._make_room(need):
            if prompt is not None:
                prompt.locks.remove(blocks)
            return None
        self.num_reserved_tokens += need
        return KvLease(cache_uid, hash_ids, block_size, blocks, need, blocks, prompt)

    def commit(self, lease: KvLease) -> None:
        """The prompt is computed: it is cached, and stays locked until the lease is released."""
        computed = (len(lease.hash_ids) - lease.num_cached_blocks) * lease.block_size
        lease.num_reserved -= computed
        self.num_reserved_tokens -= computed
        self._unlock(lease)
        lease.prompt = self._insert(lease.cache_uid, lease.hash_ids, lease.block_size)
        if lease.prompt is not None:
            lease.num_locked_blocks = len(lease.hash_ids)
            lease.prompt.locks.append(lease.num_locked_blocks)

    def release(self, lease: KvLease) -> None:
        """The request has left: its output is forgotten, its prompt may be evicted."""
        self.num_reserved_tokens -= lease.num_reserved
        lease.num_reserved = 0
        self._unlock(lease)

    def drop(self, cache_uid: str) -> None:
        """Forget a session."""
        for prompt in self._prompts.pop(cache_uid, ()):
            del self._by_use[prompt]
        self._num_cached_tokens -= self._tokens.pop(cache_uid, 0)

    def __len__(self) -> int:
        """Sessions with something cached."""
        return len(self._prompts)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of all cached prompts, shared prefixes counted once."""
        return self._num_cached_tokens

    # ------------------------------------------------------------ inside

    def _best(self, cache_uid: str, hash_ids: HashIds) -> tuple[int, _Prompt | None]:
        best, found = 0, None
        for prompt in self._prompts.get(cache_uid, ()):
            blocks = common_prefix(hash_ids, prompt.hash_ids)
            if blocks > best:
                best, found = blocks, prompt
        return best, found

    def _insert(self, cache_uid: str, hash_ids: HashIds, block_size: int) -> _Prompt | None:
        if len(hash_ids) == 0:
            return None
        known = self._prompts.setdefault(cache_uid, [])
        shared = [common_prefix(hash_ids, prompt.hash_ids) for prompt in known]
        for prompt, blocks in zip(known, shared):
            if blocks == len(hash_ids):
                self._touch(prompt)
                return prompt
        new = _Prompt(cache_uid, np.asarray(hash_ids, dtype=np.int64), block_size, [])
        for prompt, blocks in zip(known, shared):
            if blocks == len(prompt.hash_ids):
                self._give_way(prompt, new)
        known[:] = [prompt for prompt in known if prompt.heir is None] + [new]
        self._count(cache_uid, (len(hash_ids) - max(shared, default=0)) * block_size)
        self._by_use[new] = None
        return new

    def _touch(self, prompt: _Prompt) -> None:
        if self._by_use.pop(prompt, 0) is None:
            self._by_use[prompt] = None

    def _unlock(self, lease: KvLease) -> None:
        prompt, lease.prompt = lease.prompt, None
        while prompt is not None:
            prompt.locks.remove(lease.num_locked_blocks)
            prompt = prompt.heir

    def _give_way(self, prompt: _Prompt, heir: _Prompt) -> None:
        """Another prompt holds all blocks of this one."""
        prompt.heir = heir
        heir.locks += prompt.locks
        del self._by_use[prompt]

    def _count(self, cache_uid: str, num_tokens: int) -> None:
        self._tokens[cache_uid] = self._tokens.get(cache_uid, 0) + num_tokens
        self._num_cached_tokens += num_tokens

    def _make_room(self, need: int) -> bool:
        """Evict until `need` tokens are free. Evicts nothing and says False where that cannot be reached.

        What locked prompts hold is counted without sharing between them: the answer may be too cautious, and is exact
        for the only request in flight.
        """
        missing = self._num_cached_tokens + self.num_reserved_tokens + need - self.capacity_tokens
        if not self.capacity_tokens or missing <= 0:
            return True
        locked = sum(prompt.num_locked * prompt.block_size for prompt in self._by_use)
        if self.num_reserved_tokens + need + locked > self.capacity_tokens:
            return False
        while missing > 0:
            freed = next(freed for prompt in self._by_use if (freed := self._cut(prompt, missing)))
            missing -= freed
        return True

    def _cut(self, prompt: _Prompt, num_tokens: int) -> int:
        """Take up to num_tokens, in whole blocks, off the tail that only this prompt has and nobody in flight needs.
        Returns what was freed."""
        siblings = self._prompts[prompt.cache_uid]
        others = [
            (common_prefix(prompt.hash_ids, one.hash_ids), one) for one in siblings if one is not prompt
        ]
        shared, heir = max(others, key=lambda other: other[0], default=(0, None))
        blocks = min(
            len(prompt.hash_ids) - max(shared, prompt.num_locked), -(-num_tokens // prompt.block_size)
        )
        kept = len(prompt.hash_ids) - blocks
        if kept > shared:
            prompt.hash_ids = prompt.hash_ids[:kept]
        else:
            siblings.remove(prompt)
            if heir is not None and shared:
                self._give_way(prompt, heir)
            else:
                del self._by_use[prompt]
            if not siblings:
                del self._prompts[prompt.cache_uid]
        freed = blocks * prompt.block_size
        self._count(prompt.cache_uid, -freed)
        self.num_evicted_tokens += freed
        return freed
