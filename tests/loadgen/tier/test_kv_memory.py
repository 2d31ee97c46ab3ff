"""KV memory with a capacity: reservation, eviction by least use, and what it does to a rank's queue."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.tier.attention_tier import AttentionTier, TierConfig
from loadgen.tier.prefix_cache import PrefixCache
from loadgen.tier.step import TierRequest
from loadgen.trace.trace import HashIds
from megamoe.errors import InvalidArgumentError


def ids(first: int, count: int) -> HashIds:
    return np.arange(first, first + count, dtype=np.int64)


def compute(cache: PrefixCache, uid: str, hash_ids: HashIds, num_output: int = 0) -> int:
    """A whole request through the cache; returns the blocks that it found."""
    lease = cache.reserve(uid, hash_ids, 1, num_output)
    assert lease is not None
    cache.commit(lease)
    cache.release(lease)
    return lease.num_cached_blocks


def test_the_least_recently_used_prompt_makes_room() -> None:
    cache = PrefixCache(100)
    compute(cache, "a", ids(0, 40))
    compute(cache, "b", ids(0, 40))
    assert compute(cache, "a", ids(0, 40)) == 39  # a is now used later than b
    compute(cache, "c", ids(0, 50))
    assert cache.match("a", ids(0, 40)) == 40
    assert cache.match("b", ids(0, 40)) == 10  # cut from its tail, no more than was needed
    assert (cache.num_cached_tokens, cache.num_evicted_tokens) == (100, 30)


def test_what_requests_in_flight_need_is_never_evicted() -> None:
    cache = PrefixCache(100)
    compute(cache, "a", ids(0, 60))
    lease = cache.reserve("a", ids(0, 70), 1, 20)
    assert lease is not None
    assert (lease.num_cached_blocks, cache.num_reserved_tokens) == (60, 30)
    assert cache.reserve("b", ids(0, 20), 1, 0) is None
    assert cache.match("a", ids(0, 60)) == 60
    cache.commit(lease)
    assert (cache.num_cached_tokens, cache.num_reserved_tokens) == (70, 20)
    assert cache.reserve("b", ids(0, 20), 1, 0) is None
    cache.release(lease)
    assert cache.reserve("b", ids(0, 20), 1, 0) is not None
    assert cache.num_evicted_tokens == 0  # the output's room was enough, together with what was free


def test_a_lock_follows_the_prompt_into_a_longer_one() -> None:
    cache = PrefixCache(100)
    compute(cache, "a", ids(0, 30))
    first = cache.reserve("a", ids(0, 30), 1, 0)
    assert first is not None
    compute(cache, "a", ids(0, 50))
    assert cache.reserve("b", ids(0, 80), 1, 0) is None
    cache.release(first)
    assert cache.reserve("b", ids(0, 80), 1, 0) is not None


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 60)), max_size=40))
def test_cached_tokens_are_the_blocks_of_the_union_of_prompts(calls: list[tuple[int, int, int]]) -> None:
    cache = PrefixCache(100)
    for session, branch, count in calls:
        prompt = np.concatenate([ids(0, min(count, 5)), ids(1000 * (branch + 1), max(count - 5, 0))])
        compute(cache, str(session), prompt)
        assert cache.match(str(session), prompt) == count
        assert cache.num_cached_tokens <= 100
        assert cache.num_reserved_tokens == 0
        union = {
            (uid, tuple(known.hash_ids[: end + 1]))
            for uid, prompts in cache._prompts.items()
            for known in prompts
            for end in range(len(known.hash_ids))
        }
        assert cache.num_cached_tokens == len(union)


def request(uid: str, blocks: int, out: int) -> TierRequest:
    return TierRequest(
        uid=uid,
        cache_uid=uid,
        agent_uid=uid,
        hash_ids=ids(0, blocks),
        block_size=64,
        num_input=64 * blocks,
        num_output=out,
    )


def play(tier: AttentionTier) -> int:
    """Steps until nothing is left."""
    num_steps = 0
    while (step := tier.next_step()) is not None:
        num_steps += 1
        tier.finish_step(step, float(num_steps))
        assert num_steps < 10_000
    return num_steps


def test_a_request_waits_until_those_before_it_leave_room() -> None:
    def emissions(kv_capacity_tokens: int) -> tuple[float, float]:
        tier = AttentionTier(
            1, TierConfig(kv_capacity_tokens=kv_capacity_tokens, decode_rounds_per_prefill=1)
        )
        first, second = request("a", 10, 100), request("b", 10, 100)
        tier.submit(first)
        tier.submit(second)
        play(tier)
        assert first.done
        assert second.done
        return first.emissions[-1], second.emissions[0]

    end, start = emissions(2000)
    assert start < end
    end, start = emissions(1400)
    assert start > end


def test_evicted_prefixes_are_prefilled_again() -> None:
    tier = AttentionTier(1, TierConfig(kv_capacity_tokens=1000))
    for uid in ("a", "b", "a2"):
        again = request(uid, 12, 10)
        again.cache_uid = uid[0]
        tier.submit(again)
        play(tier)
    assert again.num_cached < 11 * 64
    assert tier.num_evicted_tokens > 0


def test_what_never_fits_is_refused_by_name() -> None:
    tier = AttentionTier(1, TierConfig(kv_capacity_tokens=1000))
    with pytest.raises(InvalidArgumentError, match="at most kv_capacity_tokens = 1000 tokens, got 1034"):
        tier.submit(request("a", 16, 10))
    assert tier.num_in_flight == 0
