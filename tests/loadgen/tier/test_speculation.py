"""Acceptance: the published means, with the least variance that whole tokens allow."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.tier.speculation import ACCEPTANCE_LENGTH, Speculation
from megamoe.errors import ConfigError

PUBLISHED = {1: 1.84, 2: 2.51, 3: 3.01, 4: 3.36, 5: 3.61, 6: 3.77, 7: 3.73, 8: 3.47}


@given(st.sampled_from(sorted(PUBLISHED)), st.text(max_size=8), st.integers(0, 5), st.integers(1, 300))
def test_every_step_accepts_floor_or_ceil_and_no_run_is_off_by_a_token(
    num_drafts: int, uid: str, seed: int, num_steps: int
) -> None:
    mean = PUBLISHED[num_drafts]
    schedule = Speculation(num_drafts).schedule(uid, seed)
    accepted = [schedule.next() for _ in range(num_steps)]
    assert set(accepted) <= {math.floor(mean), math.ceil(mean)}
    assert abs(sum(accepted) - num_steps * mean) < 1 + 1e-9


def test_over_many_requests_a_step_accepts_four_tokens_77_percent_of_the_time() -> None:
    first = [Speculation(6).schedule(f"request {idx}").next() for idx in range(4000)]
    assert first.count(4) / len(first) == pytest.approx(0.77, abs=0.03)
    assert sum(first) / len(first) == pytest.approx(3.77, abs=0.03)


def test_a_request_keeps_its_acceptances() -> None:
    def run(uid: str, seed: int) -> list[int]:
        schedule = Speculation(6).schedule(uid, seed)
        return [schedule.next() for _ in range(50)]

    assert run("a", 1) == run("a", 1)
    assert run("a", 1) != run("b", 1)
    assert run("a", 1) != run("a", 2)


def test_rows_and_plain_decoding() -> None:
    assert [Speculation(drafts).rows_per_request for drafts in (0, 1, 6)] == [1, 2, 7]
    plain = Speculation(0).schedule("a")
    assert [plain.next() for _ in range(10)] == [1] * 10
    assert ACCEPTANCE_LENGTH == PUBLISHED | {0: 1.0}


@pytest.mark.parametrize(("drafts", "mean"), [(9, 0.0), (-1, 0.0), (3, 4.5), (3, 0.5)])
def test_impossible_speculation_is_refused(drafts: int, mean: float) -> None:
    with pytest.raises(ConfigError, match="num_drafts|acceptance length"):
        Speculation(drafts, mean)
