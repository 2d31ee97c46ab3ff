"""A service that goes away in the middle of a run: leased again, its steps tried again; or gone for good."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

import loadgen.moe.live as live
from loadgen.moe.live import LiveTier
from loadgen.moe.scrape import Counters
from loadgen.moe.tier import TierInfo
from loadgen.replay.replay import Replay
from loadgen.report.report import compare
from loadgen.steps.records import RunPhase, RunRecord, Status
from loadgen.steps.runner import MAX_RENEWALS
from megamoe.errors import ConfigError, LeaseHeldError, MegaMoeError, StaleCallError, UnavailableError
from tests.loadgen.fake_tier import FakeTier, demo_info
from tests.loadgen.moe.test_scrape import counted_by_service, run_of
from tests.loadgen.replay.test_replay import play, report_of, short

GONE = UnavailableError("rank 3 is gone: the group restarts")


def fail_with(error: MegaMoeError, *steps: int) -> Callable[[int, int], MegaMoeError | None]:
    return lambda step_idx, layer_idx: error if step_idx in steps and layer_idx == 2 else None


@pytest.mark.parametrize(
    "error", [GONE, StaleCallError("lease_serial must be 8, got 7")], ids=lambda e: e.code
)
def test_a_step_under_a_lost_lease_is_tried_again_under_a_new_one(error: MegaMoeError) -> None:
    """A retry is always safe, and costs no try: the step was not at fault."""
    record, tier, _ = play(short(step_retries=0), fail=fail_with(error, 20, 40, 41))
    assert tier.num_renewals == 3
    assert tier.steps[20] == tier.steps[21]
    assert tier.steps[40] == tier.steps[41] == tier.steps[42]
    assert (record.num_retried_steps, record.num_failed_steps, record.num_calls_failed) == (3, 0, 3)
    assert len(record.steps) == len(tier.steps) - 3
    assert all(done.status is not Status.FAILED for done in record.requests)
    assert not record.aborted


def test_a_step_that_loses_every_lease_fails() -> None:
    lost = range(20, 20 + MAX_RENEWALS + 1)
    record, tier, _ = play(short(step_retries=0, max_failed_share=1.0), fail=fail_with(GONE, *lost))
    assert tier.num_renewals == MAX_RENEWALS
    assert record.num_failed_steps == 1
    assert {done.error for done in record.requests if done.status is Status.FAILED} == {
        f"unavailable: {GONE}"
    }
    assert not record.aborted


def test_a_service_that_stays_away_ends_the_run() -> None:
    def away(replay: Replay) -> None:
        tier = replay._runner._service
        assert isinstance(tier, FakeTier)
        tier.renew_error = UnavailableError("not ready after 60 s")

    run = play(short(), fail=fail_with(GONE, 20), during=away)
    record, tier, _ = run
    assert len(tier.steps) == 21, "no further step is tried"
    assert record.aborted == f"the service was lost ({GONE}) and did not come back: not ready after 60 s"
    assert record.num_failed_steps == 1
    report = report_of(run)
    assert report["requests"]["failed"] > 0
    assert report["run_aborted"] == record.aborted


def test_a_run_is_cancelled_while_it_waits_for_the_service() -> None:
    cancelled: list[bool] = []

    def wait_for_ever(replay: Replay) -> None:
        async def renew() -> None:
            replay.cancel()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(True)
                raise

        service = replay._runner._service
        assert isinstance(service, FakeTier)
        service.renew = renew  # type: ignore[method-assign]

    record, _, _ = play(short(max_failed_share=1.0), fail=fail_with(GONE, 20), during=wait_for_ever)
    assert record.cancelled
    assert cancelled == [True]
    assert not record.aborted


def test_after_a_restart_only_what_followed_is_compared() -> None:
    record = run_of([0.5] * 7)
    record.num_calls_failed = 2
    record.mark_restart(100.0)
    assert compare(record, Counters())["match"] is True
    record.times[RunPhase.PROFILE, "compact"].extend(run_of([0.005] * 3).path_times("compact"))
    record.num_calls += 3
    check = compare(record, counted_by_service([0.005] * 3))
    assert check["match"] is True
    assert check["layer_calls"] == {"made": 3, "failed": 0, "counted": 3}
    assert check["calls_before_restart"] == 7
    assert check["paths"]["compact"]["seen"] == 3
    assert compare(record, counted_by_service([0.005] * 4))["match"] is False, (
        "failures before the restart excuse nothing"
    )
    assert compare(record, counted_by_service([0.5] * 3))["match"] is False


def test_a_restart_is_reported_and_makes_no_submission() -> None:
    run = play(short(), during=lambda replay: replay.record.mark_restart(replay.now() + 5.0))
    report = report_of(run)
    assert report["steps"]["service_restarts"] == [5.0]
    assert "the service's group restarted 1 time(s) in the run" in report["submission_invalid_reasons"]


# ---------------------------------------------------------------------------------------------- the live tier


@dataclass
class FakeService:
    """Leases, and what each attempt to lease it says."""

    info: TierInfo
    answers: list[MegaMoeError | None] = field(default_factory=list)
    leased: int = 0
    given_back: int = 0

    @contextlib.asynccontextmanager
    async def connect(
        self, front: str, *, holder: str, wait_ready_s: float, transport: str
    ) -> AsyncIterator[Any]:
        assert (front, holder) == ("somewhere:1", "me")
        error = self.answers.pop(0) if self.answers else None
        if error is not None:
            raise error
        self.leased += 1
        try:
            yield self
        finally:
            self.given_back += 1


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> FakeService:
    made = FakeService(demo_info())
    monkeypatch.setattr(live.AsyncMoeGroup, "connect", made.connect)
    monkeypatch.setattr(live, "tier_info", lambda info: info)
    return made


async def test_a_lost_lease_is_given_back_and_taken_again(service: FakeService) -> None:
    restarts: list[int] = []

    async def restarted() -> None:
        restarts.append(tier.info.generation)

    async with LiveTier.connect("somewhere:1", holder="me", wait_ready_s=5.0) as tier:
        tier.on_restart = restarted
        service.answers = [GONE, LeaseHeldError("held by 'other'"), None]
        await tier.renew()
        assert (service.leased, service.given_back) == (2, 1)
        assert restarts == [], "the same incarnation goes on counting"
        service.info = replace(service.info, generation=2, metrics_urls=("http://new",))
        await tier.renew()
        assert restarts == [2]
        assert tier.info.metrics_urls == ("http://new",)
    assert service.leased == service.given_back == 3


async def test_a_service_that_does_not_come_back_or_is_another_one(service: FakeService) -> None:
    async with LiveTier.connect("somewhere:1", holder="me", wait_ready_s=0.0) as tier:
        service.answers = [GONE]
        with pytest.raises(UnavailableError, match="rank 3 is gone"):
            await tier.renew()
        service.info = demo_info(num_layers=5)
        with pytest.raises(ConfigError, match="must come back as it was"):
            await tier.renew()


def test_records_of_a_run_without_restarts_are_compared_whole() -> None:
    assert RunRecord().since_restart().num_calls == 0
    assert compare(run_of([0.005] * 5), counted_by_service([0.005] * 5))["calls_before_restart"] == 0
